"""One batch as slime hands it over, padded as verl and SkyRL do, and as the cookbook's lists."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slime_ext import tis
from tests import oracle
from tests.batches import tokens
from tests.test_tis import arguments, as_slime_calls

EPS = 0.2


@dataclass
class Batch:
    """[B, T] tensors in float64; padding holds NaN, which nothing may read."""

    samples: list
    mask: Tensor
    behavior: Tensor
    proximal: Tensor
    target: Tensor
    advantages: Tensor


def batch(seed: int) -> Batch:
    return of(oracle.random_batch(seed, wild=False))


def of(samples: list) -> Batch:
    samples = [s for s in samples if s["mask"]]
    width = max(len(s["mask"]) for s in samples)
    for sample in samples:  # the cookbook has one advantage per sample
        sample["advantage"] = [sample["advantage"][0]] * len(sample["mask"])

    def rows(key, fill=float("nan")):
        return torch.tensor(
            [s[key] + [fill] * (width - len(s["mask"])) for s in samples], dtype=torch.float64
        )

    values = [rows(key) for key in ("behavior", "proximal", "target", "advantage")]
    values[2].requires_grad_()
    return Batch(samples, rows("mask", 0.0), *values)


def clipped(batch: Batch) -> Tensor:
    """[T] PPO's clipped loss of the packed tokens: -min(r A, clip(r, 1 - eps, 1 + eps) A)."""
    packed, _ = tokens(batch.samples)
    ratio = (packed.target - packed.proximal).exp()
    return torch.maximum(
        -ratio * packed.advantages, -ratio.clamp(1 - EPS, 1 + EPS) * packed.advantages
    ), packed.target


def through_slime(batch: Batch, mapping, loss=clipped, **flags) -> tuple[Tensor, Tensor]:
    """The sum of the hook's loss over response tokens, and its gradient, padded."""
    host_loss, target = loss(batch)
    call = as_slime_calls(batch.samples, pg_loss=host_loss, cur_log_probs=None)
    lengths = call["response_lengths"]
    call["cur_log_probs"] = list(target.split(lengths))
    corrected, *_ = tis.correct(arguments(slime_ext=mapping, **flags), **call)
    packed, _ = tokens(batch.samples)
    total = torch.where(packed.segments.mask, corrected, 0).sum()
    (slope,) = torch.autograd.grad(total, target)
    gradient = torch.zeros_like(batch.mask)
    for row, values in enumerate(slope.split(lengths)):
        gradient[row, : lengths[row]] = values
    return total.detach(), torch.where(
        batch.mask != 0, gradient, 0
    )  # slime's own loss is NaN where it is masked
