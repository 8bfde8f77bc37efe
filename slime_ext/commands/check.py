"""``slime-ext check FILE``: whether a configuration, or a whole launch script, means what it says."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from slime_ext import dialects
from slime_ext.commands import light
from slime_ext.commands.arguments import (
    SWITCHES,
    VALUES,
    Arguments,
    forbid_misspelt,
    namespace,
    read_arguments,
    read_mapping,
)
from slime_ext.commands.output import console, needs
from slime_ext.commands.script import UNKNOWN, is_script
from slime_ext.errors import ConfigError, SlimeExtError, did_you_mean
from slime_ext.host import contract
from slime_ext.host.flags import HOOK, check_flags, skips_proximal
from slime_ext.host.functions import flag_of
from slime_ext.host.summary import brief, double_count, formula, one_line
from slime_ext.optional_args import OptionalArgs

WRONG = 1


@dataclass(frozen=True)
class Checked:
    """What a file leads to.

    Args:
        rows: what there is to know of it, by name.
        line: the same in one line.
        needs_target: whether the hook needs ``cur_log_probs``.
        notes: what its reader should know.
    """

    rows: Mapping[str, str]
    line: str
    needs_target: bool
    notes: tuple[str, ...]


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
            _show(given.file, check(config, given.file, given.args))
    except SlimeExtError as error:
        print(f"slime-ext check: {error}", file=sys.stderr)
        return WRONG
    return 0


def check(config: Any, path: str, args_path: str | None = None) -> Checked:
    """What a file leads to.

    Raises:
        ConfigError: the first thing that is wrong.
    """
    arguments = gathered(path, args_path)
    name = _function(config, arguments)
    check_flags(namespace(arguments), ())  # the kinds of what is read next
    found = _of_seed(name, arguments) if name in contract.SEEDS else _of_correction(config, name, arguments)
    _check_paths(arguments, is_launch=is_script(args_path or path))
    check_flags(namespace(arguments), HOOK)
    return found


def gathered(path: str, args_path: str | None = None) -> Arguments:
    """Every argument that a file leads to; keys of --custom-config-path go over flags, as in slime.

    Raises:
        ConfigError: a file cannot be read, or holds something else.
    """
    arguments = read_arguments(args_path) if args_path else {}
    arguments |= read_arguments(path) if is_script(path) else _of_yaml(path)
    check_flags(namespace(arguments), ())
    if "slime_ext" not in arguments and (beside := arguments.get("custom_config_path")):
        script = args_path or path
        if is_script(script) and UNKNOWN.search(beside):
            raise ConfigError(
                f"{script}: --custom-config-path: expected a path that the script itself says, got '{beside}'"
                f": slime-ext check FILE --args {script} checks the file with the script's flags"
            )
        arguments |= _of_yaml(_found(beside, script))
    return arguments


def _of_yaml(path: str) -> Arguments:
    found = read_mapping(path)
    for key in found:
        if key != "slime_ext" and (near := did_you_mean(key, ["slime_ext"])):
            raise ConfigError(f"{path}: expected the key slime_ext, got {key}{near}")
        forbid_misspelt(path, key)
    if "eps_clip" in found and "eps_clip_high" not in found:
        raise ConfigError(
            f"{path}: eps_clip_high: expected beside eps_clip, got none: slime has set it to --eps-clip "
            "before it reads this file"
        )
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


def _function(config: Any, arguments: Arguments) -> str:
    """The function in ``slime_ext.tis`` that a launch names; a mapping alone is for ``correct``."""
    path = arguments.get("custom_tis_function_path")
    if path is None and arguments.get("slime_ext") is not None:
        return "correct"
    name = contract.function_of(namespace(arguments))
    if not name:
        got = "nothing" if path is None else f"'{path}'"
        raise ConfigError(
            f"--custom-tis-function-path: expected {contract.TIS}.correct or {contract.TIS}.<preset>, got "
            f"{got}: nothing of slime_ext would run"
        )
    names = ["correct", *contract.SEEDS, *config.presets.NAMES]
    if name not in names:
        near = did_you_mean(name, names)
        raise ConfigError(
            f"--custom-tis-function-path: expected a function of {contract.TIS}, got '{name}'{near}"
        )
    return name


def _check_paths(arguments: Arguments, *, is_launch: bool) -> None:
    """Functions of ours that do not exist, or that the wrong flag names; a launch without the hook's."""
    if is_launch and not arguments.get("custom_tis_function_path"):
        raise ConfigError(
            f"--custom-tis-function-path: expected {contract.TIS}.correct beside the key slime_ext, got "
            "none: nothing would read that key"
        )
    for dest, ours in contract.OURS.items():
        path = arguments.get(dest) or ours
        if path.startswith("slime_ext") and path != ours:
            near = did_you_mean(path, [ours])
            raise ConfigError(f"{flag_of(dest)}: expected {ours} of slime_ext, got '{path}'{near}")


