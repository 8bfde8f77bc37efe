"""verl before PR 3984 (flat keys, with the new spelling given) and at PR 3984."""

from __future__ import annotations

from typing import Any

from slime_ext.config.dialects.block import Block, Reading, band, capped, inside, veto
from slime_ext.config.numbers import as_number

RS_LEVELS = ("token", "sequence", "geometric")
IS_LEVELS = ("token", "sequence")
BYPASS = {"numerator": "target", "surrogate": {"ppo_clip": {"anchor": "behavior"}}}
PURE = {"numerator": "target", "surrogate": "reinforce"}
DECOUPLED = {"numerator": "proximal", "surrogate": "host"}
UNWEIGHTED = (
    "rollout_is sets no weight in bypass mode: PPO clips target / behavior there, and a weight would count "
    "that ratio twice (in verl PR 3984 it is 1)"
)
FLOOR = (
    "verl's PPO loss has the floor of dual clip, too (clip_ratio_c of its actor, 3 by default), which is no "
    "key of this block: surrogate: {dual_clip: {anchor: behavior}} has it"
)
DETACHED = "weights are detached; at PR 3984 their gradient leaked into the loss (fixed by verl PR 4105)"
KEPT = (
    "rejected tokens leave the denominator, as in verl (denominator: kept); slime then needs "
    "get_mismatch_metrics: true where a rollout is one optimizer step"
)
HOST = (
    "rejected tokens leave the denominator in verl; here it stays the host's, for with numerator: target "
    "what is rejected is not known before the optimizer step"
)


def read_flat(block: Block) -> Reading:
    """``rollout_is: true``, level, mode: accepted, with the spelling of PR 3984 as a note.

    As in verl's trainer, rollout_is_threshold null switches everything off, while rollout_is false still
    rejects by mode mask and by the veto.
    """
    applies = block.flag("rollout_is")
    high = block.number("rollout_is_threshold", least=1)
    if high is None and applies:
        block.refuse("rollout_is", "rollout_is_threshold beside it", "without one verl corrects nothing")
    if high is None:
        off = ("write rollout_correction: null, the spelling of PR 3984",)
        return Reading({"preset": "metrics_only"}, off)
    level = block.choice("rollout_is_level", RS_LEVELS, "token")
    mode = block.choice("rollout_is_mode", ("truncate", "mask"), "truncate")
    low = block.positive("rollout_is_threshold_lower")
    if low is not None and mode == "truncate":
        block.refuse("rollout_is_threshold_lower", "null in mode truncate", "verl never looks at it there")
    masks = [band(level, *block.interval("rollout_is_threshold", 1 / high if low is None else low, high))]
    masks = (masks if mode == "mask" else []) + veto(block, "rollout_is_veto_threshold")
    # In mode mask the kept weights are inside the band: the cap cannot act there.
    weights = capped(level, high) if applies else []
    return reading(DECOUPLED, weights, masks, (_spelling(block),))


def _spelling(block: Block) -> str:
    """The same block in the words of PR 3984."""
    level, cap = block.values.get("rollout_is_level", "token"), block.values["rollout_is_threshold"]
    words = {"rollout_is": level if block.flag("rollout_is") else "null", "rollout_is_threshold": cap}
    if block.values.get("rollout_is_mode") == "mask":
        words |= {"rollout_rs": level, "rollout_rs_threshold": cap}
        words |= {"rollout_rs_threshold_lower": block.values.get("rollout_is_threshold_lower", "null")}
    if block.has("rollout_is_veto_threshold"):
        words["rollout_token_veto_threshold"] = block.values["rollout_is_veto_threshold"]
    said = ", ".join(f"{key}: {value}" for key, value in words.items())
    return f"these keys are older than PR 3984; write rollout_correction: {{{said}}}"


