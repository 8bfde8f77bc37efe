"""Computes what each correction would have done to the rollouts of a dump.

A dump holds the behavior policy and the proximal policy, but not the target. The proximal policy takes its
place, which is exact at the first optimizer step of a rollout and misses the drift of later steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, field, replace
from functools import cache

import torch
from torch import Tensor

from slime_ext import presets
from slime_ext.core.centering import Center
from slime_ext.core.correction import Correction, Outcome, Tokens
from slime_ext.core.losses import Bounds, HostLoss, Reinforce
from slime_ext.ops.segments import selected
from slime_ext.tools.analysis.document import Effect
from slime_ext.tools.analysis.measures.planned import StepPart, missing_input, steps_of
from slime_ext.tools.analysis.measures.tally import BOUNDS, Tally, TokenEffects
from slime_ext.tools.analysis.records import DumpedRollout
from slime_ext.tools.analysis.tables import Additive

NAMED = 10  # rollouts in a note
LARGE = 1 << 18  # tokens of a part; each correction has a fixed cost per part


def apply(correction: Correction, rollout: DumpedRollout, bounds: Bounds = BOUNDS) -> TokenEffects:
    """Returns the effects that the hook would have on each token of a rollout.

    Args:
        bounds: the host's clip range, for surrogates that do not set one.
    """
    if correction.center is not None and rollout.sampler_head is not None:
        correction = _with_center(
            correction, rollout.sampler_head.shape[1]
        )  # uses the width of the dump's heads
    places, parts = [], []
    for step in steps_of(correction, rollout):
        places.append(step.places)
        parts.append(_applied(correction, step, bounds))
    if len(parts) == 1:
        return parts[0]
    order = torch.cat(places).argsort()
    columns = zip(*map(astuple, parts), strict=True)
    return TokenEffects(*(None if c[0] is None else torch.cat(c)[order] for c in columns))


def _applied(correction: Correction, step: StepPart, bounds: Bounds) -> TokenEffects:
    outcome, tokens, mask = correction.decide(step.inputs, step.plan), step.tokens, step.tokens.segments.mask
    weights, keep, clipped = outcome.weights, outcome.keep, outcome.clipped & outcome.finite
    if correction.is_identity:  # the hook returns the host's loss unchanged
        weights, keep = mask.to(tokens.proximal.dtype), mask
    if step.host is None:
        return TokenEffects(weights, keep, clipped, None)
    slope, by_loss = _slope(correction, outcome, tokens, step.host, bounds)
    added = None if correction.center is None else _centering(correction, outcome, tokens, step.host, bounds)
    return TokenEffects(weights, keep, clipped if by_loss is None else clipped | by_loss, slope, added)


def _centering(
    correction: Correction, outcome: Outcome, tokens: Tokens, host: Tensor, bounds: Bounds
) -> Tensor:
    """Returns what ``center`` adds to the loss of each token, [T]."""
    centered, plain = (
        each.loss(outcome, tokens, host, bounds)[0] for each in (correction, _with_center(correction, None))
    )
    return centered - plain


@cache  # because validating a correction takes longer than a part of a rollout
def _with_center(correction: Correction, top_k: int | None) -> Correction:
    """Returns the correction with a head of another width, or without ``center``."""
    return replace(correction, center=None if top_k is None else Center(top_k))


def _slope(
    correction: Correction, outcome: Outcome, tokens: Tokens, host: Tensor, bounds: Bounds
) -> tuple[Tensor, Tensor | None]:
    """Returns d loss / d log target at target = proximal [T], and which tokens the surrogate clipped."""
    if isinstance(correction.surrogate, HostLoss) and not correction.terms:
        return correction.loss(outcome, tokens, host, bounds)  # weights multiply both alike
    is_plain = correction.bounds_products and not correction.terms and correction.center is None
    if isinstance(correction.surrogate, Reinforce) and is_plain:
        return selected(host, outcome.keep) * outcome.factor, None  # the slope of -A log pi is -A, too
    target = tokens.proximal.detach().clone().requires_grad_()
    host = tokens.segments.zeroed(host * (1 + target - tokens.proximal))
    loss, clipped = correction.loss(outcome, replace(tokens, target=target), host, bounds)
    (slope,) = torch.autograd.grad(loss.sum(), target)
    return slope, clipped


class WhatIf(Additive):
    """A collector (see ``pipeline``) of the effects of several named corrections on the same rollouts."""

    tallies: dict[str, Tally]
    stopped: list[int] = field(default_factory=list)  # rollouts at which every hook stops the run

    def add(self, rollout: DumpedRollout) -> None:
        """Applies every correction to a rollout, or to several that are joined.

        A rollout with a proximal log-prob that is not finite is left out.
        """
        if rollout.joined and not rollout.finite.equal(rollout.mask):  # may stop some of these rollouts
            for one in rollout.joined:
                self.add(one)
            return
        if not rollout.has_all and not (rollout.proximal.isfinite() | ~rollout.mask).all():
            self.stopped.append(rollout.rollout_id)
            return
        alone, coupled = [], []
        for tally in self.tallies.values():
            (coupled if tally.correction.needs_plan else alone).append(tally)
        for part in rollout.parts(LARGE):  # keeps temporary tensors small
            _count(alone, part)
        for one in rollout.rollouts:
            _count(coupled, one)

    def notes(self) -> tuple[str, ...]:
        """Returns which rollouts are left out."""
        if not self.stopped:
            return ()
        named, more = sorted(self.stopped)[:NAMED], ", ..." if len(self.stopped) > NAMED else ""
        return (
            f"rollouts {', '.join(map(str, named))}{more} are left out of the effects of corrections, "
            "because a proximal log-prob is not finite, and the hook stops every run there",
        )

    def effects(self) -> tuple[Effect, ...]:
        """Returns the effects of each correction, in the order of the request."""
        return tuple(
            tally.effect(name, *_described(name, tally.correction)) for name, tally in self.tallies.items()
        )


def _count(tallies: Iterable[Tally], rollout: DumpedRollout) -> None:
    for tally in tallies:
        if why := missing_input(tally.correction, rollout):
            tally.lacked = tally.lacked or why
        else:
            tally.add(apply(tally.correction, rollout, tally.bounds), rollout)


def _described(name: str, correction: Correction) -> tuple[str, str]:
    """Returns formula and source of a preset, or the steps of another correction in one line."""
    known = presets.PRESETS.get(name)
    if known and known.correction == correction:
        return known.formula, known.source
    from slime_ext.config.load import to_mapping  # only a user's file needs it
    from slime_ext.config.words import one_line

    return one_line(to_mapping(correction)), ""
