"""From the tokens of one micro-batch to numbers that add up: a pure function of tensors.

Its shapes depend on the correction alone, its number of operations on nothing, and nothing here waits for the
device. ``summarize`` makes every sum, and says in which bin each token lies; ``count_bins`` adds tokens up by
bin.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from slime_ext.metrics.layout import (
    AGES,
    CURVE_BINS,
    FIRST,
    LOG_PROBABILITIES,
    POSITIONS,
    SHIFT,
    SIDE,
    EffectCount,
    MetricsLayout,
)
from slime_ext.ops.divergences import k3
from slime_ext.ops.segments import Segments, as_numbers, to_device
from slime_ext.state import Outcome, SequenceStatistics, Tokens

SIGNED = 1 << (32 - SHIFT)  # bins by the first bits of a float32, the sign among them
LANES = 16  # tables that tokens of one bin are counted in, so that on a GPU few wait for each other


def largest(dtype: torch.dtype) -> float:
    """What ratios and weights beyond it count as in sums, so that their squares stay finite."""
    return 1e150 if dtype is torch.float64 else 1e17


class Measured(NamedTuple):
    """Sufficient statistics of some tokens, float64."""

    sums: Tensor  # added
    highest: Tensor  # [H] the larger is taken
    log_sums: Tensor  # [2] logarithms of sums, added as such

    def __add__(self, other: Measured) -> Measured:
        return Measured(
            self.sums + other.sums,
            torch.maximum(self.highest, other.highest),
            torch.logaddexp(self.log_sums, other.log_sums),
        )


class Summary(NamedTuple):
    """What a micro-batch adds up to, but for the bins."""

    sums: Tensor  # [MetricsLayout.names] float64
    highest: Tensor
    log_sums: Tensor
    histogram_bin: Tensor  # [T] integers
    curve_bin: Tensor | None = None  # [T] integers: (age x CURVE_BINS + position) x CURVE_BINS + probability
    columns: tuple[Tensor, ...] = ()  # CURVE_COLUMNS, [T] each


@torch.no_grad()
def measure(
    tokens: Tokens,
    outcome: Outcome,
    layout: MetricsLayout,
    *,
    surrogate_clipped: Tensor | None = None,
    counts_sequences: bool = True,
) -> Measured:
    """What a micro-batch adds to the metrics of the optimizer step.

    Args:
        outcome: of the correction, observed.
        surrogate_clipped: [T] bool, where a surrogate of ours clipped.
        counts_sequences: whether this rank is the one that counts the sequences it shares with others.
    """
    position = position_bins(tokens.segments) if layout.curves else None
    return count_bins(
        summarize(tokens, outcome, layout, position, surrogate_clipped, counts_sequences=counts_sequences)
    )


def nothing(layout: MetricsLayout, device: torch.device | str = "cpu") -> Measured:
    """What no tokens add."""
    empty = torch.zeros(0, dtype=torch.float64, device=device)
    none = empty > 0
    statistics = SequenceStatistics(empty, empty, none)
    outcome = Outcome(empty, none, none, empty, none, sequences=statistics)
    return measure(Tokens(Segments.whole([], none), empty, empty), outcome, layout)


def summarize(
    tokens: Tokens,
    outcome: Outcome,
    layout: MetricsLayout,
    position: Tensor | None,
    surrogate_clipped: Tensor | None = None,
    *,
    counts_sequences: bool = True,
) -> Summary:
    """Every sum, maximum and logarithm of sums, and the bin of each token.

    Args:
        position: [T] as ``position_bins``; None where the layout has no curves.
        others: as ``measure``.
    """
    log_ratio, finite, segments = outcome.log_ratio, outcome.finite, tokens.segments
    most = largest(log_ratio.dtype)
    behavior = tokens.behavior.detach().to(log_ratio.dtype)
    ratio_minus_one = log_ratio.expm1()
    divergence = k3(log_ratio, ratio_minus_one).clamp(max=most)
    ratio_minus_one = ratio_minus_one.clamp(max=most)
    weights = outcome.weights.clamp(max=most)
    flags = (as_numbers(flag, log_ratio.dtype) for flag in (finite, outcome.keep))
    columns = (*flags, ratio_minus_one, weights, divergence)
    rows = (*columns, torch.where(finite, behavior, 0), ratio_minus_one.square(), weights.square())
    of_sequences, oldest, log_sums = _of_sequences(
        outcome.sequences, tokens.ages, counts_sequences=counts_sequences
    )
    counts = _effect_counts(outcome, layout.effects, segments, counts_sequences=counts_sequences)
    clipped = (outcome.clipped & segments.mask).count_nonzero()
    by_surrogate = (
        torch.zeros_like(clipped) if surrogate_clipped is None else surrogate_clipped.count_nonzero()
    )
    numbers = (*counts, clipped, by_surrogate, *of_sequences)
    gone = torch.where(finite, 0, -torch.inf).to(log_ratio.dtype)
    highest = [*map(_highest, (gone + log_ratio, gone - log_ratio, outcome.weights)), *oldest]
    return Summary(
        torch.cat([segments.local_sums(rows).sum(1), torch.stack([x.double() for x in numbers])]),
        torch.stack([x.double() for x in highest]),
        log_sums,
        # The exponent and 4 bits of the mantissa: 16 bins per power of 2.
        (log_ratio.float().view(torch.int32) >> SHIFT) + SIGNED // 2,
        None if position is None else _curve_bins(tokens, behavior, position),
        () if position is None else columns,
    )


def count_bins(summary: Summary) -> Measured:
    """The sums, followed by the tokens per bin of |l| from 2^-20 to 2^7 nats, those above 0 first, and by the
    columns' sums in each bin of position, age and probability.

    A token without a finite log-prob has l = 0 and lies in no bin.
    """
    ones = summary.sums.new_ones(1).expand(summary.histogram_bin.shape)
    below, above = _sums_by_bin(summary.histogram_bin, [ones], SIGNED).view(2, -1).unbind()
    sides = [
        torch.cat([x[FIRST : FIRST + SIDE], x[FIRST + SIDE :].sum(0, keepdim=True)]) for x in (above, below)
    ]
    parts = [summary.sums, *sides]
    if summary.curve_bin is not None:
        ages = CURVE_BINS + 1  # one more where the age is unknown
        table = _sums_by_bin(summary.curve_bin, summary.columns, ages * CURVE_BINS**2)
        table = table.view(-1, ages, CURVE_BINS, CURVE_BINS)
        by_age = table.sum((2, 3))[:, :CURVE_BINS]
        parts += (x.t().reshape(-1) for x in (table.sum((1, 3)), by_age, table.sum((1, 2))))
    return Measured(torch.cat(parts), summary.highest, summary.log_sums)


def position_bins(segments: Segments) -> Tensor:
    """[T] int32, in which bin of ``POSITIONS`` each local token's position in its response lies."""
    shards = torch.tensor([shard[1:3] for shard in segments.local_shards], dtype=torch.int64).view(-1, 2, 1)
    edges = torch.tensor([0, *POSITIONS, 1 << 40])
    before = (shards - edges[:-1]).clamp_min(0).minimum(edges.diff())  # tokens of each bin before these
    lengths = (before[:, 1] - before[:, 0]).view(-1)
    bins = torch.arange(CURVE_BINS, dtype=torch.int32).repeat(len(shards))
    lengths, bins = (to_device(x, segments.device) for x in (lengths, bins))
    return bins.repeat_interleave(lengths, output_size=segments.size)


