"""``slime-ext check FILE``: whether a configuration, or a whole launch script, means what it says."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slime_ext import presets
from slime_ext.config import dialects
from slime_ext.config import load as config
from slime_ext.config.optional_args import OptionalArgs
from slime_ext.errors import ConfigError, cut, did_you_mean
from slime_ext.host import contract
from slime_ext.host.configured import forbid_misplaced, forbid_unread_key
from slime_ext.host.contract import flag_of
from slime_ext.host.flags import (
    ARGUMENTS,
    FUNCTION,
    brief,
    check_flags,
    check_plan,
    double_count,
    formula,
    one_line,
    skips_proximal,
    unread_clip,
)
from slime_ext.tools.commands.arguments import Arguments, gathered
from slime_ext.tools.commands.convert import system_of
from slime_ext.tools.commands.output import console, needs, table
from slime_ext.tools.scripts.launch import Launch
from slime_ext.tools.scripts.modules import fault_of
from slime_ext.tools.scripts.read import host_root

INIT = {"custom_megatron_init_path": contract.OURS["custom_megatron_init_path"]}
OFFERED = {  # what a launch without anything of ours could begin with
    "first": (
        {"get_mismatch_metrics": True, "custom_tis_function_path": f"{contract.TIS}.metrics_only", **INIT},
        "measures the mismatch only; applies no correction",
    ),
    "then": (
        {"use_tis": True, "custom_tis_function_path": f"{contract.TIS}.token_tis", **INIT},
        "policy loss times min(proximal / behavior, 2); slime-ext presets lists the others",
    ),
}


@dataclass(frozen=True)
class Checked:
    """What a file leads to.

    Args:
        rows: what there is to know of it, by name.
        line: the same in one line.
        needs_target: whether the hook needs ``cur_log_probs``.
        notes: what its reader should know.
        uses_ours: whether anything of slime_ext would run.
        unread: what is known only where the script runs, a line each; no rule over it was checked.
    """

    rows: Mapping[str, str]
    line: str
    needs_target: bool = False
    notes: tuple[str, ...] = ()
    uses_ours: bool = True
    unread: tuple[str, ...] = ()


def main(argv: list[str]) -> int:
    """Prints what the file resolves to and returns 0. Raises ConfigError as ``check``."""
    parser = argparse.ArgumentParser(
        prog="slime-ext check",
        description="Checks a configuration, or a launch script's arguments. A launch without slime_ext gets "
        "the lines that add it.",
    )
    parser.add_argument("file", help="YAML of --custom-config-path, or a launch script (.sh, miles' .py)")
    parser.add_argument("--args", metavar="FILE", help="launch script, YAML or JSON with the other arguments")
    parser.add_argument("own", nargs="*", metavar="FLAG", help="flags of the script's own, behind --")
    given = parser.parse_intermixed_args(argv)  # FLAG may stand behind --args
    found = check(given.file, given.args, given.own)
    rows = [*{"file": given.file, **found.rows}.items(), *(("note", note) for note in found.notes)]
    rows += [("unknown", line) for line in found.unread]
    last = ["not all known, so not all checked"] if found.unread else ["ok"] if found.uses_ours else []
    console().print(table(rows), *last, markup=False)
    return 0


def check(
    path: str, args_path: str | None = None, own: Sequence[str] = (), launch: Launch | None = None
) -> Checked:
    """What a file leads to; ``launch`` is the script's, where it was read already.

    Raises:
        ConfigError: the first thing that is wrong.
    """
    arguments = gathered(path, args_path, own, launch)
    if _names_ours(arguments) and _is_unread(arguments):
        said = "used by this launch; its correction is known only where the script runs"
        found = Checked({"slime_ext": said}, said)
    elif _names_ours(arguments):
        found = checked(arguments)
    elif arguments.script and "custom_tis_function_path" in arguments.unknown:
        said = "not known whether this launch uses it"
        found = Checked({"slime_ext": said}, said, uses_ours=False)
    else:
        found = _unused(path, arguments)
    return replace(found, notes=(*arguments.notes, *found.notes), unread=arguments.unread)


def _is_unread(arguments: Arguments) -> bool:
    """Whether the correction stands where nothing of it is seen here."""
    if not arguments.script or arguments.get("slime_ext") is not None:
        return False
    is_in_file = contract.function_of(arguments.namespace()) == "correct"
    unknown = arguments.unknown
    return "custom_tis_function_path" in unknown or (is_in_file and "custom_config_path" in unknown)


def checked(arguments: Arguments) -> Checked:
    """What arguments that name something of slime_ext lead to.

    Raises:
        ConfigError: as ``slime_ext.host.init`` refuses them.
    """
    forbid_misplaced(arguments.values)
    name = _function(arguments)
    found = _of_seed(name, arguments) if name in contract.SEEDS else _of_correction(name, arguments)
    _check_paths(arguments)
    check_flags(arguments.namespace(), unknown=arguments.unknown)
    return found


def _names_ours(arguments: Arguments) -> bool:
    paths = [arguments.get(name) for name in (*contract.OURS, "custom_tis_function_path")]
    return arguments.get("slime_ext") is not None or any(str(path).startswith("slime_ext") for path in paths)


def _unused(path: str, arguments: Arguments) -> Checked:
    """A launch without anything of ours: the flags that add it, or why none would act.

    Raises:
        ConfigError: the file is no launch, and holds nothing for slime_ext.
    """
    if not arguments.script:
        _forbid_bare_block(path, arguments)
        raise ConfigError(f"{path}: expected the key slime_ext, got none: see the files in configs/presets")
    if arguments.launcher is None and (system := system_of(arguments.script)):
        raise ConfigError(
            f"{path}: expected a launch of slime or miles, got one of {system}: "
            f"slime-ext convert --from {system} {path}"
        )
    if arguments.launcher is None and arguments.notes:
        said = "; ".join(arguments.notes)
        raise ConfigError(f"{path}: expected a launch of slime or miles, got none: {said}")
    rows, refused = {}, {}
    for when, (flags, what) in _offered(arguments).items():
        try:
            checked(arguments.with_flags(flags))
        except ConfigError as error:
            refused[str(error)] = None
        else:
            rows[when] = f"{_spelled(flags, arguments)}\n# {what}"
    theirs = arguments.get("custom_tis_function_path")
    instead = f" in place of {cut(theirs)}" if theirs else ""
    said = f"not used by this launch; add these flags{instead}" if rows else "nothing for it in this launch"
    return Checked({"slime_ext": said, **rows}, said, notes=tuple(refused), uses_ours=False)


def _offered(arguments: Arguments) -> dict[str, tuple[dict[str, Any], str]]:
    """What a launch could begin with; one that corrects its loss already keeps its correction, or is told
    what is taken out."""
    if not arguments.get("use_tis"):
        return OFFERED
    theirs = arguments.get("custom_tis_function_path")
    if not theirs:
        own = "slime's own: weights clipped at --tis-clip"
        kept = {"custom_tis_function_path": f"{contract.TIS}.vanilla_tis_function", **INIT}
        first = (kept, "the correction that it has, slime's own, with metrics of it")
    else:
        own = cut(theirs)
        flags, what = OFFERED["first"]
        first = (flags, f"takes {own} out of the loss: {what.partition(';')[0]}, and nothing is corrected")
    flags, what = OFFERED["then"]
    return {"first": first, "then": (flags, f"{what}; it replaces {own}")}


def _spelled(flags: Mapping[str, Any], arguments: Arguments) -> str:
    """Flags as they are pasted into a script's array, without those that the launch has."""
    missing = {name: value for name, value in flags.items() if arguments.get(name) != value}
    return "\n".join(flag_of(k) if v is True else f"{flag_of(k)} {v}" for k, v in missing.items())


