"""The arguments of a launch that a correction has to agree with, read out of a shell script, YAML or JSON."""

from __future__ import annotations

import difflib
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

from slime_ext.commands.script import forbid_unused_arrays, is_script, words_of
from slime_ext.errors import ConfigError
from slime_ext.host import contract
from slime_ext.host.flags import DECISIVE, NEARLY
from slime_ext.host.functions import flag_of
from slime_ext.mappings import read_yaml, text_of

VALUES = {
    "eps_clip": float,
    "eps_clip_high": float,
    "tis_clip": float,
    "tis_clip_low": float,
    "num_steps_per_rollout": int,
    "global_batch_size": int,
    "rollout_batch_size": int,
    "n_samples_per_prompt": int,
    "advantage_estimator": str,
    "custom_tis_function_path": str,
    "custom_config_path": str,
    "custom_megatron_init_path": str,
    "rollout_data_postprocess_path": str,
    "custom_rollout_log_function_path": str,
    "transformer_impl": str,
}
SWITCHES = (
    "use_tis",
    "get_mismatch_metrics",
    "use_rollout_logprobs",
    "keep_old_actor",
    "use_opsm",
    "use_dynamic_global_batch_size",
    "no_gradient_accumulation_fusion",
)
ALIKE = (*contract.CALLS, "custom_agent_function_path")  # arguments of slime and miles that look like those
Arguments = dict[str, Any]


def read_mapping(path: str) -> dict[str, Any]:
    """A YAML or JSON file that holds a mapping.

    Raises:
        ConfigError: it cannot be read, is not YAML, or holds something else.
    """
    found = read_yaml(path)
    if not isinstance(found, dict):
        raise ConfigError(
            f"{path}: expected a mapping, got {type(found).__name__}: see the files in configs/"
        )
    for key in found:
        if not isinstance(key, str):
            raise ConfigError(f"{path}: expected names as keys, got {key!r}: see the files in configs/")
    return found


def read_arguments(path: str) -> Arguments:
    """The arguments by dest name that a launch script or a file of arguments gives; the rest is left out.

    Raises:
        ConfigError: the file cannot be read, or a number is none.
    """
    if not is_script(path):
        return _of_file(path)
    text = text_of(path)
    forbid_unused_arrays(path, text, lambda flag: flag in map(flag_of, DECISIVE))
    return _of_words(path, words_of(path, text))


def namespace(arguments: Arguments) -> SimpleNamespace:
    """Arguments as the host would hold them."""
    return SimpleNamespace(**arguments)


def _of_file(path: str) -> Arguments:
    found = {_dest_of(key): value for key, value in read_mapping(path).items()}  # as --config takes both
    for dest in found:
        forbid_misspelt(path, dest)
    return {k: v for k, v in found.items() if k in VALUES or k in SWITCHES or k == "slime_ext"}


def _of_words(path: str, words: list[str]) -> Arguments:
    found: Arguments = {}
    for word, after in pairwise([*words, ""]):
        flag, _, attached = word.partition("=")
        if not flag.startswith("--"):
            continue
        forbid_misspelt(path, flag)
        dest = _dest_of(flag)
        if dest in SWITCHES:
            found[dest] = True
        elif dest in VALUES:
            found[dest] = _value(path, flag, VALUES[dest], attached or after)
    return found


def forbid_misspelt(path: str, name: str) -> None:
    """Stops at a flag, or a key of a file, that is nearly one of those that decide whether ours runs, or one
    that is read here with dashes for underscores, or the reverse.

    Raises:
        ConfigError: with the right name.
    """
    dest = _dest_of(name)
    known = dest in (*VALUES, *SWITCHES, *ALIKE)
    near = [dest] if known else difflib.get_close_matches(dest, DECISIVE, n=1, cutoff=NEARLY)
    for right in (flag_of(dest) if name.startswith("--") else dest for dest in near):
        if name != right:
            raise ConfigError(
                f"{path}: expected {right}, got {name}: slime passes over a name it does not know"
            )


def _dest_of(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _value(path: str, flag: str, kind: type, text: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        if text.startswith("$"):  # a shell variable: unknown here
            return None
        raise ConfigError(f"{path}: {flag}: expected a number, got '{text}'") from None