def _curve_bins(tokens: Tokens, behavior: Tensor, position: Tensor) -> Tensor:
    """[T] integers, where each token lies among the bins of all curves together."""
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


def _sums_by_bin(index: Tensor, rows: Sequence[Tensor], bins: int) -> Tensor:
    """K rows [T] added up by bin -> [K, bins] float64."""
    index, even = index.long(), index.shape[0] // LANES * LANES
    table = torch.zeros(len(rows), LANES, bins, dtype=torch.float64, device=index.device)
    for sums, row in zip(table, rows, strict=True):
        row = row.double()
        sums.scatter_add_(1, index[:even].view(LANES, -1), row[:even].view(LANES, -1))
        sums[0].scatter_add_(0, index[even:], row[even:])
    return table.sum(1)


def _effect_counts(
    outcome: Outcome, counts: Sequence[EffectCount], segments: Segments, *, counts_sequences: bool
) -> Iterator[Tensor]:
    """How many response tokens each of the layout's counts has."""

    def tokens_of(unit: str, flags: Tensor) -> Tensor:
        """Response tokens of the units with a flag."""
        if unit == "sequence":  # counted on one of the ranks that share them
            return (flags * outcome.sequences.count).sum() * counts_sequences
        return (_expanded(unit, flags, segments) & segments.mask).count_nonzero()

    for _, kind, step in counts:
        if kind == "kept":
            yield _kept_after(step, outcome, segments)
            continue
        did = [effect for effect in outcome.step_effects if (effect.step, effect.kind) == (step, kind)]
        if len({effect.unit for effect in did}) == 1:
            yield tokens_of(did[0].unit, functools.reduce(operator.or_, (effect.flags for effect in did)))
        else:
            flags = [_expanded(unit, flags, segments) for _, _, unit, flags in did]
            yield tokens_of("token", functools.reduce(operator.or_, flags, torch.zeros_like(outcome.keep)))


