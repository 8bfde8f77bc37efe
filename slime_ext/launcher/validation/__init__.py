"""Everything that can be known to be wrong before a model is built or a server started; one line each."""

from __future__ import annotations

import argparse

from slime_ext.launcher.validation import functions, model, numbers, places, prompts


def validate(args: argparse.Namespace) -> argparse.Namespace:
    """Checks `args` of `parse_args` from the cheapest test to the dearest, fills what only files can tell.

    Filled: train_iters, lr_decay_iters, the model's sizes (from config.json), sglang_python,
    load_iteration. torch is imported only by the functions that flags name.

    Raises:
        ConfigError: a flag or a combination of flags that cannot work.
        DataError: a prompt file that cannot be used.
    """
    for check in (
        numbers.check_batches,
        numbers.check_combinations,
        functions.check_rules,
        places.check_device,
        places.check_run,
        places.check_engine,
        model.check_model,
        prompts.check_prompts,
        places.check_load,
        numbers.check_schedule,
        functions.check_functions,
    ):
        check(args)
    return args
