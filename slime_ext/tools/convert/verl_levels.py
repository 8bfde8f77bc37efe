"""Translates verl at PR 3984, 0.6.1 and 0.7.0, and holds what all releases share.

These three releases reject by a level and a veto.

The releases differ in bypass mode. PR 3984 and 0.6.1 reject there only with the policy gradient, and read the
veto only beside rollout_rs. 0.7.0 rejects with either loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from slime_ext.config.numbers import as_number
from slime_ext.tools.convert.block import SAFE, Block, Reading, capped, inside, reject, veto

PR3984, V061, V070 = "PR 3984", "0.6.1", "0.7.0"
RS_LEVELS = ("token", "sequence", "geometric")
IS_LEVELS = ("token", "sequence")
VETO = "rollout_token_veto_threshold"
BYPASS = {"numerator": "target", "surrogate": {"ppo_clip": {"anchor": "behavior"}}}
PURE = {"numerator": "target", "surrogate": "reinforce"}
DECOUPLED = {"numerator": "proximal", "surrogate": "host"}
UNWEIGHTED = (
    "rollout_is sets no weight in bypass mode: PPO clips target / behavior there, and a weight would count "
    "that ratio twice (in verl PR 3984 the weight is 1)"
)
FLOOR = (
    "verl's PPO loss also has the floor of dual clip (clip_ratio_c of its actor, 3 by default), which is no "
    "key of this block: write surrogate: {dual_clip: {anchor: behavior}} to add it"
)
DETACHED = "weights are detached; at PR 3984 their gradient leaked into the loss (fixed by verl PR 4105)"
KEPT = (
    "rejected tokens leave the denominator, as in verl (denominator: kept); slime then needs "
    "get_mismatch_metrics: true if a rollout is one optimizer step"
)
HOST = (
    "rejected tokens leave the denominator of a micro-batch in verl before 0.7.1; here it stays the host's, "
    "because with numerator: target nobody knows before the optimizer step which tokens are rejected"
)
LATE = (
    "verl sets this loss on its driver after the actors have started (verl issue 4272): actors whose "
    "policy_loss.loss_mode is vanilla keep PPO around the sampler, without weights and rejection"
)
STEP_WIDE = (
    "rollout_is_batch_normalize: the mean is over the whole optimizer step, in verl over the whole batch"
)
EMPTY = "verl 0.6.1 counts sequences without response tokens in that mean, as weight 0"


def read(block: Block, releases: tuple[str, ...]) -> Reading:
    """Reads one of three modes: decoupled, bypass (PPO around the behavior policy) or pure (REINFORCE).

    Args:
        block: the block.
        releases: the releases that have all fields of the block.

    Raises:
        ConfigError: the block is pure without bypass, rejects where the release never does, has rollout_rs
            without a threshold, or rejects in bypass mode, where the releases differ.
    """
    bypass, pure = _mode(block)
    release = releases[-1]
    masks = _rejection(block) + veto(block, VETO)
    if bypass and masks and V061 in releases and V070 in releases:
        expected = "use_policy_gradient (verl 0.6.1) or loss_type (0.7.0) beside it"
        block.refuse("bypass_mode", expected, "0.6.1 rejects nothing with PPO there")
    if bypass and release != V070:
        _forbid_unread_rejection(block, pure)
    where = (PURE if pure else BYPASS) if bypass else DECOUPLED
    weights, notes = weights_of(block, where)
    notes = ((DETACHED,) if pure and release == PR3984 else ()) + notes
    normalizes_sequences = STEP_WIDE in notes and block.get("rollout_is") == "sequence"
    notes += (EMPTY,) if normalizes_sequences and V061 in releases else ()
    notes += (HOST,) if bypass and masks else ()
    notes = (LATE, *notes) if bypass and (pure or masks) else notes
    return reading(where, weights, masks, notes)


def _mode(block: Block) -> tuple[bool, bool]:
    """Returns whether verl takes the sampler's log-probs as proximal, and whether it then uses REINFORCE."""
    bypass = block.flag("bypass_mode") or block.flag("bypass_old_logprob_for_rollout")
    key = "use_policy_gradient" if "use_policy_gradient" in block.values else "use_pure_rollout_correction"
    pure = block.flag(key)
    if block.choice("loss_type", ("ppo_clip", "reinforce")) == "reinforce":
        key, pure = "loss_type", True
    if pure and not bypass:
        needed = "bypass_mode" if key != "use_pure_rollout_correction" else "bypass_old_logprob_for_rollout"
        block.refuse(key, f"{needed}: true beside it", "verl reads it only in bypass mode")
    return bypass, pure


