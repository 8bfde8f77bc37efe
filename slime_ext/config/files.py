"""Reads YAML files, and so also JSON files.

Duplicate keys are refused, and every mistake is reported in one line.
"""

from __future__ import annotations

import json
import stat
import sysconfig
from pathlib import Path
from typing import Any

import yaml

from slime_ext.errors import ConfigError, cut

# For a value such as 2024-13-45 or !!bool x, and for 1000 brackets, PyYAML raises Python's own errors.
UNREADABLE = (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError)

# The folders that hold configs/ and patches/: the checkout, or the data folder of an installed wheel.
ROOTS = (Path(__file__).parents[2], Path(sysconfig.get_path("data"), "share/slime-ext"))
MERGE = "tag:yaml.org,2002:merge"
SUFFIXES = (".yaml", ".yml", ".json")
MOST_TEXT = 1_000_000  # characters; PyYAML reads about a hundred thousand in a second


class UniqueKeyLoader(yaml.SafeLoader):
    """Refuses duplicate keys of a mapping, of which SafeLoader would use the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key in (self.construct_object(key, deep=True) for key, _ in node.value if key.tag != MERGE):
            if _hashable(key) in seen:
                line = node.start_mark.line + 1
                got = f"'{cut(key)}' twice: remove one (mapping at line {line})"
                raise ConfigError(f"expected each key once, got {got}")
            seen.add(_hashable(key))
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


def _hashable(key: Any) -> Any:
    return repr(key) if isinstance(key, list | dict | set) else key


def read_yaml(
    path: str, where: str | None = None, text: str | None = None, *, by_suffix: bool = False
) -> Any:
    """Reads a YAML file, or a TOML file if its name ends with .toml.

    Args:
        where: the name of the file in messages; by default its path.
        text: the text of the file, if it is not on this disk.
        by_suffix: whether .json means JSON. If not, a JSON file must be YAML, too, because slime reads it as
            YAML, where tabs are refused.

    Raises:
        ConfigError: the file cannot be read, is too long, is not YAML, or has a key twice.
    """
    where = where or path
    text = text_of(path, where) if text is None else text
    if len(text) > MOST_TEXT:
        got = f"{len(text)}: name a configuration, not data"
        raise ConfigError(f"{where}: expected at most {MOST_TEXT} characters, got {got}")
    kind = {".toml": "TOML", ".json": "JSON" if by_suffix else "YAML"}.get(Path(path).suffix, "YAML")
    try:
        if kind == "TOML":
            return _toml(text)
        if kind == "JSON":
            return json.loads(text.removeprefix("\ufeff"), object_pairs_hook=_once, parse_constant=str)
        return yaml.load(text, UniqueKeyLoader)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    except UNREADABLE as error:
        raise ConfigError(f"{where}: expected {kind}, got {cut(_fault(error))}") from None


def _toml(text: str) -> dict[str, Any]:
    import tomllib  # new in Python 3.11

    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        message, _, at = str(error).rpartition(" (at ")
        raise ConfigError(f"expected TOML, got an error at {at.removesuffix(')')}: {message}") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Builds a mapping of JSON, where Python's reader would use the last of two equal keys."""
    mapping = dict(pairs)
    for key in mapping if len(mapping) < len(pairs) else ():
        if [name for name, _ in pairs].count(key) > 1:
            raise ConfigError(f"expected each key once, got '{cut(key)}' twice: remove one")
    return mapping


def read_mapping(path: str, text: str | None = None, *, by_suffix: bool = False) -> dict[str, Any]:
    """Reads a YAML or JSON file that holds a mapping.

    Args:
        text, by_suffix: as for ``read_yaml``.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or holds something else.
    """
    content = read_yaml(path, text=text, by_suffix=by_suffix)
    if not isinstance(content, dict):
        raise ConfigError(
            f"{path}: expected a mapping, got {type(content).__name__}: see the files in configs/"
        )
    for key in content:
        if not isinstance(key, str):
            raise ConfigError(
                f"{path}: expected names as keys, got {cut(repr(key))}: see the files in configs/"
            )
    return content


def is_file_name(name: Any) -> bool:
    """Tells whether a name is that of a YAML or JSON file, not a preset.

    >>> is_file_name("runs/mine.yaml"), is_file_name(Path("mine.yml")), is_file_name("token_tis")
    (True, True, False)
    """
    return isinstance(name, Path) or (isinstance(name, str) and Path(name).suffix in SUFFIXES)


def of_package(name: str) -> Path:
    """Finds a file or folder shipped with slime_ext, such as ``configs/modes/stale.yaml``."""
    return next((root / name for root in ROOTS if (root / name).exists()), ROOTS[-1] / name)


def shipped(path: str) -> str:
    """Returns the path if it exists, else that of the shipped file of this name."""
    is_there = Path(path).is_absolute() or Path(path).exists() or not of_package(path).is_file()
    return path if is_there else str(of_package(path))


def located(path: str, file: str) -> str:
    """Resolves a path that a file names.

    Looks in the file's own folder, then in the folders above it, then in the working directory. A path that
    is found nowhere is returned unchanged. The result is relative if it is below the working directory.
    """
    here = Path.cwd()
    for folder in (*Path(file).resolve().parents, here):
        if (file_there := folder / path).exists():
            return str(file_there.relative_to(here) if file_there.is_relative_to(here) else file_there)
    return path


def text_of(path: str, where: str | None = None) -> str:
    """Reads the text of a file.

    Raises:
        ConfigError: the file cannot be read, or is not text.
    """
    where = where or path
    try:
        file = Path(shipped(path))
        if not _is_readable(file):
            raise ConfigError(f"{where}: expected a file, got a device, a pipe or a socket: name a file")
        return file.read_bytes().decode()
    except UnicodeDecodeError as error:
        got = f"{error.reason} at {error.start}: save the file as UTF-8"
        raise ConfigError(f"{where}: expected text in UTF-8, got {got}") from None
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{where}: expected a readable file, got {reason}: check the path") from None


def _is_readable(file: Path) -> bool:
    """Tells whether reading a file comes to an end.

    Reading a device or a pipe may never end. The pipe of ``| command /dev/stdin`` does.
    """
    mode = file.stat().st_mode
    is_own_pipe = stat.S_ISFIFO(mode) and file.parts[:2] == ("/", "dev")
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode) or is_own_pipe


def _fault(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "brackets that are nested too deep"
    if isinstance(error, json.JSONDecodeError):
        return f"an error at line {error.lineno}, column {error.colno}: {error.msg}"
    if not isinstance(error, yaml.YAMLError):
        return f"a value that does not fit its type: {error}".splitlines()[0]
    where, what = getattr(error, "problem_mark", None), getattr(error, "problem", error.args[-1])
    return f"an error{f' at line {where.line + 1}' if where else ''}: {what}"
