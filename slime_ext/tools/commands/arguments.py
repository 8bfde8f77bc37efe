"""The arguments of a launch that a correction has to agree with, from a launch script and YAML files."""

from __future__ import annotations

import argparse
import difflib
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from slime_ext.config.files import located, read_mapping, text_of
from slime_ext.errors import ConfigError, cut, did_you_mean
from slime_ext.host import contract
from slime_ext.host.contract import flag_of
from slime_ext.host.flags import ARGUMENTS, DECISIVE, DERIVED, NEARLY, check_kinds
from slime_ext.tools.commands.veil import veiled
from slime_ext.tools.folders import is_file
from slime_ext.tools.scripts.launch import Launch, Unread, WrittenFlag
from slime_ext.tools.scripts.read import host_root, is_script, own_folder, read_script
from slime_ext.tools.scripts.visible import Visible

NAMES = {flag_of(name): name for name, argument in ARGUMENTS.items() if argument.kind is not DERIVED}
OFF = {argument.switched_off_by: name for name, argument in ARGUMENTS.items() if argument.switched_off_by}
ALIKE = (
    *contract.FUNCTIONS,
    "custom_agent_function_path",
)  # arguments of slime and miles that look like those


OWN = "Words behind -- are flags of the script's own."


def add_flags_of_reading(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that say what a script may see, and whether one may be executed."""
    what = "let the script see this variable (again for another); what others hold is not known"
    parser.add_argument("--env", action="append", default=[], metavar="NAME", help=what)
    what = "execute a Python launcher, with your rights, and read the job that it would submit"
    parser.add_argument("--run", action="store_true", help=what)
    parser.epilog = OWN


@dataclass
class Arguments:
    """What a launch leads to.

    Args:
        values: by dest name, as far as the files say them.
        unknown: dest names that the script sets to what is known only where it runs.
        launch: the script's; one without a name where there is none.
        unread: a line for each reason why a name is unknown.
        of_file: names that stand in the file of --custom-config-path.
    """

    values: dict[str, Any] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)
    launch: Launch = field(default_factory=lambda: Launch(""))
    unread: tuple[str, ...] = ()
    of_file: tuple[str, ...] = ()

    def get(self, name: str) -> Any:
        """The value of an argument, None where it has none or cannot be known."""
        return self.values.get(name)

    def namespace(self) -> SimpleNamespace:
        """Arguments as the host holds them."""
        return SimpleNamespace(**self.values)

    def with_flags(self, flags: dict[str, Any]) -> Arguments:
        """The same launch with more flags."""
        return replace(self, values=self.values | flags, unknown=self.unknown - set(flags))

    def with_file(self, path: str, text: str | None = None) -> Arguments:
        """The same launch with the keys of a file for --custom-config-path.

        Args:
            path: as messages name it.
            text: what it holds, where it cannot be read at that path.
        """
        found = of_yaml(path, text)
        return replace(self.with_flags(found), of_file=tuple(found))


def apart(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words of a command, and those behind ``--``, which are another program's.

    >>> apart(["run.sh", "--", "--lr", "1"])
    (['run.sh'], ['--lr', '1'])
    """
    end = list(words).index("--") if "--" in words else len(words)
    return list(words[:end]), list(words[end + 1 :])


def gathered(
    path: str,
    args_path: str | None = None,
    given: Sequence[str] = (),
    launch: Launch | None = None,
    *,
    run: bool = False,
    environment: Sequence[str] = (),
) -> Arguments:
    """Every argument that a file leads to; keys of --custom-config-path override flags, as in slime.

    Args:
        args_path: a launch script, for a YAML ``path``.
        given: flags of the script's own.
        launch: the script's, where it was read already.
        run: whether a Python launcher may be executed.
        environment: names of the variables that the script may see.

    Raises:
        ConfigError: a file cannot be read or holds something else.
    """
    script = next((file for file in (path, args_path) if file and is_script(file)), "")
    if args_path and not script:
        raise ConfigError(f"--args: expected a launch script, got {cut(args_path)}: give run.sh there")
    if args_path and script == path:
        raise ConfigError(f"--args: expected a YAML before it, got the script {cut(path)}: check it alone")
    if given and not script:
        raise ConfigError(f"{path}: expected no flags behind -- beside a YAML, got {cut(given[0])}")
    found = Arguments(unknown=set(ARGUMENTS))
    if script:
        found = _of_launch(launch or read_script(script, given, run=run, environment=environment))
    if path != script:
        found = found.with_file(path)
    check_kinds(found.namespace(), found.unknown)
    if "slime_ext" not in found.values:
        _forbid_unread_path(found.launch)
        if beside := found.get("custom_config_path"):
            found = found.with_file(*_config_of(found.launch, beside, path))
            check_kinds(found.namespace(), found.unknown)
    return found


def of_yaml(path: str, text: str | None = None) -> dict[str, Any]:
    """The keys of a file for --custom-config-path.

    Raises:
        ConfigError: it cannot be read, or has a name in it that slime would pass over.
    """
    found = read_mapping(path, text)
    for key in found:
        if key != "slime_ext" and (near := did_you_mean(key, ["slime_ext"])):
            raise ConfigError(f"{path}: expected the key slime_ext, got {cut(key)}{near}")
        forbid_misspelt(path, key)
    return found


def _of_launch(launch: Launch) -> Arguments:
    """A launch's flags, as the host's parser reads them; flags of other parts are left out."""
    values: dict[str, Any] = {}
    unread: dict[Any, str] = {}  # dest name, or a gap -> why it is unknown
    unknown = set()
    for flag, after in zip_longest(launch.flags, launch.flags[1:]):
        forbid_misspelt(launch.script, flag.name)
        name = OFF.get(flag.name) or NAMES.get(flag.name)
        if name is None:
            continue
        text = next(iter(flag.values), after and after.name)
        if ARGUMENTS[name].kind.parse is None:
            _forbid_value(launch, flag)
        values[name] = False if flag.name in OFF else _value(launch.script, flag, text)
        unread.pop(name, None)
        if launch.is_known(flag.name):
            _forbid_no_choice(launch.script, flag, ARGUMENTS[name].choices, values[name])
        if values[name] is None:
            why = "known only where the script runs; no rule over it is checked"
            unread[name] = f"{flag.where}: {flag}: {why}{_of_environment(str(flag))}"
    unknown.update(unread)
    for spelled, name in (NAMES | OFF).items():
        if gap := launch.gap(spelled):
            unknown.add(name)
            known = None if gap.names is None else frozenset(gap.names & (NAMES.keys() | OFF.keys()))
            unread[gap] = str(replace(gap, names=known))
    return Arguments(as_parsed(values, unknown), unknown, launch, tuple(unread.values()))


def _of_environment(text: str) -> str:
    """How the first variable that is set here, and that a text names, is read."""
    names = (name for name in re.findall(r"\$\{?([A-Za-z_]\w*)", text) if name in os.environ)
    return next((f"; --env {name} reads it" for name in names), "")


def _forbid_value(launch: Launch, switch: WrittenFlag) -> None:
    for word in (word for word in switch.values if not isinstance(word, Unread)):
        raise ConfigError(
            f"{launch.script}: {switch.name}: expected no value, got {cut(veiled(word, switch.instead))}: a "
            "switch is on where it stands; leave it out to switch it off"
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


def _forbid_no_choice(script: str, flag: WrittenFlag, choices: Collection[str], value: Any) -> None:
    """Raises ConfigError for a word that the host's parser refuses. A fork can take more than slime and miles
    do: where the script lies in a checkout, a word that its parser's file has in quotes passes."""
    if not choices or value is None or value in choices:
        return
    root = host_root(script)
    files = [root / kind / "utils/arguments.py" for kind in ("slime", "miles")] if root else []
    if any('"' + str(value) + '"' in text_of(str(file)) for file in files if is_file(file)):
        return
    known = f"one of {', '.join(choices)}"
    near = did_you_mean(value, choices)
    raise ConfigError(f"{flag.where}: {flag.name}: expected {known}, got '{cut(value)}'{near}")


def _forbid_unread_path(launch: Launch) -> None:
    path = launch.value("--custom-config-path")
    if isinstance(path, Unread):
        raise ConfigError(
            f"{launch.script}: --custom-config-path: expected a path that the script itself says, got "
            f"'{cut(path)}': slime-ext check FILE --args {launch.script} checks the file with its flags"
        )
    if isinstance(launch.files.get(path), Unread):
        raise ConfigError(
            f"{launch.script}: {cut(path)}: expected a text that the script itself says, got one that "
            f"depends on the machine: slime-ext check FILE --args {launch.script} checks a copy of it"
        )


def _config_of(launch: Launch, path: str, file: str) -> tuple[str, str | None]:
    """The file of --custom-config-path: how messages name it, and its text where it lies elsewhere.

    A launch's lies in the folder in which its program runs: the script's ``cd``, the host's checkout that the
    script lies in, else the working directory of this command. Of a script only files are read that it may
    see.

    Args:
        file: the YAML that names it, if no launch does.

    Raises:
        ConfigError: there is none, or the script may not see it.
    """
    if not launch.script:
        return located(path, file), None
    where = f"{launch.script}: --custom-config-path"
    if path in launch.veiled:
        raise ConfigError(
            f"{where}: expected a text that the script itself says, got one with parts of another file or of "
            f"a variable: slime-ext check FILE --args {launch.script} checks a copy of it"
        )
    if (text := launch.files.get(path)) is not None:
        return path, text
    folder = Path(launch.folder or host_root(launch.script) or Path.cwd())
    if not is_file(found := folder / str(path)):
        shown = "the folder that it changes to" if str(folder) in launch.veiled else folder
        raise ConfigError(
            f"{where}: expected a file where the script runs, got no {cut(path)} in {shown}: run slime-ext "
            "there, or name it from the script's own folder"
        )
    if not Visible([own_folder(launch.script), Path.cwd()]).is_file(found):
        raise ConfigError(
            f"{where}: expected a file below the script's checkout or the working directory, got "
            f"{cut(path)}: slime-ext check FILE --args {launch.script} reads it"
        )
    flag = launch.flag("--custom-config-path")
    is_veiled = str(folder) in launch.veiled or (flag and flag.instead)
    name = str(flag) if is_veiled else str(found)
    return name, text_of(str(found), name)


def forbid_misspelt(path: str, name: str) -> None:
    """Stops at a flag, or a key of a file, that is nearly one of those that decide whether ours runs, or one
    that is read here with dashes for underscores, or the reverse.

    Raises:
        ConfigError: with the right name.
    """
    as_flag = name.startswith("--")
    dest = _name_of(name)
    known = dest in ARGUMENTS or dest in ALIKE
    near = [dest] if known else difflib.get_close_matches(dest, DECISIVE, n=1, cutoff=NEARLY)
    for right in (flag_of(near_name) if as_flag else near_name for near_name in near):
        if name != right:
            raise ConfigError(
                f"{path}: expected {right}, got {cut(name)}: slime ignores a name it does not know"
            )


def _name_of(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")