def read_pr3984(block: Block) -> Reading:
    """Decoupled, bypass (PPO clips around the behavior policy) or pure (REINFORCE with weights).

    Raises:
        ConfigError: pure without bypass, rejection in bypass (the ratio is 1 there and it never acts), a veto
            without rollout_rs in pure mode (verl ignores it), rollout_rs without a threshold.
    """
    bypass, pure = block.flag("bypass_old_logprob_for_rollout"), block.flag("use_pure_rollout_correction")
    if pure and not bypass:
        needed = "bypass_old_logprob_for_rollout: true beside it"
        block.refuse("use_pure_rollout_correction", needed, "verl applies it in bypass mode only")
    veto_key = "rollout_token_veto_threshold"
    masks = _rejection(block) + veto(block, veto_key)
    for key in ("rollout_rs", veto_key) if bypass and not pure else ():
        if block.has(key):
            why = "the proximal policy is the behavior policy then, every ratio is 1 and nothing is rejected"
            block.refuse(key, "null in bypass mode without use_pure_rollout_correction", why)
    if pure and block.has(veto_key) and not block.has("rollout_rs"):
        block.refuse(veto_key, "rollout_rs beside it in pure mode", "verl ignores the veto without")
    where = PURE if pure else BYPASS if bypass else DECOUPLED
    return reading(where, weights_of(block), masks, (DETACHED,) if pure else ())


def _rejection(block: Block) -> list[dict[str, Any]]:
    level = block.choice("rollout_rs", RS_LEVELS)
    check_threshold(block, level is not None)
    if level is None:
        return []
    block.positive("rollout_rs_threshold")
    high, low = block.given("rollout_rs_threshold", 1.0), block.number("rollout_rs_threshold_lower")
    key = "rollout_rs_threshold" if low is None else "rollout_rs_threshold_lower"
    return [band(level, *block.interval(key, 1 / high if low is None else low, high))]


def check_threshold(block: Block, rejects: bool) -> None:
    """Raises ConfigError for a threshold without rollout_rs, or the reverse."""
    if rejects:
        block.required("rollout_rs_threshold", "silent before verl PR 3984, a ValueError since")
        return
    for key in ("rollout_rs_threshold", "rollout_rs_threshold_lower"):
        if block.has(key):
            block.refuse(key, "rollout_rs beside it", "verl rejects nothing without")


def weights_of(block: Block) -> list[dict[str, Any]]:
    """Weights by rollout_is: capped, or by IcePop where the threshold is "lower_upper" (since PR 5722)."""
    level, text = block.choice("rollout_is", IS_LEVELS), block.values.get("rollout_is_threshold")
    if isinstance(text, str) and "_" in text:
        low, high = block.interval("rollout_is_threshold", *pair(block, "rollout_is_threshold", text))
        return inside(level, low, high) if level else []
    cap = block.number("rollout_is_threshold", 2.0, least=1)
    if level is None:
        return []
    if cap is None:
        block.refuse("rollout_is_threshold", "a number", "verl sets no weights without")
    return capped(level, cap)


def pair(block: Block, key: str, text: str) -> tuple[float, float]:
    """Both ends of "lower_upper"."""
    low, high = (as_number(part) for part in text.split("_", 1))
    if low is None or high is None or low <= 0:
        block.refuse(key, 'two numbers > 0, as in "0.5_2.0"')
    return low, high


def reading(
    where: dict[str, Any], weights: list[dict[str, Any]], masks: list[dict[str, Any]], notes: tuple[str, ...]
) -> Reading:
    """Weights and masks as a correction. If it rejects, it also reduces the masks and uses verl's denominator
    if that can be known. PPO around the behavior policy gets no weights."""
    if where is BYPASS:
        notes, weights = (FLOOR, *((UNWEIGHTED,) if weights else ()), *notes), []
    scope: dict[str, str] = {"mask_scope": "all"} if masks else {}
    if masks and where["numerator"] == "target":
        notes = (*notes, HOST)
    elif masks:
        scope, notes = scope | {"denominator": "kept"}, (*notes, KEPT)
    return Reading({**where, **scope, "steps": weights + masks}, notes)
