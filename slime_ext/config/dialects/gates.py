"""OpenRLHF, open-instruct and ms-swift: a weight per token, and a gate that drops tokens or sequences too far
off.

There as here, what a gate drops gets weight 0 and stays in the denominator. Sources: OpenRLHF 0.11.2,
openrlhf/models/loss.py (PolicyLoss); open-instruct, open_instruct/grpo_utils.py (compute_rho_correction,
Autumn 2026); ms-swift, swift/trainers/rlhf_trainer/grpo_trainer.py (_apply_rollout_importance_sampling).
"""

from __future__ import annotations

from typing import Any

from slime_ext.config.dialects.block import SAFE, Block, Reading, capped, inside, native, reject
from slime_ext.config.numbers import as_number

TOKEN = {"reweight": {"level": "token"}}
UNBOUNDED = (
    "nothing bounds the weights that stay, as in {system}; truncate: {{high: 2.0}} after reweight would"
)

OPENRLHF = tuple(f"is_correction_{what}" for what in ("level", "mode", "gating", "threshold"))


def read_openrlhf(block: Block) -> Reading:
    """``is_correction_*``: token ratios clamped, or dropped by their size, a divergence, a sequence's mean.

    Raises:
        ConfigError: what PolicyLoss itself refuses, or a threshold that is neither number nor pair.
    """
    level, mode, gating, threshold = OPENRLHF
    if (unit := block.choice(level, ("off", "token", "seq"), "off")) == "off":
        return Reading({"preset": "metrics_only"})
    statistic = block.choice(gating, ("ratio", "binary_kl", "tv"), "ratio")
    low, high = _pair(block, threshold)
    if statistic != "ratio" and low > 0:
        block.refuse(threshold, f"one upper bound beside {gating} {statistic}", "OpenRLHF raises ValueError")
    if block.choice(mode, ("mask", "clip"), "mask") == "clip":
        if (unit, statistic) != ("token", "ratio"):
            block.refuse(mode, f"mask beside {level} {unit} and {gating} {statistic}", "it raises ValueError")
        return native([TOKEN, {"clip": {"low": low, "high": high}}] if low else capped("token", high))
    if (unit, statistic) == ("token", "ratio"):
        return native(inside("token", low, high))
    gate = reject({"seq": "sequence"}.get(unit, unit), "mean", low or None, high, statistic=statistic)
    return native([TOKEN, gate], (UNBOUNDED.format(system="OpenRLHF"),))


def _pair(block: Block, key: str) -> tuple[float, float]:
    """HIGH, [HIGH] or [LOW, HIGH]."""
    value = block.values.get(key, [0.5, 5.0])
    numbers = [as_number(each) for each in (value if isinstance(value, list | tuple) else [value])]
    if len(numbers) not in (1, 2) or None in numbers:
        block.refuse(key, "HIGH, or [LOW, HIGH]")
    low, high = ([0.0, *numbers])[-2:]
    return float(low or 0.0), float(high or 0.0)


OPEN_INSTRUCT = (
    *("loss_fn", "clip_lower", "clip_higher", "policy_ratio_denominator", "rollout_importance_correction"),
    *(f"rho_clamp_{end}_bound" for end in ("lower", "upper")),
    *(
        f"rho_mask_{what}"
        for what in ("metric", "source", "level", "direction", "lower_bound", "upper_bound")
    ),
)
STATISTICS = {"ratio": "ratio", "tv": "tv", "kl": "binary_kl"}


