"""Everything that can be known to be wrong before a model is built or a server started; one line each."""

from __future__ import annotations

import argparse

from slime_ext.host.contract import CALLS, check_call
from slime_ext.host.flags import check_flags, check_plan
from slime_ext.launcher.validation import model, places, prompts

READ = (*CALLS, "custom_tis_function_path", "slime_ext")


def validate(args: argparse.Namespace) -> argparse.Namespace:
    """Checks `args` of `parse_args` from the cheapest test to the dearest, fills what only files can tell.

    Filled: the model's sizes (from config.json), sglang_python, load_iteration. torch is imported last, with
    the functions that flags name.

    Raises:
        ConfigError: a flag or a combination of flags that cannot work.
        DataError: a prompt file that cannot be used.
    """
    for check in (
        check_flags,
        places.check_device,
        places.check_run,
        places.check_engine,
        model.check_model,
        prompts.check_prompts,
        places.check_load,
        check_functions,
    ):
        check(args)
    return args


def check_functions(args: argparse.Namespace) -> None:
    """The checks of `slime_ext.host.init`: imports every function that a flag names, binds the call to its
    signature, and loads the correction."""
    if args.custom_rm_path:
        check_call("--custom-rm-path", args.custom_rm_path, ("args", "sample"))
    if not any(getattr(args, name, None) for name in READ):
        return
    from slime_ext.host import startup  # torch, for which a mistake before it need not wait

    startup.check_functions(args)
    correction = startup.correction_of(args)
    if correction is not None and correction.needs_plan:
        check_plan(args, may_skip_proximal=True)
