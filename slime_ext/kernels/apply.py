"""What every backend does with the tokens of one hook call, and how the plain one does it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from slime_ext.correction import NO_PLAN, Correction, Outcome, Plan, Tokens, plan_step
from slime_ext.metrics.layout import Layout
from slime_ext.metrics.measure import Measured, announce, measure
from slime_ext.objectives import Bounds
from slime_ext.ops.segments import AllSum, identity

Channel = tuple[Tensor, Tensor, Tensor]  # [T] float32 each: ratio, clipped, rejected


@dataclass(frozen=True)
class Work:
    """One hook call's tokens with everything that is known about them.

    Args:
        plan: what was settled for the optimizer step; None makes the tokens a step of their own.
        host_loss: [T] the host's policy loss, with grad.
        acts: whether the loss is corrected; if not it comes back as it is.
        layout: of the metrics to measure; None measures nothing.
        first: whether this rank is the one that counts the sequences it shares with others.
    """

    tokens: Tokens
    host_loss: Tensor
    plan: Plan | None = None
    bounds: Bounds = field(default_factory=Bounds)
    acts: bool = True
    layout: Layout | None = None
    first: bool = True


@dataclass(frozen=True)
class Applied:
    """What the hook returns and keeps of a call."""

    loss: Tensor  # [T] with grad, 0 at rejected and masked tokens
    keep: Tensor  # [T] bool
    channel: Channel
    measured: Measured | None


def settled(correction: Correction, tokens: Tokens, plan: Plan | None) -> Plan:
    """The plan, or the one of a step that these tokens are all of."""
    if plan is not None:
        return plan
    return plan_step(correction, [tokens], tokens.segments.all_sum) if correction.is_coupled else NO_PLAN


def over_ranks(table: Tensor, all_sum: AllSum) -> Tensor:
    """[K, S] -> [K, S], summed in the order in which the eager path hands numbers over: a rank with few
    tokens may compute its share eagerly while the others do not."""
    if all_sum is identity:
        return table
    return all_sum(table.t().reshape(-1)).view(table.shape[1], table.shape[0]).t().contiguous()


class Backend(Protocol):
    """What serves a correction."""

    name: str

    def outcome(
        self, tokens: Tokens, plan: Plan | None = None, *, observe: bool = False, bounds: bool = False
    ) -> Outcome: ...

    def apply(self, work: Work) -> Applied: ...


@dataclass(frozen=True)
class Eager:
    """PyTorch operation by operation: needs nothing, serves every correction and every device."""

    correction: Correction
    name: str = "eager"

    def outcome(
        self, tokens: Tokens, plan: Plan | None = None, *, observe: bool = False, bounds: bool = False
    ) -> Outcome:
        """As ``Correction.__call__``."""
        return self.correction(tokens, plan, observe=observe, bounds=bounds)

    def apply(self, work: Work) -> Applied:
        """The whole of a hook call between packing and handing back."""
        if work.layout is not None and not work.host_loss.is_cpu:
            announce(work.tokens, work.layout)
        outcome = self.correction.outcome(
            work.tokens, work.plan, observe=work.layout is not None, bounds=True
        )
        return finish(self.correction, outcome, work, measured_plainly)


def measured_plainly(work: Work, outcome: Outcome, clipped: Tensor | None) -> Measured:
    """Measures operation by operation."""
    return measure(work.tokens, outcome, work.layout, surrogate_clipped=clipped, first=work.first)


def finish(
    correction: Correction,
    outcome: Outcome,
    work: Work,
    measured_by: Callable[..., Measured],
    channel: Channel | None = None,
) -> Applied:
    """Loss, host metrics and measures of an observed outcome.

    Args:
        channel: the host metrics where they are known, without what a surrogate of ours clipped.
    """
    loss, clipped = work.host_loss, None
    if work.acts:
        loss, clipped = correction.loss(outcome, work.tokens, work.host_loss, work.bounds)
    ratio, bounded, rejected = channel or outcome.channel(work.tokens.segments.mask)
    if clipped is not None:
        bounded = torch.maximum(bounded, clipped)
    measured = None if work.layout is None else measured_by(work, outcome, clipped)
    return Applied(loss, outcome.keep, (ratio, bounded, rejected), measured)