def read_open_instruct(block: Block) -> Reading:
    """GRPOExperimentConfig: pi_old / mu clamped beside its loss, or its loss over mu itself; ``rho_mask_*``.

    Raises:
        ConfigError: two policies over mu at once, DPPO over the old policy, or a sequence's gate by the
            direction of each token.
    """
    loss = block.choice("loss_fn", ("dapo", "cispo", "dppo"), "dapo")
    over = block.choice("policy_ratio_denominator", ("old_policy", "rollout_policy"), "old_policy")
    corrects = block.choice("rollout_importance_correction", ("clipped", "none"), "clipped") == "clipped"
    gate, source = _gate(block)
    if over == "rollout_policy":
        if corrects:
            why = "the loss has the target's ratio to the sampler already"
            block.refuse("rollout_importance_correction", "none beside rollout_policy", why)
        high = 1 + block.given("clip_higher", 0.272, least=0)
        if loss == "dapo":
            clip = {"eps_low": block.given("clip_lower", 0.2, least=0), "eps_high": high - 1}
            surrogate = {"ppo_clip": {"anchor": "behavior", **clip}}
            return native(gate, (), "target", surrogate)  # type: ignore[arg-type]
        weights = capped("token", high) if loss == "cispo" else [TOKEN]
        notes = () if loss == "cispo" else (UNBOUNDED.format(system="open-instruct"),)
        return native([*weights, *gate], notes, "target", "reinforce")
    if loss == "dppo":
        why = "no surrogate here is target / proximal without a clip; the nearest is rollout_policy"
        block.refuse("loss_fn", "dapo or cispo beside old_policy", why)
    if corrects and gate and source == "current_policy":
        block.refuse("rho_mask_source", "old_policy beside clipped weights", "a correction has one numerator")
    notes = ("loss_fn cispo is --advantage-estimator cispo in slime",) if loss == "cispo" else ()
    numerator = "target" if gate and source == "current_policy" else "proximal"
    return native([*(_clamped(block) if corrects else []), *gate], notes, numerator)


def _clamped(block: Block) -> list[dict[str, Any]]:
    low, high = block.given("rho_clamp_lower_bound", 0.0), block.given("rho_clamp_upper_bound", 2.0)
    if not high:
        return [TOKEN]
    return [TOKEN, {"clip": {"low": low, "high": high}}] if low else capped("token", high)


def _gate(block: Block) -> tuple[list[dict[str, Any]], str]:
    """The steps of ``rho_mask_*``, and the policy whose ratio to the sampler they read; a bound of 0 means
    none."""
    metric = block.choice("rho_mask_metric", ("none", *STATISTICS), "ratio")
    source = block.choice("rho_mask_source", ("old_policy", "current_policy"), "old_policy")
    low, high = (block.given(f"rho_mask_{end}_bound", 0.0) or None for end in ("lower", "upper"))
    if metric == "none" or (low, high) == (None, None):
        return [], source
    level = block.choice("rho_mask_level", ("token", "sequence"), "token")
    outward = block.choice("rho_mask_direction", ("symmetric", "increase_only"), "symmetric") != "symmetric"
    if outward and level == "sequence":
        why = "it drops single tokens of such a sequence; outward here is of its mean"
        block.refuse("rho_mask_direction", "symmetric at rho_mask_level sequence", why)
    more = {"statistic": STATISTICS[metric], **({"when": "outward"} if outward else {})}
    return [reject(level, "mean", low, high, **more)], source


MS_SWIFT = (
    "rollout_importance_sampling_mode",
    "rollout_importance_sampling_threshold",
    "off_policy_sequence_mask_delta",
)
MODES = tuple(f"{level}_{how}" for level in ("token", "sequence") for how in ("truncate", "mask"))


def read_ms_swift(block: Block) -> Reading:
    """GRPO's rollout correction: ``sequence`` is the geometric mean; its mask keeps the tokens' own weights.

    Raises:
        ConfigError: weights and the mask of negative advantages at once, which need two numerators.
    """
    mode_key, threshold_key, delta_key = MS_SWIFT
    mode, delta = block.choice(mode_key, MODES), block.number(delta_key)
    high = block.given(threshold_key, 2.0, least=1)
    if delta is not None:
        if mode is not None:
            why = "the mask compares the target with the sampler, the weights the policy before the step"
            block.refuse(delta_key, f"null beside {mode_key}", why)
        gate = reject("sequence", "mean", None, delta, statistic="k1", when="negative_advantage")
        return native([gate], numerator="target")
    if mode is None:
        return Reading({"preset": "metrics_only"})
    if mode == "sequence_truncate":
        return native(capped("geometric", high, clamp=SAFE))
    if mode == "sequence_mask":
        gate = reject("sequence", "mean", None, high, clamp=SAFE)
        return native([TOKEN, gate], (UNBOUNDED.format(system="ms-swift"),))
    return native(capped("token", high) if mode == "token_truncate" else inside("token", 0.0, high))
