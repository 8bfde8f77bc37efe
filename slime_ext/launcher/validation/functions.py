"""Functions and corrections that flags name: the checks of `slime_ext.host.init`, before anything starts."""

from __future__ import annotations

import argparse

from slime_ext.host.contract import CALLS, check_call
from slime_ext.host.flags import check_plan

READ = (*CALLS, "custom_tis_function_path", "slime_ext")


def check_functions(args: argparse.Namespace) -> None:
    """Imports every function that a flag names, binds the call to its signature, and loads the correction."""
    if args.custom_rm_path:
        check_call("--custom-rm-path", args.custom_rm_path, ("args", "sample"))
    if not any(getattr(args, name, None) for name in READ):
        return
    from slime_ext.host import startup  # torch, for which a mistake before it need not wait

    startup.check_functions(args)
    correction = startup.correction_of(args)
    if correction is not None and correction.needs_plan:
        check_plan(args, may_skip_proximal=True)
