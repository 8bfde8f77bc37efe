"""Runs the second pass of ``check``: turns a launch into the ``Setup`` of the rules."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from slime_ext.config.files import located, read_mapping, text_of
from slime_ext.errors import ConfigError, cut, did_you_mean
from slime_ext.hosts import contract
from slime_ext.hosts.code import HostCode
from slime_ext.hosts.contract import flag_of
from slime_ext.hosts.flags import ARGUMENTS, DERIVED, FUNCTION, check_keys, check_kinds, forbid_misspelt
from slime_ext.rules import configuration
from slime_ext.rules.configuration import loaded_from, near_function
from slime_ext.rules.of_engines import CUSTOM, EXPERTS
from slime_ext.rules.of_files import MEASURING
from slime_ext.rules.setup import Parameter, Setup
from slime_ext.tools.check import router
from slime_ext.tools.check.rollout_source import parameters_of
from slime_ext.tools.check.veil import Veiled, veiled
from slime_ext.tools.checkout import signature_of
from slime_ext.tools.folders import find_own_steps, is_file
from slime_ext.tools.launch.config_file import config_file
from slime_ext.tools.launch.launch import Launch, Unread, WrittenFlag
from slime_ext.tools.launch.modules import fault_of, file_of

NAMES = {flag_of(name): name for name, argument in ARGUMENTS.items() if argument.kind is not DERIVED}
OFF = {argument.switched_off_by: name for name, argument in ARGUMENTS.items() if argument.switched_off_by}


def setup_of(launch: Launch, file: str = "", host: HostCode | None = None) -> Setup:
    """Builds the setup of a launch: every argument, and the correction that they name.

    Keys of --custom-config-path override flags, as in slime.

    Args:
        launch: the launch of a script; ``Launch("")`` without a script.
        file: a YAML file that is read before the file that the launch names.
        host: the code that the launch will run, if it is here.

    Raises:
        ConfigError: the host or slime_ext refuses a flag or a key, a file cannot be read, or a configuration
            does not load.
    """
    values, unknown = _of_flags(launch) if launch.script else ({}, set(ARGUMENTS))
    setup = Setup(
        SimpleNamespace(**values),
        unknown=frozenset(unknown),
        host=host,
        environment=launch.environment,
        program=launch.program,
        flag_names=tuple(dict.fromkeys(flag.name for flag in launch.flags)),
    )
    if file:
        setup = with_keys(setup, keys_of(file))
    check_kinds(setup.args, setup.unknown)
    if not hasattr(setup.args, "slime_ext"):
        path = getattr(setup.args, "custom_config_path", None) or ""
        if launch.script:
            name, text = config_file(launch, path)
        else:
            name, text = path and located(path, file), None
        if path and not name:  # the script writes it
            setup = replace(setup, unknown=frozenset(setup.unknown) | {"custom_config_path"})
        if name:
            setup = with_keys(setup, keys_of(name, text))
            check_kinds(setup.args, setup.unknown)
    for dest in (dest for dest, argument in ARGUMENTS.items() if argument.kind is FUNCTION):
        contract.forbid_respelled(str(getattr(setup.args, dest, None) or ""), flag_of(dest))
    is_known = setup.names_ours and not is_correction_unknown(setup, launch)
    return with_correction(setup, launch) if is_known else setup


def with_flags(setup: Setup, flags: Mapping[str, Any]) -> Setup:
    """Returns the setup of the same launch with more flags, by dest name."""
    args = SimpleNamespace(**(vars(setup.args) | flags))
    return replace(setup, args=args, unknown=frozenset(setup.unknown) - flags.keys())


def with_keys(setup: Setup, keys: Mapping[str, Any]) -> Setup:
    """Returns the setup of the same launch with the keys of its --custom-config-path."""
    return replace(with_flags(setup, keys), file=tuple(keys))


def with_correction(setup: Setup, launch: Launch) -> Setup:
    """Returns the setup with the function that it names, and that function's correction.

    Raises:
        ConfigError: the configuration does not load, or a flag names a function that does not exist.
    """
    setup = replace(setup, function=_function_of(setup, launch))
    find_own_steps(getattr(setup.args, "slime_ext", None))
    setup = replace(
        setup,
        custom_loss=_custom_loss(setup, launch),
        sampled_with=_sampled_with(setup, launch),
        router_drops=router.dropped((EXPERTS, CUSTOM)) if launch.script else {},
    )
    setup = loaded_from(setup)
    _check_functions(setup, launch)
    return setup


def is_correction_unknown(setup: Setup, launch: Launch) -> bool:
    """Whether a launch names or writes its correction in a place that is unknown here."""
    if not launch.script or getattr(setup.args, "slime_ext", None) is not None:
        return False
    is_in_file = contract.function_of(setup.args) == "correct"
    unknown = setup.unknown
    return "custom_tis_function_path" in unknown or (is_in_file and "custom_config_path" in unknown)


def _function_of(setup: Setup, launch: Launch) -> str:
    """Returns the function in ``slime_ext.tis`` that a launch names.

    A YAML file that is checked alone is for ``correct``. Returns an empty string if another package's
    function runs, or none.
    """
    path = getattr(setup.args, "custom_tis_function_path", None)
    mapping = getattr(setup.args, "slime_ext", None)
    if path is None:
        measures = isinstance(mapping, Mapping) and set(mapping) <= MEASURING
        return "" if launch.script or mapping is None or measures else "correct"
    name = contract.function_of(setup.args)
    if name not in configuration.NAMES and str(path).startswith("slime_ext"):
        last = str(path).rpartition(".")[2]
        near = f": write {contract.TIS}.{last}" if last in configuration.NAMES else near_function(last)
        raise ConfigError(
            f"--custom-tis-function-path: expected a function of {contract.TIS}, got '{cut(path)}'{near}"
        )
    return name


# Flags of the command line.


def _of_flags(launch: Launch) -> tuple[dict[str, Any], set[str]]:
    """Returns a launch's flags as the host parses them, and names of unknown ones.

    Leaves out the flags that ``ARGUMENTS`` does not list.
    """
    values: dict[str, Any] = {}
    for flag, after in zip_longest(launch.flags, launch.flags[1:]):
        forbid_misspelt(launch.script, flag.name)
        name = OFF.get(flag.name) or NAMES.get(flag.name)
        if name is None:
            continue
        if ARGUMENTS[name].kind.parse is None:
            _forbid_value(launch.script, flag)
        text = next(iter(flag.values), after and after.name)
        values[name] = False if flag.name in OFF else _value(launch.script, flag, text)
        if launch.is_known(flag.name):
            _forbid_no_choice(launch, flag, ARGUMENTS[name].choices, values[name])
    unknown = {name for name, value in values.items() if value is None}
    unknown |= {name for spelled, name in (NAMES | OFF).items() if launch.doubt(spelled)}
    return as_parsed(values, unknown), unknown


def _forbid_value(script: str, switch: WrittenFlag) -> None:
    for word in (word for word in switch.values if not isinstance(word, Unread)):
        raise ConfigError(
            f"{script}: {switch.name}: expected no value, got {cut(veiled(word, switch.instead))}: write the "
            "switch alone to switch it on, or leave it out"
        )


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
    derived = {
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


def _value(script: str, flag: WrittenFlag, text: str | None) -> Any:
    """Parses a flag's text as the host does. Returns None if the text is known only where the script runs."""
    parse = ARGUMENTS[NAMES[flag.name]].kind.parse
    if parse is None:
        return True
    if not text or text.startswith("--"):
        got = text if not text or text in NAMES else "another flag"
        raise ConfigError(f"{script}: {flag.name}: expected a value, got {got or 'none'}")
    if isinstance(text, Unread):
        return None
    try:
        return veiled(parse(text), flag.instead)
    except ValueError:
        got = cut(veiled(text, flag.instead))
        raise ConfigError(f"{script}: {flag.name}: expected a number, got '{got}'") from None


