"""Turns the tokens of one micro-batch into numbers that add up.

``measure`` is a pure function of tensors. Shapes depend only on the correction, the number of operations is
constant, and nothing here waits for the device.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from slime_ext.core.metrics.layout import (
    AGES,
    CURVE_BINS,
    CURVE_COLUMNS,
    DIFFERING,
    HIGHEST,
    HISTOGRAM,
    LOG_PROBABILITIES,
    LOG_SUMS,
    NUMBERS,
    PER_SEQUENCE,
    POSITIONS,
    TAIL,
    EffectCount,
    MetricsLayout,
)
from slime_ext.core.state import Outcome, SequenceStatistics
from slime_ext.core.tokens import Support, Tokens
from slime_ext.ops.divergences import k3
from slime_ext.ops.segments import Segments, as_numbers, detached, to_device

if TYPE_CHECKING:
    from torch import Tensor

# Larger ratios and weights count as this number in sums, so that the squares of 1e8 tokens do not overflow.
LARGEST_RATIO = {4: 1e15, 8: 1e140}  # by the bytes of a number: 4 for float32, 8 for float64
COUNTERS = 1 << 19  # counters for one row of tokens; the more there are, the fewer atomic adds collide


class StepSums(NamedTuple):
    """The measurements of an optimizer step as float64 sums over tokens.

    The tokens are those of one micro-batch, of all micro-batches of a rank, or of all ranks.
    """

    sums: Tensor  # in the order of ``MetricsLayout.names``, then the histogram's keys, then the curves
    highest: Tensor  # in the order of ``HIGHEST``; two parts are combined by their maximum
    log_sums: Tensor  # in the order of ``LOG_SUMS``: logarithms of sums

    @classmethod
    def nothing(cls, layout: MetricsLayout, device: torch.device | str = "cpu") -> StepSums:
        """Makes the sums over no tokens."""
        sums = torch.zeros(layout.size, dtype=torch.float64, device=device)
        return cls(sums, *(sums.new_full((len(names),), -torch.inf) for names in (HIGHEST, LOG_SUMS)))

    def __add__(self, other: StepSums) -> StepSums:  # type: ignore[override]
        return StepSums(
            self.sums + other.sums,
            torch.maximum(self.highest, other.highest),
            torch.logaddexp(self.log_sums, other.log_sums),
        )


def measure(
    tokens: Tokens,
    outcome: Outcome,
    layout: MetricsLayout,
    surrogate_clipped: Tensor | None = None,
    terms: Sequence[Tensor] = (),
    *,
    counts_sequences: bool = True,
) -> StepSums:
    """Adds up what one micro-batch contributes to the metrics of its optimizer step.

    Args:
        outcome: from the correction, called with ``observe=True``.
        surrogate_clipped: [T] bool, where the surrogate clipped; None for the host's loss.
        terms: [T] for each loss term, nats; 0 where it adds nothing.
        counts_sequences: True on only one of the ranks that share sequences.
    """
    with torch.no_grad():
        assert outcome.sequences is not None
        segments, log_ratio, counted = tokens.segments, outcome.log_ratio, outcome.finite
        behavior = detached(tokens.behavior).to(log_ratio.dtype)
        zero = torch.zeros((), dtype=torch.float64, device=log_ratio.device)
        sums = {
            "counted": counted.count_nonzero(),
            "kept": outcome.keep.count_nonzero(),
            "clipped": (outcome.clipped & segments.mask).count_nonzero(),
            **{
                effect.name: row.count_nonzero()
                for effect, row in _affected(outcome, layout.effects, segments)
            },
            "surrogate_clipped": zero if surrogate_clipped is None else surrogate_clipped.count_nonzero(),
        }
        if layout.differing:  # two float32 numbers are equal exactly if their difference is 0
            sums[DIFFERING] = log_ratio.count_nonzero()
        sums |= {name: term.sum(dtype=torch.float64) for name, term in zip(layout.terms, terms, strict=True)}
        if layout.head:
            sums[TAIL] = _missing_probability(tokens, outcome).sum()
        of_sequences, largest_ages, log_sums = _of_sequences(
            outcome.sequences, tokens, zero, counts_sequences=counts_sequences
        )
        sums |= of_sequences
        uncounted = ~counted
        rows = _numbers(behavior, outcome, uncounted)
        # ``stack`` and ``cat`` convert counts and float32 to float64, the type of the sums over sequences.
        parts = [rows.sum(1), torch.stack([sums[name] for name in layout.names[len(NUMBERS) :]])]
        # A token without a finite log-prob has l = 0. ``totals.reduce`` takes it out of the bin around 0.
        parts.append(_counts_by_bin(HISTOGRAM.keys(log_ratio), HISTOGRAM.size))
        if layout.curves:
            of_curves = {
                "counted": as_numbers(counted, log_ratio.dtype),
                "kept": as_numbers(outcome.keep, log_ratio.dtype),
                **dict(zip(NUMBERS, rows.unbind(), strict=True)),
            }
            parts += _curves(tokens, behavior, [of_curves[name] for name in CURVE_COLUMNS])
        highest = [*_extremes(outcome, uncounted), *largest_ages]
        return StepSums(torch.cat(parts), torch.stack(highest), log_sums)


def _numbers(behavior: Tensor, outcome: Outcome, uncounted: Tensor) -> Tensor:
    """Computes the numbers of each token that are added up: [rows of ``NUMBERS``, T].

    The rows are in one tensor, because one sum over all of them takes a fifth of the time of six sums on a
    few tokens.
    """
    log_ratio, most = outcome.log_ratio, LARGEST_RATIO[outcome.log_ratio.element_size()]
    table = log_ratio.new_empty(len(NUMBERS), len(log_ratio))
    log_behavior, divergence, ratio_minus_one, its_square, weight, squared_weight = table.unbind()
    log_behavior.copy_(behavior).masked_fill_(uncounted, 0)
    torch.expm1(log_ratio, out=ratio_minus_one)
    torch.clamp(k3(log_ratio, ratio_minus_one), max=most, out=divergence)
    ratio_minus_one.clamp_(max=most)
    torch.square(ratio_minus_one, out=its_square)
    torch.clamp(outcome.weights, max=most, out=weight)
    torch.square(weight, out=squared_weight)
    return table


def _extremes(outcome: Outcome, uncounted: Tensor) -> list[Tensor]:
    """Finds the largest l, the largest -l and the largest weight of the tokens, as numbers []."""
    log_ratio = outcome.log_ratio
    if not len(log_ratio):
        return [log_ratio.new_full((), -torch.inf)] * 3
    largest = log_ratio.masked_fill(uncounted, -torch.inf).amax()
    smallest = log_ratio.masked_fill(uncounted, torch.inf).amin()
    # The largest weight is not clamped, so that an infinite weight shows.
    return [largest, -smallest, outcome.weights.amax()]


def _affected(
    outcome: Outcome, effects: Sequence[EffectCount], segments: Segments
) -> Iterator[tuple[EffectCount, Tensor]]:
    """Yields each effect and the mask [T] of the tokens that it counts.

    "clipped" and "rejected" look at one step alone; "kept" looks at that step and all earlier ones.
    """
    acted: dict[tuple[int, str], Tensor] = {}
    for step, kind, unit, flags in outcome.step_records:
        row, join = segments.expand_to_tokens(unit, flags), operator.and_ if kind == "kept" else operator.or_
        acted[step, kind] = join(acted[step, kind], row) if (step, kind) in acted else row
    for effect in effects:
        if effect.kind == "kept":
            so_far = (row for (step, kind), row in acted.items() if kind == "kept" and step <= effect.step)
            yield effect, functools.reduce(operator.and_, so_far, outcome.finite)
        elif effect.kind == "rejected":
            kept = acted.get((effect.step, "kept"), segments.mask)
            yield effect, segments.mask > kept  # in the mask and not kept
        else:
            clipped = acted.get((effect.step, "clipped"))
            yield effect, torch.zeros_like(segments.mask) if clipped is None else segments.mask & clipped


def _missing_probability(tokens: Tokens, outcome: Outcome) -> Tensor:
    """Computes the probability that the sampler's head leaves out, [T].

    It is 0 with a support, and NaN without a head.
    """
    if isinstance(tokens.head, Support):
        return torch.zeros_like(outcome.weights, dtype=torch.float64)
    if tokens.head is None:
        return torch.full_like(outcome.weights, torch.nan, dtype=torch.float64)
    tail = (1 - tokens.head.sampler.exp().sum(1, dtype=torch.float64)).clamp_min(0)
    return torch.where(outcome.finite, tail, 0)


def _of_sequences(
    statistics: SequenceStatistics, tokens: Tokens, zero: Tensor, *, counts_sequences: bool
) -> tuple[dict[str, Tensor], list[Tensor], Tensor]:
    """Adds up the numbers of all sequences with response tokens.

    Args:
        zero: [] float64.
        counts_sequences: False adds up none.

    Returns:
        The sums of ``PER_SEQUENCE``, the two largest ages, [] float64 each, and two logarithms of sums, [2].
    """
    lowest = zero - torch.inf
    sums, ages_highest = dict.fromkeys(PER_SEQUENCE, zero), [lowest, lowest]
    if not (counts_sequences and tokens.segments.count):
        return sums, ages_highest, torch.stack([lowest, lowest])
    log_ratio, count = statistics.log_ratio, statistics.count  # both 0 where there is no response token
    absent = count == 0
    of_present = log_ratio.masked_fill(absent, -torch.inf)
    present = count.count_nonzero()
    sums |= {"log_ratio": log_ratio.sum(), "response": count.sum(), "sequences": present}
    sums["kept_sequences"] = (
        present if statistics.keep is None else (statistics.keep > absent).count_nonzero()
    )
    of_ages = (("age", "aged", tokens.ages), ("age_steps", "aged_steps", tokens.age_steps))
    for i, (total, number, ages) in enumerate(of_ages):
        if ages is not None:
            known, ages = ~(ages.isnan() | absent), ages.to(log_ratio)
            sums |= {total: torch.where(known, ages, 0).sum(), number: known.count_nonzero()}
            ages_highest[i] = torch.where(known, ages, -torch.inf).amax()
    log_sums = torch.stack([2 * of_present, of_present]).logsumexp(1)
    return sums, ages_highest, log_sums


def _curves(tokens: Tokens, behavior: Tensor, rows: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yields each curve as one flat tensor: bin by bin, the sums of ``rows``.

    The rows are [T] each, in the order of ``CURVE_COLUMNS``.
    """
    ages = CURVE_BINS + 1  # one more for an unknown age
    index = _curve_bins(tokens, behavior, position_bins(tokens.segments))
    table = _sums_by_bin(index, rows, ages * CURVE_BINS**2).view(-1, ages, CURVE_BINS, CURVE_BINS)
    by_age = table.sum((2, 3))[:, :CURVE_BINS]
    for curve in (table.sum((1, 3)), by_age, table.sum((1, 2))):
        yield curve.t().reshape(-1)


