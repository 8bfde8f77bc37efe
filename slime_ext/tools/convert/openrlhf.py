"""Translates OpenRLHF's ``is_correction_*``: token weights, and a gate that drops tokens or sequences.

In OpenRLHF as in slime_ext, a dropped token gets weight 0 and stays in the denominator.

Source: OpenRLHF 0.11.2, openrlhf/models/loss.py (PolicyLoss).
"""

from __future__ import annotations

from slime_ext.config.numbers import as_number
from slime_ext.tools.convert.block import KEPT, Block, Reading, capped, inside, native, reject

LEVEL, MODE, GATING, THRESHOLD = (
    f"is_correction_{what}" for what in ("level", "mode", "gating", "threshold")
)
DEFAULTS = {
    LEVEL: "off",
    MODE: "mask",
    GATING: "ratio",
    THRESHOLD: [0.5, 5.0],
    "policy_loss_type": "ppo",
}
FORMER = dict.fromkeys(  # keys of releases before 0.11 -> what today's release has instead
    (
        *("is_correction_enable", "is_correction_type", "enable_vllm_is_correction"),
        *("vllm_is_correction_type", "vllm_is_truncated_threshold"),
    ),
    f"write {LEVEL}, {MODE}, {GATING} and {THRESHOLD}",
)
TOKEN = {"reweight": {"level": "token"}}
UNBOUNDED = (
    "nothing bounds the remaining weights, as in OpenRLHF; to bound them, add truncate: {high: 2.0} after "
    "reweight"
)
RAISES = "OpenRLHF raises ValueError"


def read(block: Block) -> Reading:
    """Reads token ratios that are clamped, or dropped by their size, a divergence or a mean.

    Raises:
        ConfigError: PolicyLoss itself refuses the settings, a threshold is neither a number nor a pair, or a
            level is set beside gspo, where it only selects the denominator of the sequence's ratio.
    """
    # YAML 1.1 reads off without quotes as false.
    level = "off" if block.get(LEVEL) is False else block.choice(LEVEL, ("off", "token", "seq"))
    is_gspo = block.choice("policy_loss_type", ("ppo", "gspo")) == "gspo"
    if level == "off":
        return Reading({"preset": "metrics_only"}, (), {"advantage_estimator": "gspo"} if is_gspo else {})
    if is_gspo:
        why = "OpenRLHF applies no weight there, but takes the sequence's ratio over the sampler"
        block.refuse(LEVEL, "off beside policy_loss_type gspo", why)
    statistic, low, high = _gate(block)
    if block.choice(MODE, ("mask", "clip")) == "clip":
        if (level, statistic) != ("token", "ratio"):
            block.refuse(MODE, f"mask beside {LEVEL} {level} and {GATING} {statistic}", RAISES)
        return native([TOKEN, {"clip": {"low": low, "high": high}}] if low else capped("token", high))
    if (level, statistic) == ("token", "ratio"):
        return native(inside("token", low, high))
    unit = "sequence" if level == "seq" else level
    gate = reject(unit, "mean", low or None, high, statistic=statistic)
    return native([TOKEN, gate], (UNBOUNDED,))


def _gate(block: Block) -> tuple[str, float, float]:
    """Returns a statistic and its bounds, which are a threshold HIGH, [HIGH] or [LOW, HIGH]."""
    statistic = block.choice(GATING, ("ratio", "binary_kl", "tv"))
    value = block.get(THRESHOLD)
    numbers = [as_number(each) for each in (value if isinstance(value, list | tuple) else [value])]
    if len(numbers) not in (1, 2) or None in numbers:
        block.refuse(THRESHOLD, "HIGH, or [LOW, HIGH]")
    low, high = (float(x or 0.0) for x in ([0.0, *numbers])[-2:])
    low = max(low, 0.0)  # no statistic is below 0
    if statistic == "ratio":
        block.interval(THRESHOLD, low, high)
    elif high < 0:
        block.refuse(THRESHOLD, f"a number >= 0 beside {GATING} {statistic}", KEPT)
    elif low > 0:
        block.refuse(THRESHOLD, f"one upper bound beside {GATING} {statistic}", RAISES)
    return statistic, low, high
