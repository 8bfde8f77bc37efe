"""Everything that can be known to be wrong before a model is built or a server started; one line each."""

from __future__ import annotations

import argparse

from slime_ext.host.flags import check_flags
from slime_ext.launcher.validation import functions, model, places, prompts


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
        functions.check_functions,
    ):
        check(args)
    return args
