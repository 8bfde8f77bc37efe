"""Translates AReaL's ``PPOActorConfig`` and ``RejectionSamplingConfig`` (1.0.4).

Source: AReaL 1.0.4, areal/api/cli_args.py; areal/trainer/ppo/actor.py (grpo_loss_fn);
areal/utils/functional/functional.py (apply_rejection_sampling, ppo_actor_loss_fn).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from slime_ext.tools.convert.block import SHRINK, Block, Reading, native, reject
from slime_ext.tools.convert.loss_side import of_loss

FILTER: dict[str, Any] = {
    **{"level": "token", "action": "mask", "metric": "ratio", "agg": "mean"},
    **{"upper": 5.0, "lower": None},
}
DEFAULTS = {
    **FILTER,
    **{"rejection_sampling": None, "m2_threshold": None, "use_decoupled_loss": False},
    **{"recompute_logprob": False, "prox_logp_method": "recompute"},
    **{"use_sapo_loss": False, "sapo_tau_pos": 1.0, "sapo_tau_neg": 1.05},
    **{"eps_clip": 0.2, "eps_clip_higher": None, "c_clip": None, "importance_sampling_level": "token"},
}
FORMER = {  # keys of other releases -> what to write for 1.0.4
    "behave_imp_weight_cap": "write rejection_sampling, which replaced it",
    "behave_imp_weight_mode": "write rejection_sampling, which replaced it",
    "use_cispo_loss": "1.0.4 has no CISPO, so its users cannot have the key",
}
LOSS = ("eps_clip", "eps_clip_higher", "c_clip", "importance_sampling_level")
METRICS = {"ratio": "ratio", "kl_k1": "k1", "kl_k2": "k2"}
PROXIMAL = ("recompute", "metrics")  # values of prox_logp_method that use log-probs from before the step
TOKEN = {"reweight": {"level": "token"}}
UNBOUNDED = "nothing bounds the weights, as in AReaL; to bound them, add truncate: {high: 2.0} after reweight"
M2 = "m2_threshold: the mean is over the whole optimizer step, in AReaL over a micro-batch"
M2_DIVISOR = (
    "AReaL divides by the tokens that m2_threshold keeps; denominator: kept would also leave out tokens that "
    "rejection_sampling drops, so this file keeps the host's denominator"
)
RAISES = "AReaL raises ValueError"


def read(block: Block) -> Reading:
    """Reads the filter and M2 of decoupled PPO, or the loss of coupled PPO.

    Weights act only with ``use_decoupled_loss`` and a ``rejection_sampling`` that is not null. A block with
    only the keys of RejectionSamplingConfig is read as part of a decoupled run.

    Raises:
        ConfigError: the block does not say whether the loss is decoupled, AReaL itself raises, or no step
            here does the same.
    """
    filter_keys = [key for key in block.values if key in FILTER]
    if filter_keys and set(block.values) - {*FILTER, "m2_threshold"}:
        block.refuse(filter_keys[0], "this key under rejection_sampling, where AReaL reads it")
    acts = [key for key in ("rejection_sampling", "m2_threshold") if block.has(key)]
    if acts and not filter_keys and not block.has("use_decoupled_loss"):
        why = f"{acts[0]} acts only with true, and AReaL's default is false"
        block.refuse("use_decoupled_loss", "true or false", why)
    if filter_keys:
        return _decoupled(block, block)
    if not block.flag("use_decoupled_loss"):
        return _coupled(block)
    has_filter = block.values.get("rejection_sampling") is not None
    return _decoupled(block, block.part("rejection_sampling", FILTER) if has_filter else None)


def _decoupled(block: Block, filters: Block | None) -> Reading:
    """Reads decoupled PPO: weights proximal / behavior times the host's loss over the proximal policy."""
    if block.get("prox_logp_method") not in (None, *PROXIMAL):
        why = "with this value the proximal policy is not the policy before the step"
        block.refuse("prox_logp_method", " or ".join(PROXIMAL), why)
    if block.flag("use_sapo_loss"):
        block.refuse("use_sapo_loss", "false beside use_decoupled_loss: true", RAISES)
    moment = block.positive("m2_threshold")
    steps: list[dict[str, Any]] = []
    notes: tuple[str, ...] = ()
    if filters is not None:
        # AReaL applies M2 first, so a sequence's statistics use only the tokens that M2 keeps.
        steps, notes = _filtered(filters, {} if moment is None else {"over": "kept"})
    more = {}
    if moment is not None:
        rejects = any("reject" in step for step in steps)
        notes = (*notes, M2, *((M2_DIVISOR,) if rejects else ()))
        more = {} if rejects else {"denominator": "kept"}
        steps = [{"second_moment": {"threshold": moment}}, *steps]
    reading = native(steps, notes, **more) if steps else Reading({"preset": "metrics_only"})
    return _of_host(block, reading)


