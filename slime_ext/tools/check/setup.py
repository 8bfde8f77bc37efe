"""Runs the second pass of ``check``: turns a launch into the setup that the rules judge."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from slime_ext.config.files import text_of
from slime_ext.errors import ConfigError, cut, did_you_mean
from slime_ext.hosts import contract
from slime_ext.hosts.contract import OURS, flag_of
from slime_ext.hosts.flags import ARGUMENTS, DERIVED, FUNCTION, check_kinds, forbid_misspelt
from slime_ext.rules import configuration
from slime_ext.rules.configuration import near_function
from slime_ext.rules.of_files import MEASURING
from slime_ext.rules.setup import Parameter, Setup, drops_nothing
from slime_ext.tools.check import router
from slime_ext.tools.check.rollout_source import parameters_of
from slime_ext.tools.check.veil import veiled
from slime_ext.tools.checkout import signature_of
from slime_ext.tools.folders import is_file
from slime_ext.tools.launch.launch import Launch, Unread, WrittenFlag
from slime_ext.tools.launch.sources import Sources
from slime_ext.tools.modules import fault_of, file_of

NAMES = {flag_of(name): name for name, argument in ARGUMENTS.items() if argument.kind is not DERIVED}
OFF = {argument.switched_off_by: name for name, argument in ARGUMENTS.items() if argument.switched_off_by}
DESTS = NAMES | OFF  # flag -> the argument that it sets or switches off
INIT = {"custom_megatron_init_path": OURS["custom_megatron_init_path"]}
OFFERED: dict[str, dict[str, Any]] = {  # flags that add slime_ext to a launch without it
    "first": INIT,
    "then": {"use_tis": True, "custom_tis_function_path": f"{contract.TIS}.token_tis", **INIT},
}


class Use(Enum):
    """Says how a launch uses slime_ext."""

    KNOWN = "it runs something of slime_ext, and the correction is known"
    CORRECTION_UNKNOWN = "it runs something of slime_ext, and the correction is unknown"
    UNKNOWN = "it is unknown whether it runs anything of slime_ext"
    NONE = "it runs nothing of slime_ext"


@dataclass(frozen=True)
class Case:
    """Holds what the rules judge of a launch, or of a YAML file.

    Args:
        sources: the launch and its files.
        setup: the setup of the launch. Its configuration is loaded in the third pass.
        use: how the launch uses slime_ext.
        offers: ``first`` or ``then`` -> the setup with the flags of ``OFFERED``, or why they cannot be added;
            empty if the launch uses slime_ext.
    """

    sources: Sources
    setup: Setup
    use: Use
    offers: Mapping[str, Setup | ConfigError] = field(default_factory=dict)


def case_of(sources: Sources) -> Case:
    """Builds what the rules judge.

    Keys of --custom-config-path override flags, as in slime.

    Raises:
        ConfigError: the host or slime_ext refuses a flag or a value, or a flag names a function that does not
            exist.
    """
    launch = sources.launch
    setup = _setup_of(sources)
    for dest in (dest for dest, argument in ARGUMENTS.items() if argument.kind is FUNCTION):
        contract.forbid_respelled(str(_argument(setup, dest) or ""), flag_of(dest))
    use, offers = _use_of(setup, sources), dict[str, Setup | ConfigError]()
    if use is Use.KNOWN:
        setup = with_functions(setup, launch)
    for when, flags in OFFERED.items() if use is Use.NONE else ():
        try:
            offers[when] = with_functions(_with_flags(without_file(setup), flags), launch)
        except ConfigError as error:
            offers[when] = error
    return Case(sources, setup, use, offers)


def _setup_of(sources: Sources) -> Setup:
    """Builds the setup of the flags, as the host parses them, and of the keys in files."""
    launch = sources.launch
    last: Mapping[str, Any] = {}
    values, unknown = _of_flags(launch) if launch.script else ({}, set(ARGUMENTS))
    for last in sources.keys.values():
        values |= last
        unknown -= last.keys()
    if sources.is_unwritten:
        unknown.add("custom_config_path")
    check_kinds(SimpleNamespace(**values), unknown)
    return Setup(
        SimpleNamespace(**values),
        unknown=frozenset(unknown),
        file=tuple(last),
        host=sources.host,
        environment=launch.environment,
        program=launch.program,
        flag_names=tuple(dict.fromkeys(flag.name for flag in launch.flags)),
    )


def without_file(setup: Setup) -> Setup:
    """Returns the setup without the keys of its file, if these are for a hook that is not ours."""
    return replace(setup, file=()) if _argument(setup, "custom_tis_function_path") else setup


def _argument(setup: Setup, name: str) -> Any:
    return getattr(setup.args, name, None)


def _use_of(setup: Setup, sources: Sources) -> Use:
    """Says how a launch uses slime_ext."""
    launch = sources.launch
    is_configured = _argument(setup, "slime_ext") is not None
    functions = (str(_argument(setup, name)) for name in (*OURS, "custom_tis_function_path"))
    is_function_unknown = "custom_tis_function_path" in setup.unknown
    # The script names a file that is not known, and its keys can name any function.
    is_file_unknown = "custom_config_path" in setup.unknown and flag_of("custom_config_path") in launch.text
    if is_configured or any(function.startswith("slime_ext") for function in functions):
        function = contract.function_of(setup.args)
        is_in_file = "custom_config_path" in setup.unknown and function == "correct"
        is_in_file |= is_file_unknown and _argument(setup, "custom_tis_function_path") is None
        is_unknown = launch.script and not is_configured and (is_function_unknown or is_in_file)
        return Use.CORRECTION_UNKNOWN if is_unknown else Use.KNOWN
    # If it does not mention slime_ext, it can still name a function or a file that is unknown.
    flags = (launch.flag(flag_of(name)) for name in ("custom_tis_function_path", "custom_config_path"))
    is_named = any(isinstance(word, Unread) for flag in flags if flag for word in flag.values)
    is_mentioned = "slime_ext" in launch.text
    can_be = is_file_unknown or (is_function_unknown and (is_mentioned or is_named))
    can_be |= bool(sources.doubts) and is_mentioned  # the script can write our key into the file
    return Use.UNKNOWN if launch.script and can_be else Use.NONE


def _with_flags(setup: Setup, flags: Mapping[str, Any]) -> Setup:
    """Returns the setup of the same launch with more flags, by dest name."""
    args = SimpleNamespace(**(vars(setup.args) | flags))
    return replace(setup, args=args, unknown=frozenset(setup.unknown) - flags.keys())


def with_functions(setup: Setup, launch: Launch) -> Setup:
    """Returns the setup with the function of ``slime_ext.tis`` that runs, and what a user's functions do.

    Raises:
        ConfigError: a flag names a function that does not exist.
    """
    # The function that runs. A YAML file that is checked alone is for ``correct``.
    path, mapping = _argument(setup, "custom_tis_function_path"), _argument(setup, "slime_ext")
    function = contract.function_of(setup.args)
    if path is None:
        measures = isinstance(mapping, Mapping) and set(mapping) <= MEASURING
        function = "" if launch.script or mapping is None or measures else "correct"
    elif function not in configuration.NAMES and str(path).startswith("slime_ext"):
        last = str(path).rpartition(".")[2]
        near = f": write {contract.TIS}.{last}" if last in configuration.NAMES else near_function(last)
        raise ConfigError(
            f"--custom-tis-function-path: expected a function of {contract.TIS}, got '{cut(path)}'{near}"
        )

    # The functions of a user, in the folders from which Python would import them.
    script = Path(launch.script).resolve() if launch.script else None
    near_script = [folder for folder in (script and script.parent, launch.root) if folder]
    folders = [Path.cwd(), *near_script, *map(Path, sys.path)]
    for dest, argument in ARGUMENTS.items():
        if argument.kind is FUNCTION and (named := _argument(setup, dest)):
            is_ours = dest in (*OURS, "custom_tis_function_path") and named.startswith("slime_ext")
            if not is_ours:
                _check_function(dest, named, setup, folders)
    for dest in OURS:
        contract.forbid_other(dest, _argument(setup, dest))
    paths = ("custom_loss_function_path", "custom_generate_function_path")
    loss, generate = (
        file_of(str(_argument(setup, name) or "").rpartition(".")[0], folders) for name in paths
    )
    return replace(
        setup,
        function=function,
        custom_loss=loss.read_text("utf-8", "ignore") if loss else None,
        custom_generate=generate.read_text("utf-8", "ignore") if generate else None,
        sampled_with=tuple(_sampled_with(setup, folders)),
        router_drops=router.drops if launch.script else drops_nothing,
    )


def _sampled_with(setup: Setup, folders: Collection[Path]) -> Iterator[Parameter]:
    """Yields the sampling parameters that the user's rollout functions set, if their source is here."""
    for dest in ("rollout_function_path", "custom_generate_function_path"):
        path = _argument(setup, dest) or ""
        module, _, name = path.rpartition(".")
        file = None if path in OURS.values() else file_of(module, folders)
        if file:
            place = flag_of(dest) if hasattr(path, "veil") else f"{module.replace('.', '/')}.py"
            yield from parameters_of(file.read_text("utf-8", "ignore"), name, place)


