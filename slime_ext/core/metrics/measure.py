"""Turns the tokens of one micro-batch into numbers that add up: a pure function of tensors.

Shapes depend only on the correction, the number of operations is constant, and nothing here waits for the
device.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from slime_ext.core.metrics.layout import (
    AGES,
    COLUMNS,
    CURVE_BINS,
    CURVE_COLUMNS,
    HIGHEST,
    HISTOGRAM,
    LOG_PROBABILITIES,
    LOG_SUMS,
    POSITIONS,
    EffectCount,
    MetricsLayout,
)
from slime_ext.core.state import Outcome, SequenceStatistics, Tokens
from slime_ext.ops.divergences import k3
from slime_ext.ops.segments import Segments, as_numbers, to_device

# What ratios and weights beyond it count as in sums, so that the squares of 1e8 tokens add up to a number.
LARGEST = {torch.float32: 1e15, torch.float64: 1e140}
COUNTERS = 1 << 19  # numbers that one row of tokens is added up in, so that on a GPU few wait for each other


class StepSums(NamedTuple):
    """The measurements of an optimizer step as float64 sums over tokens: of a micro-batch, of all
    micro-batches of a rank, or of all ranks."""

    sums: Tensor  # by ``MetricsLayout.names``, then the histogram's keys, then the curves'
    highest: Tensor  # by ``HIGHEST``; of two parts the larger
    log_sums: Tensor  # by ``LOG_SUMS``: logarithms of sums

    @classmethod
    def nothing(cls, layout: MetricsLayout, device: torch.device | str = "cpu") -> StepSums:
        """The sums over no tokens."""
        sums = torch.zeros(layout.size, dtype=torch.float64, device=device)
        return cls(sums, *(sums.new_full((len(names),), -torch.inf) for names in (HIGHEST, LOG_SUMS)))

    def __add__(self, other: StepSums) -> StepSums:  # type: ignore[override]
        return StepSums(
            self.sums + other.sums,
            torch.maximum(self.highest, other.highest),
            torch.logaddexp(self.log_sums, other.log_sums),
        )


@torch.no_grad()
def measure(
    tokens: Tokens,
    outcome: Outcome,
    layout: MetricsLayout,
    surrogate_clipped: Tensor | None = None,
    terms: Sequence[Tensor] = (),
    *,
    counts_sequences: bool = True,
) -> StepSums:
    """A micro-batch's share of the optimizer step's metrics.

    Args:
        outcome: of the correction, observed.
        surrogate_clipped: [T] bool, where a surrogate of ours clipped.
        terms: [T] each, what the loss terms add, nats; 0 where they add nothing.
        counts_sequences: whether this rank is the one that counts the sequences it shares with others.
    """
    log_ratio, segments = outcome.log_ratio, tokens.segments
    assert outcome.sequences is not None
    behavior = tokens.behavior.detach().to(log_ratio.dtype)
    named, columns = {}, []
    for name, row in _rows(outcome, behavior):
        named[name] = row.sum().double()
        if layout.curves and name in CURVE_COLUMNS:
            columns.append(row)
    clipped = outcome.clipped & segments.mask
    by_surrogate = torch.zeros_like(clipped) if surrogate_clipped is None else surrogate_clipped
    rows = (*_acted_on(outcome, layout.effects, segments), clipped, by_surrogate)
    counts = (as_numbers(row, torch.float32).sum().double() for row in rows)
    of_sequences, oldest, log_sums = _of_sequences(
        outcome.sequences, tokens, counts_sequences=counts_sequences
    )
    of_terms = (term.sum(dtype=torch.float64) for term in terms)
    tail = [_tail(tokens, outcome)] if layout.head else []
    sums = (*(named[name] for name in COLUMNS), *counts, *of_terms, *of_sequences, *tail)
    extremes = (torch.where(outcome.finite, x, -torch.inf) for x in (log_ratio, -log_ratio))
    highest = [x.amax() if x.shape[0] else x.new_full((), -math.inf) for x in (*extremes, outcome.weights)]
    # A token without a finite log-prob has l = 0: ``Totals`` takes it out of the bin around 0.
    parts = [torch.stack([x.double() for x in sums])]
    parts += _sums_by_bin(HISTOGRAM.keys(log_ratio), [None], HISTOGRAM.size)
    parts += _curves(tokens, behavior, columns) if layout.curves else ()
    return StepSums(torch.cat(parts), torch.stack([x.double() for x in (*highest, *oldest)]), log_sums)


def _tail(tokens: Tokens, outcome: Outcome) -> Tensor:
    """Sum over tokens of the probability that the sampler's head leaves out."""
    if tokens.head is None:
        return outcome.weights.new_full((), torch.nan)
    tail = (1 - tokens.head.sampler.exp().sum(1, dtype=torch.float64)).clamp_min(0)
    return torch.where(outcome.finite, tail, 0).sum()


