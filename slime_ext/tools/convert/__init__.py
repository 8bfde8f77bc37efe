"""Translates other systems' configurations into native keys, with one reader per system.

If a system's code and documentation differ, we follow the code. A setting that the system ignores is named in
a note. docs/convert.md lists the translations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from slime_ext.errors import ConfigError, check_known, quoted
from slime_ext.tools.convert import areal, fireworks, ms_swift, openrlhf, rlinf, skyrl, slime_mis, trl, verl
from slime_ext.tools.convert.block import Block, Reading


class System(NamedTuple):
    """A system whose settings can be translated.

    Args:
        title: the name that the system gives itself.
        defaults: every key that its block may have, with the system's own default.
        read: the reader of a block.
        former: keys of other releases -> what to write instead.
    """

    title: str
    defaults: Mapping[str, Any]
    read: Callable[[Block], Reading]
    former: Mapping[str, str] = MappingProxyType({})


CONVERTED = {
    "verl": System("verl", verl.DEFAULTS, verl.read),
    "skyrl": System("SkyRL", skyrl.DEFAULTS, skyrl.read),
    "fireworks": System("the cookbook", fireworks.DEFAULTS, fireworks.read),
    "slime_mis": System("mis.py", slime_mis.DEFAULTS, slime_mis.read),
    "trl": System("TRL", trl.DEFAULTS, trl.read),
    "areal": System("AReaL", areal.DEFAULTS, areal.read, areal.FORMER),
    "openrlhf": System("OpenRLHF", openrlhf.DEFAULTS, openrlhf.read, openrlhf.FORMER),
    "ms_swift": System("ms-swift", ms_swift.DEFAULTS, ms_swift.read),
    "rlinf": System("RLinf", rlinf.DEFAULTS, rlinf.read),
}


def read(system: str, block: Any) -> Reading:
    """Translates a system's block into native keys, with notes on surprising meanings.

    Every key of the block is read, or named in a note, unless it has the system's default.

    >>> read("fireworks", {"cap": 5.0, "level": "sequence"}).mapping["steps"][0]
    {'reweight': {'level': 'geometric', 'clamp': 20.0}}

    Args:
        system: the name of the system, a key of ``CONVERTED``.
        block: the mapping with the system's field names; a number may be a text.

    Raises:
        ConfigError: the system or a key is unknown, a value is wrong, or no correction here does the same.
    """
    check_known("convert.read", "system", system, CONVERTED)
    title, defaults, reader, former = CONVERTED[system]
    if not isinstance(block, Mapping):
        raise ConfigError(f"{system}: expected a mapping with keys of {system}, got {quoted(block)}")
    for key in former:
        if block.get(key) not in (None, False):
            expected = f"expected a key of the release of {system} that convert reads"
            raise ConfigError(f"{system}.{key}: {expected}, got another release's: {former[key]}")
    block = {key: value for key, value in block.items() if key not in former}
    values = Block.closed(system, block, defaults)
    reading = reader(values)
    if unread := values.unread():
        note = f"{title} ignores {', '.join(unread)} with these settings"
        reading = replace(reading, notes=(*reading.notes, note))
    return reading
