"""OpenRLHF's PolicyLoss."""

from __future__ import annotations

from typing import Any

import torch

from tests.peers.wheels import folder, take

NAME, VERSIONS, CLOSE = "openrlhf", ("0.11.2",), 1e-8
IS = "is_correction"


def block(rng: Any, version: str) -> dict[str, Any]:
    level, gating = (
        rng.choice(("off", "token", "token", "seq", "seq")),
        rng.choice(("ratio", "binary_kl", "tv")),
    )
    if gating == "ratio":
        bounds = rng.choice(
            ([0.5, 5.0], [rng.uniform(0.3, 0.9), rng.uniform(1.1, 3.0)], [rng.uniform(1.1, 2)])
        )
    else:
        bounds = rng.choice((rng.uniform(0.01, 0.5), [rng.uniform(0.01, 0.5)]))
    clips = level != "seq" and gating == "ratio"
    values = {
        f"{IS}_level": level,
        f"{IS}_gating": gating,
        f"{IS}_threshold": bounds,
        f"{IS}_mode": rng.choice(("mask", "clip")) if clips else "mask",
    }
    return {
        key: value
        for key, value in values.items()
        if key.endswith(("gating", "threshold")) or rng.random() < 0.8
    }


def loss(settings: dict[str, Any], batch: Any, version: str) -> torch.Tensor:
    path = folder("openrlhf", version) / "openrlhf/models"
    mean = take(path / "utils.py", "masked_mean", torch=torch).masked_mean
    scope = {"torch": torch, "nn": torch.nn, "masked_mean": mean}
    losses = take(path / "loss.py", "aggregate_loss", "PolicyLoss", **scope)
    pair = settings.get(f"{IS}_threshold", [0.5, 5.0])
    pair = pair if isinstance(pair, list) else [pair]
    policy = losses.PolicyLoss(**{**settings, f"{IS}_threshold": [0.0, *pair][-2:]})
    count = float(batch.mask.sum())
    rows = batch.target, batch.proximal, batch.advantages, batch.mask, batch.behavior
    return policy(*rows, batch_num_tokens=count)[0]


def per_token(settings: dict[str, Any]) -> bool:
    return True