def position_bins(segments: Segments) -> Tensor:
    """Finds the bin of ``POSITIONS`` for each local token's position in its response: [T] int32."""
    shards = torch.tensor([shard[1:3] for shard in segments.local_shards], dtype=torch.int64).view(-1, 2, 1)
    edges = torch.tensor([0, *POSITIONS, 1 << 40])
    before = (shards - edges[:-1]).clamp_min(0).minimum(edges.diff())  # per bin: tokens before start and stop
    lengths = (before[:, 1] - before[:, 0]).view(-1)
    bins = torch.arange(CURVE_BINS, dtype=torch.int32).repeat(len(shards))
    lengths, bins = (to_device(x, segments.mask.device) for x in (lengths, bins))
    return bins.repeat_interleave(lengths, output_size=segments.size)


def _curve_bins(tokens: Tokens, behavior: Tensor, position: Tensor) -> Tensor:
    """Finds each token's bin in a table of age, position and probability: [T] integers."""
    probability = _bins(behavior, LOG_PROBABILITIES)
    if tokens.ages is None:
        age = torch.full_like(position[:1], CURVE_BINS)
    else:
        known = _bins(tokens.ages, AGES)
        age = tokens.segments.expand(torch.where(tokens.ages.isnan(), CURVE_BINS, known))
    return (age.int() * CURVE_BINS + position) * CURVE_BINS + probability


