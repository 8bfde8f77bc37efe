"""Rules of the file of --custom-config-path."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from pathlib import Path

from slime_ext.config.foreign import FOREIGN
from slime_ext.config.places import PLACES
from slime_ext.hosts import contract
from slime_ext.hosts.contract import OURS
from slime_ext.hosts.flags import ARGUMENTS
from slime_ext.rules.rule import FILE, HINT, REFUSE, WARN, rule
from slime_ext.rules.setup import Setup

MEASURING = {"guards", "metrics"}  # keys that act without a correction of slime_ext
# Arguments that slime checks, or derives others from, before it reads --custom-config-path.
CHECKED_BEFORE = {
    *(ARGUMENTS.keys() - OURS - {"custom_tis_function_path", "use_tis", "get_mismatch_metrics"}),
    *"kl_loss_coef grpo_std_normalization use_dynamic_batch_size max_tokens_per_gpu balance_by_flops "
    "over_sampling_batch_size save save_interval eval_interval eval_prompt_data eval_config dump_details "
    "save_debug_rollout_data save_debug_train_data load_debug_rollout_data debug_rollout_only "
    "debug_train_only enable_mtp_training mtp_num_layers opd_type opd_teacher_load".split(),
}


@rule(REFUSE, FILE)
def misplaced_key(setup: Setup) -> str | None:
    """The file has a key beside ``slime_ext:`` that belongs under it, or to another system."""
    # A lost indentation or a previous hook can leave it there. A user's hook may read keys there, as slime's
    # mis.py does. Beside such a hook, only the keys in MEASURING are judged.
    if not setup.function and setup.flags.slime_ext is None:
        return None
    is_anothers = not setup.function and setup.flags.custom_tis_function_path is not None
    start, end = "--custom-config-path: expected ", "; if it is an argument of your own, rename it"
    keys = (key for key in setup.file if key in MEASURING or not is_anothers)
    for key in keys:
        if system := FOREIGN.get(key):
            return (
                f"{start}no key of {system} beside slime_ext, got {key}: remove it, or translate the "
                f"file: slime-ext convert --from {system} FILE{end}"
            )
        if place := PLACES.get(key):
            return (
                f"{start}the key {key} {place}, got it beside slime_ext, where nothing reads it: indent it"
                f"{end}"
            )
    return None


@rule(REFUSE, FILE)
def unread_configuration(setup: Setup) -> str | None:
    """The function that the launch names does not read the key ``slime_ext:``."""
    mapping = setup.flags.slime_ext
    if setup.function not in ("", *contract.SLIME_FUNCTIONS) or mapping is None:
        return None
    if isinstance(mapping, Mapping) and set(mapping) <= MEASURING:
        return None
    return (
        f"--custom-tis-function-path: expected {contract.TIS}.correct beside the key slime_ext, got "
        f"{setup.flags.custom_tis_function_path or 'none'}: name {contract.TIS}.correct, or remove the key, "
        "because nothing reads it"
    )


@rule(REFUSE)
def metrics_file_is_no_file(setup: Setup) -> str | None:
    """The file for the metrics of each step is a folder or a device."""
    path = setup.loaded.metrics.file
    try:
        mode = Path(path).stat().st_mode if path else stat.S_IFREG
    except (OSError, ValueError):  # the run creates it
        return None
    if stat.S_ISREG(mode):
        return None
    got = "a folder" if stat.S_ISDIR(mode) else "a device, a pipe or a socket"
    return f"slime_ext.metrics.file: expected a file, got {got} at {path}: name a file such as metrics.jsonl"


@rule(WARN)
def host_flag_in_file(setup: Setup) -> str | None:
    """The file has flags of slime, which slime checks before it reads the file."""
    keys = ", ".join(key for key in setup.file if key in CHECKED_BEFORE)
    if not keys:
        return None
    return (
        f"--custom-config-path: expected slime's flags on the command line, got {keys} in the file: move "
        "them to the command line, because slime checks its flags, and derives others from them, before it "
        "reads the file"
    )


@rule(HINT)
def missing_function(setup: Setup) -> str | None:
    """The file has a correction and names no function that reads it."""
    if setup.function != "correct" or setup.flags.custom_tis_function_path:
        return None
    return f"names no function: for slime, add custom_tis_function_path: {contract.TIS}.correct"
