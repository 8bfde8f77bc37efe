"""What a correction takes and hands on: packed tokens, the plan of their optimizer step, an outcome."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from slime_ext.facts import Step
from slime_ext.ops.segments import Segments, as_bytes, as_numbers, is_traced, selected_

Operation = Callable[..., Tensor]


def largest_factor(dtype: torch.dtype) -> float:
    """What a loss of this dtype is multiplied with at most; of float32 what bfloat16, too, can hold."""
    narrower = torch.bfloat16 if dtype is torch.float32 else dtype
    return torch.finfo(narrower).max


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
    acted: Tensor | None = None  # integers, bit i: step i (from 1) rejected or bounded here; ``Facts.acted``
    sequences: Sequences | None = None
    scale: Tensor | None = None  # [T] the plan's factors of the loss; None: 1
    bounds: int = 0  # the bits of what acted that ``clipped`` stands for, where that is None

    @property
    def factor(self) -> Tensor:
        """[T] what multiplies the loss: weights, scaled where the plan says so."""
        return self.weights if self.scale is None else self.weights * self.scale

    def in_full(self) -> Outcome:
        """With what acted as int32, and its bit 0 at every token without a finite behavior log-prob."""
        acted = self.acted.int() | as_numbers(~self.finite, torch.int32)
        clipped = (self.acted & self.bounds).to(torch.bool) if self.clipped is None else self.clipped
        return replace(self, acted=acted, clipped=clipped, bounds=0)

    @cached_property
    def excess(self) -> Tensor:
        """[T] ratio - 1, whose sums lose no digits where policies are close."""
        return self.log_ratio.expm1()

    def channel(self, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T] float32 each: ratio, 1 where a bound acted, 1 where rejected. The outcome must know where
        weights were bounded."""
        if self.sequences is None:
            ratio = selected_(self.finite, self.log_ratio.exp())
        else:  # e^l - 1 is 0 where there is no ratio, and will be measured
            ratio = self.excess + as_bytes(self.finite)
        if self.clipped is None and not self.bounds:
            clipped = torch.zeros_like(mask, dtype=torch.float32)
        else:
            clipped = _both(self._bounded(), self.finite)
        return ratio.float(), clipped, _either(mask, self.keep)

    def _bounded(self) -> Tensor:
        """[T] bool, or bytes whose lowest bit says it, or on a device any integers, not 0: where a bound
        changed a weight."""
        if self.clipped is not None:
            return self.clipped
        if not is_traced(self.acted) and self.acted.device.type != "cpu":
            return self.acted & self.bounds
        one = self.bounds.bit_count() == 1 and self.acted.dtype is torch.uint8
        if one:
            return self.acted >> self.bounds.bit_length() - 1
        return (self.acted & self.bounds).to(torch.bool)


def _both(one: Tensor, other: Tensor) -> Tensor:
    """[T] float32, 1 where both flags are set."""
    return _numbered(torch.bitwise_and, torch.logical_and, one, other)


def _either(one: Tensor, other: Tensor) -> Tensor:
    """[T] float32, 1 where one flag is set and the other is not."""
    return _numbered(torch.bitwise_xor, torch.logical_xor, one, other)


def _numbered(of_bits: Operation, of_truth: Operation, one: Tensor, other: Tensor) -> Tensor:
    """[T] float32 of flags combined, in one operation: bits of bytes are the faster on a CPU, but on CUDA
    they are written as they are read, and raise otherwise."""
    if is_traced(one):
        return as_numbers(of_bits(one, other), torch.float32)
    found = one.new_empty(one.shape, dtype=torch.float32)
    if one.device.type != "cpu":
        return of_truth(one, other, out=found)
    return of_bits(one.view(torch.uint8), other.view(torch.uint8), out=found)
