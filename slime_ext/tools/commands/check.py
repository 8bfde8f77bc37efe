"""``slime-ext check FILE``: whether a configuration, or a whole launch script, means what it says."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slime_ext.config import load as config
from slime_ext.config.places import FOREIGN
from slime_ext.config.words import brief, one_line
from slime_ext.errors import ConfigError, SlimeExtError, cut, did_you_mean
from slime_ext.host import configured, contract
from slime_ext.host.configured import BOUNDS, loaded_from, near_function
from slime_ext.host.contract import flag_of
from slime_ext.host.flags import ARGUMENTS, FUNCTION
from slime_ext.host.hosts import HostCode
from slime_ext.host.rules import (
    HINT,
    HOST,
    MEASURING,
    OF_INIT_ALONE,
    REFUSE,
    RULES,
    WARN,
    ArgumentUnknownError,
    BrokenRuleError,
    HostUnknownError,
    Line,
    Setup,
    require,
    said,
    unchecked,
)
from slime_ext.tools.checkout import Checkout, checkout_in, named_checkout, signature_of
from slime_ext.tools.commands import cli
from slime_ext.tools.commands.arguments import NAMES, Arguments, add_flags_of_reading, apart, gathered
from slime_ext.tools.commands.output import console, needs, table
from slime_ext.tools.commands.veil import Veiled
from slime_ext.tools.convert import CONVERTED
from slime_ext.tools.folders import find_own_steps
from slime_ext.tools.scripts.launch import Launch, Unread
from slime_ext.tools.scripts.modules import fault_of, file_of
from slime_ext.tools.scripts.read import host_root

INIT = {"custom_megatron_init_path": contract.OURS["custom_megatron_init_path"]}
OFFERED = {  # what a launch without anything of ours could begin with
    "first": (INIT, "measures the mismatch only; applies no correction"),
    "then": (
        {"use_tis": True, "custom_tis_function_path": f"{contract.TIS}.token_tis", **INIT},
        "policy loss times min(proximal / behavior, 2); slime-ext presets lists the others",
    ),
}
LAST_LINES = {"ok": "ok", "incomplete": "not all known, so not all checked", "unused": ""}


@dataclass(frozen=True)
class Checked:
    """What a file leads to.

    Args:
        rows: what there is to know of it, by name.
        line: the same in one line.
        notes: what its reader should know.
        uses_ours: whether anything of slime_ext would run.
        unread: what is known only where the script runs, a line each; no rule over it was checked.
        skipped: rules that read an argument which is known only there, a line each.
        unasked: what was not checked because it needs the host's code, a line each.
    """

    rows: Mapping[str, str]
    line: str
    notes: tuple[Line, ...] = ()
    uses_ours: bool = True
    unread: tuple[str, ...] = ()
    skipped: tuple[Line, ...] = ()
    unasked: tuple[Line, ...] = ()

    @property
    def status(self) -> str:
        """A key of ``LAST_LINES``."""
        if self.unread or self.unasked:
            return "incomplete"
        return "ok" if self.uses_ours else "unused"


def main(argv: list[str]) -> int:
    """Prints what the file resolves to and returns 0, or with --json 1 for an error, which is in the object.
    Raises ConfigError as ``check``."""
    parser = argparse.ArgumentParser(
        prog="slime-ext check",
        description="Checks a configuration, or a launch script's arguments. A launch without slime_ext gets "
        "the lines that add it.",
    )
    parser.add_argument("file", help="YAML of --custom-config-path, or a launch script")
    parser.add_argument("--args", metavar="SCRIPT", help="launch script with the other arguments of a YAML")
    what = "checkout of the host; default: the one whose train.py the script starts"
    parser.add_argument("--host", metavar="DIR", help=what)
    what = "leave out the lines of a rule that warns or hints; give it once for each rule"
    parser.add_argument("--ignore", metavar="NAME", action="append", default=[], help=what)
    parser.add_argument("--json", action="store_true", help="print one JSON object, for CI")
    add_flags_of_reading(parser)
    words, own = apart(argv)
    given = parser.parse_args(words)
    try:
        _forbid_ignoring(given.ignore)
        host = None if given.host is None else named_checkout(given.host)
        found = check(given.file, given.args, own, host=host, run=given.run, environment=given.env)
    except SlimeExtError as error:
        line = _line_of(error)
        if given.json:
            print(_json_of(given.file, Checked({}, ""), "error", line))
            return cli.WRONG
        if line.rule:
            raise ConfigError(str(line)) from None
        raise
    notes = [note for note in found.notes if note.rule is None or note.rule.name not in given.ignore]
    if given.json:
        print(_json_of(given.file, replace(found, notes=tuple(notes)), found.status))
        return 0
    rows = [*{"file": given.file, **found.rows}.items(), *(("note", str(note)) for note in notes)]
    rows += [("unknown", line) for line in found.unread]
    rows += [("not checked", str(line)) for line in found.unasked]
    last = filter(None, [LAST_LINES[found.status]])
    console().print(table(rows), *last, markup=False)
    return 0


def _forbid_ignoring(names: Sequence[str]) -> None:
    """Raises ConfigError for a name that is no rule's, or that of a rule which refuses."""
    for name in names:
        if name not in RULES:
            near = did_you_mean(name, RULES) or ": docs/slime.md lists the rules"
            raise ConfigError(f"--ignore: expected a rule's name, got '{cut(name)}'{near}")
        if RULES[name].severity not in (WARN, HINT):
            why = RULES[name].severity.value
            raise ConfigError(
                f"--ignore: expected a rule that warns or hints, got {name} ({why}): change the launch"
            )


