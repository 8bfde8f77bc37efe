"""fw-ai cookbook: ``ISConfig`` of PR 169 and ``TISConfig`` of today, distinguished by their field names.

Source: https://github.com/fw-ai/cookbook/pull/169; training/utils/rl/tis.py.
"""

from __future__ import annotations

from dataclasses import replace

from slime_ext.tools.convert.block import SAFE, Block, Reading, capped, inside, native

IS_CONFIG = ("eps_clip", "eps_clip_high", "tis_cap", "tis_level")
TIS_CONFIG = ("cap", "level", "icepop_threshold")
KEYS = (*TIS_CONFIG, *IS_CONFIG)
LEVELS = ("token", "sequence")
GEOMETRIC = "level sequence is the geometric mean of the clamped token ratios here, not their product"


def read(block: Block) -> Reading:
    """One weight per token: min(ratio, cap), the ratio at the level; outside IcePop's band it is 0.

    Raises:
        ConfigError: fields of both configurations, a cap below 1, or IcePop at level sequence.
    """
    now, then = ([k for k in block.values if k in keys] for keys in (TIS_CONFIG, IS_CONFIG))
    if now and then:
        block.refuse(then[0], f"the fields of ISConfig or of TISConfig alone (beside it: {', '.join(now)})")
    level_key, cap_key = ("tis_level", "tis_cap") if then else ("level", "cap")
    level = block.choice(level_key, LEVELS, "token")
    low, high = block.number("eps_clip", least=0), block.number("eps_clip_high", least=0)
    clip = {"eps_clip": low, "eps_clip_high": low if high is None else high}
    args = {key: value for key, value in clip.items() if value is not None}
    cap, band = block.given(cap_key, 5.0, least=1), block.number("icepop_threshold", least=1)
    if band is not None and level != "token":
        block.refuse("icepop_threshold", "null at level sequence", "the cookbook has it for tokens only")
    if level == "sequence":
        return replace(native(capped("geometric", cap, clamp=SAFE), (GEOMETRIC,)), args=args)
    # A clamp of +-20 can only be seen in a mean: every cap is far below e^20.
    steps = capped("token", cap)
    if band is not None:
        # Inside the band the cap acts only where it is the smaller.
        steps = [*inside("token", 1 / band, band), *(steps[-1:] if cap < band else ())]
    return replace(native(steps), args=args)