def _check_function(dest: str, function: str, setup: Setup, folders: Collection[Path]) -> None:
    """Raises ConfigError for a missing function, or for a hook without a keyword, without an import.

    A function of a package that is not here passes. A hook must accept the keywords with which the host calls
    it.
    """
    if fault := fault_of(function, [*folders]):
        fault = "there is no such function" if hasattr(function, "veil") else fault
        raise ConfigError(
            f"{flag_of(dest)}: expected package.module.function, got '{cut(function)}': {fault}"
        )
    module, _, name = function.rpartition(".")
    file = file_of(module, folders) if dest == "custom_tis_function_path" else None
    if file and (signature := signature_of(file.read_text("utf-8", "ignore"), name)):
        more = contract.OPTIONAL if setup.host and setup.host.passes("cur_log_probs") else ()
        contract.require_keywords(function, signature, (*contract.REQUIRED, *more))


# Flags of the command line.


def _of_flags(launch: Launch) -> tuple[dict[str, Any], set[str]]:
    """Returns a launch's flags as the host parses them, and names of unknown ones.

    Leaves out the flags that ``ARGUMENTS`` does not list.
    """
    values: dict[str, Any] = {}
    for flag, after in zip_longest(launch.flags, launch.flags[1:]):
        forbid_misspelt(launch.script, flag.name)
        if dest := DESTS.get(flag.name):
            value = _value(launch, dest, flag, after)
            values[dest] = False if flag.name in OFF else value
    unknown = {dest for dest, value in values.items() if value is None}
    unknown |= {DESTS[name] for name in launch.unknown if name in DESTS}
    return as_parsed(values, unknown), unknown


