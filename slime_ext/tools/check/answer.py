"""Runs the third pass of ``check``: rules, and what a launch resolves to."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from slime_ext.config import load as config
from slime_ext.config.foreign import FOREIGN
from slime_ext.config.words import brief, one_line
from slime_ext.errors import ConfigError, cut
from slime_ext.hosts import contract
from slime_ext.hosts.code import HostCode
from slime_ext.hosts.contract import flag_of
from slime_ext.hosts.flags import ARGUMENTS
from slime_ext.rules.configuration import BOUNDS
from slime_ext.rules.judge import OF_INIT_ALONE, RULES, broken, require, unchecked
from slime_ext.rules.rule import HINT, HOST, REFUSE, WARN, BrokenRuleError, Line
from slime_ext.rules.setup import ArgumentUnknownError, HostUnknownError, Setup, UnknownError
from slime_ext.tools import decision
from slime_ext.tools.check.setup import (
    NAMES,
    OFF,
    is_correction_unknown,
    setup_of,
    with_correction,
    with_flags,
)
from slime_ext.tools.checkout import Checkout, checkout_in
from slime_ext.tools.convert import CONVERTED
from slime_ext.tools.launch.config_file import doubts_of_file
from slime_ext.tools.launch.launch import Launch, Unread, WrittenFlag
from slime_ext.tools.launch.read import is_script, read_script
from slime_ext.tools.wording import needs

INIT = {"custom_megatron_init_path": contract.OURS["custom_megatron_init_path"]}
OFFERED = {  # flags that add slime_ext to a launch without it, and what they do
    "first": (INIT, "measures the mismatch only; applies no correction"),
    "then": (
        {"use_tis": True, "custom_tis_function_path": f"{contract.TIS}.token_tis", **INIT},
        "policy loss times min(proximal / behavior, 2); slime-ext presets lists other corrections",
    ),
}


@dataclass(frozen=True)
class Offer:
    """The flags that add slime_ext to a launch, without those that it has already.

    Args:
        comments: what the flags do, and what they replace.
    """

    flags: tuple[str, ...]
    comments: tuple[str, ...]

    def __str__(self) -> str:
        return "\n# ".join(["\n".join(self.flags), *self.comments])


@dataclass(frozen=True)
class Answer:
    """The result of ``check`` for one file.

    Args:
        rows: name -> what the file resolves to.
        offers: ``first`` or ``then`` -> what adds slime_ext to a launch without it.
        line: the same on one line.
        notes: warnings and hints.
        uses_ours: whether anything of slime_ext would run.
        unread: arguments that are known only where the script runs, one line each.
        skipped: the rules that read such an argument and so were not checked, one line each.
        unasked: what was not checked because the host's code is not here, one line each.
    """

    rows: Mapping[str, str]
    line: str
    notes: tuple[Line, ...] = ()
    uses_ours: bool = True
    unread: tuple[str, ...] = ()
    skipped: tuple[Line, ...] = ()
    unasked: tuple[Line, ...] = ()
    offers: Mapping[str, Offer] = field(default_factory=dict)

    @property
    def status(self) -> str:
        """``incomplete`` if anything is unknown, ``unused`` if slime_ext would not run, else ``ok``."""
        if self.unread or self.unasked:
            return "incomplete"
        return "ok" if self.uses_ours else "unused"


def check(
    path: str,
    args_path: str | None = None,
    arguments: Sequence[str] = (),
    host: HostCode | None = None,
    *,
    run: bool = False,
    environment: Sequence[str] = (),
) -> Answer:
    """Checks a launch script or a YAML file.

    Args:
        path: the launch script or the YAML file.
        args_path: the launch script whose other arguments go with a YAML ``path``.
        arguments: the arguments of the script.
        host: the code that the launch will run; by default the checkout whose train.py it starts.
        run: whether a Python launcher may be executed.
        environment: names of the variables that the script may see.

    Raises:
        ConfigError: the first mistake.
    """
    script, file = _script_and_file(path, args_path, arguments)
    launch = read_script(script, arguments, run=run, environment=environment) if script else Launch("")
    if script and not launch.program:
        got = f"none: {'; '.join(launch.notes) or 'check the script that starts train.py'}"
        raise ConfigError(f"{script}: expected a launch of slime or miles, got {got}")
    return answer(launch, file, host)


def check_file(path: str) -> None:
    """Raises ConfigError for a mistake in a YAML file that names something of slime_ext."""
    setup = setup_of(Launch(""), path)
    if setup.names_ours:
        require(setup, (REFUSE, HOST))


def answer(launch: Launch, file: str = "", host: HostCode | None = None) -> Answer:
    """Checks a launch, a YAML file, or both.

    Args:
        launch: the launch of a script; ``Launch("")`` without a script.
        file: the YAML file; empty without a file.
        host: as for ``check``.

    Raises:
        ConfigError: ``slime_ext.host.init`` or the host would refuse the launch.
    """
    setup = setup_of(launch, file, host or host_of(launch))
    if not setup.names_ours:
        result = _without_ours(setup, launch, file)
    elif is_correction_unknown(setup, launch):
        words = "used by this launch; its correction is known only where the script runs"
        result = Answer({"slime_ext": words}, words)
    else:
        result = judged(setup, launch)
    notes = (*map(Line, (*launch.notes, *_overridden(launch))), *result.notes)
    # A file that is named beside the script is the one to judge.
    doubts = (
        () if file else tuple(Line(f"{doubt}{_of_environment(doubt)}") for doubt in doubts_of_file(launch))
    )
    unread = tuple(_why_unknown(launch))
    return replace(result, notes=notes, unread=unread, unasked=(*doubts, *result.unasked))


def judged(setup: Setup, launch: Launch) -> Answer:
    """Checks a launch that names something of slime_ext.

    Args:
        setup: the result of ``with_correction``.

    Raises:
        BrokenRuleError: the setup breaks a rule that refuses, or a rule of the host.
    """
    require(setup, (REFUSE, HOST))
    rows, line = _described(setup)
    loading = tuple(map(Line, (*setup.loaded.notes, *_replaced_steps(setup))))
    if not launch.script:  # the launch is unknown, so rules over its flags become lines, too
        return Answer(rows, line, (*loading, *broken(replace(setup, unknown=()), (REFUSE, HOST, WARN, HINT))))
    skipped, unasked = (tuple(unchecked(setup, kind)) for kind in (ArgumentUnknownError, HostUnknownError))
    notes = (*loading, *broken(setup, (WARN, HINT)))
    return Answer(rows, line, notes, skipped=skipped, unasked=unasked)


def _why_unknown(launch: Launch) -> list[str]:
    """Returns a line for each reason why an argument that a rule reads is unknown."""
    counting: dict[str, WrittenFlag] = {}  # dest name -> its last flag, in the order of the launch
    for flag in launch.flags:
        if name := OFF.get(flag.name) or NAMES.get(flag.name):
            counting.pop(name, None)
            counting[name] = flag
    reasons = [
        f"{flag.where}: {flag}: known only where the script runs, so no rule checks it"
        f"{_of_environment(str(flag))}"
        for name, flag in counting.items()
        if ARGUMENTS[name].kind.parse and isinstance(next(iter(flag.values), None), Unread)
    ]
    unread = {flag.name for flag in counting.values() if isinstance(next(iter(flag.values), None), Unread)}
    doubted: dict[str, list[str]] = {}  # why -> the flags that it makes unknown
    for name in sorted((NAMES.keys() | OFF.keys()) - unread):
        if why := launch.doubt(name):
            doubted.setdefault(why, []).append(name)
    for why, names in doubted.items():
        which = "any flag" if why == launch.others else ", ".join(names)
        reasons.append(f"{why}: {which} can depend on it{_of_environment(why)}")
    return reasons


def _overridden(launch: Launch) -> Iterator[str]:
    """Yields a line for each flag that a launch sets to two values."""
    written = [flag for flag in launch.flags if not any(isinstance(word, Unread) for word in flag.values)]
    for name in filter(launch.is_known, NAMES):
        same = [flag for flag in written if flag.name == name]
        if other := next((flag for flag in same if flag.values != same[-1].values), None):
            yield f"{same[-1].where}: {same[-1]} counts, because it comes after {other} in {other.where}"


def _replaced_steps(setup: Setup) -> Iterator[str]:
    """Yields a line if the file replaces the steps of the correction that the launch names."""
    mapping = getattr(setup.args, "slime_ext", None)
    if setup.function not in ("", "correct") and isinstance(mapping, Mapping) and "steps" in mapping:
        yield (
            f"slime_ext.steps of the file replaces the steps of {setup.function}, which "
            f"--custom-tis-function-path names; {contract.TIS}.correct would name none"
        )


def _of_environment(text: str) -> str:
    """Returns how to read the first variable in a text that is set here."""
    names = (name for name in re.findall(r"\$\{?([A-Za-z_]\w*)", text) if name in os.environ)
    return next((f"; add --env {name} to read it" for name in names), "")


def line_of(error: Exception) -> Line:
    """Returns an error as a line, with the rule that raised it."""
    return Line(str(error), error.rule if isinstance(error, BrokenRuleError) else None)


def _script_and_file(path: str, args_path: str | None, arguments: Sequence[str]) -> tuple[str, str]:
    """Returns the launch script and the YAML file of two paths; "" if missing.

    Raises:
        ConfigError: the combination has no meaning.
    """
    if not path:
        raise ConfigError("FILE: expected a launch script or a YAML file, got an empty name: name a file")
    script = next((file for file in (path, args_path) if file and is_script(file)), "")
    if args_path and not script:
        raise ConfigError(f"--args: expected a launch script, got {cut(args_path)}: write --args run.sh")
    if args_path and script == path:
        raise ConfigError(
            f"--args: expected a YAML file before it, got the script {cut(path)}: leave out --args"
        )
    if arguments and not script:
        raise ConfigError(
            f"{path}: expected no flags after -- with a YAML file, got {cut(arguments[0])}: leave them out"
        )
    return script, "" if path == script else path


def host_of(launch: Launch) -> Checkout | None:
    """Returns the checkout whose train.py a launch starts, or which contains its script; else None."""
    if not launch.script:
        return None
    folders = ((launch.runs_in / launch.program).parent, launch.root)
    return next((host for folder in folders if folder and (host := checkout_in(folder))), None)


# A launch without anything of slime_ext.


def _without_ours(setup: Setup, launch: Launch, file: str) -> Answer:
    """Returns the flags that add slime_ext to a launch, or why none would act.

    Raises:
        ConfigError: the file is not a launch and holds nothing for slime_ext.
    """
    if not launch.script:
        _forbid_bare_block(setup, file)
        raise ConfigError(
            f"{file}: expected the key slime_ext, got none: run slime-ext presets NAME to print one"
        )
    is_unknown = "custom_tis_function_path" in setup.unknown
    if is_unknown and _may_use_ours(launch):
        words = "not known whether this launch uses it"
        return Answer({"slime_ext": words}, words, uses_ours=False)
    theirs = getattr(setup.args, "custom_tis_function_path", None)
    if theirs:  # because the keys of the file are for that hook
        setup = replace(setup, file=())
    host = setup.host.name if setup.host else "the host"
    replaced = cut(theirs) if theirs else f"{host}'s own weights" if _get(setup, "use_tis") else ""
    offers: dict[str, Offer] = {}
    refused: dict[str, Line] = {}
    for when, (flags, what) in OFFERED.items():
        try:
            offered = with_correction(with_flags(setup, flags), launch)
            require(offered, (REFUSE, HOST))
            require(offered, (WARN,), OF_INIT_ALONE)
        except ConfigError as error:
            refused.setdefault(str(error), line_of(error))
            continue
        comments = [what, _when(launch)] if "use_tis" in flags else [what]
        if replaced and "use_tis" in flags:
            comments.append(f"replaces {replaced}{_unread_block(setup) if theirs else ''}")
        if init_function := _get(setup, "custom_megatron_init_path"):
            comments.append(
                f"replaces {cut(init_function)}; or keep that and call slime_ext.host.init(args) in it"
            )
        offers[when] = Offer(tuple(_spelled(flags, setup)), tuple(comments))
    verb = "mentioned" if is_unknown else "used"
    words = f"not {verb} by this launch; add these flags" if offers else "cannot be added to this launch"
    notes = (*refused.values(), *broken(setup, (WARN,), [RULES["misspelt_host_flag"]]))
    return Answer({"slime_ext": words}, words, notes=notes, uses_ours=False, offers=offers)


def _when(launch: Launch) -> str:
    """Returns the row of the decision table that says when a launch needs a correction."""
    row = decision.LAGGING if "async" in launch.program else decision.FAR
    return decision.plain(f"{row.run}: {row.advice}")


def _may_use_ours(launch: Launch) -> bool:
    """Whether a launch with unknown flags can use anything of slime_ext.

    It can if it mentions slime_ext, or if it names a function or a file that is unknown.
    """
    named = (launch.flag(flag_of(name)) for name in ("custom_tis_function_path", "custom_config_path"))
    words = (word for flag in named if flag for word in flag.values)
    return "slime_ext" in launch.text or any(isinstance(word, Unread) for word in words)


def _spelled(flags: Mapping[str, Any], setup: Setup) -> Iterator[str]:
    """Yields flags as they are typed, without those that the launch has already."""
    for name, value in flags.items():
        if _get(setup, name) != value:
            yield flag_of(name) if value is True else f"{flag_of(name)} {value}"


def _get(setup: Setup, name: str) -> Any:
    return getattr(setup.args, name, None)


def _forbid_bare_block(setup: Setup, file: str) -> None:
    """Raises ConfigError for another system's keys at the top of the file."""
    foreign = vars(setup.args).keys() - ARGUMENTS.keys()
    shared = {name: [key for key in each.defaults if key in foreign] for name, each in CONVERTED.items()}
    system = max(shared, key=lambda name: len(shared[name]))
    if keys := shared[system]:
        raise ConfigError(
            f"{file}: expected the key slime_ext, got keys of {system} ({', '.join(map(cut, keys[:3]))}), "
            "which slime_ext does not read there: keep them for a hook that does, or run slime-ext convert "
            f"--from {system} {file} to translate them"
        )


