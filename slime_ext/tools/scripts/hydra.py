"""Settings as Hydra takes them: overrides on a command line, or one YAML file. What other files would add is
left to Hydra itself."""

from __future__ import annotations

import re
from collections.abc import Container
from typing import Any

import yaml

from slime_ext.config.files import UNREADABLE, read_mapping
from slime_ext.errors import ConfigError, cut
from slime_ext.tools.scripts.launch import Unread
from slime_ext.tools.scripts.read import followed

OVERRIDE = re.compile(r"[+]{0,2}([A-Za-z_]\w*(?:\.\w+)+)=(.*)", re.DOTALL)
NAMES_FILE = re.compile(r"(--config-(name|path|dir)|-c[npd])(=.*)?", re.DOTALL)
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
        *parents, name = match[1].split(".")
        if name in keys and isinstance(text, Unread):
            raise ConfigError(
                f"{path}: {match[1]}: expected a value that the script itself says, got '{cut(match[2])}'"
            )
        place = found
        for part in parents:
            place = place.setdefault(part, {})
        place[name] = _value(match[2])
    return found


def forbid_named_file(path: str, words: list[str]) -> None:
    """Raises ConfigError for a script whose command reads a configuration file of its own."""
    if named := next(filter(NAMES_FILE.fullmatch, words), None):
        raise ConfigError(f"{path}: expected overrides alone, got {cut(named)}: {COMPOSE}")


def of_file(path: str, wanted: tuple[str, ...]) -> dict[str, Any]:
    """A YAML file's mapping.

    Args:
        wanted: first parts of the packages that matter.

    Raises:
        ConfigError: it cannot be read, or its ``defaults`` add another file to one of them.
    """
    own = read_mapping(path)
    if not isinstance(own.get("defaults"), list):
        return own
    for entry in own.pop("defaults"):
        for key, option in (entry if isinstance(entry, dict) else {str(entry): ""}).items():
            group, _, package = str(key).rpartition(" ")[2].partition("@")
            first = re.split(r"[./]", (package or group).lstrip("/"))[0]
            is_file = group != "_self_" and option is not None
            if is_file and (first in wanted or (option == "" and not package)):
                raise ConfigError(f"{path}: defaults: expected only _self_, got {cut(key)}: {COMPOSE}")
    return own


def _value(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except UNREADABLE:
        return text
