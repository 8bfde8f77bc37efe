"""The second pass of ``check``: a launch -> the ``Setup`` that the rules look at."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from slime_ext.config.files import located, read_mapping, text_of
from slime_ext.errors import ConfigError, cut, did_you_mean
from slime_ext.host import configured, contract
from slime_ext.host.configured import loaded_from, near_function
from slime_ext.host.contract import flag_of
from slime_ext.host.flags import ARGUMENTS, DECISIVE, DERIVED, FUNCTION, NEARLY, check_kinds
from slime_ext.host.hosts import HostCode
from slime_ext.host.rules import MEASURING, Setup
from slime_ext.tools.check.veil import Veiled, veiled
from slime_ext.tools.checkout import signature_of
from slime_ext.tools.folders import find_own_steps, is_file
from slime_ext.tools.scripts.config_file import config_file
from slime_ext.tools.scripts.launch import Launch, Unread, WrittenFlag
from slime_ext.tools.scripts.modules import fault_of, file_of

NAMES = {flag_of(name): name for name, argument in ARGUMENTS.items() if argument.kind is not DERIVED}
OFF = {argument.switched_off_by: name for name, argument in ARGUMENTS.items() if argument.switched_off_by}
ALIKE = (
    *contract.FUNCTIONS,
    "custom_agent_function_path",
)  # names of slime and miles that look like ours


def setup_of(launch: Launch, file: str = "", host: HostCode | None = None) -> Setup:
    """What a launch means for slime_ext: every argument, and the correction that they name.

    Keys of --custom-config-path override flags, as in slime.

    Args:
        launch: a script's; ``Launch("")`` where there is none.
        file: a YAML that is read before the one that the launch names.
        host: the code that the launch will run, where it is at hand.

    Raises:
        ConfigError: a flag or a key that the host or slime_ext refuses, a file that cannot be read, or a
            configuration that does not load.
    """
    values, unknown = _of_flags(launch) if launch.script else ({}, set(ARGUMENTS))
    setup = Setup(SimpleNamespace(**values), unknown=frozenset(unknown), host=host)
    if file:
        setup = with_keys(setup, keys_of(file))
    check_kinds(setup.args, setup.unknown)
    if not hasattr(setup.args, "slime_ext"):
        path = getattr(setup.args, "custom_config_path", None) or ""
        if launch.script:
            name, text = config_file(launch, path)
        else:
            name, text = path and located(path, file), None
        if name:
            setup = with_keys(setup, keys_of(name, text))
            check_kinds(setup.args, setup.unknown)
    for dest in (dest for dest, argument in ARGUMENTS.items() if argument.kind is FUNCTION):
        contract.forbid_respelled(str(getattr(setup.args, dest, None) or ""), flag_of(dest))
    is_known = setup.names_ours and not is_correction_unknown(setup, launch)
    return with_correction(setup, launch) if is_known else setup


def with_flags(setup: Setup, flags: Mapping[str, Any]) -> Setup:
    """The setup of the same launch with more flags, by dest name."""
    args = SimpleNamespace(**(vars(setup.args) | flags))
    return replace(setup, args=args, unknown=frozenset(setup.unknown) - flags.keys())


def with_keys(setup: Setup, keys: Mapping[str, Any]) -> Setup:
    """The setup of the same launch with the keys of its --custom-config-path."""
    return replace(with_flags(setup, keys), file=tuple(keys))


def with_correction(setup: Setup, launch: Launch) -> Setup:
    """The setup with the function of ``slime_ext.tis`` that it names, and what that function is made of.

    Raises:
        ConfigError: the configuration does not load, or a flag names a function that does not exist.
    """
    setup = replace(setup, function=_function_of(setup, launch))
    find_own_steps(getattr(setup.args, "slime_ext", None))
    setup = loaded_from(setup)
    _check_functions(setup, launch)
    return setup


def is_correction_unknown(setup: Setup, launch: Launch) -> bool:
    """Whether the correction is named or written where nothing of it is seen here."""
    if not launch.script or getattr(setup.args, "slime_ext", None) is not None:
        return False
    is_in_file = contract.function_of(setup.args) == "correct"
    unknown = setup.unknown
    return "custom_tis_function_path" in unknown or (is_in_file and "custom_config_path" in unknown)


def _function_of(setup: Setup, launch: Launch) -> str:
    """The function in ``slime_ext.tis`` that a launch names; a mapping alone is for ``correct``; empty where
    another's function runs, or none."""
    path = getattr(setup.args, "custom_tis_function_path", None)
    mapping = getattr(setup.args, "slime_ext", None)
    if path is None:
        measures = isinstance(mapping, Mapping) and set(mapping) <= MEASURING
        return "" if launch.script or mapping is None or measures else "correct"
    name = contract.function_of(setup.args)
    if name not in configured.NAMES and str(path).startswith("slime_ext"):
        last = str(path).rpartition(".")[2]
        near = f": write {contract.TIS}.{last}" if last in configured.NAMES else near_function(last)
        raise ConfigError(
            f"--custom-tis-function-path: expected a function of {contract.TIS}, got '{cut(path)}'{near}"
        )
    return name


