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
    """Reads the options of rollout_rs and their thresholds into native steps, with notes."""
    text = block.get("rollout_rs")
    if not isinstance(text, str | None):
        block.refuse("rollout_rs", 'text with commas between the options, as in "token_k1,seq_mean_k3"')
    listed = [part.strip() for part in (text or "").split(",") if part.strip()]
    for option in listed:
        check_known(f"{block.where}.rollout_rs", "value", option, [*OPTIONS, "null"])
    options = list(dict.fromkeys(listed))
    check_threshold(block, bool(options))
    if not options:
        return [], ()
    specs = [part.strip() for part in str(block.get("rollout_rs_threshold")).split(",") if part.strip()]
    if len(specs) not in (1, len(options)):
        wanted = f"one threshold, or {len(options)} (one per option of rollout_rs)"
        block.refuse("rollout_rs_threshold", wanted)
    specs = specs * len(options) if len(specs) == 1 else specs
    steps_and_notes = [_option(block, *both) for both in zip(options, specs, strict=True)]
    return [step for step, _ in steps_and_notes], tuple(note for _, note in steps_and_notes if note)


def _option(block: Block, option: str, spec: str) -> tuple[dict[str, Any], str]:
    """Translates an option of rollout_rs into a native step, with a note on surprising bounds."""
    scope, _, statistic = option.rpartition("_")
    unit, _, aggregate = scope.partition("_")
    unit = "sequence" if unit == "seq" else unit
    is_ratio, is_pair = statistic == "k1", "_" in spec
    high = None if is_ratio and is_pair else as_number(spec)
    if is_ratio and is_pair:
        low, high = pair(block, "rollout_rs_threshold", spec)
    elif high is None or high <= 0:
        wanted = f'a number > 0 or "lower_upper" for {option}' if is_ratio else f"one number > 0 for {option}"
        why = () if is_ratio else ("divergences have no lower bound",)
        block.refuse("rollout_rs_threshold", wanted, *why)
    else:
        low = 1 / high
    if not is_ratio:
        return reject(unit, aggregate, None, high, statistic=statistic, clamp=SAFE), ""
    block.interval("rollout_rs_threshold", low, high)
    step = reject(unit, aggregate, 1 / high, 1 / low, **({"clamp": SAFE} if aggregate else {}))
    if abs(low * high - 1) < 1e-9:  # symmetric bounds are the same on both ratios
        return step, ""
    return step, INVERTED.format(option=option, low=low, high=high, ours_low=1 / high, ours_high=1 / low)
