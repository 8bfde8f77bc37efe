"""Translates AReaL's ``PPOActorConfig`` and ``RejectionSamplingConfig`` (1.0.4 and cbff54d, August 2026).

Source: https://github.com/areal-project/AReaL, areal/api/cli_args.py; areal/trainer/ppo/actor.py
(grpo_loss_fn); areal/utils/functional/functional.py (apply_rejection_sampling, ppo_actor_loss_fn).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from slime_ext.tools.convert.block import (
    SHRINK,
    Block,
    Reading,
    capped,
    native,
    reject,
)
from slime_ext.tools.convert.loss_side import cispo, of_loss

FILTER = ("level", "action", "metric", "agg", "upper", "lower")
LOSS = ("eps_clip", "eps_clip_higher", "c_clip", "importance_sampling_level")
KEYS = (
    *FILTER,
    *("rejection_sampling", "m2_threshold", "use_decoupled_loss", "recompute_logprob", "prox_logp_method"),
    *("use_sapo_loss", "sapo_tau_pos", "sapo_tau_neg", "use_cispo_loss"),
    *LOSS,
)
METRICS = {"ratio": "ratio", "kl_k1": "k1", "kl_k2": "k2", "binary_kl": "binary_kl_max"}
PROXIMAL = ("recompute", "metrics")  # values of prox_logp_method that use log-probs from before the step
TOKEN = {"reweight": {"level": "token"}}
IDLE = "AReaL ignores {key} with use_decoupled_loss: false"
UNBOUNDED = "nothing bounds the weights, as in AReaL; to bound them, add truncate: {high: 2.0} after reweight"
M2 = "m2_threshold: the mean is over the whole optimizer step, in AReaL over a micro-batch"
M2_DIVISOR = (
    "AReaL divides by the tokens that m2_threshold keeps; denominator: kept would also leave out tokens that "
    "rejection_sampling drops, so this file keeps the host's denominator"
)
EDGES = "binary_kl: probabilities are clamped to [1e-6, 1 - 1e-6] here, to [1e-8, 1 - 1e-8] in AReaL"
UNREAD = "AReaL ignores metric {metric} with action clamp at level token"


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
    nested = (
        {key: block.values[key] for key in filter_keys}
        if filter_keys
        else block.values.get("rejection_sampling")
    )
    if nested is not None and not isinstance(nested, Mapping):
        block.refuse("rejection_sampling", "a mapping or null")
    filters = None
    if nested is not None:
        where = block.where if filter_keys else f"{block.where}.rejection_sampling"
        filters = Block.closed(where, nested, FILTER)
    acts = [key for key in ("rejection_sampling", "m2_threshold") if block.has(key)]
    if acts and not filter_keys and not block.has("use_decoupled_loss"):
        block.refuse(
            "use_decoupled_loss",
            "true or false",
            f"{acts[0]} acts only with true, and AReaL's default is false",
        )
    if filter_keys or block.flag("use_decoupled_loss"):
        return _decoupled(block, filters)
    return _coupled(block, tuple(IDLE.format(key=key) for key in acts))


def _decoupled(block: Block, filters: Block | None) -> Reading:
    """Reads decoupled PPO: weights proximal / behavior times the host's loss over the proximal policy."""
    if block.has("prox_logp_method") and block.values["prox_logp_method"] not in PROXIMAL:
        why = "with this value the proximal policy is not the policy before the step"
        block.refuse("prox_logp_method", " or ".join(PROXIMAL), why)
    if block.flag("use_sapo_loss"):
        block.refuse("use_sapo_loss", "false beside use_decoupled_loss: true", "AReaL raises ValueError")
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


def _coupled(block: Block, notes: tuple[str, ...]) -> Reading:
    """Reads coupled PPO.

    Its ratio is target / policy before the step if AReaL recomputes that policy, else target / sampler.
    """
    recomputed, sapo = block.flag("recompute_logprob"), block.flag("use_sapo_loss")
    if not recomputed or sapo:
        why = "no surrogate here has a sequence's ratio"
        if block.choice("importance_sampling_level", ("token", "sequence"), "token") == "sequence":
            block.refuse("importance_sampling_level", "token", why)
    if sapo:
        if block.flag("use_cispo_loss"):
            block.refuse("use_cispo_loss", "false beside use_sapo_loss: true", "AReaL raises ValueError")
        defaults = {"pos": 1.0, "neg": 1.05}
        tau = {f"tau_{sign}": block.temperature(f"sapo_tau_{sign}", at) for sign, at in defaults.items()}
        surrogate = {"sapo": {"anchor": "proximal" if recomputed else "behavior", **tau}}
        return native([], notes, "target", surrogate)  # type: ignore[arg-type]
    if recomputed:
        return _of_host(block, Reading({"preset": "metrics_only"}, notes))
    low, high = _clip(block)
    if block.flag("use_cispo_loss"):
        bound = {"clip": {"low": 1 - low, "high": 1 + high}} if low < 1 else {"truncate": {"high": 1 + high}}
        return native([TOKEN, bound], notes, "target", "reinforce")
    clip: dict[str, Any] = {"anchor": "behavior", "eps_low": low, "eps_high": high}
    dual = block.number("c_clip")
    surrogate = {"ppo_clip": clip} if dual is None else {"dual_clip": {**clip, "eps_c": dual}}
    return native([], notes, "target", surrogate)  # type: ignore[arg-type]