def _forbid_unread_rejection(block: Block, pure: bool) -> None:
    """Refuses rejection that PR 3984 and 0.6.1 ignore in bypass mode."""
    if not pure:
        for key in (key for key in ("rollout_rs", VETO) if block.has(key)):
            why = "with PPO verl rejects nothing there"
            block.refuse(key, "null in bypass mode without the policy gradient", why)
    elif block.has(VETO) and not block.has("rollout_rs"):
        why = "verl ignores the veto without it"
        block.refuse(VETO, "rollout_rs beside it with the policy gradient", why)


def _rejection(block: Block) -> list[dict[str, Any]]:
    level = block.choice("rollout_rs", RS_LEVELS)
    check_threshold(block, level is not None)
    if level is None:
        return []
    block.positive("rollout_rs_threshold")
    high, low = block.required_number("rollout_rs_threshold"), block.number("rollout_rs_threshold_lower")
    key = "rollout_rs_threshold" if low is None else "rollout_rs_threshold_lower"
    low, high = block.interval(key, 1 / high if low is None else low, high)
    # verl clamps the ratio to e^-20 .. e^20, so a bound outside never acts.
    acts_low, acts_high = low > math.exp(-SAFE), high < math.exp(SAFE)
    if not (acts_low or acts_high):
        block.refuse("rollout_rs_threshold", "a bound within e^-20 .. e^20", "verl clamps the ratio to that")
    unit, aggregate = ("sequence", "mean") if level == "geometric" else (level, "sum")
    return [reject(unit, aggregate, low if acts_low else 0.0, high if acts_high else None)]


def check_threshold(block: Block, rejects: bool) -> None:
    """Raises ConfigError for a threshold without rollout_rs, or for rollout_rs without a threshold."""
    if rejects:
        block.required(
            "rollout_rs_threshold", "verl before PR 3984 ignored that, later releases raise ValueError"
        )
        return
    for key in ("rollout_rs_threshold", "rollout_rs_threshold_lower"):
        if block.has(key):
            block.refuse(key, "rollout_rs beside it", "verl rejects nothing without it")


def weights_of(block: Block, where: Mapping[str, Any]) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """Returns weights by rollout_is, and notes.

    Weights are capped, or IcePop for a threshold "lower_upper" (since PR 5722). PPO around the behavior
    policy applies none.

    Args:
        where: BYPASS, PURE or DECOUPLED.
    """
    level = block.choice("rollout_is", IS_LEVELS)
    if where is BYPASS:
        return [], (UNWEIGHTED,) if level else ()
    normalizes = block.flag("rollout_is_batch_normalize")
    if level is None:
        if normalizes:
            why = "there is no weight to normalise"
            block.refuse("rollout_is_batch_normalize", "rollout_is beside it", why)
        return [], ()
    if normalizes and where is PURE:
        why = "the target's weights, and so their mean, are not known before the optimizer step"
        block.refuse("rollout_is_batch_normalize", "false in bypass mode", why)
    more, notes = ([{"normalize": {"level": level}}], (STEP_WIDE,)) if normalizes else ([], ())
    text = block.get("rollout_is_threshold")
    if isinstance(text, str) and "_" in text:
        bounds = block.interval("rollout_is_threshold", *pair(block, "rollout_is_threshold", text))
        return [*inside(level, *bounds), *more], notes
    cap = block.number("rollout_is_threshold", least=1)
    if cap is None:
        block.refuse("rollout_is_threshold", "a number", "verl sets no weights without it")
    return [*capped(level, cap), *more], notes


def pair(block: Block, key: str, text: str) -> tuple[float, float]:
    """Returns both numbers of "lower_upper"."""
    low, high = (as_number(part) for part in text.split("_", 1))
    if low is None or high is None or low <= 0:
        block.refuse(key, 'two numbers > 0, as in "0.5_2.0"')
    return low, high


def reading(
    where: dict[str, Any], weights: list[dict[str, Any]], masks: list[dict[str, Any]], notes: tuple[str, ...]
) -> Reading:
    """Builds a correction from weights and masks.

    A correction that rejects also reduces the returned masks, and has verl's denominator unless its numerator
    is the target.
    """
    if where is BYPASS:
        notes = (FLOOR, *notes)
    scope: dict[str, str] = {"mask_scope": "all"} if masks else {}
    if masks and where["numerator"] == "proximal":
        scope, notes = scope | {"denominator": "kept"}, (*notes, KEPT)
    return Reading({**where, **scope, "steps": weights + masks}, notes)