def _line_of(error: SlimeExtError) -> Line:
    return Line(str(error), error.rule if isinstance(error, BrokenRuleError) else None)


def _as_json(line: Line) -> dict[str, str | None]:
    name, severity = (line.rule.name, line.rule.severity.name.lower()) if line.rule else (None, None)
    return {"rule": name, "severity": severity, "message": line.message}


def _json_of(file: str, found: Checked, status: str, error: Line | None = None) -> str:
    unread = [{"rule": None, "why": line} for line in found.unread]
    unjudged = [
        {"rule": line.rule and line.rule.name, "why": line.message}
        for line in (*found.skipped, *found.unasked)
    ]
    answer = {
        "file": file,
        "status": status,
        "resolved": dict(found.rows),
        "lines": [_as_json(note) for note in found.notes],
        "not_checked": unread + unjudged,
        "error": None if error is None else _as_json(error),
    }
    return json.dumps(answer, indent=2)


def check(
    path: str,
    args_path: str | None = None,
    own: Sequence[str] = (),
    launch: Launch | None = None,
    host: HostCode | None = None,
    *,
    run: bool = False,
    environment: Sequence[str] = (),
) -> Checked:
    """What a file leads to.

    Args:
        own, launch, run, environment: as for ``gathered``.
        host: the code that the launch will run; by default that of the checkout whose train.py it starts.

    Raises:
        ConfigError: the first thing that is wrong.
    """
    arguments = gathered(path, args_path, own, launch, run=run, environment=environment)
    host = host or host_of(arguments.launch)
    _forbid_no_launch(arguments.launch)
    for dest in (dest for dest, argument in ARGUMENTS.items() if argument.kind is FUNCTION):
        contract.forbid_respelled(str(arguments.get(dest) or ""), flag_of(dest))
    if _names_ours(arguments) and _is_unread(arguments):
        said = "used by this launch; its correction is known only where the script runs"
        found = Checked({"slime_ext": said}, said)
    elif _names_ours(arguments):
        found = checked(arguments, host)
    elif "custom_tis_function_path" in arguments.unknown and _may_use_ours(arguments.launch):
        said = "not known whether this launch uses it"
        found = Checked({"slime_ext": said}, said, uses_ours=False)
    else:
        found = _unused(path, arguments, host)
    unruled = map(Line, (*arguments.launch.notes, *_overridden(arguments.launch)))
    notes = (*unruled, *found.notes)
    return replace(found, notes=notes, unread=arguments.unread)


