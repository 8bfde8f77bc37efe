"""AReaL's grpo_loss_fn, behind its own checks of a configuration."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy
import torch

from tests.peers.wheels import folder, take

# Its ratio to the sampler is float32.
NAME, VERSIONS, CLOSE = "areal", ("1.0.4",), 2e-5

NESTED = {"rejection_sampling": {"level": "token", "action": "mask", "metric": "ratio", "agg": "mean",
                                 "upper": 5.0, "lower": None}}  # fmt: skip


def synonyms(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns values that mean the same: a sequence's mean leaves bounds around 1 where its sum does."""
    clamps = (settings.get("rejection_sampling") or {}).get("action") == "clamp"
    return {"prox_logp_method": ("recompute", "metrics"), **({"agg": ("mean", "sum")} if clamps else {})}


def block(rng: Any, version: str) -> dict[str, Any]:
    decoupled, metric = rng.random() < 0.8, rng.choice(("ratio", "ratio", "ratio", "kl_k1", "kl_k2"))
    upper = rng.uniform(1.05, 5.0) if metric == "ratio" else rng.uniform(0.01, 0.5)
    low = {"ratio": rng.uniform(0.3, 0.95), "kl_k1": -rng.uniform(0.01, 0.5), "kl_k2": None}[metric]
    action = rng.choice(("mask", "clamp")) if metric == "ratio" else "mask"
    nested = {
        "level": rng.choice(("token", "sequence")),
        "action": action,
        "metric": metric,
        "agg": rng.choice(("mean", "mean", "sum", "max")),
        "upper": upper,
        "lower": rng.choice((None, low)),
    }
    # Without these keys the block would have the defaults, which another metric does not allow.
    nested = {k: v for k, v in nested.items() if k in ("metric", "upper") or rng.random() < 0.8}
    values = {
        "rejection_sampling": rng.choice((None, nested, nested, nested)),
        "recompute_logprob": rng.random() < 0.3,
        "sapo_tau_pos": rng.uniform(0.5, 2.0),
        "sapo_tau_neg": rng.uniform(0.5, 2.0),
        "use_sapo_loss": not decoupled and rng.random() < 0.4,
        "prox_logp_method": rng.choice(("recompute", "metrics")),
        "eps_clip": 0.2 if decoupled else rng.uniform(0.1, 0.4),
        "m2_threshold": rng.choice((None, None, None, rng.uniform(0.01, 0.2))),
    }
    if not decoupled and not values["recompute_logprob"]:
        values["c_clip"] = rng.choice((None, rng.uniform(1.5, 4.0)))
    if values["recompute_logprob"]:
        values["eps_clip"] = 0.2
    kept = {key: value for key, value in values.items() if key == "recompute_logprob" or rng.random() < 0.8}
    return {"use_decoupled_loss": decoupled, **kept}


@functools.cache
def package(version: str) -> SimpleNamespace:
    root = folder("areal", version) / "areal"
    estimator = take(root / "utils/data.py", "KLEstimator", torch=torch).KLEstimator
    # decorators: `_compute_approx_kl` is a static method, which `take` removes
    estimator._compute_approx_kl = staticmethod(estimator._compute_approx_kl)
    scope = {"dataclass": dataclass, "field": field}
    config = take(root / "api/cli_args.py", "RejectionSamplingConfig", decorated=True, **scope)
    scope |= {"torch": torch, "np": numpy, "KLEstimator": estimator}
    names = ("_compute_sequence_level_ratio_and_advantages", "RejectionSamplingResult", "_check_bounds")
    names = (*names, "apply_rejection_sampling", "ppo_actor_loss_fn", "sapo_loss_fn")
    losses = take(root / "utils/functional/functional.py", *names, decorated=True, **scope)
    methods = take(root / "utils/constants.py", "ProxLogpMethod", Enum=Enum)
    scope = {
        "torch": torch,
        "math": math,
        "stats_tracker": MagicMock(),
        "logger": MagicMock(),
        **vars(losses),
    }
    scope |= {"infer_token_denominator": lambda data, mask: mask, "ProxLogpMethod": methods.ProxLogpMethod}
    scope |= {f"PROX_LOGP_METHOD_{m.name}": m.value for m in methods.ProxLogpMethod}
    scope |= dict.fromkeys(
        ("_log_proximal_approximation_stats", "_log_version_staleness_stats"), lambda **_: None
    )
    names = ("grpo_loss_fn", "_apply_m2po_masking", "_get_m2po_loss_mask", "_resolve_proximal_logp")
    functions = take(root / "trainer/ppo/actor.py", *names, **scope)
    return SimpleNamespace(config=config.RejectionSamplingConfig, **vars(functions))


def loss(settings: dict[str, Any], batch: Any, version: str) -> torch.Tensor:
    functions = package(version)
    decoupled, recomputes = settings["use_decoupled_loss"], settings.get("recompute_logprob", False)
    nested = settings.get("rejection_sampling")
    inside = batch.mask.bool()
    lengths = [int(row.nonzero().max()) + 1 for row in inside]

    def packed(rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([row[:n] for row, n in zip(rows, lengths, strict=True)])

    behavior, proximal = packed(batch.behavior), packed(batch.proximal)
    # As its trainer does: without a decoupled loss, recomputed log-probs take the place of the sampler's.
    sampler = behavior if decoupled or not recomputes else proximal
    data = {
        "logprobs": sampler,
        "advantages": packed(batch.advantages),
        "loss_mask": packed(inside),
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0),
    }
    data["prox_logp"] = proximal if decoupled or recomputes else behavior
    total = functions.grpo_loss_fn(
        packed(batch.target),
        torch.zeros(len(behavior)),
        data,
        eps_clip=settings.get("eps_clip", 0.2),
        eps_clip_higher=settings.get("eps_clip_higher"),
        c_clip=settings.get("c_clip"),
        rejection_sampling=None if nested is None else functions.config(**nested),
        m2_threshold=settings.get("m2_threshold"),
        prox_logp_method=settings.get("prox_logp_method", "recompute"),
        use_sapo_loss=settings.get("use_sapo_loss", False),
        sapo_tau_pos=settings.get("sapo_tau_pos", 1.0),
        sapo_tau_neg=settings.get("sapo_tau_neg", 1.05),
        use_decoupled_loss=decoupled,
    )
    if decoupled and settings.get("m2_threshold") and nested and nested.get("action", "mask") == "mask":
        masked = functions._apply_m2po_masking(sampler, proximal, data["loss_mask"], settings["m2_threshold"])
        total = total * masked.sum() / data["loss_mask"].sum()  # a note says that slime divides by all tokens
    return total


def per_token(settings: dict[str, Any]) -> bool:
    return True
