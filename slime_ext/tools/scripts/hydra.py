"""Settings as Hydra takes them: overrides on a command line over the files of a program, or one YAML file.
Where files add others, Hydra itself composes them."""

from __future__ import annotations

import ast
import importlib.util
import re
import warnings
from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from slime_ext.config.files import UNREADABLE, read_mapping, text_of
from slime_ext.errors import ConfigError, cut
from slime_ext.tools.folders import is_file, is_folder
from slime_ext.tools.scripts.launch import Unread
from slime_ext.tools.scripts.read import followed

OVERRIDE = re.compile(r"[+]{0,2}([A-Za-z_]\w*(?:\.\w+)+)=(.*)", re.DOTALL)
CHOICE = re.compile(r"[+]{0,2}[A-Za-z_][\w/]*(?:@[\w.]*)?=.*", re.DOTALL)  # of a group's file, or a first key
FLAGS = {f"--config-{name}": f"--config-{name}" for name in ("path", "name", "dir")}
FLAGS |= {"-cp": "--config-path", "-cn": "--config-name", "-cd": "--config-dir"}
HERE = "$(pwd)/"  # as a script writes where training starts
COMPOSE = "convert the output of the training command with `--cfg job`, by which Hydra prints all of it"


def words_of(path: str) -> list[str]:
    """Words of a shell script's commands that have overrides; of all where none has."""
    commands = followed(path).commands()
    found = [words for words in commands if any(map(OVERRIDE.fullmatch, words))]
    return [word for words in found or commands for word in words]


def overrides(path: str, words: list[str], below: tuple[str, ...], keys: Container[str]) -> dict[str, Any]:
    """The overrides (``a.b.c=value``) among words, as nested mappings.

    Args:
        path: the script's, for messages.
        below: beginnings of the dotted names that are wanted.
        keys: last parts of names whose values have to be known.

    Raises:
        ConfigError: a wanted value is deleted, or known only where the script runs.
    """
    found: dict[str, Any] = {}
    for text in words:
        match = OVERRIDE.fullmatch(text)
        if text.startswith("~") and text[1:].startswith(below):
            raise ConfigError(f"{path}: expected values that are set, got {cut(text)}: leave it out")
        if match is None or not match[1].startswith(below):
            continue
        if match[1].rpartition(".")[2] in keys and isinstance(text, Unread):
            raise ConfigError(
                f"{path}: {match[1]}: expected a value that the script itself says, got '{cut(match[2])}'"
            )
        _put(found, match[1], _value(match[2]))
    return found


def beneath(path: str, words: list[str], places: Sequence[str], plain: str) -> dict[str, Any]:
    """What a script's overrides are put over: the files that its program's ``hydra.main`` or a flag names.

    Args:
        places: dotted keys that are wanted.
        plain: the program whose own files set nothing there; empty where the system does without Hydra.

    Raises:
        ConfigError: what another program's files set, or those that a flag names, cannot be seen.
    """
    start = next((i for i, word in enumerate(words) if word == "-m" or word.endswith(".py")), len(words))
    program = " ".join(words[start : start + 2]).removeprefix("-m ").partition(" ")[0]
    flags = {flag: _from_here(path, said) for flag, said in _flags(words).items()}
    if program == plain and not flags:
        return {}
    source = _source(path, program)
    folder, name = _declared(source) if source else (None, None)
    if folder is None and not flags and not plain:
        return {}
    if source is None or "--config-dir" in flags or any(isinstance(said, Unread) for said in flags.values()):
        shown = " ".join(f"{flag} {said}" for flag, said in flags.items()) or program or "another program"
        raise ConfigError(f"{path}: expected overrides alone, got {cut(shown)}: {COMPOSE}")
    folder, name = flags.get("--config-path", folder or "."), flags.get("--config-name", name or "")
    choices = [word for word in words[start:] if CHOICE.fullmatch(word)]
    return _composed(path, source.parent / folder, name.removesuffix(".yaml"), choices, places)


def _from_here(path: str, folder: str) -> str:
    """A folder as Hydra finds it: one below the working directory lies there, or above the script."""
    inside = folder.removeprefix(HERE)
    if inside == folder:
        return folder
    return next((str(root / inside) for root in _roots(path, "") if is_folder(root / inside)), inside)