def _may_use_ours(launch: Launch) -> bool:
    """Whether a launch with unknown flags can use anything of slime_ext.

    It mentions it, or names a function or a file that is not known. In any other launch it does not matter
    what a helper prints.
    """
    named = (launch.flag(flag_of(name)) for name in ("custom_tis_function_path", "custom_config_path"))
    words = (word for flag in named if flag for word in flag.values)
    return "slime_ext" in launch.text or any(isinstance(word, Unread) for word in words)


def _overridden(launch: Launch) -> Iterator[str]:
    """A line for each flag that stands in a launch with two values; the last counts."""
    written = [flag for flag in launch.flags if not any(isinstance(word, Unread) for word in flag.values)]
    for name in filter(launch.is_known, NAMES):
        given = [flag for flag in written if flag.name == name]
        if other := next((flag for flag in given if flag.values != given[-1].values), None):
            yield f"{given[-1].where}: {given[-1]} counts, {other} in {other.where} does not"


def check_file(path: str) -> None:
    """Raises ConfigError for a mistake in a YAML; one that names nothing of ours is the host's own matter."""
    arguments = gathered(path)
    if _names_ours(arguments):
        checked(arguments)


def _is_unread(arguments: Arguments) -> bool:
    """Whether the correction stands where nothing of it is seen here."""
    if not arguments.launch.script or arguments.get("slime_ext") is not None:
        return False
    is_in_file = contract.function_of(arguments.namespace()) == "correct"
    unknown = arguments.unknown
    return "custom_tis_function_path" in unknown or (is_in_file and "custom_config_path" in unknown)


def host_of(launch: Launch) -> Checkout | None:
    """The checkout whose train.py a launch starts, or that its script lies in; None where neither is here."""
    if not launch.script:
        return None
    own = host_root(launch.script)
    runs_in = Path(launch.folder or own or Path.cwd())
    folders = ((runs_in / launch.program).parent, own)
    return next((found for folder in folders if folder and (found := checkout_in(folder))), None)


def checked(arguments: Arguments, host: HostCode | None = None) -> Checked:
    """What arguments that name something of slime_ext lead to.

    Args:
        host: the code that the launch will run, where it is at hand.

    Raises:
        ConfigError: as ``slime_ext.host.init`` refuses them, or the host.
    """
    function, args = _function(arguments), arguments.namespace()
    find_own_steps(arguments.get("slime_ext"))
    setup = Setup(args, function, unknown=arguments.unknown, file=arguments.of_file, host=host)
    setup = loaded_from(setup)
    _check_paths(arguments, host)
    require(setup, (REFUSE, HOST))
    if arguments.launch.script:
        notes = said(setup, (WARN, HINT))
    else:  # what the flags beside this file still have to say
        notes = said(replace(setup, unknown=()), (REFUSE, HOST, WARN, HINT))
    rows, line = _described(setup)
    notes = (*map(Line, setup.loaded.notes), *notes)
    if not arguments.launch.script:
        return Checked(rows, line, notes)
    skipped, unasked = (tuple(unchecked(setup, kind)) for kind in (ArgumentUnknownError, HostUnknownError))
    return Checked(rows, line, notes, skipped=skipped, unasked=unasked)


def _names_ours(arguments: Arguments) -> bool:
    paths = [arguments.get(name) for name in (*contract.OURS, "custom_tis_function_path")]
    return arguments.get("slime_ext") is not None or any(str(path).startswith("slime_ext") for path in paths)


