"""Reads YAML files (JSON is YAML): duplicate keys are refused, every mistake is one line."""

from __future__ import annotations

import math
import stat
import sysconfig
from pathlib import Path
from typing import Any

import yaml

from slime_ext.errors import ConfigError, cut

# PyYAML lets Python's own errors through for values such as 2024-13-45, 0b_, !!bool x and 3000 brackets.
UNREADABLE = (
    yaml.YAMLError,
    ImportError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)

# Where configs/ and patches/ are: a checkout, or what a wheel installs.
ROOTS = (Path(__file__).parents[2], Path(sysconfig.get_path("data"), "share/slime-ext"))
MERGE = "tag:yaml.org,2002:merge"
SUFFIXES = (".yaml", ".yml", ".json")
MOST_ALIASED = 10_000  # values that a file's aliases may add


class UniqueKeyLoader(yaml.SafeLoader):
    """Refuses a duplicate key in a mapping (SafeLoader would use the last) and aliases that multiply.

    Nine lines of ten aliases each are a value of 1e9 items, and code that walks through it never ends.
    """

    def get_single_node(self) -> yaml.Node | None:
        node, sizes = super().get_single_node(), dict[int, float]()
        if node is not None and (count := _size(node, sizes, set())) > MOST_ALIASED + len(sizes):
            got = f"{count:.0e} by its aliases: write them out"
            raise ConfigError(f"expected the {len(sizes)} values that the file writes, got {got}")
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key in (self.construct_object(key, deep=True) for key, _ in node.value if key.tag != MERGE):
            if _hashable(key) in seen:
                line = node.start_mark.line + 1
                raise ConfigError(f"expected each key once, got '{cut(key)}' twice (mapping at line {line})")
            seen.add(_hashable(key))
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        return found


def _size(node: yaml.Node, sizes: dict[int, float], above: set[int]) -> float:
    """Counts the values in a node as if its aliases were written out; infinite if it contains itself."""
    if id(node) in above:
        return math.inf
    if id(node) not in sizes:
        parts = node.value if isinstance(node, yaml.CollectionNode) else ()
        parts = [part for pair in parts for part in (pair if isinstance(pair, tuple) else (pair,))]
        sizes[id(node)] = 1 + sum(_size(part, sizes, above | {id(node)}) for part in parts)
    return sizes[id(node)]


def _hashable(key: Any) -> Any:
    return repr(key) if isinstance(key, list | dict | set) else key


def read_yaml(path: str, where: str | None = None, text: str | None = None) -> Any:
    """What a YAML file holds.

    Args:
        where: what errors call the file; its path by default.
        text: the file's, where it is not on this disk.

    Raises:
        ConfigError: it cannot be read, is not YAML, or has a key twice.
    """
    where = where or path
    text = text_of(path, where) if text is None else text
    kind = "TOML" if path.endswith(".toml") else "YAML"
    try:
        if kind == "TOML":
            import tomllib  # of Python 3.11

            return tomllib.loads(text)
        return yaml.load(text, UniqueKeyLoader)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    except UNREADABLE as error:
        raise ConfigError(f"{where}: expected {kind}, got {cut(_fault(error))}") from None


def read_mapping(path: str, text: str | None = None) -> dict[str, Any]:
    """A YAML or JSON file that holds a mapping.

    Args:
        text: as for ``read_yaml``.

    Raises:
        ConfigError: it cannot be read, is not YAML, or holds something else.
    """
    found = read_yaml(path, text=text)
    if not isinstance(found, dict):
        raise ConfigError(
            f"{path}: expected a mapping, got {type(found).__name__}: see the files in configs/"
        )
    for key in found:
        if not isinstance(key, str):
            raise ConfigError(
                f"{path}: expected names as keys, got {cut(repr(key))}: see the files in configs/"
            )
    return found


def is_file_name(name: Any) -> bool:
    """Whether text or a path names a YAML or JSON file, not a preset.

    >>> is_file_name("runs/mine.yaml"), is_file_name(Path("mine.yml")), is_file_name("token_tis")
    (True, True, False)
    """
    return isinstance(name, Path) or (isinstance(name, str) and Path(name).suffix in SUFFIXES)


def of_package(name: str) -> Path:
    """A file or folder shipped with slime_ext, such as ``configs/modes/stale.yaml``."""
    return next((root / name for root in ROOTS if (root / name).exists()), ROOTS[-1] / name)


def shipped(path: str) -> str:
    """The path if it exists, else that of a shipped file with the same name."""
    is_there = Path(path).is_absolute() or Path(path).exists() or not of_package(path).is_file()
    return path if is_there else str(of_package(path))


def located(path: str, file: str) -> str:
    """Resolves a path that a file names: from the file's own folder, from one above it, or from the working
    directory; unchanged if found in none. The result is relative if it lies below the working directory."""
    here = Path.cwd()
    for folder in (*Path(file).resolve().parents, here):
        if (found := folder / path).exists():
            return str(found.relative_to(here) if found.is_relative_to(here) else found)
    return path


def text_of(path: str, where: str | None = None) -> str:
    """The text of a file.

    Raises:
        ConfigError: it cannot be read, or is not text.
    """
    where = where or path
    try:
        file = Path(shipped(path))
        if not _is_readable(file):
            raise ConfigError(f"{where}: expected a file, got a device, a pipe or a socket")
        return file.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: expected text in UTF-8, got {error.reason} at {error.start}") from None
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{where}: expected a readable file, got {reason}") from None


def _is_readable(file: Path) -> bool:
    """Whether reading a file ends: not that of a device or a pipe, save that of ``| command /dev/stdin``."""
    mode = file.stat().st_mode
    is_own_pipe = stat.S_ISFIFO(mode) and file.parts[:2] == ("/", "dev")
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode) or is_own_pipe


def _fault(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "brackets that are nested too deep"
    if not isinstance(error, yaml.YAMLError):
        return f"a value that is none of its type: {error}".splitlines()[0]
    where, what = getattr(error, "problem_mark", None), getattr(error, "problem", error.args[-1])
    return f"an error at {f'line {where.line + 1}' if where else 'it'}: {what}"