def of_file(path: str, places: Sequence[str]) -> dict[str, Any]:
    """A YAML file's mapping, with what its ``defaults`` add.

    Args:
        places: dotted keys that are wanted, if it has any.

    Raises:
        ConfigError: it cannot be read or composed.
    """
    own = read_mapping(path)
    if own.pop("defaults", ["_self_"]) == ["_self_"]:
        return own
    return _composed(path, Path(path).parent, Path(path).stem, [], places)


def _flags(words: list[str]) -> dict[str, str]:
    """What Hydra's flags that name files say, by their long names."""
    pairs = ((word, word.partition("="), after) for word, after in zip(words, [*words[1:], ""], strict=True))
    found = ((key, type(word)(said) if sign else after) for word, (key, sign, said), after in pairs)
    return {FLAGS[key]: said for key, said in found if key in FLAGS}


def _source(path: str, program: str) -> Path | None:
    """The program's own file, in a folder above the script, here, or where its package is installed."""
    inside = program if program.endswith(".py") else program.replace(".", "/") + ".py"
    return next((root / inside for root in _roots(path, program) if is_file(root / inside)), None)


def _roots(path: str, program: str) -> Iterator[Path]:
    yield from (*Path(path).resolve().parents, Path.cwd())
    top = program.partition(".")[0]
    installed = importlib.util.find_spec(top) if top.isidentifier() else None
    yield from (Path(place).parent for place in (installed and installed.submodule_search_locations) or ())


def _declared(source: Path) -> tuple[str | None, str | None]:
    """``config_path`` and ``config_name`` of a file's ``hydra.main``."""
    for call in (node for node in ast.walk(ast.parse(text_of(str(source)))) if isinstance(node, ast.Call)):
        if ast.unparse(call.func) == "hydra.main":
            said = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
            return said.get("config_path"), said.get("config_name")
    return None, None


def _composed(
    path: str, folder: Path, name: str, choices: list[str], places: Sequence[str]
) -> dict[str, Any]:
    """A configuration's wanted places, by Hydra.

    Args:
        choices: overrides that choose a file of a group.

    Raises:
        ConfigError: Hydra is not here, or says what is wrong.
    """
    if importlib.util.find_spec("hydra") is None:
        what = f"pip install hydra-core, or {COMPOSE}"
        raise ConfigError(f"{path}: expected Hydra, to read what {name} adds to it, got none: {what}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from hydra import compose, initialize_config_dir
            from omegaconf import OmegaConf

            with initialize_config_dir(str(folder.resolve()), version_base=None):
                config = compose(name, [*choices, *_search_path(path, folder / f"{name}.yaml")])
        found: dict[str, Any] = OmegaConf.to_container(config)
        for place in sorted(places):
            if OmegaConf.is_config(value := OmegaConf.select(config, place)):
                _put(found, place, OmegaConf.to_container(value, resolve=True))
    except Exception as error:  # also of a resolver that a file names
        reason = cut(str(error).partition("\n")[0].rstrip("."))
        raise ConfigError(f"{path}: expected files that Hydra composes, got {reason}: {COMPOSE}") from error
    return found


def _search_path(path: str, file: Path) -> list[str]:
    """The override that has folders where a file's search path has packages, which would be imported, or
    folders below where training starts."""
    own = read_mapping(str(file)).get("hydra") if file.is_file() else None
    found = []
    for entry in (own or {}).get("searchpath", ()):
        kind, _, place = str(entry).partition("://")
        inside = place.replace(".", "/") if kind == "pkg" else place
        roots = _roots(path, inside.partition("/")[0])
        found.append(next((f"file://{root / inside}" for root in roots if is_folder(root / inside)), entry))
    return [f"hydra.searchpath=[{','.join(repr(str(entry)) for entry in found)}]"] if found else []


def _put(found: dict[str, Any], name: str, value: Any) -> None:
    """Sets a dotted name in nested mappings."""
    *parents, last = name.split(".")
    for part in parents:
        found = found.setdefault(part, {})
    found[last] = value


def _value(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except UNREADABLE:
        return text