def _acted_on(outcome: Outcome, effects: Sequence[EffectCount], segments: Segments) -> Iterator[Tensor]:
    """[T] bool for each effect, the response tokens that it counts: those that a step clipped or rejected,
    whatever the other steps do, or those that are kept after it and the steps before it."""
    acted = [(step, did, segments.expand_to_tokens(unit, x)) for step, did, unit, x in outcome.step_effects]
    for effect in effects:
        is_kept = effect.kind == "kept"
        kind = "rejected" if is_kept else effect.kind
        rows = (
            row
            for step, did, row in acted
            if did == kind and (step == effect.step or (is_kept and step < effect.step))
        )
        found = functools.reduce(operator.or_, rows, torch.zeros_like(segments.mask))
        yield outcome.finite & ~found if is_kept else segments.mask & found


def _rows(outcome: Outcome, behavior: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The quantities of ``COLUMNS``, [T] each, 0 where undefined. One at a time, so that each reuses the
    memory of the one before."""
    log_ratio, most = outcome.log_ratio, LARGEST[outcome.log_ratio.dtype]
    finite = as_numbers(outcome.finite, log_ratio.dtype)
    yield "counted", finite
    yield "log_behavior", torch.where(outcome.finite, behavior, 0)
    yield "kept", as_numbers(outcome.keep, log_ratio.dtype)
    ratio_minus_one = log_ratio.expm1()
    yield "k3", k3(log_ratio, ratio_minus_one).clamp(max=most)
    ratio_minus_one = ratio_minus_one.clamp(max=most)
    yield "ratio_minus_one", ratio_minus_one
    yield "ratio_minus_one_squared", ratio_minus_one.square()
    weights = outcome.weights.clamp(max=most)
    yield "weight", weights
    yield "weight_squared", weights.square()


def _curves(tokens: Tokens, behavior: Tensor, rows: Sequence[Tensor]) -> Iterator[Tensor]:
    """For each curve, the sums of ``rows`` [T] (by ``CURVE_COLUMNS``) in each of its bins, flat."""
    ages = CURVE_BINS + 1  # one more where the age is unknown
    index = _curve_bins(tokens, behavior, position_bins(tokens.segments))
    table = _sums_by_bin(index, rows, ages * CURVE_BINS**2).view(-1, ages, CURVE_BINS, CURVE_BINS)
    by_age = table.sum((2, 3))[:, :CURVE_BINS]
    for curve in (table.sum((1, 3)), by_age, table.sum((1, 2))):
        yield curve.t().reshape(-1)


def position_bins(segments: Segments) -> Tensor:
    """[T] int32, in which bin of ``POSITIONS`` each local token's position in its response lies."""
    shards = torch.tensor([shard[1:3] for shard in segments.local_shards], dtype=torch.int64).view(-1, 2, 1)
    edges = torch.tensor([0, *POSITIONS, 1 << 40])
    before = (shards - edges[:-1]).clamp_min(0).minimum(edges.diff())  # tokens of each bin before these
    lengths = (before[:, 1] - before[:, 0]).view(-1)
    bins = torch.arange(CURVE_BINS, dtype=torch.int32).repeat(len(shards))
    lengths, bins = (to_device(x, segments.mask.device) for x in (lengths, bins))
    return bins.repeat_interleave(lengths, output_size=segments.size)


def _curve_bins(tokens: Tokens, behavior: Tensor, position: Tensor) -> Tensor:
    """[T] integers: each token's bin, counted over all curves."""
    probability = _bins(behavior, LOG_PROBABILITIES)
    if tokens.ages is None:
        age = torch.full_like(position[:1], CURVE_BINS)
    else:
        known = _bins(tokens.ages, AGES)
        age = tokens.segments.expand(torch.where(tokens.ages.isnan(), CURVE_BINS, known))
    return (age.int() * CURVE_BINS + position) * CURVE_BINS + probability


def _bins(values: Tensor, edges: Sequence[float]) -> Tensor:
    """Bytes, how many edges each value has reached: a few comparisons are faster than a search."""
    return functools.reduce(operator.add, (as_numbers(values >= edge, torch.uint8) for edge in edges))


def _sums_by_bin(index: Tensor, rows: Sequence[Tensor | None], bins: int) -> Tensor:
    """K rows [T], None for ones, added up by bin -> [K, bins] float64."""
    if index.device.type == "cpu":  # elsewhere bincount would wait for the device
        weights = (None if row is None else row.double() for row in rows)
        return torch.stack([torch.bincount(index, some, bins).double() for some in weights])
    return _scattered(index.long(), rows, bins)


def _scattered(index: Tensor, rows: Sequence[Tensor | None], bins: int) -> Tensor:
    """As ``_sums_by_bin``. A bin has several lanes, and neighbouring tokens add to different ones: most of
    them lie in the same few bins, where on a GPU each would wait for the one before."""
    lanes = max(COUNTERS // bins, 1)
    even = index.shape[0] // lanes * lanes
    ones = torch.ones(1, dtype=torch.float64, device=index.device).expand(index.shape)
    table = torch.zeros(len(rows), bins, lanes, dtype=torch.float64, device=index.device)
    for sums, row in zip(table, rows, strict=True):
        row = ones if row is None else row.double()
        sums.scatter_add_(0, index[:even].view(-1, lanes), row[:even].view(-1, lanes))
        sums[:, 0].scatter_add_(0, index[even:], row[even:])
    return table.sum(2)


def _of_sequences(
    statistics: SequenceStatistics, tokens: Tokens, *, counts_sequences: bool
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """The sums of PER_SEQUENCE, four maxima and two logarithms of sums over the sequences that have response
    tokens; of none on a rank that does not count them."""
    there = statistics.count > 0 if counts_sequences else torch.zeros_like(statistics.keep)
    nan = torch.full_like(statistics.count, torch.nan)
    ages = torch.stack([nan if x is None else x.to(nan) for x in (tokens.ages, tokens.age_steps)])  # [2, S]
    known = there & ~ages.isnan()
    log_ratio = statistics.log_ratio
    sums = [
        torch.where(there, log_ratio, 0).sum(),
        torch.where(there, statistics.count, 0).sum(),
        there.sum(),
        (there & statistics.keep).sum(),
        *known.sum(1),
        *torch.where(known, ages, 0).sum(1),
    ]
    rows = [torch.where(there, x, -torch.inf) for x in (log_ratio, -log_ratio, 2 * log_ratio)]
    rows = [*rows, torch.where(known, ages, -torch.inf)]
    high, low, double, aged = (torch.nn.functional.pad(row, (0, 1), value=-math.inf) for row in rows)
    log_sums = torch.stack([double.logsumexp(0), high.logsumexp(0)])
    return sums, [high.amax(), low.amax(), *aged.amax(1)], log_sums
