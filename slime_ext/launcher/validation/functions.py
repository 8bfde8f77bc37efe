"""Functions and corrections that flags name: the checks of `slime_ext.host.init`, before anything starts."""

from __future__ import annotations

import argparse

from slime_ext.host.flags import check_flags, check_plan
from slime_ext.host.functions import check_call


def check_rules(args: argparse.Namespace) -> None:
    """The rules between flags that the hosts have, too; needs no torch."""
    check_flags(args)


def check_functions(args: argparse.Namespace) -> None:
    """Imports every function that a flag names, binds the call to its signature, and loads the correction."""
    from slime_ext.host import startup  # torch, which a mistake before it saves

    if args.custom_rm_path:
        check_call("--custom-rm-path", args.custom_rm_path, ("args", "sample"))
    startup.check_functions(args)
    correction = startup.correction_of(args)
    if correction is not None and correction.needs_plan:
        check_plan(args, may_skip_proximal=True)
