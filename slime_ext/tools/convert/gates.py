"""Translates OpenRLHF, open-instruct and ms-swift: token weights, and a gate that drops tokens or sequences.

In these systems as in slime_ext, a dropped token gets weight 0 and stays in the denominator.

Sources: OpenRLHF 0.11.2, openrlhf/models/loss.py (PolicyLoss); open-instruct, open_instruct/grpo_utils.py
(compute_rho_correction, Autumn 2026); ms-swift, 4.6.0, swift/rlhf_trainers/grpo_trainer.py.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from slime_ext.config.numbers import as_number
from slime_ext.tools.convert.block import KEPT, SAFE, Block, Reading, bounded, capped, inside, native, reject
from slime_ext.tools.convert.loss_side import cispo
from slime_ext.tools.convert.trl import LOSS, loss_of

TOKEN = {"reweight": {"level": "token"}}
UNBOUNDED = (
    "nothing bounds the remaining weights, as in {system}; to bound them, add truncate: {{high: 2.0}} after "
    "reweight"
)

IS_CORRECTION = tuple(f"is_correction_{what}" for what in ("level", "mode", "gating", "threshold"))
OPENRLHF = (*IS_CORRECTION, "policy_loss_type")


def read_openrlhf(block: Block) -> Reading:
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
    return native([TOKEN, gate], (UNBOUNDED.format(system="OpenRLHF"),))


def _pair(block: Block, key: str) -> tuple[float, float]:
    """Returns both bounds of a threshold HIGH, [HIGH] or [LOW, HIGH]."""
    value = block.values.get(key, [0.5, 5.0])
    numbers = [as_number(each) for each in (value if isinstance(value, list | tuple) else [value])]
    if len(numbers) not in (1, 2) or None in numbers:
        block.refuse(key, "HIGH, or [LOW, HIGH]")
    low, high = ([0.0, *numbers])[-2:]
    return max(low or 0.0, 0.0), float(high or 0.0)  # no statistic is below 0


MASK = tuple(
    f"rho_mask_{what}" for what in ("metric", "source", "level", "direction", "lower_bound", "upper_bound")
)
CLAMP = ("rho_clamp_lower_bound", "rho_clamp_upper_bound")
FORMER = (  # keys of releases until Summer 2026
    *("use_rho_correction", "use_vllm_logprobs", "rho_mask_sequence_level", "rho_mask_tv_divergence"),
    *("truncated_importance_sampling_ratio_cap", "tis_mask_lower", "tis_mask_upper"),
    *(
        "dppo_divergence_type",
        "dppo_divergence_threshold",
        "tvpo_divergence_threshold",
        "tvpo_truncation_cap",
    ),
)
OPEN_INSTRUCT = (
    *("loss_fn", "clip_lower", "clip_higher", "policy_ratio_denominator", "rollout_importance_correction"),
    *(*CLAMP, *MASK, *FORMER),
)
STATISTICS = {"ratio": "ratio", "tv": "tv", "kl": "binary_kl"}
RAISES = "open-instruct raises ValueError"
CLIP_HIGHER = 0.272  # open-instruct's default
EDGES = "rho_mask_metric kl: probabilities are clamped to [1e-6, 1 - 1e-6] here, to [2e-16, 1 - 2e-16] there"


def read_open_instruct(block: Block) -> Reading:
    """Reads GRPOExperimentConfig: clamped weights beside its loss, or its loss over the sampler's policy.

    ``rho_mask_*`` adds a gate to either.

    Raises:
        ConfigError: the block has a key of an earlier release, open-instruct itself refuses it, it has DPPO
            over old_policy, it needs two numerators, or it gates sequences by the direction of each token.
    """
    for key in (key for key in FORMER if block.has(key)):
        why = "write policy_ratio_denominator, rollout_importance_correction and rho_mask_metric instead"
        block.refuse(key, "no key of a release before Autumn 2026", why)
    loss = block.choice("loss_fn", ("dapo", "cispo", "dppo"), "dapo")
    over = block.choice("policy_ratio_denominator", ("old_policy", "rollout_policy"), "old_policy")
    corrects = block.choice("rollout_importance_correction", ("clipped", "none"), "clipped") == "clipped"
    gate, source, notes = _gate(block)
    if not corrects:
        idle = block.unlike(dict.fromkeys(CLAMP[:1], 0.0) | dict.fromkeys(CLAMP[1:], 2.0))
        why = "with rollout_importance_correction: none"
        notes = (*notes, *(f"open-instruct ignores {key} {why}" for key in idle))
    if over == "rollout_policy":
        return _over_rollouts(block, loss, corrects, source, native(gate, notes))
    if loss == "dppo":
        block.refuse("loss_fn", "dapo or cispo beside old_policy", RAISES)
    if corrects and gate and source == "current_policy":
        block.refuse("rho_mask_source", "old_policy beside clipped weights", "a correction has one numerator")
    weights = _clamped(block) if corrects else []
    args: dict[str, Any] = {}
    if loss == "cispo":
        high = block.given("clip_higher", CLIP_HIGHER, least=0)
        args = cispo(1.0, high)
    if corrects and not block.number(CLAMP[1], 2.0):
        notes = (*notes, UNBOUNDED.format(system="open-instruct"))
    numerator = "target" if gate and source == "current_policy" else "proximal"
    return replace(native([*weights, *gate], notes, numerator), args=args)


def _over_rollouts(block: Block, loss: str, corrects: bool, source: str, gated: Reading) -> Reading:
    """Builds one of three losses of the target's ratio to the sampler, after a gate."""
    if corrects:
        block.refuse("rollout_importance_correction", "none beside rollout_policy", RAISES)
    if source == "old_policy" and block.values.get("rho_mask_metric") != "none":
        block.refuse("rho_mask_source", "current_policy beside rollout_policy", RAISES)
    gate, notes = gated.mapping["steps"], gated.notes
    high = block.given("clip_higher", CLIP_HIGHER, least=0)
    if loss == "dapo":
        clip = {"eps_low": block.given("clip_lower", 0.2, least=0), "eps_high": high}
        surrogate = {"ppo_clip": {"anchor": "behavior", **clip}}
        return native(gate, notes, "target", surrogate)  # type: ignore[arg-type]
    if loss == "cispo":
        return native([*capped("token", 1 + high), *gate], notes, "target", "reinforce")
    if not gate:
        block.refuse("rho_mask_upper_bound", "a number > 0 beside dppo", RAISES)
    return native([TOKEN, *gate], (*notes, UNBOUNDED.format(system="open-instruct")), "target", "reinforce")


