"""Hydra's two ways of writing settings: overrides on a command line, and YAML files with ``defaults``."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from slime_ext.config.files import UNREADABLE, read_mapping
from slime_ext.errors import ConfigError, cut
from slime_ext.tools.scripts.launch import Unread
from slime_ext.tools.scripts.read import followed

OVERRIDE = re.compile(r"[+]{0,2}([A-Za-z_]\w*(?:\.\w+)+)=(.*)", re.DOTALL)
DEEPEST = 5  # files whose defaults name files


def settings_of_script(
    path: str, below: tuple[str, ...], keys: Container[str], wanted: tuple[str, ...]
) -> dict[str, Any]:
    """What a shell script sets: the file of ``--config-name``, and its overrides over it.

    Args:
        below: beginnings of the dotted names that are wanted.
        keys: last parts of names whose values have to be known.
        wanted: as for ``with_defaults``.

    Raises:
        ConfigError: a wanted value or file that is known or found only where the script runs.
    """
    words = _words(path)
    found: dict[str, Any] = {}
    if file := _named_file(path, words):
        found = with_defaults(str(file), wanted, roots=tuple(Path(path).resolve().parents))
    return _merge(found, _overridden(path, words, below, keys))


def overrides(path: str, below: tuple[str, ...], keys: Container[str]) -> dict[str, Any]:
    """The overrides (``a.b.c=value``) of a shell script, as nested mappings; arguments as above."""
    return _overridden(path, _words(path), below, keys)


def _words(path: str) -> list[str]:
    """Words of the commands that have overrides; of all where none has."""
    commands = followed(path).commands()
    found = [words for words in commands if any(OVERRIDE.fullmatch(word) for word in words)]
    return [word for words in found or commands for word in words]


def _overridden(path: str, words: list[str], below: tuple[str, ...], keys: Container[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for text in words:
        match = OVERRIDE.fullmatch(text)
        if text.startswith("~") and text[1:].startswith(below):
            raise ConfigError(
                f"{path}: {cut(text)}: expected values that are set, got one taken away: leave it out"
            )
        if match is None or not match[1].startswith(below):
            continue
        *parents, name = match[1].split(".")
        if name in keys and isinstance(text, Unread):
            raise ConfigError(
                f"{path}: {match[1]}: expected a value that the script itself says, got '{cut(match[2])}'"
            )
        _inside(found, parents)[name] = _value(match[2])
    return found


def _named_file(path: str, words: list[str]) -> Path | None:
    """The file that ``--config-name`` names; None where the script names none.

    Raises:
        ConfigError: it is not beside the script nor in the folder of its program.
    """
    name, folder = (
        _option(words, "--config-name", "-cn"),
        _option(words, "--config-path", "-cp", "--config-dir", "-cd"),
    )
    if name is None:
        if folder is None:
            return None
        raise _not_seen(path, f"--config-path {folder}")
    module = words[words.index("-m") + 1] if "-m" in words[:-1] else ""
    inside = module.replace(".", "/").rpartition("/")[0]
    parents = Path(path).resolve().parents
    folders = (
        [parents[0]] if not folder else [root / part / folder for root in parents for part in ("", inside)]
    )
    folders += [root / inside / "config" for root in parents if inside]
    file = name if Path(name).suffix in (".yaml", ".yml") else f"{name}.yaml"
    found = next((place / file for place in folders if (place / file).is_file()), None)
    if found is None:
        raise _not_seen(path, f"--config-name {name}")
    return found


def _option(words: list[str], *names: str) -> str | None:
    for i, word in enumerate(words):
        name, has_value, said = word.partition("=")
        if name in names:
            return said if has_value else (words[i + 1] if i + 1 < len(words) else "")
    return None


def _not_seen(path: str, what: str) -> ConfigError:
    return ConfigError(
        f"{path}: {what}: expected a file beside the script, got none: what it sets is not seen, so "
        "nothing is converted; put it there, or convert the whole configuration that the run prints"
    )


def with_defaults(
    path: str, wanted: tuple[str, ...], depth: int = 0, roots: tuple[Path, ...] = ()
) -> dict[str, Any]:
    """A YAML file's mapping over the files that its ``defaults`` name, as Hydra composes them.

    Args:
        wanted: first parts of the packages that are composed; a file of another package is not looked for.
        roots: folders that relative entries of ``hydra.searchpath`` are below.

    Raises:
        ConfigError: a file is not there or cannot be read, holds no mapping, or names itself.
    """
    own = read_mapping(path)
    listed = own.pop("defaults", None)
    if not isinstance(listed, list):
        return own if listed is None else own | {"defaults": listed}
    if depth == DEEPEST:
        raise ConfigError(f"{path}: defaults: expected files that end, got {DEEPEST} that name one another")
    found: dict[str, Any] = {}
    roots = roots or tuple(Path(path).resolve().parents)
    folders = [Path(path).parent, *_search_path(own, roots)]
    for package, name, is_optional in _files(listed):
        if package and package[0] not in wanted:
            continue
        file = next((folder / name for folder in folders if (folder / name).is_file()), None)
        if file is not None:
            _merge(_inside(found, package), with_defaults(str(file), wanted, depth + 1, roots))
        elif not is_optional:
            raise ConfigError(
                f"{path}: defaults: expected {name} beside it, got none: what it sets is "
                "not seen, so nothing is converted; put it there, or convert the whole "
                "configuration that the run prints"
            )
    return _merge(found, own)


def _search_path(own: Mapping[str, Any], roots: tuple[Path, ...]) -> Iterator[Path]:
    """Folders of ``hydra.searchpath``."""
    hydra = own.get("hydra")
    listed = hydra.get("searchpath") if isinstance(hydra, Mapping) else None
    for entry in listed if isinstance(listed, list) else ():
        kind, _, name = str(entry).partition("://")
        folder = name.replace(".", "/") if kind == "pkg" else name
        yield from (root / folder for root in roots)


def _files(listed: list[Any]) -> Iterator[tuple[list[str], str, bool]]:
    """(package, file, whether it may be absent) of each entry: ``group@package: option``, or the name of a
    whole configuration."""
    for entry in listed:
        for key, option in (entry if isinstance(entry, Mapping) else {str(entry): None}).items():
            optional = str(key).startswith("optional ")
            group, _, package = str(key).removeprefix("optional ").removeprefix("override ").partition("@")
            if option is None and (group == "_self_" or isinstance(entry, Mapping)):
                continue  # itself, or a group of which nothing is chosen
            if option is None:
                yield package.split(".") if package else [], f"{group.lstrip('/')}.yaml", optional
            else:
                package = package or group.strip("/").replace("/", ".")
                yield package.split("."), f"{group.strip('/')}/{option}.yaml", optional


def _merge(below: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in above.items():
        if isinstance(value, Mapping) and isinstance(below.get(key), dict):
            _merge(below[key], value)
        else:
            below[key] = value
    return below


def _inside(whole: dict[str, Any], parts: list[str]) -> dict[str, Any]:
    for part in parts:
        if not isinstance(whole.get(part), dict):
            whole[part] = {}
        whole = whole[part]
    return whole


def _value(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except UNREADABLE:
        return text
