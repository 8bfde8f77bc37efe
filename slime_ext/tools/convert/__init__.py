"""Translates other systems' configurations into native keys, with one reader per system.

If a system's code and documentation differ, we follow the code. We refuse settings that the system silently
ignores. docs/convert.md lists the translations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from slime_ext.errors import ConfigError, check_known, shown
from slime_ext.tools.convert import areal, fireworks, ms_swift, openrlhf, skyrl, slime_mis, trl, verl
from slime_ext.tools.convert.block import Block, Reading

Dialect = tuple[tuple[str, ...], Callable[[Block], Reading]]  # the keys that a block may have, and its reader
CONVERTED: dict[str, Dialect] = {
    "verl": (verl.KEYS, verl.read),
    "skyrl": (skyrl.KEYS, skyrl.read),
    "fireworks": (fireworks.KEYS, fireworks.read),
    "slime_mis": (slime_mis.KEYS, slime_mis.read),
    "trl": (trl.KEYS, trl.read),
    "areal": (areal.KEYS, areal.read),
    "openrlhf": (openrlhf.KEYS, openrlhf.read),
    "ms_swift": (ms_swift.KEYS, ms_swift.read),
}


def read(system: str, block: Any) -> Reading:
    """Translates a system's block into native keys, with notes on surprising meanings.

    >>> read("fireworks", {"cap": 5.0, "level": "sequence"}).mapping["steps"][0]
    {'reweight': {'level': 'geometric', 'clamp': 20.0}}

    Args:
        system: the name of the system, a key of ``CONVERTED``.
        block: the mapping with the system's field names; a number may be a text.

    Raises:
        ConfigError: the system or a key is unknown, a value is wrong, or the system silently ignores the
            combination.
    """
    check_known("convert", "system", system, CONVERTED)
    keys, reader = CONVERTED[system]
    where = f"convert.{system}"
    if not isinstance(block, Mapping):
        raise ConfigError(f"{where}: expected a mapping with keys of {system}, got {shown(block)}")
    return reader(Block.closed(where, block, keys))