def _of_seed(name: str, arguments: Arguments) -> Checked:
    if arguments.get("slime_ext") is not None:
        raise ConfigError(
            f"--custom-tis-function-path: expected {contract.TIS}.correct beside the key slime_ext, got "
            f"{contract.TIS}.{name}: nothing would read that key"
        )
    line, needs_target = formula(name, arguments), name in contract.NEED_TARGET
    rows = {"function": name, "formula": line, "needs": "cur_log_probs" if needs_target else "-"}
    notes = _notes(arguments, needs_target=needs_target)
    if name == "off_policy_is_function" and (line_of := double_count(namespace(arguments))):
        notes = (line_of, *notes)
    return Checked(rows, f"{name}: {line}", needs_target, notes)


def _of_correction(config: Any, name: str, arguments: Arguments) -> Checked:
    mapping = config.with_preset(arguments.get("slime_ext"), None if name == "correct" else name)
    loaded = config.read_config(mapping)
    config.check_args(loaded, namespace(arguments))
    correction, keys = loaded.correction, config.to_mapping(loaded.correction)
    surrogate = keys["surrogate"]
    rows = {
        "read as": ", ".join(str(key) for key in mapping),
        "numerator": keys["numerator"],
        "loss": surrogate if isinstance(surrogate, str) else brief([surrogate]),
        "steps": brief(keys["steps"]),
        "masks": keys["mask_scope"],
        **{key: keys[key] for key in ("denominator", "group") if keys[key] not in ("host", "ignore")},
        "needs": needs(correction),
    }
    notes = _notes(
        arguments,
        needs_target=correction.needs_target,
        needs_plan=correction.needs_plan,
        acts=not correction.is_identity,
    )
    return Checked(rows, one_line(keys), correction.needs_target, (*loaded.notes, *notes))


def _notes(
    arguments: Arguments, *, needs_target: bool, needs_plan: bool = False, acts: bool = True
) -> tuple[str, ...]:
    """What a launch still lacks."""
    path, init = (arguments.get(k) for k in ("custom_tis_function_path", "custom_megatron_init_path"))
    lacking = {
        f"names no function: slime needs custom_tis_function_path: {contract.TIS}.correct": not path,
        f"no metrics: in slime add {contract.CARRY}": path and not init and not needs_target,
        "--use-tis is not set: the loss stays as it is, only metrics are computed": acts
        and not arguments.get("use_tis"),
        "no step and the host's loss: it stays as it is, only metrics are computed": not acts
        and arguments.get("use_tis"),
        f"needs cur_log_probs: in slime add {contract.CARRY}": needs_target and not init,
        f"needs the whole optimizer step: in slime add {contract.PLAN_FLAG} {contract.PLAN}": needs_plan
        and arguments.get("rollout_data_postprocess_path") != contract.PLAN,
        "needs log-probs from before the step: in slime since v0.3.0 add --get-mismatch-metrics": needs_plan
        and skips_proximal(OptionalArgs(namespace(arguments))),
    }
    return tuple(note for note, is_lacking in lacking.items() if is_lacking)


def _show(path: str, found: Checked) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    for key, value in {"file": path, **found.rows}.items():
        table.add_row(key, value)
    for note in found.notes:
        table.add_row("note", note)
    console().print(table, "ok", markup=False)