def _forbid_no_choice(launch: Launch, flag: WrittenFlag, choices: Collection[str], value: Any) -> None:
    """Raises ConfigError for a word that the host's parser refuses.

    A fork may accept more words than slime and miles do. If the script is in a checkout, a word also passes
    if the file of the checkout's parser contains it in quotes.
    """
    if not choices or value is None or value in choices:
        return
    root = launch.root
    files = [root / kind / "utils/arguments.py" for kind in ("slime", "miles")] if root else []
    if any('"' + str(value) + '"' in text_of(str(file)) for file in files if is_file(file)):
        return
    known = f"one of {', '.join(choices)}"
    near = did_you_mean(value, choices)
    raise ConfigError(f"{flag.where}: {flag.name}: expected {known}, got '{cut(value)}'{near}")


# The file of --custom-config-path.


def keys_of(path: str, text: str | None = None) -> dict[str, Any]:
    """Reads the keys of a file for --custom-config-path.

    Args:
        path: the name of the file in messages; also its path if ``text`` is None.
        text: the text of the file.

    Raises:
        ConfigError: the file cannot be read, or has a misspelt key, which slime would ignore.
    """
    keys = read_mapping(path, text)
    check_keys(path, keys)
    return keys


# Functions that flags name, checked without an import.


def _check_functions(setup: Setup, launch: Launch) -> None:
    """Raises ConfigError for a function that does not exist, or that the wrong flag names."""
    named = {
        dest: getattr(setup.args, dest, None)
        for dest, argument in ARGUMENTS.items()
        if argument.kind is FUNCTION
    }
    for dest, function in named.items():
        is_ours = dest in (*contract.OURS, "custom_tis_function_path")
        if function and not (function.startswith("slime_ext") and is_ours):
            _check_function(dest, function, setup, launch)
    for dest in contract.OURS:
        contract.forbid_other(dest, named.get(dest))


