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

from slime_ext.core.metrics.layout import (
    AGES,
    COLUMNS,
    CURVE_BINS,
    CURVE_COLUMNS,
    FIRST,
    LOG_PROBABILITIES,
    POSITIONS,
    SHIFT,
    SIDE,
    EffectCount,
    MetricsLayout,
)
from slime_ext.core.state import Outcome, SequenceStatistics, Tokens
from slime_ext.ops.divergences import k3
from slime_ext.ops.segments import Segments, as_numbers, to_device

SIGNED = 1 << (32 - SHIFT)  # bins by the first bits of a float32, the sign among them
# What ratios and weights beyond it count as in sums, so that their squares stay finite.
LARGEST = {torch.float32: 1e17, torch.float64: 1e150}
LANES = 16  # tables that tokens of one bin are counted in, so that on a GPU few wait for each other


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
    columns: tuple[Tensor, ...] = ()  # [T] each, by CURVE_COLUMNS


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
    statistics = SequenceStatistics(empty, empty, empty, none)
    outcome = Outcome(empty, none, none, empty, none, empty, sequences=statistics)
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
    log_ratio, segments = outcome.log_ratio, tokens.segments
    behavior = tokens.behavior.detach().to(log_ratio.dtype)
    named, columns = {}, []
    for name, row in _rows(outcome, behavior):
        named[name] = row.sum().double()
        if position is not None and name in CURVE_COLUMNS:
            columns.append(row)
    counts = _effect_counts(
        outcome, layout.effects, segments, named["counted"], counts_sequences=counts_sequences
    )
    clipped = _count(outcome.clipped & segments.mask)
    by_surrogate = clipped * 0 if surrogate_clipped is None else _count(surrogate_clipped)
    of_sequences, oldest, log_sums = _of_sequences(
        outcome.sequences, tokens.ages, counts_sequences=counts_sequences
    )
    sums = (*(named[name] for name in COLUMNS), *counts, clipped, by_surrogate, *of_sequences)
    extremes = (torch.where(outcome.finite, x, -torch.inf) for x in (log_ratio, -log_ratio))
    highest = [x.amax() if x.shape[0] else x.new_full((), -math.inf) for x in (*extremes, outcome.weights)]
    return Summary(
        torch.stack([x.double() for x in sums]),
        torch.stack([x.double() for x in (*highest, *oldest)]),
        log_sums,
        # The exponent and 4 bits of the mantissa: 16 bins per power of 2.
        (log_ratio.float().view(torch.int32) >> SHIFT) + SIGNED // 2,
        None if position is None else _curve_bins(tokens, behavior, position),
        tuple(columns),
    )


def _rows(outcome: Outcome, behavior: Tensor) -> Iterator[tuple[str, Tensor]]:
    """What ``COLUMNS`` adds up, [T] each, 0 where there is none; one at a time, so that the memory of one
    serves the next."""
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


def count_bins(summary: Summary) -> Measured:
    """The sums, followed by the tokens per bin of |l| from 2^-20 to 2^7 nats, those above 0 first, and by the
    columns' sums in each bin of position, age and probability.

    A token without a finite log-prob has l = 0 and lies in no bin.
    """
    below, above = _sums_by_bin(summary.histogram_bin, [None], SIGNED).view(2, -1).unbind()
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
    lengths, bins = (to_device(x, segments.mask.device) for x in (lengths, bins))
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


def _sums_by_bin(index: Tensor, rows: Sequence[Tensor | None], bins: int) -> Tensor:
    """K rows [T], None for ones, added up by bin -> [K, bins] float64."""
    if index.device.type == "cpu":  # elsewhere bincount would wait for the device
        weights = (None if row is None else row.double() for row in rows)
        return torch.stack([torch.bincount(index, some, bins).double() for some in weights])
    return _scattered(index.long(), rows, bins)


def _scattered(index: Tensor, rows: Sequence[Tensor | None], bins: int) -> Tensor:
    """As ``_sums_by_bin``, in tables that few tokens share."""
    even = index.shape[0] // LANES * LANES
    ones = torch.ones(1, dtype=torch.float64, device=index.device).expand(index.shape)
    table = torch.zeros(len(rows), LANES, bins, dtype=torch.float64, device=index.device)
    for sums, row in zip(table, rows, strict=True):
        row = ones if row is None else row.double()
        sums.scatter_add_(1, index[:even].view(LANES, -1), row[:even].view(LANES, -1))
        sums[0].scatter_add_(0, index[even:], row[even:])
    return table.sum(1)


def _effect_counts(
    outcome: Outcome,
    counts: Sequence[EffectCount],
    segments: Segments,
    finite: Tensor,
    *,
    counts_sequences: bool,
) -> Iterator[Tensor]:
    """How many response tokens each of the layout's counts has; ``finite`` of all are.

    What only whole sequences did is counted by sequence, on one of the ranks that share them.
    """
    sequences = outcome.sequences
    for _, kind, step in counts:
        wanted = "rejected" if kind == "kept" else kind
        flags: dict[str, Tensor] = {}
        for place, did, unit, some in outcome.step_effects:
            if did == wanted and (place == step or (kind == "kept" and place < step)):
                flags[unit] = flags[unit] | some if unit in flags else some
        among, of_sequence = segments.mask, sequences.count
        if kind == "kept":
            among, of_sequence = outcome.finite, sequences.finite
        if flags.keys() == {"sequence"}:
            count = (flags["sequence"] * of_sequence).sum() * counts_sequences
        else:
            expanded = (segments.expand_to_tokens(unit, some) for unit, some in flags.items())
            count = _count(functools.reduce(operator.or_, expanded, torch.zeros_like(among)) & among)
        yield finite - count if kind == "kept" else count


def _count(flags: Tensor) -> Tensor:
    """[T] bool -> [] float64, how many local tokens have the flag."""
    return as_numbers(flags, torch.float32).sum().double()


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
    high, low, double, aged = (torch.nn.functional.pad(row, (0, 1), value=-math.inf) for row in rows)
    log_sums = torch.stack([double.logsumexp(0), high.logsumexp(0)])
    return sums, [high.amax(), low.amax(), aged.amax()], log_sums