def _bins(values: Tensor, edges: Sequence[float]) -> Tensor:
    """Counts how many edges each value has reached: uint8.

    A few comparisons are faster than a search.
    """
    return functools.reduce(operator.add, (as_numbers(values >= edge, torch.uint8) for edge in edges))


def _counts_by_bin(index: Tensor, bins: int) -> Tensor:
    """Counts tokens by bin: [bins]."""
    if index.device.type == "cpu":  # elsewhere bincount would wait for the device
        return torch.bincount(index, minlength=bins)
    ones = torch.ones(1, dtype=torch.float64, device=index.device).expand(index.shape)
    return _scattered(index.long(), [ones], bins)[0]


def _sums_by_bin(index: Tensor, rows: Sequence[Tensor], bins: int) -> Tensor:
    """Adds up K rows [T] by bin: [K, bins] float64."""
    if index.device.type == "cpu":  # without a token, bincount returns int64
        return torch.stack([torch.bincount(index, row.double(), bins).double() for row in rows])
    return _scattered(index.long(), rows, bins)


def _scattered(index: Tensor, rows: Sequence[Tensor], bins: int) -> Tensor:
    """Adds up rows like ``_sums_by_bin``, but on a GPU.

    On a GPU, atomic adds to the same bin collide. So each bin has several counters (lanes). Token i uses lane
    i mod lanes, and the lanes are added at the end. Atomic adds have no fixed order, so the last bit of a sum
    may differ from run to run.
    """
    lanes = max(COUNTERS // bins, 1)
    even = index.shape[0] // lanes * lanes
    table = torch.zeros(len(rows), bins, lanes, dtype=torch.float64, device=index.device)
    for sums, row in zip(table, rows, strict=True):
        row = row.double()
        sums.scatter_add_(0, index[:even].view(-1, lanes), row[:even].view(-1, lanes))
        sums[:, 0].scatter_add_(0, index[even:], row[even:])
    return table.sum(2)