def _forbid_bare_block(path: str, arguments: Arguments) -> None:
    """Another system's keys at the top of the file, where nothing of ours looks."""
    foreign = set(arguments.values) - ARGUMENTS.keys()
    shared = {name: [key for key in keys if key in foreign] for name, (keys, _) in dialects.DIALECTS.items()}
    system = max(shared, key=lambda name: len(shared[name]))
    if shared[system]:
        raise ConfigError(
            f"{path}: {shared[system][0]}: expected it under slime_ext: {{{system}: ...}}, got it at the "
            f"top, where slime_ext never looks; or slime-ext convert --from {system} {path}"
        )


def _function(arguments: Arguments) -> str:
    """The function in ``slime_ext.tis`` that a launch names; a mapping alone is for ``correct``."""
    path = arguments.get("custom_tis_function_path")
    if path is None and arguments.get("slime_ext") is not None:
        return "correct"
    name = contract.function_of(arguments.namespace())
    if not name:
        got = "none" if path is None else f"'{cut(path)}'"
        raise ConfigError(
            f"--custom-tis-function-path: expected {contract.TIS}.correct or {contract.TIS}.<preset>, got "
            f"{got}: nothing of slime_ext would run"
        )
    names = ["correct", *contract.SEEDS, *presets.NAMES]
    if name not in names:
        near = did_you_mean(name, names)
        raise ConfigError(
            f"--custom-tis-function-path: expected a function of {contract.TIS}, got '{cut(name)}'{near}"
        )
    return name