def _unused(path: str, arguments: Arguments, host: HostCode | None) -> Checked:
    """A launch without anything of ours: the flags that add it, or why none would act.

    Raises:
        ConfigError: the file is no launch, and holds nothing for slime_ext.
    """
    if not arguments.launch.script:
        _forbid_bare_block(path, arguments)
        raise ConfigError(f"{path}: expected the key slime_ext, got none: slime-ext presets NAME prints one")
    theirs = arguments.get("custom_tis_function_path")
    if theirs:  # the keys of the file are for that hook
        arguments = replace(arguments, of_file=())
    replaced = cut(theirs) if theirs else "slime's own weights" if arguments.get("use_tis") else ""
    rows: dict[str, str] = {}
    refused: dict[str, Line] = {}
    for when, (flags, what) in OFFERED.items():
        offered = arguments.with_flags(flags)
        try:
            checked(offered, host)
            setup = Setup(offered.namespace(), _function(offered), unknown=offered.unknown)
            require(setup, (WARN,), OF_INIT_ALONE)
        except ConfigError as error:
            refused.setdefault(str(error), _line_of(error))
        else:
            comments = [what]
            if replaced and "use_tis" in flags:
                comments.append(f"in place of {replaced}{_unread_block(arguments) if theirs else ''}")
            if own := arguments.get("custom_megatron_init_path"):
                comments.append(
                    f"in place of {cut(own)}: or keep it and call slime_ext.host.init(args) there"
                )
            rows[when] = "\n# ".join([_spelled(flags, arguments), *comments])
    verb = "mentioned" if "custom_tis_function_path" in arguments.unknown else "used"
    words = f"not {verb} by this launch; add these flags" if rows else "nothing for it in this launch"
    return Checked({"slime_ext": words, **rows}, words, notes=tuple(refused.values()), uses_ours=False)


def _forbid_no_launch(launch: Launch) -> None:
    """Raises ConfigError for a script that starts no host."""
    if launch.program or not launch.script:
        return
    got = f"none: {'; '.join(launch.notes) or 'check the script that starts train.py'}"
    raise ConfigError(f"{launch.script}: expected a launch of slime or miles, got {got}")


def _spelled(flags: Mapping[str, Any], arguments: Arguments) -> str:
    """Flags as they are pasted into a script's array, without those that the launch has."""
    missing = {name: value for name, value in flags.items() if arguments.get(name) != value}
    return "\n".join(flag_of(k) if v is True else f"{flag_of(k)} {v}" for k, v in missing.items())


def _forbid_bare_block(path: str, arguments: Arguments) -> None:
    """Raises ConfigError for another system's keys at the top of the file, where nothing of ours looks."""
    foreign = set(arguments.values) - ARGUMENTS.keys()
    shared = {name: [key for key in keys if key in foreign] for name, (keys, _) in CONVERTED.items()}
    system = max(shared, key=lambda name: len(shared[name]))
    if keys := shared[system]:
        raise ConfigError(
            f"{path}: expected the key slime_ext, got keys of {system} ({', '.join(map(cut, keys[:3]))}), "
            "which slime_ext does not read where they are; leave them there for a hook that does, or "
            f"translate them: slime-ext convert --from {system} {path}"
        )


def _unread_block(arguments: Arguments) -> str:
    """What becomes of the keys of a hook that ours would replace."""
    system = next((FOREIGN[key] for key in arguments.values if key in FOREIGN), "")
    path = arguments.get("custom_config_path")
    if not system or not path:
        return ""
    file = cut(path)
    return f": leave out {file}, whose keys are its own, or slime-ext convert --from {system} {file}"


def _function(arguments: Arguments) -> str:
    """The function in ``slime_ext.tis`` that a launch names; a mapping alone is for ``correct``; empty where
    another's function runs, or none."""
    path, mapping = arguments.get("custom_tis_function_path"), arguments.get("slime_ext")
    if path is None:
        measures = isinstance(mapping, Mapping) and set(mapping) <= MEASURING
        return "" if arguments.launch.script or mapping is None or measures else "correct"
    name = contract.function_of(arguments.namespace())
    if name not in configured.NAMES and str(path).startswith("slime_ext"):
        last = str(path).rpartition(".")[2]
        near = f": write {contract.TIS}.{last}" if last in configured.NAMES else near_function(last)
        raise ConfigError(
            f"--custom-tis-function-path: expected a function of {contract.TIS}, got '{cut(path)}'{near}"
        )
    return name


