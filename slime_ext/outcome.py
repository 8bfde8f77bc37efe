"""What a correction takes and hands on: packed tokens, the plan of their optimizer step, an outcome."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from slime_ext.facts import Step
from slime_ext.ops.segments import Segments, as_numbers


@dataclass(frozen=True)
class Tokens:
    """The packed response tokens [T] that a correction looks at; masked positions may hold anything."""

    segments: Segments
    proximal: Tensor  # log-probs under the trainer's frozen policy, nats
    behavior: Tensor  # log-probs under the policy that sampled the tokens, nats
    target: Tensor | None = None  # log-probs under the policy that is being trained, nats, with grad
    advantages: Tensor | None = None
    ages: Tensor | None = None  # [S] trainer's weight version - that of the sample; NaN where unknown


@dataclass(frozen=True)
class Plan:
    """What was settled over the whole optimizer step before any of its micro-batches is trained.

    Args:
        numbers: coupled step -> its number, [] float64.
        scale: [S] factor of each sequence's loss (``denominator: kept``); None: 1.
        keep: [S] bool, false where the sequence's whole group is rejected (``group: atomic``); None: true.
    """

    numbers: Mapping[Step, Tensor] = field(default_factory=dict)
    scale: Tensor | None = None
    keep: Tensor | None = None


NO_PLAN = Plan()


@dataclass(frozen=True)
class Sequences:
    """What metrics look at per sequence, [S] each, the same on every rank that shares them."""

    log_ratio: Tensor  # float64, the sum over the response tokens with a finite behavior log-prob, nats
    count: Tensor  # float64, response tokens
    keep: Tensor  # bool, false where a step or the plan rejected the whole sequence


@dataclass(frozen=True)
class Outcome:
    """What a correction decided, [T] each, detached."""

    weights: Tensor  # 0 at rejected and masked tokens
    keep: Tensor  # bool, response tokens that stay in the policy loss
    finite: Tensor  # bool, response tokens whose behavior log-prob is finite
    log_ratio: Tensor  # 0 at tokens that are not finite
    clipped: Tensor | None = None  # bool, where a bound changed a weight; None unless observed, as the next
    acted: Tensor | None = None  # int32, bit i: step i (from 1) rejected or bounded here; ``Facts.acted``
    sequences: Sequences | None = None
    scale: Tensor | None = None  # [T] the plan's factors of the loss; None: 1

    @property
    def factor(self) -> Tensor:
        """[T] what multiplies the loss: weights, scaled where the plan says so."""
        return self.weights if self.scale is None else self.weights * self.scale

    def channel(self, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T] float32 each: ratio, 1 where a bound acted, 1 where rejected. The outcome must be observed."""
        ratio = torch.where(self.finite, self.log_ratio.exp(), 0)
        flags = (self.clipped & self.finite, mask & ~self.keep)
        return ratio.float(), *(as_numbers(flag, torch.float32) for flag in flags)