def as_parsed(flags: Mapping[str, Any], unknown: Collection[str] = ()) -> dict[str, Any]:
    """Adds to flags the defaults and derived arguments of a host's parser.

    slime derives arguments before it merges the keys of --custom-config-path (slime/utils/arguments.py,
    slime_validate_args).

    Args:
        flags: dest name -> value, for the flags on the command line.
        unknown: dest names of flags with unknown values. The result lacks them and all that is derived from
            them.
    """
    arguments = {name: known.default for name, known in ARGUMENTS.items()} | dict(flags)
    for name in unknown:
        arguments.pop(name, None)
    derived: dict[str, Callable[[], Any]] = {
        "eps_clip_high": lambda: (
            arguments["eps_clip"] if arguments["eps_clip_high"] is None else arguments["eps_clip_high"]
        ),
        "use_critic": lambda: arguments["advantage_estimator"] == "ppo",
        "use_routing_replay": lambda: (
            arguments["use_routing_replay"] or arguments["use_rollout_routing_replay"]
        ),
    }
    for name, value in derived.items():
        try:
            arguments[name] = value()
        except KeyError:  # it is derived from an unknown argument
            arguments.pop(name, None)
    return arguments


def _value(launch: Launch, dest: str, flag: WrittenFlag, after: WrittenFlag | None) -> Any:
    """Parses a flag's text as the host does.

    Args:
        after: the flag after it.

    Returns:
        The value; None if the text is known only where the script runs.

    Raises:
        ConfigError: the host's parser refuses the text.
    """
    where, argument = f"{launch.script}: {flag.name}", ARGUMENTS[dest]
    parse, choices = argument.kind.parse, argument.choices
    if parse is None:
        for word in (word for word in flag.values if not isinstance(word, Unread)):
            got = cut(veiled(word, flag.instead))
            what = "write the switch alone to switch it on, or leave it out"
            raise ConfigError(f"{where}: expected no value, got {got}: {what}")
        return True
    text = next(iter(flag.values), after.name if after else "")
    if not text or text.startswith("--"):
        got = text if not text or text in NAMES else "another flag"
        raise ConfigError(f"{where}: expected a value, got {got or 'none'}")
    if isinstance(text, Unread):
        return None
    text = veiled(text, flag.instead)
    try:
        value = veiled(parse(text), flag.instead)
    except ValueError:
        raise ConfigError(f"{where}: expected a number, got '{cut(text)}'") from None
    if not choices or value in choices or not launch.is_known(flag.name):
        return value
    # A fork may accept more words. A word passes if the parser of the script's checkout has it in quotes.
    files = [launch.root / kind / "utils/arguments.py" for kind in ("slime", "miles")] if launch.root else []
    if any(f'"{value!s}"' in text_of(str(file)) for file in files if is_file(file)):
        return value
    known, near = f"one of {', '.join(choices)}", did_you_mean(value, choices)
    raise ConfigError(f"{flag.where}: {flag.name}: expected {known}, got '{cut(value)}'{near}")
