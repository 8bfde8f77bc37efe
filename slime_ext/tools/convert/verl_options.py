"""Translates verl 0.7.1 and later: options with thresholds as text, IcePop (0.8.0), bypass mode."""

from __future__ import annotations

from typing import Any

from slime_ext.config.numbers import as_number
from slime_ext.errors import check_known
from slime_ext.tools.convert.block import SAFE, Block, Reading, reject
from slime_ext.tools.convert.verl_levels import (
    BYPASS,
    DECOUPLED,
    PURE,
    check_threshold,
    pair,
    reading,
    weights_of,
)

OPTIONS = (
    *(f"token_k{i}" for i in (1, 2, 3)),
    *(f"seq_{how}_k{i}" for how in ("sum", "mean") for i in (1, 2, 3)),
    "seq_max_k2",
    "seq_max_k3",
)
INVERTED = (
    "rollout_rs {option}: verl applies {low:g} .. {high:g} to rollout / train, so train / rollout is kept "
    "in {ours_low:g} .. {ours_high:g}; verl PR 3984 applied {low:g} .. {high:g} to train / rollout"
)


def read(block: Block, *, bypass: bool) -> Reading:
    """Reads weights (capped or IcePop), every option of rollout_rs, and the loss of bypass mode.

    In bypass mode the loss divides by all tokens, because it rejects after they are counted.

    Raises:
        ConfigError: an option is unknown or its threshold does not fit, rollout_rs has no threshold (or the
            reverse), or batch normalisation has no weights or has weights that are unknown before the step.
    """
    loss = block.choice("loss_type", ("ppo_clip", "reinforce"))
    if loss == "reinforce" and not bypass:
        block.refuse("loss_type", "ppo_clip without bypass_mode: true", "verl reads it only in bypass mode")
    where = (BYPASS if loss == "ppo_clip" else PURE) if bypass else DECOUPLED
    weights, notes = weights_of(block, where)
    masks, more = _rejection(block)
    return reading(where, weights, masks, (*notes, *more))


def _rejection(block: Block) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    options = _options(block)
    check_threshold(block, bool(options))
    specs = _specs(block, len(options)) if options else []
    read = [_option(block, option, spec) for option, spec in zip(options, specs, strict=True)]
    return [step for step, _ in read], tuple(note for _, note in read if note)


def _options(block: Block) -> list[str]:
    if (text := block.get("rollout_rs")) is None:
        return []
    if not isinstance(text, str):
        block.refuse("rollout_rs", 'text with commas between the options, as in "token_k1,seq_mean_k3"')
    listed = [part.strip() for part in text.split(",") if part.strip()]
    for option in listed:
        check_known(f"{block.where}.rollout_rs", "value", option, [*OPTIONS, "null"])
    return list(dict.fromkeys(listed))


def _specs(block: Block, count: int) -> list[str]:
    specs = [part.strip() for part in str(block.get("rollout_rs_threshold")).split(",") if part.strip()]
    if len(specs) not in (1, count):
        block.refuse("rollout_rs_threshold", f"one threshold, or {count} (one per option of rollout_rs)")
    return specs * count if len(specs) == 1 else specs


def _option(block: Block, option: str, spec: str) -> tuple[dict[str, Any], str]:
    """Translates an option of rollout_rs into a native step, with a note on surprising bounds."""
    scope, _, statistic = option.rpartition("_")
    unit, _, aggregate = scope.partition("_")
    unit = "sequence" if unit == "seq" else unit
    if statistic == "k1":
        return _ratio(block, option, unit, aggregate, spec)
    high = as_number(spec)
    if high is None or high <= 0:
        block.refuse(
            "rollout_rs_threshold", f"one number > 0 for {option}", "divergences have no lower bound"
        )
    return reject(unit, aggregate, None, high, statistic=statistic, clamp=SAFE), ""


def _ratio(block: Block, option: str, unit: str, aggregate: str, spec: str) -> tuple[dict[str, Any], str]:
    low, high = _k1_bounds(block, option, spec)
    block.interval("rollout_rs_threshold", low, high)
    step = reject(unit, aggregate, 1 / high, 1 / low, **({"clamp": SAFE} if aggregate else {}))
    same = abs(low * high - 1) < 1e-9
    inverted = INVERTED.format(option=option, low=low, high=high, ours_low=1 / high, ours_high=1 / low)
    return step, "" if same else inverted


def _k1_bounds(block: Block, option: str, spec: str) -> tuple[float, float]:
    if "_" in spec:
        return pair(block, "rollout_rs_threshold", spec)
    high = as_number(spec)
    if high is None or high <= 0:
        block.refuse("rollout_rs_threshold", f'a number > 0 or "lower_upper" for {option}')
    return 1 / high, high
