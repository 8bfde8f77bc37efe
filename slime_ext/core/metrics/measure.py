"""Turns the tokens of one micro-batch into numbers that add up.

``measure`` is a pure function of tensors. Shapes depend only on the correction, the number of operations is
constant, and nothing here waits for the device.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from slime_ext.core.metrics.layout import (
    AGES,
    CURVE_BINS,
    CURVE_COLUMNS,
    DIFFERING,
    HIGHEST,
    HISTOGRAM,
    LOG_PROBABILITIES,
    LOG_SUMS,
    POSITIONS,
    TAIL,
    EffectCount,
    MetricsLayout,
)
from slime_ext.core.state import Outcome, SequenceStatistics
from slime_ext.core.tokens import Support, Tokens
from slime_ext.ops.divergences import k3
from slime_ext.ops.segments import Segments, as_numbers, selected, to_device

# Larger ratios and weights count as this number in sums, so that the squares of 1e8 tokens do not overflow.
LARGEST = {torch.float32: 1e15, torch.float64: 1e140}
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
    """Adds up what one micro-batch contributes to the metrics of its optimizer step.

    Args:
        outcome: from the correction, called with ``observe=True``.
        surrogate_clipped: [T] bool, where the surrogate clipped; None for the host's loss.
        terms: [T] for each loss term, nats; 0 where it adds nothing.
        counts_sequences: True on only one of the ranks that share sequences.
    """
    assert outcome.sequences is not None
    log_ratio, counted, mask = outcome.log_ratio, outcome.finite, tokens.segments.mask
    behavior = tokens.behavior.detach().to(log_ratio.dtype)
    most = LARGEST[log_ratio.dtype]
    weight = outcome.weights.clamp(max=most)
    ratio_minus_one = log_ratio.expm1()
    divergence = k3(log_ratio, ratio_minus_one).clamp(max=most)
    ratio_minus_one = ratio_minus_one.clamp(max=most)

    # Beside the name of each sum is the mask or the number that is added up. A row of tokens is freed as soon
    # as it is summed, because the rows of a long micro-batch would fill the device.
    counts = {
        "counted": counted.sum(),
        "kept": outcome.keep.sum(),
        "clipped": (outcome.clipped & mask).sum(),
        **{effect.name: row.sum() for effect, row in _affected(outcome, layout.effects, tokens.segments)},
    }
    if layout.differing:  # two float32 numbers are equal exactly if their difference is 0
        counts[DIFFERING] = log_ratio.count_nonzero()
    numbers = {
        "log_behavior": selected(behavior, counted).sum(),
        "k3": divergence.sum(),
        "ratio_minus_one": ratio_minus_one.sum(),
        "ratio_minus_one_squared": ratio_minus_one.square().sum(),
        "weight": weight.sum(),
        "weight_squared": weight.square().sum(),
    }
    none = torch.zeros((), dtype=torch.float64, device=mask.device)
    wide = {
        "surrogate_clipped": none if surrogate_clipped is None else surrogate_clipped.sum().double(),
        **{name: term.sum(dtype=torch.float64) for name, term in zip(layout.terms, terms, strict=True)},
    }
    if layout.head:
        wide[TAIL] = _missing_probability(tokens, outcome).sum()
    of_sequences, sequence_highest, log_sums = _of_sequences(
        outcome.sequences, tokens, counts_sequences=counts_sequences
    )
    sums = _by_name(counts) | _by_name(numbers) | wide | of_sequences

    parts = [torch.stack([sums[name] for name in layout.names])]
    # A token without a finite log-prob has l = 0. ``totals.reduce`` takes it out of the bin around 0.
    parts += _sums_by_bin(HISTOGRAM.keys(log_ratio), [None], HISTOGRAM.size)
    if layout.curves:
        rows = {
            "counted": as_numbers(counted, log_ratio.dtype),
            "kept": as_numbers(outcome.keep, log_ratio.dtype),
            "k3": divergence,
            "ratio_minus_one": ratio_minus_one,
            "weight": weight,
        }
        parts += _curves(tokens, behavior, [rows[name] for name in CURVE_COLUMNS])
    if tokens.segments.size:
        largest = torch.where(counted, log_ratio, -torch.inf).amax()
        smallest = torch.where(counted, log_ratio, torch.inf).amin()
        # The largest weight is not clamped, so that an infinite weight shows.
        highest = torch.stack([largest, -smallest, outcome.weights.amax()]).double()
    else:
        highest = sequence_highest.new_full((3,), -torch.inf)
    return StepSums(torch.cat(parts), torch.cat([highest, sequence_highest]), log_sums)


def _by_name(sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Converts sums of one dtype to float64."""
    return dict(zip(sums, torch.stack([*sums.values()]).double().unbind(), strict=True))