# Flags of the command line.


def _of_flags(launch: Launch) -> tuple[dict[str, Any], set[str]]:
    """A launch's flags as the host's parser reads them, and the names of those whose values are unknown.
    Flags of other parts of the host are left out."""
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
    unknown |= {name for spelled, name in (NAMES | OFF).items() if launch.gap(spelled)}
    return as_parsed(values, unknown), unknown


def _forbid_value(script: str, switch: WrittenFlag) -> None:
    for word in (word for word in switch.values if not isinstance(word, Unread)):
        raise ConfigError(
            f"{script}: {switch.name}: expected no value, got {cut(veiled(word, switch.instead))}: a switch "
            "is on where it stands; leave it out to switch it off"
        )


def as_parsed(flags: Mapping[str, Any], unknown: Collection[str] = ()) -> dict[str, Any]:
    """The arguments that a host's parser makes of flags: defaults, and what slime derives from other flags
    before it merges the keys of --custom-config-path (slime/utils/arguments.py, slime_validate_args).

    Args:
        flags: values by dest name, of those that the command line gives.
        unknown: dest names of flags whose values cannot be known; they and what follows from them are left
            out.
    """
    found = {name: known.default for name, known in ARGUMENTS.items()} | dict(flags)
    for name in unknown:
        found.pop(name, None)
    derived = {
        "eps_clip_high": lambda: (
            found["eps_clip"] if found["eps_clip_high"] is None else found["eps_clip_high"]
        ),
        "use_critic": lambda: found["advantage_estimator"] == "ppo",
        "use_routing_replay": lambda: found["use_routing_replay"] or found["use_rollout_routing_replay"],
    }
    for name, value in derived.items():
        try:
            found[name] = value()
        except KeyError:  # an unknown one among what it follows from
            found.pop(name, None)
    return found


def _value(script: str, flag: WrittenFlag, text: str | None) -> Any:
    """What the host's parser makes of a flag's text; None where that is known only where the script runs."""
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
    """Raises ConfigError for a word that the host's parser refuses. A fork can take more than slime and miles
    do: where the script lies in a checkout, a word that its parser's file has in quotes passes."""
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
    """The keys of a file for --custom-config-path.

    Args:
        path: as messages name it.
        text: what it holds, where it cannot be read at that path.

    Raises:
        ConfigError: it cannot be read, or has a name in it that slime would pass over.
    """
    keys = read_mapping(path, text)
    for key in keys:
        if key != "slime_ext" and (near := did_you_mean(key, ["slime_ext"])):
            raise ConfigError(f"{path}: expected the key slime_ext, got {cut(key)}{near}")
        forbid_misspelt(path, key)
    return keys


def forbid_misspelt(path: str, name: str) -> None:
    """Stops at a flag, or a key of a file, that is nearly one of those that decide whether ours runs, or one
    that is read here with dashes for underscores, or the reverse.

    Raises:
        ConfigError: with the right name.
    """
    as_flag = name.startswith("--")
    dest = name.removeprefix("--").replace("-", "_")
    known = dest in ARGUMENTS or dest in ALIKE
    near = [dest] if known else difflib.get_close_matches(dest, DECISIVE, n=1, cutoff=NEARLY)
    for right in (flag_of(near_name) if as_flag else near_name for near_name in near):
        if name != right:
            raise ConfigError(
                f"{path}: expected {right}, got {cut(name)}: slime ignores a name it does not know"
            )


# Functions that flags name: nothing is imported.


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
    for dest, ours in contract.OURS.items():
        function = named.get(dest) or ours
        if function.startswith("slime_ext") and function != ours:
            near = did_you_mean(function, [ours])
            raise ConfigError(f"{flag_of(dest)}: expected {ours} of slime_ext, got '{cut(function)}'{near}")


def _check_function(dest: str, function: str, setup: Setup, launch: Launch) -> None:
    """Raises ConfigError for a function of the user's own that is no dotted path, or that a package which is
    seen from here does not define; a hook must take the keywords that the host calls it with."""
    script = Path(launch.script).resolve() if launch.script else None
    near = [script.parent] if script else []
    near += [launch.root] if launch.root else []
    folders = [Path.cwd(), *near, *map(Path, sys.path)]
    if fault := fault_of(function, folders):
        fault = "it is not there" if isinstance(function, Veiled) else fault
        raise ConfigError(
            f"{flag_of(dest)}: expected package.module.function, got '{cut(function)}': {fault}"
        )
    module, _, name = function.rpartition(".")
    file = file_of(module, folders) if dest == "custom_tis_function_path" else None
    if file and (signature := signature_of(file.read_text("utf-8", "ignore"), name)):
        more = contract.OPTIONAL if setup.host and setup.host.passes("cur_log_probs") else ()
        contract.require_keywords(function, signature, (*contract.REQUIRED, *more))
