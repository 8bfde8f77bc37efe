"""The arguments of a launch that a correction has to agree with, read out of a shell script, YAML or JSON."""

from __future__ import annotations

import difflib
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from slime_ext.errors import ConfigError
from slime_ext.host import contract
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
ASSIGNMENT = re.compile(
    r"^\s*(?:(?:export|readonly|local|declare)\s+)?(\w+)=(\"[^\"]*\"|'[^']*'|[^\s;]*)\s*;?(?:\s*#.*)?$"
)
REFERENCE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::-([^}]*))?\})")
ARRAY = re.compile(r"^\w+\+?=\(")
SCRIPT = (".sh", ".bash", "")
QUOTED = 100  # lines that one quote may span
# What decides whether anything of ours runs; a misspelling of it is one that slime passes over.
DECISIVE = (*contract.OURS, "custom_tis_function_path", "custom_config_path", *SWITCHES[:2], "tis_clip_low")
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


def is_script(path: str) -> bool:
    """Whether a file is a launch script rather than a mapping."""
    return Path(path).suffix in SCRIPT


def read_arguments(path: str) -> Arguments:
    """The arguments by dest name that a launch script or a file of arguments gives; the rest is left out.

    Raises:
        ConfigError: the file cannot be read, or a number is none.
    """
    if not is_script(path):
        return {
            k: v for k, v in read_mapping(path).items() if k in VALUES or k in SWITCHES or k == "slime_ext"
        }
    return _of_words(path, words_of(path, text_of(path)))


def namespace(arguments: Arguments) -> SimpleNamespace:
    """Arguments as the host would hold them."""
    return SimpleNamespace(**arguments)


def words_of(path: str, text: str) -> list[str]:
    """Shell words of a script without comments and array brackets; variables that are known replaced."""
    lines = _substituted(text, _variables(path, text)).replace("\\\n", " ").splitlines()
    bare = [re.sub(r"(^|\s)#.*", "", line) for line in lines]
    return [ARRAY.sub("", word).lstrip("(").rstrip(");") for word in _split(bare)]


def _split(lines: Sequence[str]) -> Iterator[str]:
    """Shell words; a quote is read to its end, a line with one that has no end is left out."""
    begin = 0
    while begin < len(lines):
        begin, words = begin + 1, []
        for stop in range(begin, min(begin + QUOTED, len(lines) + 1)):
            try:
                words = shlex.split("\n".join(lines[begin - 1 : stop]))
            except ValueError:
                continue
            begin = stop
            break
        yield from words


def _variables(path: str, text: str) -> dict[str, str]:
    """What the script assigns to names, each value with the names before it put in."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        if match := ASSIGNMENT.match(line):
            name, value = match[1], match[2].strip("\"'")
            found[name] = _substituted(value, found)
        elif "BASH_SOURCE" in line and "=" in line:  # its own folder, the way slime's scripts find it
            found[line.partition("=")[0].split()[-1]] = str(Path(path).resolve().parent)
    return found


def _substituted(text: str, known: dict[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        name, default = match[1] or match[2], match[3]
        return known.get(name) or os.environ.get(name) or (match[0] if default is None else default)

    return REFERENCE.sub(value, text)


def _of_words(path: str, words: list[str]) -> Arguments:
    found: Arguments = {}
    for word, after in pairwise([*words, ""]):
        flag, _, attached = word.partition("=")
        dest = flag.removeprefix("--").replace("-", "_")
        if not flag.startswith("--"):
            continue
        if dest in SWITCHES:
            found[dest] = True
        elif dest in VALUES:
            found[dest] = _value(path, flag, VALUES[dest], attached or after)
        else:
            forbid_misspelt(path, flag)
    return found


def forbid_misspelt(path: str, name: str) -> None:
    """Stops at a flag, or a key of a file, that is nearly one of those that decide whether ours runs.

    Raises:
        ConfigError: with the right name.
    """
    dest = name.removeprefix("--").replace("-", "_")
    if dest in (*VALUES, *SWITCHES, *ALIKE):
        return
    if near := difflib.get_close_matches(dest, DECISIVE, n=1, cutoff=0.85):
        right = flag_of(near[0]) if name.startswith("--") else near[0]
        raise ConfigError(f"{path}: expected {right}, got {name}: slime passes over a name it does not know")


def _value(path: str, flag: str, kind: type, text: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        if text.startswith("$"):  # a shell variable: unknown here
            return None
        raise ConfigError(f"{path}: {flag}: expected a number, got '{text}'") from None
