"""The eager backend on a CPU: two passes over the tokens in numpy, whose calls cost a fifth of PyTorch's.

The first adds up over sequences, the second weights the loss and measures. In between the correction's steps
decide, written as straight lines of numpy.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from slime_ext.correction import OBSERVED, Tokens
from slime_ext.kernels.apply import Work, over_ranks
from slime_ext.kernels.looked import Looked
from slime_ext.kernels.passes import Named, Parts, TwoPasses
from slime_ext.kernels.vector_text import Acted, Decided, Program, program
from slime_ext.metrics.bins import places_of
from slime_ext.metrics.layout import Layout
from slime_ext.metrics.measure_on_cpu import Seen, Sequences, measured
from slime_ext.ops import arrays
from slime_ext.ops.segments import AllSum, identity
from slime_ext.outcome import largest_factor

Arrays = dict[str, np.ndarray]
OUTCOME = Parts(outcome=True)  # weights, keep and what is finite, and no more


class Verdict(NamedTuple):
    """What the steps and the plan decided."""

    acted: Sequence[Acted]  # what steps did that looked at sequences
    acting: Mapping[int, Sequence[np.ndarray]]  # those that looked at tokens -> [T] flags each
    kept: np.ndarray  # [S] bool
    keep: np.ndarray  # [T] bool
    weights: np.ndarray  # [T], 0 where not kept
    clipped: np.ndarray | bool  # [T] bool, anything where not finite; or one for all
    of_sequences: np.ndarray | None  # [S] weights, where a sequence is kept or rejected as a whole
    sound: bool  # whether a token that is not finite takes its sequence with it
    every: bool  # whether every token is kept


@dataclass(frozen=True, eq=False)
class Vectors(TwoPasses):
    """Numpy for one correction. What it cannot see runs operation by operation."""

    name: str = "eager"

    def __post_init__(self) -> None:
        self.__dict__.update(_programs={})

    def _serves(self, tokens: Tokens, parts: Parts) -> bool:
        read = (self.correction.numerator_of(tokens), tokens.behavior, tokens.segments.mask)
        return all(type(values) is Tensor and values.is_cpu for values in read)

    def _weights(self, loss: Tensor) -> bool:
        return loss.is_cpu and loss.dtype in (torch.float32, torch.float64)

    def _program(self, parts: Parts) -> Program:
        needs, notes = self._needs(parts), parts.loss or parts.bounds
        if (needs, notes) not in self._programs:
            self._programs[needs, notes] = program(self.correction, needs, notes=notes)
        return self._programs[needs, notes]

    def _run(self, work: Work, parts: Parts) -> Named:
        with arrays.quiet():
            found = self._passes(work, parts)
        return {name: torch.from_numpy(values) for name, values in found.items()}

    def _passes(self, work: Work, parts: Parts) -> Arrays:
        settled = {name: arrays.of(t) for name, t in self._settled(work.tokens, work.plan).items()}
        looked, needs = Looked(self.correction, work.tokens), self._needs(parts)
        share = looked.sums([need.name for need in needs])
        table = _over_ranks(share, work.tokens.segments.all_sum)
        verdict = self._decide(looked, table, settled, parts)
        found = {"keeps": verdict.keep}
        if parts.outcome:
            found |= _outcome(looked, verdict, table, parts)
        if parts.loss:
            found |= self._weighted(work.host_loss, looked, verdict, work.plan.scale)
        if parts.loss or parts.layout is not None:
            found |= _channel(looked, verdict)
        if parts.layout is not None:
            rows = dict(zip(needs, table, strict=True))
            own = Sequences(*(rows[need] for need in OBSERVED), verdict.kept, settled.get("ages"))
            counts = share[needs.index(OBSERVED[1])]
            found |= _measured(work, looked, verdict, own, counts)
        return found

    def _decide(self, looked: Looked, table: list[np.ndarray], settled: Arrays, parts: Parts) -> Verdict:
        steps = self._program(parts)
        decided = steps(
            table,
            numbers=settled.get("numbers"),
            ages=settled.get("ages"),
            l=looked.log_ratio,
            num=looked.numerator,
            beh=looked.behavior,
            adv=looked.advantages,
            mask=looked.mask,
            finite=looked.finite,
            ratios=looked.exponentials if parts == OUTCOME else lambda: looked.ratio_or_one,
            spread=looked.spread,
            narrow=lambda values: values.astype(looked.log_ratio.dtype),
        )
        if "groups" in settled:
            decided = self._without(decided, settled["groups"].view(bool))
        return _verdict(looked, decided, steps)

    def _without(self, decided: Decided, groups: np.ndarray) -> Decided:
        """Without the sequences whose group was rejected."""
        acted = Acted(len(self.correction.steps) + 1, groups, inside=True)
        return decided._replace(kept=groups & decided.kept, acted=[*decided.acted, acted])

    def _weighted(self, host_loss: Tensor, looked: Looked, verdict: Verdict, scale: Tensor | None) -> Arrays:
        factor, loss = verdict.weights, arrays.of(host_loss.detach())
        if scale is not None:
            factor = factor * looked.spread(arrays.of(scale))
        factor = factor.astype(loss.dtype, copy=False)
        if not self.correction.bounds_weights:
            factor = np.minimum(factor, largest_factor(host_loss.dtype))  # infinity times 0 is NaN
        product = loss * factor
        if not verdict.every:
            arrays.masked(verdict.keep, product, product)
        return {"factors": factor, "products": product}


def _verdict(looked: Looked, decided: Decided, by: Program) -> Verdict:
    keep, dtype = decided.keep, looked.log_ratio.dtype
    together = keep is looked.finite  # no token was rejected alone
    if np.ndim(decided.kept):
        held = looked.spread(decided.kept)
        keep = held if together and looked.whole else keep & held
    kept, every = _each(decided.kept, looked.sequences, np.bool_), looked.whole and keep is looked.finite
    of_sequences, exact, weights = None, every, decided.weights
    if by.shared:
        own = _each(np.where(kept, weights, 0), looked.sequences, dtype)
        weights, exact = looked.spread(own), together and looked.whole
        of_sequences = own if exact or (together and by.sound) else None
    if not exact:
        weights = arrays.masked(keep, weights)
    return Verdict(
        acted=decided.acted,
        acting=decided.acting,
        kept=kept,
        keep=keep,
        weights=weights,
        clipped=looked.spread(decided.clipped) if by.shared else decided.clipped,
        of_sequences=of_sequences,
        sound=by.sound,
        every=every,
    )


def _each(values: np.ndarray | float, count: int, dtype: np.dtype | type) -> np.ndarray:
    """[N], of one number for all, too."""
    if np.ndim(values):
        return values.astype(dtype, copy=False)
    found = arrays.new(count, dtype)
    found.fill(values)
    return found


def _over_ranks(share: list[np.ndarray], all_sum: AllSum) -> list[np.ndarray]:
    """[S] each, summed over the ranks that share the sequences."""
    if all_sum is identity or not share:
        return share
    return list(arrays.of(over_ranks(torch.from_numpy(arrays.table(share)), all_sum)))


def _outcome(looked: Looked, verdict: Verdict, table: list[np.ndarray], parts: Parts) -> Arrays:
    found = {"weights": verdict.weights, "finites": looked.finite}
    if parts.bounds:
        found["log_ratios"] = looked.log_ratio
        found["clippeds"] = _each(verdict.clipped, len(looked.finite), np.bool_)
    if parts.observe:
        found |= {"table": np.array(table, np.float64), "kepts": verdict.kept}
    if parts.observe and parts.layout is None:  # or it is counted, not handed out
        found["acteds"] = _acteds(looked, verdict)
    return found


def _acteds(looked: Looked, verdict: Verdict) -> np.ndarray:
    """As ``Outcome.in_full`` has it."""
    acted = np.logical_not(looked.finite).astype(np.int32)
    for step, flags, inside in verdict.acted:
        acted |= np.multiply(looked.spread(flags ^ inside), 1 << step, dtype=np.int32)
    for step, every in verdict.acting.items():
        for flags in every:
            acted |= np.multiply(flags, 1 << step, dtype=np.int32)
    return acted


def _channel(looked: Looked, verdict: Verdict) -> Arrays:
    """As ``Outcome.channel``."""
    size = len(looked.finite)
    clipped = _each(verdict.clipped, size, np.float32)
    if not looked.whole:
        arrays.masked(looked.finite, clipped, clipped)
    rejected = _each(not verdict.every and np.not_equal(looked.mask, verdict.keep), size, np.float32)
    ratios = looked.ratio.astype(np.float32, copy=False)
    return {"ratios": ratios, "bounded_ones": clipped, "rejected_ones": rejected}


def _measured(work: Work, looked: Looked, verdict: Verdict, own: Sequences, counts: np.ndarray) -> Arrays:
    layout, tokens = work.layout, work.tokens
    places = places_of(tokens, torch.from_numpy(looked.behavior).dtype) if layout.curves else None
    seen = Seen(
        log_ratio=looked.log_ratio,
        excess=looked.excess,
        behavior=looked.behavior,
        weights=verdict.weights,
        finite=looked.finite,
        keep=verdict.keep,
        count=looked.count,
        acted=_acted(layout, looked, verdict, counts),
        sequences=own,
        places=places,
        shared=None if verdict.of_sequences is None else (verdict.of_sequences, counts),
    )
    return dict(zip(("sums", "highest", "log_sums"), measured(seen, first=work.first), strict=True))


def _acted(layout: Layout, looked: Looked, verdict: Verdict, counts: np.ndarray) -> list[float]:
    """Response tokens that each of the layout's flags asks for, each question answered once."""
    acting = dict(verdict.acting)
    if not (looked.whole or verdict.sound):
        acting[0] = (np.logical_not(looked.finite),)
    asked = tuple(dict.fromkeys(bits for _, bits in layout.flags))
    of_all = _of_all(asked, verdict.acted, len(counts))
    found = dict(zip(asked, of_all @ counts, strict=True))
    for bits, of_sequences in zip(asked, of_all, strict=True) if acting else ():
        flags = [flags for step, every in acting.items() if bits >> step & 1 for flags in every]
        if flags and any(bits >> act.step & 1 for act in verdict.acted):
            flags.append(looked.spread(of_sequences))
        if flags:
            found[bits] = _count(looked, flags)
    return [found[bits] for _, bits in layout.flags]


def _of_all(asked: tuple[int, ...], acted: Sequence[Acted], count: int) -> np.ndarray:
    """[Q, S] bool, whether any step of a question acted on the sequence."""
    if not acted:
        return np.zeros((len(asked), count), np.bool_)
    signs, least = _signs(asked, tuple((act.step, act.inside) for act in acted))
    return np.greater(signs @ arrays.table([_each(act.flags, count, np.bool_) for act in acted]), least)


@functools.lru_cache(maxsize=256)
def _signs(asked: tuple[int, ...], acted: tuple[tuple[int, bool], ...]) -> tuple[np.ndarray, np.ndarray]:
    """[Q, F] what each flag counts for a question, -1 where it says that its step did nothing; [Q, 1] what
    they come to where no step acted."""
    signs = np.array([[(bits >> step & 1) * (1 - 2 * inside) for step, inside in acted] for bits in asked])
    return signs.astype(np.float64), np.minimum(signs, 0).sum(1, keepdims=True)


def _count(looked: Looked, flags: Sequence[np.ndarray]) -> int:
    """Response tokens with any of these flags."""
    every = functools.reduce(np.logical_or, flags)
    return np.count_nonzero(every if looked.whole else every & looked.mask)