def _unread_block(setup: Setup) -> str:
    """Returns what to do with the configuration of a hook that slime_ext would replace."""
    system = next((FOREIGN[key] for key in vars(setup.args) if key in FOREIGN), "")
    path = _get(setup, "custom_config_path")
    if not system or not path:
        return ""
    file = cut(path)
    return f": leave out {file}, which configures that hook, or run slime-ext convert --from {system} {file}"


# What a correction does.


def _who_corrects(setup: Setup) -> str:
    """Says what corrects the loss of a launch in which slime_ext only measures."""
    switches = ("use_tis", "get_mismatch_metrics", "custom_tis_function_path", "use_score_centering")
    if unknown := [flag_of(name) for name in switches if name in setup.unknown]:
        return f"what corrects the loss depends on {' and '.join(unknown)}, unknown here"
    try:
        if setup.replaces_policy_loss:
            return "no correction (--loss-type custom_loss calls no hook)"
    except UnknownError as error:
        return f"what corrects the loss is not known: {error}"
    hook = setup.flags.custom_tis_function_path
    weights = cut(hook) if hook else "the host's own weights"
    # With --get-mismatch-metrics alone, slime also uses the loss that the hook returns, so its weights act.
    switches = ("use_tis", "get_mismatch_metrics")
    named = next((flag_of(name) for name in switches if getattr(setup.flags, name)), "")
    parts = [f"{weights} ({named})"] if named else []
    parts += ["the host's score centering (--use-score-centering)"] if setup.flags.use_score_centering else []
    return f"the loss is corrected by {' and '.join(parts)}" if parts else "no correction (--use-tis is off)"


def _described(setup: Setup) -> tuple[dict[str, str], str]:
    """Describes a correction: as name -> text, and on one line."""
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
    is_seed = setup.function in contract.SLIME_FUNCTIONS
    if bounds := [dest for dest in BOUNDS if is_seed and dest in setup.unknown]:
        rows["steps"] += f" with the defaults of {', '.join(map(flag_of, bounds))}"
    return rows, f"{setup.function}: {one_line(keys)}"
