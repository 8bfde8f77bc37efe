"""TRL, NeMo-RL and ROLL: their settings of today in native keys, for ``slime-ext convert``.

Features without a step here are refused or noted, never dropped. Sources: trl/trainer/grpo_config.py;
nemo_rl/algorithms/loss_functions.py (ClippedPGLossConfig); roll/configs/base_config.py
(TrainInferCorrectionConfig), each of Summer 2026.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from slime_ext.config.dialects.block import Block, Reading, band, bounded, native, reject

TOKEN = {"reweight": {"level": "token"}}
UNBOUNDED = "nothing bounds the weights, as in {system}; truncate: {{high: 2.0}} after reweight would"

TRL = (
    "vllm_importance_sampling_correction",
    "vllm_importance_sampling_mode",
    "vllm_importance_sampling_clip_min",
    "vllm_importance_sampling_clip_max",
    "vllm_importance_sampling_cap",
    "off_policy_mask_threshold",
)
TRL_MODES = tuple(f"{level}_{how}" for level in ("token", "sequence") for how in ("truncate", "mask"))


def read_trl(block: Block) -> Reading:
    """GRPOConfig: weights at a level, capped or 0 outside a band; the mask of negative advantages.

    Raises:
        ConfigError: both at once, which need two numerators.
    """
    threshold = block.number("off_policy_mask_threshold")
    if threshold is not None:
        if block.flag("vllm_importance_sampling_correction", True):
            why = "the mask compares the target with the sampler, the weights the policy before the step"
            block.refuse("off_policy_mask_threshold", "vllm_importance_sampling_correction: false", why)
        more = {"statistic": "k1", "when": "negative_advantage"}
        return native([reject("sequence", "mean", None, threshold, **more)], numerator="target")
    if not block.flag("vllm_importance_sampling_correction", True):
        return Reading({"preset": "metrics_only"})
    level, _, how = block.choice("vllm_importance_sampling_mode", TRL_MODES, "sequence_mask").partition("_")
    cap = block.number("vllm_importance_sampling_cap", least=1)  # it wins over clip_max
    high = block.number("vllm_importance_sampling_clip_max", 3.0, least=1) if cap is None else cap
    low = block.number("vllm_importance_sampling_clip_min")
    if low is not None:
        block.interval("vllm_importance_sampling_clip_min", low, math.inf if high is None else high)
    elif high is None and how == "truncate":
        why = "TRL raises ValueError"
        block.refuse(
            "vllm_importance_sampling_clip_max", "a number here or in vllm_importance_sampling_clip_min", why
        )
    return native(bounded(level, how, low, high), () if high else (UNBOUNDED.format(system="TRL"),))


NEMO_RL = (
    "use_importance_sampling_correction",
    "truncated_importance_sampling_ratio",
    "truncated_importance_sampling_ratio_min",
    "truncated_importance_sampling_type",
    "sequence_level_importance_ratios",
    "seq_logprob_error_threshold",
)
DROPPED = "seq_logprob_error_threshold drops sequences by mean exp|l|, which no step here does"


def read_nemo_rl(block: Block) -> Reading:
    """ClippedPGLossConfig: tis, icepop, or sequences masked by the geometric mean under raw weights."""
    notes = (DROPPED,) if block.has("seq_logprob_error_threshold") else ()
    if not block.flag("use_importance_sampling_correction"):
        return Reading({"preset": "metrics_only"}, notes)
    kind = block.choice("truncated_importance_sampling_type", ("tis", "icepop", "seq-mask-tis"), "tis")
    high = block.number("truncated_importance_sampling_ratio", least=1)
    low = block.number("truncated_importance_sampling_ratio_min")
    level = "sequence" if block.flag("sequence_level_importance_ratios") else "token"
    if kind == "seq-mask-tis":
        block.required("truncated_importance_sampling_ratio", "it bounds the geometric mean")
        masked = reject("sequence", "mean", low, high)
        return native([TOKEN, masked], (*notes, UNBOUNDED.format(system="NeMo-RL")))
    steps = bounded(level, "mask" if kind == "icepop" else "truncate", low, high)
    return native(steps, notes if high else (*notes, UNBOUNDED.format(system="NeMo-RL")))


ROLL = ("is_weight", "filters")
WEIGHT = ("enabled", "weight_type", "upper_bound", "detach")
FILTER = (
    "enabled",
    "agg_type",
    *(f"{kind}_{end}" for kind in ("ratio", "diff") for end in ("enabled", "low", "high")),
)
LEVELS = ("token", "segment", "geometric", "sequence")
RECOMPUTED = (
    "where ROLL recomputes log-probs (enable_old_logprobs_recompute, which it sets itself when a rollout is "
    "several optimizer steps), it divides by the tokens that its filters keep: denominator: kept does that"
)


def read_roll(block: Block) -> Reading:
    """TrainInferCorrectionConfig: a capped weight, and filters by ratio or difference of probabilities.

    ROLL's ``segment`` is a run of response tokens, as ``turn`` here, with the geometric mean of its ratios.

    Raises:
        ConfigError: a weight per segment, a filter by another difference than |p - q| of a token.
    """
    steps: list[dict[str, Any]] = []
    nested = block.values.get("is_weight") or {}
    filters = block.values.get("filters") or []
    if not isinstance(nested, Mapping):
        block.refuse("is_weight", "a mapping")
    if not isinstance(filters, list) or not all(isinstance(entry, Mapping) for entry in filters):
        block.refuse("filters", "a list of mappings")
    weight = Block.closed(f"{block.where}.is_weight", nested, WEIGHT)
    notes: tuple[str, ...] = ()
    if weight.flag("enabled"):
        level = weight.choice("weight_type", LEVELS, "token")
        if level == "segment":
            why = "ROLL weights by the geometric mean of a segment, and no weight here does"
            weight.refuse("weight_type", "token, geometric or sequence", why)
        high = weight.number("upper_bound", 1.2, least=1)
        steps = bounded(level, "truncate", None, high)
        notes = () if high else (UNBOUNDED.format(system="ROLL"),)
    for i, entry in enumerate(filters):
        steps += _filtered(Block.closed(f"{block.where}.filters[{i}]", entry, FILTER))
    notes += (RECOMPUTED,) if any("reject" in step for step in steps) else ()
    return native(steps, notes) if steps else Reading({"preset": "metrics_only"})


def _filtered(block: Block) -> list[dict[str, Any]]:
    """The steps of one of ROLL's filters."""
    if not block.flag("enabled"):
        return []
    kind, found = block.choice("agg_type", LEVELS, "token"), []
    if block.flag("ratio_enabled", True):
        bounds = block.interval("ratio_low", block.given("ratio_low", 0.8), block.given("ratio_high", 1.2))
        found.append(reject("turn", "mean", *bounds) if kind == "segment" else band(kind, *bounds))
    if block.flag("diff_enabled"):
        low, high = block.given("diff_low", -0.2), block.given("diff_high", 0.2)
        if kind != "token" or low != -high:
            block.refuse("diff_low", f"-diff_high ({-high:g}) at agg_type token", "no step here has another")
        found.append(reject("token", "sum", None, high, statistic="tv"))
    return found
