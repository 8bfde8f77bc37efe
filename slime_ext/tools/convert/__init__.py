"""Other systems' configurations, read as they are: one mapping per system, from its block to our native keys.

If a system's code and documentation differ, we follow the code. Settings that it silently ignores are
refused. docs/convert.md lists these readings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from slime_ext.errors import ConfigError, check_known, shown
from slime_ext.tools.convert import (
    areal,
    fireworks,
    gates,
    nemo_rl,
    prime_rl,
    roll,
    skyrl,
    slime_mis,
    trl,
    verl,
)
from slime_ext.tools.convert.block import Block, Reading

Dialect = tuple[tuple[str, ...], Callable[[Block], Reading]]  # the keys it may have, and its reader
CONVERTED: dict[str, Dialect] = {
    "verl": (verl.KEYS, verl.read),
    "skyrl": (skyrl.KEYS, skyrl.read),
    "fireworks": (fireworks.KEYS, fireworks.read),
    "slime_mis": (slime_mis.KEYS, slime_mis.read),
    "trl": (trl.KEYS, trl.read),
    "areal": (areal.KEYS, areal.read),
    "nemo_rl": (nemo_rl.KEYS, nemo_rl.read),
    "prime_rl": (prime_rl.KEYS, prime_rl.read),
    "roll": (roll.KEYS, roll.read),
    "openrlhf": (gates.OPENRLHF, gates.read_openrlhf),
    "open_instruct": (gates.OPEN_INSTRUCT, gates.read_open_instruct),
    "ms_swift": (gates.MS_SWIFT, gates.read_ms_swift),
}


def read(system: str, block: Any) -> Reading:
    """A system's own block -> native keys, with notes on surprising meanings.

    >>> read("fireworks", {"cap": 5.0, "level": "sequence"}).mapping["steps"][0]
    {'reweight': {'level': 'geometric', 'clamp': 20.0}}

    Args:
        block: the mapping, in the system's field names; numbers may be given as text.

    Raises:
        ConfigError: unknown system or key, wrong value, or a combination that the system silently ignores.
    """
    check_known("convert", "system", system, CONVERTED)
    keys, reader = CONVERTED[system]
    where = f"convert.{system}"
    if not isinstance(block, Mapping):
        raise ConfigError(f"{where}: expected that system's own mapping, got {shown(block)}")
    return reader(Block.closed(where, block, keys))
