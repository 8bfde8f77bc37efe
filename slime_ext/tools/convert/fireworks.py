"""Translates fw-ai cookbook's ``ISConfig`` (PR 169) and today's ``TISConfig``, told apart by their fields.

Source: https://github.com/fw-ai/cookbook/pull/169; training/utils/rl/tis.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slime_ext.tools.convert.block import SAFE, Block, Reading, capped, inside, native

TIS_CONFIG: dict[str, Any] = {"cap": 5.0, "level": "token", "icepop_threshold": None}
IS_CONFIG: dict[str, Any] = {"eps_clip": None, "eps_clip_high": None, "tis_cap": 5.0, "tis_level": "token"}
DEFAULTS = {**TIS_CONFIG, **IS_CONFIG}
LEVELS = ("token", "sequence")
GEOMETRIC = (
    "the cookbook's level sequence is the geometric mean of the clamped token ratios, not their product"
)


def read(block: Block) -> Reading:
    """Reads one weight per token: min(ratio at the level, cap), or 0 outside IcePop's band.

    Raises:
        ConfigError: the block has fields of both configurations, a cap below 1, or IcePop at level sequence.
    """
    of_tis, of_is = ([key for key in block.values if key in keys] for keys in (TIS_CONFIG, IS_CONFIG))
    if of_tis and of_is:
        block.refuse(of_is[0], f"only fields of ISConfig or of TISConfig (beside it: {', '.join(of_tis)})")
    level_key, cap_key = ("tis_level", "tis_cap") if of_is else ("level", "cap")
    level = block.choice(level_key, LEVELS)
    low, high = block.number("eps_clip", least=0), block.number("eps_clip_high", least=0)
    clip = {"eps_clip": low, "eps_clip_high": low if high is None else high}
    args = {key: value for key, value in clip.items() if value is not None}
    cap, band = block.required_number(cap_key, least=1), block.number("icepop_threshold", least=1)
    if band is not None and level != "token":
        block.refuse("icepop_threshold", "null at level sequence", "the cookbook has IcePop for tokens only")
    if level == "sequence":
        return replace(native(capped("geometric", cap, clamp=SAFE), (GEOMETRIC,)), args=args)
    # The clamp of +-20 matters only in a mean, because every cap is far below e^20.
    steps = capped("token", cap)
    if band is not None:
        # Inside the band the cap acts only if it is smaller than the band's upper end.
        steps = [*inside("token", 1 / band, band), *(steps[-1:] if cap < band else ())]
    return replace(native(steps), args=args)