def _kept_after(step: int, outcome: Outcome, segments: Segments) -> Tensor:
    """Response tokens that the steps up to one keep."""
    lost: dict[str, Tensor] = {}
    for place, kind, unit, flags in outcome.step_effects:
        if kind == "rejected" and place <= step:
            lost[unit] = lost[unit] | flags if unit in lost else flags
    gone = (_expanded(unit, flags, segments) for unit, flags in lost.items())
    return (~functools.reduce(operator.or_, gone, ~outcome.finite)).count_nonzero()


def _expanded(unit: str, flags: Tensor, segments: Segments) -> Tensor:
    """Flags per unit -> [T] bool."""
    if unit == "token":
        return flags
    return segments.expand_turns(flags) if unit == "turn" else segments.expand(flags)


def _highest(values: Tensor) -> Tensor:
    """[] the largest; -inf for none."""
    return values.amax() if values.shape[0] else values.new_full((), -math.inf)


def _of_sequences(
    statistics: SequenceStatistics, ages: Tensor | None, *, counts_sequences: bool
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """The sums of PER_SEQUENCE, three maxima and two logarithms of sums over the sequences that have response
    tokens; of none on a rank that does not count them."""
    there = statistics.count > 0 if counts_sequences else torch.zeros_like(statistics.keep)
    known = torch.zeros_like(there) if ages is None else there & (ages == ages)
    age = statistics.count.new_zeros(()) if ages is None else ages
    log_ratio = statistics.log_ratio
    sums = [
        torch.where(there, log_ratio, 0).sum(),
        torch.where(there, statistics.count, 0).sum(),
        there.sum(),
        (there & statistics.keep).sum(),
        known.sum(),
        torch.where(known, age, 0).sum(),
    ]
    rows = [torch.where(there, x, -torch.inf) for x in (log_ratio, -log_ratio, 2 * log_ratio)]
    rows = [*rows, torch.where(known, age, -torch.inf)]
    high, low, double, old = (torch.nn.functional.pad(row, (0, 1), value=-math.inf) for row in rows)
    log_sums = torch.stack([double.logsumexp(0), high.logsumexp(0)])
    return sums, [high.amax(), low.amax(), old.amax()], log_sums