def _check_paths(arguments: Arguments) -> None:
    """Functions that do not exist, or that the wrong flag names; a key that no function reads."""
    for dest, argument in ARGUMENTS.items():
        named = arguments.get(dest) if argument.kind is FUNCTION else None
        if named and not (
            named.startswith("slime_ext") and dest in (*contract.OURS, "custom_tis_function_path")
        ):
            _check_function(dest, named, arguments)
    if arguments.script or arguments.get("custom_tis_function_path"):
        forbid_unread_key(arguments.namespace())
    for dest, ours in contract.OURS.items():
        named = arguments.get(dest) or ours
        if named.startswith("slime_ext") and named != ours:
            near = did_you_mean(named, [ours])
            raise ConfigError(f"{flag_of(dest)}: expected {ours} of slime_ext, got '{cut(named)}'{near}")


def _check_function(dest: str, named: str, arguments: Arguments) -> None:
    """One's own function: a dotted path, and in a package that is seen from here the name of a function."""
    script = Path(arguments.script).resolve() if arguments.script else None
    near = [script.parent, host_root(str(script))] if script else []
    folders = [Path.cwd(), *(folder for folder in near if folder), *map(Path, sys.path)]
    if fault := fault_of(named, folders):
        raise ConfigError(f"{flag_of(dest)}: expected package.module.function, got '{cut(named)}': {fault}")


def _of_seed(name: str, arguments: Arguments) -> Checked:
    line, needs_target = formula(name, arguments.values), name in contract.NEED_TARGET
    rows = {"function": name, "formula": line, "needs": "cur_log_probs" if needs_target else "-"}
    notes = _notes(arguments, needs_target=needs_target)
    if name == "off_policy_is_function" and (line_of := double_count(arguments.namespace())):
        notes = (line_of, *notes)
    return Checked(rows, f"{name}: {line}", needs_target, notes)


def _of_correction(name: str, arguments: Arguments) -> Checked:
    mapping = config.with_preset(arguments.get("slime_ext"), None if name == "correct" else name)
    loaded = config.read_config(mapping)
    config.check_args(loaded, arguments.namespace())
    correction, keys = loaded.correction, config.to_mapping(loaded.correction)
    if (
        correction.needs_plan
        and arguments.script
        and "rollout_data_postprocess_path" not in arguments.unknown
    ):
        check_plan(arguments.namespace(), may_skip_proximal=True)
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
    plan = arguments.get("rollout_data_postprocess_path")
    lacking = {
        (line := unread_clip(arguments.namespace())): line,
        f"names no function: slime needs custom_tis_function_path: {contract.TIS}.correct": not path,
        f"no metrics: in slime add {contract.INIT_FLAG}": path and not init and not needs_target,
        f"no metrics and no check at start-up: {cut(init)} is run in place of "
        f"{INIT['custom_megatron_init_path']}; call that one from it": init
        and init != INIT["custom_megatron_init_path"],
        "--use-tis is not set: the loss stays as it is, only metrics are computed": acts
        and not arguments.get("use_tis"),
        "no step and the host's loss: it stays as it is, only metrics are computed": not acts
        and arguments.get("use_tis"),
        f"needs cur_log_probs: in slime add {contract.INIT_FLAG}": needs_target and not init,
        f"needs the whole optimizer step: in slime add {contract.PLAN_FLAG} {contract.PLAN}": needs_plan
        and plan != contract.PLAN,
        "needs log-probs from before the step: in slime since v0.3.0 add --get-mismatch-metrics": needs_plan
        and skips_proximal(OptionalArgs(arguments.namespace())),
    }
    unread = arguments.unknown if arguments.script else ()
    if {"custom_megatron_init_path", "use_tis", "rollout_data_postprocess_path"} & set(unread):
        return ()  # each of these lines could be wrong
    return tuple(note for note, is_lacking in lacking.items() if is_lacking)
