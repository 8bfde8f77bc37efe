"""Translates OpenRLHF's ``is_correction_*``: token weights, and a gate that drops tokens or sequences.

In OpenRLHF as in slime_ext, a dropped token gets weight 0 and stays in the denominator.

Source: OpenRLHF 0.11.2, openrlhf/models/loss.py (PolicyLoss).
"""

from __future__ import annotations

from slime_ext.config.numbers import as_number
from slime_ext.tools.convert.block import KEPT, Block, Reading, capped, inside, native, reject

TOKEN = {"reweight": {"level": "token"}}
UNBOUNDED = (
    "nothing bounds the remaining weights, as in OpenRLHF; to bound them, add truncate: {high: 2.0} after "
    "reweight"
)
IS_CORRECTION = tuple(f"is_correction_{what}" for what in ("level", "mode", "gating", "threshold"))
KEYS = (*IS_CORRECTION, "policy_loss_type")


def read(block: Block) -> Reading:
    """Reads ``is_correction_*``. Token ratios are clamped, or dropped by their size, a divergence or a mean.

    Raises:
        ConfigError: PolicyLoss itself refuses the settings, a threshold is neither a number nor a pair, or a
            level is set beside gspo, where it only selects the denominator of the sequence's ratio.
    """
    level = IS_CORRECTION[0]
    if block.values.get(level) is False:  # YAML 1.1 reads off without quotes as false
        block = Block(block.where, {**block.values, level: "off"})
    if block.choice("policy_loss_type", ("ppo", "gspo"), "ppo") == "gspo":
        if block.choice(level, ("off", "token", "seq"), "off") != "off":
            why = "OpenRLHF applies no weight there, but takes the sequence's ratio over the sampler"
            block.refuse(level, "off beside policy_loss_type gspo", why)
        return Reading({"preset": "metrics_only"}, _idle(block), {"advantage_estimator": "gspo"})
    unit = block.choice(level, ("off", "token", "seq"), "off")
    return Reading({"preset": "metrics_only"}, _idle(block)) if unit == "off" else _gated(block, unit)


def _idle(block: Block) -> tuple[str, ...]:
    """Returns notes on settings that OpenRLHF reads beside a level only."""
    level, mode, gating, threshold = IS_CORRECTION
    idle = block.unlike({mode: "mask", gating: "ratio", threshold: [0.5, 5.0]})
    return tuple(f"OpenRLHF ignores {key} with {level}: off" for key in idle)


def _gated(block: Block, unit: str) -> Reading:
    """Weights tokens by their ratios. ``gating`` names the statistic by which they are clipped or dropped."""
    _, mode, gating, threshold = IS_CORRECTION
    statistic = block.choice(gating, ("ratio", "binary_kl", "tv"), "ratio")
    low, high = _pair(block, threshold)
    if statistic == "ratio":
        block.interval(threshold, low, high)
    elif high < 0:
        block.refuse(threshold, f"a number >= 0 beside {gating} {statistic}", KEPT)
    if statistic != "ratio" and low > 0:
        block.refuse(threshold, f"one upper bound beside {gating} {statistic}", "OpenRLHF raises ValueError")
    if block.choice(mode, ("mask", "clip"), "mask") == "clip":
        if (unit, statistic) != ("token", "ratio"):
            block.refuse(
                mode,
                f"mask beside {IS_CORRECTION[0]} {unit} and {gating} {statistic}",
                "OpenRLHF raises ValueError",
            )
        return native([TOKEN, {"clip": {"low": low, "high": high}}] if low else capped("token", high))
    if (unit, statistic) == ("token", "ratio"):
        return native(inside("token", low, high))
    gate = reject({"seq": "sequence"}.get(unit, unit), "mean", low or None, high, statistic=statistic)
    return native([TOKEN, gate], (UNBOUNDED,))


def _pair(block: Block, key: str) -> tuple[float, float]:
    """Returns both bounds of a threshold HIGH, [HIGH] or [LOW, HIGH]."""
    value = block.values.get(key, [0.5, 5.0])
    numbers = [as_number(each) for each in (value if isinstance(value, list | tuple) else [value])]
    if len(numbers) not in (1, 2) or None in numbers:
        block.refuse(key, "HIGH, or [LOW, HIGH]")
    low, high = ([0.0, *numbers])[-2:]
    return max(low or 0.0, 0.0), float(high or 0.0)  # no statistic is below 0
