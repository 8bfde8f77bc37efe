"""Translates ROLL's TrainInferCorrectionConfig (8eb27cc, August 2026).

Source: https://github.com/alibaba/ROLL, roll/configs/base_config.py; roll/utils/train_infer_corrections.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime_ext.tools.convert.block import Block, Reading, band, bounded, native, reject

UNBOUNDED = "nothing bounds the weights, as in ROLL; to bound them, add truncate: {high: 2.0} after reweight"
KEYS = ("is_weight", "filters")
WEIGHT = ("enabled", "weight_type", "upper_bound", "detach")
FILTER = (
    "enabled",
    "agg_type",
    *(f"{kind}_{end}" for kind in ("ratio", "diff") for end in ("enabled", "low", "high")),
)
LEVELS = ("token", "segment", "geometric", "sequence")
RECOMPUTED = (
    "if ROLL recomputes log-probs (enable_old_logprobs_recompute, which it sets itself when a rollout is "
    "several optimizer steps), it divides by the tokens that its filters keep: add denominator: kept to do so"
)


def read(block: Block) -> Reading:
    """Reads a capped weight, and filters by the ratio or the difference of probabilities.

    ROLL's ``segment`` is a run of response tokens, like ``turn`` here. Its ratio is the geometric mean.

    Raises:
        ConfigError: the weight is per segment, or a filter uses another difference than |p - q| of a token.
    """
    steps: list[dict[str, Any]] = []
    nested = block.values.get("is_weight") or {}
    filters = block.values.get("filters") or []
    if not isinstance(nested, Mapping):
        block.refuse("is_weight", "a mapping")
    if not isinstance(filters, list) or not all(isinstance(entry, Mapping) for entry in filters):
        block.refuse("filters", "a list of mappings")
    weight = Block.closed(f"{block.where}.is_weight", nested, WEIGHT)
    idle = weight.unlike({"weight_type": "token", "upper_bound": 1.2, "detach": True})
    notes = tuple(f"ROLL ignores is_weight.{key} with is_weight.enabled: false" for key in idle)
    if weight.flag("enabled"):
        if not weight.flag("detach", True):
            weight.refuse("detach", "true", "no weight here carries a gradient")
        level = weight.choice("weight_type", LEVELS, "token")
        if level == "segment":
            why = "ROLL weights by the geometric mean of a segment; no weight here does"
            weight.refuse("weight_type", "token, geometric or sequence", why)
        high = weight.number("upper_bound", 1.2, least=1)
        steps = bounded(level, "truncate", None, high)
        notes = () if high else (UNBOUNDED,)
    for i, entry in enumerate(filters):
        steps += _filtered(Block.closed(f"{block.where}.filters[{i}]", entry, FILTER))
    notes += (RECOMPUTED,) if any("reject" in step for step in steps) else ()
    return native(steps, notes) if steps else Reading({"preset": "metrics_only"}, notes)


def _filtered(block: Block) -> list[dict[str, Any]]:
    """Returns the steps of one of ROLL's filters."""
    if not block.flag("enabled"):
        return []
    kind, steps = block.choice("agg_type", LEVELS, "token"), []
    if block.flag("ratio_enabled", True):
        bounds = block.interval("ratio_low", block.given("ratio_low", 0.8), block.given("ratio_high", 1.2))
        steps.append(reject("turn", "mean", *bounds) if kind == "segment" else band(kind, *bounds))
    if block.flag("diff_enabled"):
        low, high = block.given("diff_low", -0.2), block.given("diff_high", 0.2)
        if kind != "token" or low != -high:
            block.refuse(
                "diff_low", f"-diff_high ({-high:g}) at agg_type token", "no other filter has a step here"
            )
        steps.append(reject("token", "sum", None, high, statistic="tv"))
    return steps