def _folders(launch: Launch) -> list[Path]:
    """Lists the folders from which Python would import a user's functions."""
    script = Path(launch.script).resolve() if launch.script else None
    near = [script.parent] if script else []
    near += [launch.root] if launch.root else []
    return [Path.cwd(), *near, *map(Path, sys.path)]


def _custom_loss(setup: Setup, launch: Launch) -> str | None:
    """Reads the source of the module of --custom-loss-function-path; None if it is not here."""
    path = str(getattr(setup.args, "custom_loss_function_path", None) or "")
    file = file_of(path.rpartition(".")[0], _folders(launch))
    return file.read_text("utf-8", "ignore") if file else None


def _sampled_with(setup: Setup, launch: Launch) -> list[Parameter]:
    """Reads the sampling parameters that the user's rollout functions set, as far as their source is here."""
    parameters: list[Parameter] = []
    for dest in ("rollout_function_path", "custom_generate_function_path"):
        path = getattr(setup.args, dest, None) or ""
        module, _, name = path.rpartition(".")
        file = None if path in contract.OURS.values() else file_of(module, _folders(launch))
        if file:
            place = flag_of(dest) if isinstance(path, Veiled) else f"{module.replace('.', '/')}.py"
            parameters += parameters_of(file.read_text("utf-8", "ignore"), name, place)
    return parameters


def _check_function(dest: str, function: str, setup: Setup, launch: Launch) -> None:
    """Raises ConfigError for a missing function, or for a hook without a keyword.

    A function of a package that is not here passes. A hook must accept the keywords with which the host calls
    it.
    """
    folders = _folders(launch)
    if fault := fault_of(function, folders):
        fault = "there is no such function" if isinstance(function, Veiled) else fault
        raise ConfigError(
            f"{flag_of(dest)}: expected package.module.function, got '{cut(function)}': {fault}"
        )
    module, _, name = function.rpartition(".")
    file = file_of(module, folders) if dest == "custom_tis_function_path" else None
    if file and (signature := signature_of(file.read_text("utf-8", "ignore"), name)):
        more = contract.OPTIONAL if setup.host and setup.host.passes("cur_log_probs") else ()
        contract.require_keywords(function, signature, (*contract.REQUIRED, *more))