def _coupled(block: Block) -> Reading:
    """Reads coupled PPO.

    Its ratio is target / policy before the step if AReaL recomputes that policy, else target / sampler.
    """
    recomputed, sapo = block.flag("recompute_logprob"), block.flag("use_sapo_loss")
    if not recomputed or sapo:
        why = "no surrogate here has a sequence's ratio"
        if block.choice("importance_sampling_level", ("token", "sequence")) == "sequence":
            block.refuse("importance_sampling_level", "token", why)
    if sapo:
        tau = {f"tau_{sign}": block.temperature(f"sapo_tau_{sign}") for sign in ("pos", "neg")}
        surrogate = {"sapo": {"anchor": "proximal" if recomputed else "behavior", **tau}}
        return native([], (), "target", surrogate)
    if recomputed:
        return _of_host(block, Reading({"preset": "metrics_only"}))
    low, high = block.required_number("eps_clip", least=0), block.number("eps_clip_higher", least=0)
    clip: dict[str, Any] = {"anchor": "behavior", "eps_low": low, "eps_high": low if high is None else high}
    dual = block.number("c_clip")
    surrogate = {"ppo_clip": clip} if dual is None else {"dual_clip": {**clip, "eps_c": dual}}
    return native([], (), "target", surrogate)


def _of_host(block: Block, reading: Reading) -> Reading:
    """Adds notes on the keys of the host's loss to a reading."""
    said = ((key, block.get(key)) for key in LOSS if block.has(key))
    notes = (of_loss("areal", key, value) for key, value in said if value != "token")
    return replace(reading, notes=(*reading.notes, *notes))


def _filtered(block: Block, scope: dict[str, Any]) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """Returns the steps of RejectionSamplingConfig, and notes.

    Args:
        block: the block of RejectionSamplingConfig.
        scope: the native key ``over`` of a sequence's statistic; empty for all tokens.
    """
    level = block.choice("level", ("token", "sequence"))
    metric = block.choice("metric", ("ratio", "kl_k1", "kl_k2", "kl_k3"))
    low, high = block.number("lower"), block.required_number("upper")
    clamps = block.choice("action", ("mask", "clamp")) == "clamp"
    if low is not None and low > high:
        block.refuse("lower", f"at most upper, {high:g}", RAISES)
    if metric == "ratio" and high <= 1:
        block.refuse("upper", "a number > 1 beside metric ratio", RAISES)
    geometric = level == "sequence" and metric == "ratio"
    weights = {"reweight": {"level": "geometric", **scope}} if geometric else TOKEN
    if clamps:
        return [weights, _clamped(block, metric, level, low, high)], ()
    agg = block.choice("agg", ("sum", "mean", "max")) if level == "sequence" else "mean"
    statistic, bounds = _statistic(block, metric, agg, low, high)
    scope = scope if level == "sequence" else {}
    if scope and agg == "max" and bounds[0] is not None:
        why = "no step here has a lower bound on the largest ratio of the tokens that M2 keeps"
        block.refuse("agg", "sum or mean beside lower and m2_threshold", why)
    masked = reject(level, agg, *bounds, statistic=statistic, **scope)
    # A kept ratio is at most `upper`, and so is the weight; a mean of k1 or k2 bounds no single token.
    is_bounded = metric == "ratio" or level == "token"
    return [weights, masked], () if is_bounded else (UNBOUNDED,)


def _clamped(block: Block, metric: str, level: str, low: float | None, high: float) -> dict[str, Any]:
    """Returns the step that clamps the weights to the bounds."""
    if metric != "ratio":
        block.refuse("action", f"mask beside metric {metric}", RAISES)
    if high < 1:
        block.refuse("upper", "a number >= 1 beside action clamp", SHRINK)
    if low is not None and low > 1:
        block.refuse("lower", "a number <= 1 beside action clamp", "it would raise on-policy weights")
    has_low = low is not None and low > 0
    if has_low and level == "sequence" and block.choice("agg", ("sum", "mean", "max")) == "max":
        why = "AReaL then raises a weight only where the largest ratio is below lower"
        block.refuse("agg", "sum or mean beside action clamp and lower", why)
    return {"clip": {"low": low, "high": high}} if has_low else {"truncate": {"high": high}}


def _statistic(
    block: Block, metric: str, agg: str, low: float | None, high: float
) -> tuple[str, tuple[float | None, float | None]]:
    """Returns the statistic of a mask, and its bounds."""
    if metric == "kl_k3":
        why = "AReaL's kl_k3 uses the ratio sampler / trainer, k3 here trainer / sampler"
        block.refuse("metric", "ratio, kl_k1 or kl_k2", why)
    if metric == "ratio":
        block.interval("upper" if low is None else "lower", low or 0.0, high)
        return "ratio", (low if low and low > 0 else None, high)
    key = "upper" if low is None or high < 0 else "lower"
    if not (-math.inf if low is None else low) <= 0 <= high:
        block.refuse(key, f"bounds around 0 beside metric {metric}", "on-policy data must be kept")
    if metric != "kl_k1":  # the metric is never below 0, so the lower bound never acts
        return METRICS[metric], (None, high)
    if agg == "max":
        block.refuse("agg", "sum or mean beside kl_k1", "AReaL's largest log-ratio is the smallest k1 here")
    return "k1", (-high, None if low is None else -low)
