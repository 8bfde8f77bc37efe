"""``slime-ext check FILE``: whether a configuration, or a whole launch script, means what it says."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from rich.table import Table

from slime_ext import dialects
from slime_ext.commands import light
from slime_ext.commands.arguments import (
    SWITCHES,
    VALUES,
    Arguments,
    is_script,
    namespace,
    read_arguments,
    read_mapping,
)
from slime_ext.commands.output import console, needs
from slime_ext.errors import ConfigError, SlimeExtError, did_you_mean
from slime_ext.host import contract
from slime_ext.host.flags import HOOK, check_flags
from slime_ext.host.summary import brief

HOOKS = ("correct", "vanilla_tis_function", "icepop_function", "off_policy_is_function")
ROOM = "slime_ext.tis."
WRONG = 1


def main(argv: list[str]) -> int:
    """Prints what the file resolves to and returns 0; a mistake is one line on stderr and status 1."""
    parser = argparse.ArgumentParser(
        prog="slime-ext check", description="Checks a configuration, or a launch script's arguments."
    )
    parser.add_argument("file", help="YAML of --custom-config-path, or a launch script (.sh)")
    parser.add_argument("--args", metavar="FILE", help="launch script, YAML or JSON with the other arguments")
    given = parser.parse_args(argv)
    try:
        with light.config() as config:
            _show(given.file, config, *check(config, given.file, given.args))
    except SlimeExtError as error:
        print(f"slime-ext check: {error}", file=sys.stderr)
        return WRONG
    return 0


def check(config: Any, path: str, args_path: str | None = None) -> tuple[Any, Any, list[str]]:
    """The mapping that a file leads to, what it resolves to, and what its reader should know.

    Raises:
        ConfigError: the first thing that is wrong.
    """
    arguments = gathered(path, args_path)
    mapping = _mapping(config, arguments)
    loaded = config.read_config(mapping)
    config.check_args(loaded, namespace(arguments))
    check_flags(namespace(arguments), HOOK)
    return mapping, loaded, _notes(loaded, arguments)


def gathered(path: str, args_path: str | None = None) -> Arguments:
    """Every argument that a file leads to; keys of --custom-config-path go over flags, as in slime.

    Raises:
        ConfigError: a file cannot be read, or holds something else.
    """
    arguments = read_arguments(args_path) if args_path else {}
    arguments |= read_arguments(path) if is_script(path) else _of_yaml(path)
    if "slime_ext" not in arguments and (beside := arguments.get("custom_config_path")):
        arguments |= _of_yaml(_found(beside, args_path or path))
    return arguments


def _of_yaml(path: str) -> Arguments:
    found = read_mapping(path)
    for key in found:
        if key != "slime_ext" and (near := did_you_mean(str(key), ["slime_ext"])):
            raise ConfigError(f"{path}: {key}: expected the key slime_ext, got another one{near}")
    if "slime_ext" not in found:
        _forbid_bare_block(path, found)
    return found


def _forbid_bare_block(path: str, found: Arguments) -> None:
    """Another system's keys at the top of the file, where nothing of ours looks."""
    foreign = set(found) - {*VALUES, *SWITCHES}
    shared = {
        system: [key for key in keys if key in foreign] for system, (keys, _) in dialects.DIALECTS.items()
    }
    system = max(shared, key=lambda name: len(shared[name]))
    if shared[system]:
        raise ConfigError(
            f"{path}: {shared[system][0]}: expected it under slime_ext: {{{system}: ...}}, got it at the "
            f"top, where slime_ext never looks; or slime-ext convert --from {system} {path}"
        )


def _found(path: str, script: str) -> str:
    """A path of a launch script, from the working directory or from the script's own."""
    beside = Path(script).parent / path
    return str(beside) if not Path(path).exists() and beside.exists() else path


def _mapping(config: Any, arguments: Arguments) -> Any:
    """The mapping that the named function would read."""
    path, mapping = arguments.get("custom_tis_function_path"), arguments.get("slime_ext")
    if path is None and mapping is not None:
        return mapping
    name = str(path or "").removeprefix(ROOM)
    if not str(path or "").startswith(ROOM):
        got = "nothing" if path is None else f"'{path}'"
        raise ConfigError(
            f"--custom-tis-function-path: expected {ROOM}correct or {ROOM}<preset>, got {got}: "
            "nothing of slime_ext would run"
        )
    names = [*HOOKS, *config.presets.PRESETS, *config.presets.ALIASES]
    if name not in names:
        near = did_you_mean(name, names)
        raise ConfigError(
            f"--custom-tis-function-path: expected a function of slime_ext.tis, got '{name}'{near}"
        )
    if name == "correct" and mapping is None:
        raise ConfigError("slime_ext: expected a mapping in --custom-config-path, got none: correct reads it")
    if name in HOOKS:
        return {"preset": "metrics_only"} if mapping is None else mapping
    return {"preset": name} | (mapping or {})


def _notes(loaded: Any, arguments: Arguments) -> list[str]:
    notes = list(loaded.notes)
    if not loaded.correction.is_identity and not arguments.get("use_tis"):
        notes.append("--use-tis is not set: the loss stays as it is, only metrics are computed")
    if loaded.correction.needs_target and not arguments.get("custom_megatron_init_path"):
        notes.append(f"needs cur_log_probs: in slime add {contract.CARRY}")
    if loaded.correction.needs_plan and arguments.get("rollout_data_postprocess_path") != contract.PLAN:
        notes.append(f"needs the whole optimizer step: in slime add {contract.PLAN_FLAG} {contract.PLAN}")
    return notes


def _show(path: str, config: Any, mapping: Any, loaded: Any, notes: list[str]) -> None:
    keys = config.to_mapping(loaded.correction)
    table = Table(box=None, show_header=False, pad_edge=False)
    surrogate = keys["surrogate"]
    rows = {
        "file": path,
        "read as": ", ".join(str(key) for key in mapping),
        "numerator": keys["numerator"],
        "loss": surrogate if isinstance(surrogate, str) else brief([surrogate]),
        "steps": brief(keys["steps"]),
        "masks": keys["mask_scope"],
        **{key: keys[key] for key in ("denominator", "group") if keys[key] not in ("host", "ignore")},
        "needs": needs(loaded.correction),
    }
    for key, value in rows.items():
        table.add_row(key, value)
    for note in notes:
        table.add_row("note", note)
    console().print(table, "ok", markup=False)