def _clip(block: Block) -> tuple[float, float]:
    """Returns how far below and above 1 AReaL clips the ratio."""
    low = block.given("eps_clip", 0.2, least=0)
    if block.flag("use_cispo_loss"):
        block.required("eps_clip_higher", "AReaL raises ValueError")
        return low, block.positive("eps_clip_higher") or 0.0
    high = block.number("eps_clip_higher", least=0)
    return low, low if high is None else high


def _of_host(block: Block, reading: Reading) -> Reading:
    """Adds the flags and notes of the host's loss to a reading."""
    if block.flag("use_cispo_loss"):
        low, high = _clip(block)
        return replace(reading, args=cispo(low, high))
    said = ((key, block.values.get(key)) for key in LOSS)
    notes = (of_loss("areal", key, value) for key, value in said if value not in (None, "token"))
    return replace(reading, notes=(*reading.notes, *notes))


def _filtered(block: Block, scope: dict[str, Any]) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """Returns the steps of RejectionSamplingConfig, and notes.

    Args:
        block: the block of RejectionSamplingConfig.
        scope: the native key ``over`` of a sequence's statistic; empty for all tokens.
    """
    level = block.choice("level", ("token", "sequence"), "token")
    metric = block.choice("metric", (*METRICS, "kl_k3"), "ratio")
    low, high = block.number("lower"), block.given("upper", 5.0)
    if low is not None and low > high:
        block.refuse("lower", f"at most upper, {high:g}", "AReaL raises ValueError")
    if metric == "ratio" and high <= 1:
        block.refuse("upper", "a number > 1 beside metric ratio", "AReaL raises ValueError")
    geometric = level == "sequence" and metric == "ratio"
    weights = {"reweight": {"level": "geometric", **scope}} if geometric else TOKEN
    if block.choice("action", ("mask", "clamp"), "mask") == "clamp":
        return _clamped(block, weights, level, metric, low, high)
    statistic, bounds = _statistic(block, level, metric, low, high)
    scope = scope if level == "sequence" else {}
    agg = block.choice("agg", ("sum", "mean", "max"), "mean")
    if scope and agg == "max" and bounds[0] is not None:
        why = "no step here has a lower bound on the largest ratio of the tokens that M2 keeps"
        block.refuse("agg", "sum or mean beside lower and m2_threshold", why)
    masked = reject(level, agg, *bounds, statistic=statistic, **scope)
    return [weights, masked], (UNBOUNDED, *((EDGES,) if metric == "binary_kl" else ()))


def _clamped(
    block: Block, weights: dict[str, Any], level: str, metric: str, low: float | None, high: float
) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """Returns steps that clamp the weights to the bounds, and notes. AReaL ignores a token's metric here."""
    if level == "sequence" and metric != "ratio":
        why = "AReaL clamps the weights of some sequences only; no step here does that"
        block.refuse("action", f"mask beside level sequence and metric {metric}", why)
    if high < 1:
        block.refuse("upper", "a number >= 1 beside action clamp", SHRINK)
    if low is not None and low > 1:
        block.refuse("lower", "a number <= 1 beside action clamp", "it would raise on-policy weights")
    bounded = low is not None and low > 0
    if bounded and level == "sequence" and block.values.get("agg") == "max":
        why = "AReaL then raises a weight only where the largest ratio is below lower"
        block.refuse("agg", "sum or mean beside action clamp and lower", why)
    bound = capped("token", high)[1] if not bounded else {"clip": {"low": low, "high": high}}
    notes = (UNREAD.format(metric=metric),) if metric != "ratio" else ()
    return [weights, bound], notes


def _statistic(
    block: Block, level: str, metric: str, low: float | None, high: float
) -> tuple[str, tuple[float | None, float | None]]:
    """Returns the statistic of a mask, and its bounds."""
    if metric == "kl_k3":
        why = "AReaL's kl_k3 uses the ratio sampler / trainer, k3 here trainer / sampler"
        block.refuse("metric", "ratio, kl_k1, kl_k2 or binary_kl", why)
    if metric == "ratio":
        block.interval("upper" if low is None else "lower", low or 0.0, high)
        return "ratio", (low if low and low > 0 else None, high)
    key = "upper" if low is None or high < 0 else "lower"
    if not (-math.inf if low is None else low) <= 0 <= high:
        block.refuse(key, f"bounds around 0 beside metric {metric}", "on-policy data must be kept")
    if metric != "kl_k1":  # the metric is never below 0, so the lower bound never acts
        return METRICS[metric], (None, high)
    if level == "sequence" and block.values.get("agg") == "max":
        block.refuse("agg", "sum or mean beside kl_k1", "AReaL's largest log-ratio is the smallest k1 here")
    return "k1", (-high, None if low is None else -low)