def _affected(
    outcome: Outcome, effects: Sequence[EffectCount], segments: Segments
) -> Iterator[tuple[EffectCount, Tensor]]:
    """Yields each effect and the mask [T] of the tokens that it counts.

    "clipped" and "rejected" look at one step alone; "kept" looks at that step and all earlier ones.
    """
    acted: dict[tuple[int, str], Tensor] = {}
    for step, kind, unit, flags in outcome.step_effects:
        row, join = segments.expand_to_tokens(unit, flags), operator.and_ if kind == "kept" else operator.or_
        acted[step, kind] = join(acted[step, kind], row) if (step, kind) in acted else row
    nowhere = torch.zeros_like(segments.mask)
    for effect in effects:
        if effect.kind == "kept":
            so_far = (row for (step, kind), row in acted.items() if kind == "kept" and step <= effect.step)
            yield effect, functools.reduce(operator.and_, so_far, outcome.finite)
        elif effect.kind == "rejected":
            yield effect, segments.mask & ~acted.get((effect.step, "kept"), segments.mask)
        else:
            yield effect, segments.mask & acted.get((effect.step, "clipped"), nowhere)


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
    statistics: SequenceStatistics, tokens: Tokens, *, counts_sequences: bool
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Adds up the numbers of all sequences with response tokens.

    On a rank that does not count sequences, it adds up none. Returns the sums of ``PER_SEQUENCE``, four
    maxima and two logarithms of sums.
    """
    log_ratio, count = statistics.log_ratio, statistics.count
    there = count > 0 if counts_sequences else torch.zeros_like(statistics.keep)
    unknown = torch.full_like(count, torch.nan)
    age, age_steps = (unknown if x is None else x.to(unknown) for x in (tokens.ages, tokens.age_steps))
    ages = torch.stack([age, age_steps])
    aged, aged_steps = (there & ~ages.isnan()).unbind()
    counts = {
        "sequences": there,
        "kept_sequences": there & statistics.keep,
        "aged": aged,
        "aged_steps": aged_steps,
    }
    numbers = {
        "log_ratio": (there, log_ratio),
        "response": (there, count),
        "age": (aged, age),
        "age_steps": (aged_steps, age_steps),
    }
    extremes = [
        *((there, x) for x in (2 * log_ratio, log_ratio, -log_ratio)),
        *((aged, age), (aged_steps, age_steps)),
    ]
    masks, values = (torch.stack(rows) for rows in zip(*numbers.values(), *extremes, strict=True))
    # On a rank that holds no sequence, the padding makes each maximum -inf.
    highest = pad(torch.where(masks, values, -torch.inf)[len(numbers) :], (0, 1), value=-torch.inf)
    sums = torch.where(masks, values, 0)[: len(numbers)].sum(1)
    of_counts = torch.stack([*counts.values()]).sum(1).double()
    named = dict(zip((*numbers, *counts), torch.cat([sums, of_counts]).unbind(), strict=True))
    return named, highest[1:].amax(1), highest[:2].logsumexp(1)


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


def _sums_by_bin(index: Tensor, rows: Sequence[Tensor | None], bins: int) -> Tensor:
    """Adds up K rows [T] by bin: [K, bins] float64.

    A row of None counts tokens.
    """
    if index.device.type == "cpu":  # elsewhere bincount would wait for the device
        weights = (None if row is None else row.double() for row in rows)
        return torch.stack([torch.bincount(index, some, bins).double() for some in weights])
    return _scattered(index.long(), rows, bins)


def _scattered(index: Tensor, rows: Sequence[Tensor | None], bins: int) -> Tensor:
    """Adds up rows like ``_sums_by_bin``, but on a GPU.

    On a GPU, atomic adds to the same bin collide. So each bin has several counters (lanes). Token i uses lane
    i mod lanes, and the lanes are added at the end. Atomic adds have no fixed order, so the last bit of a sum
    may differ from run to run.
    """
    lanes = max(COUNTERS // bins, 1)
    even = index.shape[0] // lanes * lanes
    ones = torch.ones(1, dtype=torch.float64, device=index.device).expand(index.shape)
    table = torch.zeros(len(rows), bins, lanes, dtype=torch.float64, device=index.device)
    for sums, row in zip(table, rows, strict=True):
        row = ones if row is None else row.double()
        sums.scatter_add_(0, index[:even].view(-1, lanes), row[:even].view(-1, lanes))
        sums[:, 0].scatter_add_(0, index[even:], row[even:])
    return table.sum(2)