def _clamped(block: Block) -> list[dict[str, Any]]:
    """Returns the steps of token weights; a bound of 0 means no bound."""
    low, high = (block.given(key, at, least=0) for key, at in zip(CLAMP, (0.0, 2.0), strict=True))
    block.interval(CLAMP[0] if low else CLAMP[1], low, high or math.inf)
    return bounded("token", "truncate", low, high or None)


def _gate(block: Block) -> tuple[list[dict[str, Any]], str, tuple[str, ...]]:
    """Returns the steps of ``rho_mask_*``, the policy of their numerator, and notes.

    A bound of 0 means no bound.
    """
    metric = block.choice("rho_mask_metric", ("none", *STATISTICS), "ratio")
    source = block.choice("rho_mask_source", ("old_policy", "current_policy"), "old_policy")
    low, high = (block.given(f"rho_mask_{end}_bound", 0.0, least=0) or None for end in ("lower", "upper"))
    if metric in ("none", "tv", "kl") and low is not None:
        block.refuse("rho_mask_lower_bound", f"0 beside rho_mask_metric {metric}", RAISES)
    if metric == "none" and high is not None:
        block.refuse("rho_mask_upper_bound", "0 beside rho_mask_metric none", RAISES)
    if (low, high) == (None, None):
        return [], source, ()
    if metric == "ratio":
        end = "upper" if low is None else "lower"
        block.interval(f"rho_mask_{end}_bound", low or 0.0, math.inf if high is None else high)
    level = block.choice("rho_mask_level", ("token", "sequence"), "token")
    outward = block.choice("rho_mask_direction", ("symmetric", "increase_only"), "symmetric") != "symmetric"
    if outward and level == "sequence":
        why = "open-instruct drops single tokens of such a sequence; outward here uses the sequence's mean"
        block.refuse("rho_mask_direction", "symmetric at rho_mask_level sequence", why)
    more = {"statistic": STATISTICS[metric], **({"when": "outward"} if outward else {})}
    return [reject(level, "mean", low, high, **more)], source, (EDGES,) if metric == "kl" else ()


SWIFT = (
    "rollout_importance_sampling_mode",
    "rollout_importance_sampling_threshold",
    "off_policy_sequence_mask_delta",
)
MS_SWIFT = (*SWIFT, *LOSS, "tau_pos", "tau_neg")
SWIFT_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "real", "fipo")
MODES = tuple(f"{level}_{how}" for level in ("token", "sequence") for how in ("truncate", "mask"))


def read_ms_swift(block: Block) -> Reading:
    """Reads GRPO's rollout correction, whose ``sequence`` level is the geometric mean.

    ``sequence_mask`` drops sequences by that mean and keeps the weights of single tokens.

    Raises:
        ConfigError: weights and the mask of negative advantages are both on, which needs two numerators.
    """
    loss = loss_of(block, "ms_swift", SWIFT_LOSSES, ("tau_pos", "tau_neg"))
    mode_key, threshold_key, delta_key = SWIFT
    mode, delta = block.choice(mode_key, MODES), block.number(delta_key)
    high = block.given(threshold_key, 2.0, least=1)
    idle = tuple(f"ms-swift ignores {key} without {mode_key}" for key in block.unlike({threshold_key: 2.0}))
    if delta is not None:
        if mode is not None:
            why = "the mask uses the target's ratio, the weights use the ratio of the policy before the step"
            block.refuse(delta_key, f"null beside {mode_key}", why)
        gate = reject("sequence", "mean", None, delta, statistic="k1", when="negative_advantage")
        return loss.under(native([gate], idle, numerator="target"))
    if mode is None:
        return loss.under(Reading({"preset": "metrics_only"}, idle))
    if mode == "sequence_truncate":
        return loss.under(native(capped("geometric", high, clamp=SAFE)))
    if mode == "sequence_mask":
        gate = reject("sequence", "mean", None, high, clamp=SAFE)
        return loss.under(native([TOKEN, gate], (UNBOUNDED.format(system="ms-swift"),)))
    weights = capped("token", high) if mode == "token_truncate" else inside("token", 0.0, high)
    return loss.under(native(weights))
