"""YAML files (JSON is YAML) as they are read everywhere: each key once, every mistake in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from slime_ext.errors import ConfigError

# PyYAML lets Python's own errors through for values such as 2024-13-45, 0b_, !!bool x and 3000 brackets.
UNREADABLE = (yaml.YAMLError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)

MERGE = "tag:yaml.org,2002:merge"


class UniqueKeyLoader(yaml.SafeLoader):
    """SafeLoader lets the last of two equal keys win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value if key.tag != MERGE]
        for twice in (key for i, key in enumerate(keys) if key in keys[:i]):
            line = node.start_mark.line + 1
            raise ConfigError(f"expected each key once, got '{twice}' twice (mapping at line {line})")
        return super().construct_mapping(node, deep)


def read_yaml(path: str, where: str | None = None) -> Any:
    """What a YAML file holds.

    Args:
        where: what errors call the file; its path by default.

    Raises:
        ConfigError: it cannot be read, is not YAML, or has a key twice.
    """
    where = where or path
    text = text_of(path, where)
    try:
        return yaml.load(text, UniqueKeyLoader)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    except UNREADABLE as error:
        raise ConfigError(f"{where}: expected YAML, got {_fault(error)}") from None


def text_of(path: str, where: str | None = None) -> str:
    """What a file says.

    Raises:
        ConfigError: it cannot be read, or is no text.
    """
    where = where or path
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{where}: expected a readable file, got {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: expected text in UTF-8, got {error.reason} at {error.start}") from None


def _fault(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "brackets that are nested too deep"
    if not isinstance(error, yaml.YAMLError):
        return f"a value that is none of its type: {error}".splitlines()[0]
    where, what = getattr(error, "problem_mark", None), getattr(error, "problem", error.args[-1])
    return f"an error at {f'line {where.line + 1}' if where else 'it'}: {what}"