def _check_paths(arguments: Arguments, host: HostCode | None) -> None:
    """Functions that do not exist, or that the wrong flag names."""
    for dest, argument in ARGUMENTS.items():
        named = arguments.get(dest) if argument.kind is FUNCTION else None
        if named and not (
            named.startswith("slime_ext") and dest in (*contract.OURS, "custom_tis_function_path")
        ):
            _check_function(dest, named, arguments, host)
    for dest, ours in contract.OURS.items():
        named = arguments.get(dest) or ours
        if named.startswith("slime_ext") and named != ours:
            near = did_you_mean(named, [ours])
            raise ConfigError(f"{flag_of(dest)}: expected {ours} of slime_ext, got '{cut(named)}'{near}")


def _check_function(dest: str, named: str, arguments: Arguments, host: HostCode | None) -> None:
    """One's own function: a dotted path, and in a package that is seen from here the name of a function, and
    of a hook the keywords that the host calls it with."""
    script = Path(arguments.launch.script).resolve() if arguments.launch.script else None
    near = [script.parent, host_root(str(script))] if script else []
    folders = [Path.cwd(), *(folder for folder in near if folder), *map(Path, sys.path)]
    if fault := fault_of(named, folders):
        fault = "it is not there" if isinstance(named, Veiled) else fault
        raise ConfigError(f"{flag_of(dest)}: expected package.module.function, got '{cut(named)}': {fault}")
    module, _, name = named.rpartition(".")
    file = file_of(module, folders) if dest == "custom_tis_function_path" else None
    if file and (signature := signature_of(file.read_text("utf-8", "ignore"), name)):
        more = contract.OPTIONAL if host and host.passes("cur_log_probs") else ()
        contract.require_keywords(named, signature, (*contract.REQUIRED, *more))


def _who_corrects(setup: Setup) -> str:
    """What corrects the loss of a launch in which ours only measures."""
    switches = ("use_tis", "get_mismatch_metrics", "custom_tis_function_path", "use_score_centering")
    if unknown := [flag_of(name) for name in switches if name in setup.unknown]:
        return f"what corrects is not known, because {' and '.join(unknown)} is not"
    hook = setup.a.custom_tis_function_path
    weights = cut(hook) if hook else "the host's own weights"
    # slime takes the loss that the hook returns under --get-mismatch-metrics, too, and its own weights act
    named = (
        "--use-tis" if setup.a.use_tis else "--get-mismatch-metrics" if setup.a.get_mismatch_metrics else ""
    )
    parts = [f"{weights} ({named})"] if named else []
    parts += ["the host's score centering (--use-score-centering)"] if setup.a.use_score_centering else []
    return f"what corrects is {' and '.join(parts)}" if parts else "nothing corrects (--use-tis is off)"


def _described(setup: Setup) -> tuple[dict[str, str], str]:
    """What there is to know of a correction: by name, and in one line."""
    if not setup.function:
        line = f"measures; {_who_corrects(setup)}"
        return {"slime_ext": line}, line
    correction, keys = setup.correction, config.to_mapping(setup.correction)
    mapping = getattr(setup.args, "slime_ext", None)
    surrogate = keys["surrogate"]
    rows = {
        "function": f"{contract.TIS}.{setup.function}",
        **({"read as": ", ".join(map(str, mapping))} if mapping else {}),
        "numerator": keys["numerator"],
        "loss": surrogate if isinstance(surrogate, str) else brief([surrogate]),
        "steps": brief(keys["steps"]),
        "masks": keys["mask_scope"],
        **{key: keys[key] for key in ("denominator", "group") if keys[key] not in ("host", "ignore")},
        "needs": needs(correction),
    }
    is_seed = setup.function in contract.SEEDS
    if bounds := [dest for dest in BOUNDS if is_seed and dest in setup.unknown]:
        rows["steps"] += f" with the defaults of {', '.join(map(flag_of, bounds))}"
    return rows, f"{setup.function}: {one_line(keys)}"
