"""Hydra's two ways of writing settings: overrides on a command line, and YAML files with ``defaults``."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from slime_ext.commands.arguments import read_mapping
from slime_ext.commands.launch_script import words_of
from slime_ext.commands.shell import UNKNOWN
from slime_ext.errors import ConfigError, cut
from slime_ext.mappings import UNREADABLE

OVERRIDE = re.compile(r"[+]{0,2}([A-Za-z_]\w*(?:\.\w+)+)=(.*)", re.DOTALL)
DEEPEST = 5  # files whose defaults name files


def overrides(path: str, below: tuple[str, ...], keys: Container[str]) -> dict[str, Any]:
    """The overrides (``a.b.c=value``) of a shell script, as nested mappings.

    Args:
        below: beginnings of the dotted names that are wanted.
        keys: last parts of names whose values have to be known.

    Raises:
        ConfigError: a wanted value that only a shell knows.
    """
    found: dict[str, Any] = {}
    for word in words_of(path):
        match = OVERRIDE.fullmatch(word)
        if match is None or not match[1].startswith(below):
            continue
        *parents, name = match[1].split(".")
        if name in keys and UNKNOWN.search(match[2]):
            raise ConfigError(
                f"{path}: {match[1]}: expected a value that the script itself says, got '{cut(match[2])}'"
            )
        _inside(found, parents)[name] = _value(match[2])
    return found


def with_defaults(path: str, wanted: tuple[str, ...], depth: int = 0) -> dict[str, Any]:
    """A YAML file's mapping over the files that its ``defaults`` name, as Hydra composes them.

    Args:
        wanted: first parts of the packages that are composed; a file of another package is not looked for.

    Raises:
        ConfigError: a file cannot be read or holds no mapping, or names itself.
    """
    own = read_mapping(path)
    listed = own.pop("defaults", None)
    if not isinstance(listed, list):
        return own if listed is None else own | {"defaults": listed}
    if depth == DEEPEST:
        raise ConfigError(f"{path}: defaults: expected files that end, got {DEEPEST} that name one another")
    found: dict[str, Any] = {}
    for package, file in _files(Path(path).parent, listed):
        if file.is_file() and (not package or package[0] in wanted):
            _merge(_inside(found, package), with_defaults(str(file), wanted, depth + 1))
    return _merge(found, own)


def _files(folder: Path, listed: list[Any]) -> Iterator[tuple[list[str], Path]]:
    """(package, file) of each entry: ``group@package: option``, or the name of a whole configuration."""
    for entry in listed:
        for key, option in (entry if isinstance(entry, Mapping) else {str(entry): None}).items():
            group, _, package = str(key).removeprefix("optional ").removeprefix("override ").partition("@")
            if option is None:
                yield package.split(".") if package else [], folder / f"{group}.yaml"
            else:
                yield (package or group.replace("/", ".")).split("."), folder / group / f"{option}.yaml"


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
