"""From the tokens of one micro-batch to numbers that add up, where numpy sees them: what ``measure`` does
elsewhere, in few calls and few passes.

Sums over tokens are of two levels: blocks of 256 in the dtype of the log-ratios (float32 or more), the blocks
in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from slime_ext.correction import Outcome, Tokens
from slime_ext.metrics.bins import Places, kept_by_place, places_of, sums_by_place
from slime_ext.metrics.columns import BLOCK, LARGEST
from slime_ext.metrics.layout import FIRST, SHIFT, SIDE, Layout
from slime_ext.ops import arrays

MOST = {np.dtype(str(dtype).removeprefix("torch.")): most for dtype, most in LARGEST.items()}
NO_SUMS, NONE = (0.0,) * 5, (-math.inf,) * 3
SIGN = 1 << (31 - SHIFT)  # the first bit of a number, among those that say its bin


class Sequences(NamedTuple):
    """What is measured of sequences, [S] each, the same on every rank that shares them."""

    log_ratio: np.ndarray  # float64, nats
    count: np.ndarray  # float64, response tokens
    keep: np.ndarray  # bool
    ages: np.ndarray | None  # float64; NaN where unknown


class Seen(NamedTuple):
    """What is measured of tokens, [T] each, and of their sequences."""

    log_ratio: np.ndarray  # nats; 0 at tokens that are not finite
    excess: np.ndarray  # e^l - 1; is written to
    behavior: np.ndarray  # log-probs, nats; anything at tokens that are not finite
    weights: np.ndarray  # 0 at rejected and masked tokens
    finite: np.ndarray  # bool
    keep: np.ndarray  # bool
    count: int  # of the finite tokens
    acted: Sequence[float]  # response tokens that each of the layout's flags asks for
    sequences: Sequences
    places: Places | None = None  # of the curves
    # [S] each, where no token was rejected alone: the weight of a sequence's tokens, and how many there are.
    shared: tuple[np.ndarray, np.ndarray] | None = None
    surrogate_clipped: float = 0  # tokens


Three = tuple[np.ndarray, np.ndarray, np.ndarray]


def on_cpu(
    tokens: Tokens, outcome: Outcome, layout: Layout, surrogate_clipped: Tensor | None, *, first: bool
) -> Three:
    """As ``measure`` of an observed outcome: the three parts of ``Measured``."""
    own = (outcome.log_ratio, outcome.excess, tokens.behavior.detach().to(outcome.log_ratio.dtype))
    log_ratio, excess, behavior = map(arrays.of, own)
    weights, finite, keep = map(arrays.of, (outcome.weights, outcome.finite, outcome.keep))
    acted = _acted(outcome, arrays.of(tokens.segments.mask), layout)
    of = (outcome.sequences.log_ratio, outcome.sequences.count, outcome.sequences.keep)
    sequences = Sequences(*map(arrays.of, of), None if tokens.ages is None else arrays.of(tokens.ages))
    places = places_of(tokens, outcome.log_ratio.dtype) if layout.curves else None
    clipped = 0 if surrogate_clipped is None else np.count_nonzero(arrays.of(surrogate_clipped))
    count = np.count_nonzero(finite)
    seen = Seen(log_ratio, excess.copy(), behavior, weights, finite, keep, count, acted, sequences, places)
    with arrays.quiet():
        return measured(seen._replace(surrogate_clipped=clipped), first=first)


def measured(seen: Seen, *, first: bool) -> Three:
    """What a micro-batch adds to the metrics of the optimizer step, in the three parts of ``Measured``; may
    overflow: the caller is ``quiet``.

    Args:
        first: whether this rank is the one that counts the sequences it shares with others.
    """
    log_ratio, per_sequence, of_sequences, log_sums = _of_sequences(seen.sequences, first=first)
    high, low = _ends(seen)
    heaviest = np.maximum.reduce(seen.weights, initial=-math.inf)
    (*before, behavior, excess_squared, weight_squared), rows = _columns(seen, high, heaviest)
    kept, curves = _kept(seen, rows)
    numbers = (*kept, *before, log_ratio, behavior, excess_squared, weight_squared)
    numbers += (*seen.acted, seen.surrogate_clipped, *per_sequence)
    sums = np.concatenate([numbers, *_histogram(seen.log_ratio), *curves])
    return sums, np.array([high, -low, heaviest, *of_sequences]), np.array(log_sums)


def _columns(seen: Seen, highest: float, heaviest: float) -> tuple[Sequence[float], Three]:
    """The sums of excess, weight, k3 and log behavior, and of the first two squared; [T] each, k3, excess and
    weights as they were added."""
    excess, weights, most = seen.excess, seen.weights, MOST[seen.excess.dtype]
    if not highest < math.log(most):
        np.minimum(excess, most, out=excess)
    if not heaviest <= most:
        weights = np.minimum(weights, most)
    whole, k3 = seen.count == len(seen.finite), excess - seen.log_ratio
    behavior = seen.behavior if whole else arrays.masked(seen.finite, seen.behavior)
    if seen.shared is None:
        rows = (behavior, k3, excess, weights)
        of_behavior, of_k3, of_excess, of_weight, *squares = _sums(rows, 2)
    else:
        of_behavior, of_k3, of_excess, of_squares = _sums((behavior, k3, excess), 1)
        of_weight, *squares = _of_shared(*seen.shared, most)
        squares.insert(0, of_squares)
    return (of_excess, of_weight, of_k3, of_behavior, *squares), (k3, excess, weights)


def _of_shared(weights: np.ndarray, count: np.ndarray, most: float) -> tuple[float, float]:
    """The sums of weights and of their squares."""
    weights = np.minimum(weights, most)
    return weights @ count, np.einsum("s,s,s->", weights, weights, count)


def _sums(rows: Sequence[np.ndarray], squared: int) -> np.ndarray:
    """[R + squared] float64, the sums of the rows, and of the squares of the last, of which none is written
    down."""
    size, many = len(rows[0]), len(rows)
    whole = size - size % BLOCK
    sums = arrays.new((many + squared, -(-size // BLOCK)), rows[0].dtype)
    of_blocks, blocks = sums[:, : whole // BLOCK], [row[:whole].reshape(-1, BLOCK) for row in rows]
    for out, row in zip(of_blocks, blocks, strict=False):
        np.einsum("nb->n", row, out=out)
    for out, row in zip(of_blocks[many:], blocks[-squared:], strict=True):
        np.einsum("nb,nb->n", row, row, out=out)
    if whole < size:
        rest = np.stack([row[whole:] for row in rows])
        np.einsum("rn->r", rest, out=sums[:many, -1])
        np.einsum("rn,rn->r", rest[-squared:], rest[-squared:], out=sums[many:, -1])
    return np.add.reduce(sums, 1, np.float64)


def _ends(seen: Seen) -> tuple[float, float]:
    """The largest and the smallest log-ratio of finite tokens; NaN does not count; -inf and inf for none."""
    values, whole = seen.log_ratio, seen.count == len(seen.finite)
    high = np.maximum.reduce(values, initial=-math.inf)
    low = np.minimum.reduce(values, initial=math.inf)
    if high > 0 > low or (whole and high >= low):  # both are a finite token's, and none is NaN
        return high, low
    high = np.fmax.reduce(values, where=seen.finite, initial=-math.inf)
    return high, np.fmin.reduce(values, where=seen.finite, initial=math.inf)


def _kept(seen: Seen, rows: Sequence[np.ndarray]) -> tuple[Sequence[float], Sequence[np.ndarray]]:
    """How many tokens are finite and how many are kept; the numbers of the curves, in parts."""
    if seen.places is None:
        return (seen.count, np.count_nonzero(seen.keep)), ()
    finite, keep, *rows = map(torch.from_numpy, (seen.finite, seen.keep, *rows))
    kept, curves = sums_by_place(seen.places, kept_by_place(seen.places, finite, keep), rows)
    return arrays.of(kept), [arrays.of(curve) for curve in curves]


def _acted(outcome: Outcome, mask: np.ndarray, layout: Layout) -> list[int]:
    """Bit 0 stands for every token without a finite log-prob, whether what acted carries it or not."""
    acted, lost = arrays.of(outcome.acted), np.logical_not(arrays.of(outcome.finite))
    carried = int(np.iinfo(acted.dtype).max)  # a byte has none of the higher bits
    found = {}
    for bits in {bits for _, bits in layout.flags}:
        flags = (acted & (bits & carried)) > 0
        found[bits] = np.count_nonzero(((flags | lost) if bits & 1 else flags) & mask)
    return [found[bits] for _, bits in layout.flags]


def _histogram(log_ratio: np.ndarray) -> Sequence[np.ndarray]:
    """Tokens per bin of |l|, see ``measure``: BINS numbers in parts, those above 0 first."""
    index = (log_ratio.astype(np.float32, copy=False).view(np.uint32) >> SHIFT).view(np.int32)
    sides = arrays.of(torch.bincount(torch.from_numpy(index), minlength=2 * SIGN)).reshape(2, SIGN)
    beyond = np.add.reduce(sides[:, FIRST + SIDE :], 1)
    above, below = sides[:, FIRST : FIRST + SIDE]
    return above, beyond[:1], below, beyond[1:]


def _of_sequences(
    seen: Sequences, *, first: bool
) -> tuple[float, Sequence[float], Sequence[float], Sequence[float]]:
    """The sum of log-ratios; sums, maxima and logarithms of sums over the sequences that have response
    tokens."""
    there = seen.count > 0
    if not first or not len(there):
        return 0.0, NO_SUMS, NONE[:3], NONE[:2]
    rows, oldest = [seen.log_ratio, seen.count, there, seen.keep], -math.inf
    if seen.ages is not None:
        known = there & (seen.ages == seen.ages)
        rows += [known, np.where(known, seen.ages, 0.0)]
        oldest = np.maximum.reduce(seen.ages, where=known, initial=-math.inf)
    log_ratio, *sums = arrays.table(rows) @ there.astype(np.float64)
    own = np.where(there, seen.log_ratio, -math.inf)
    high = np.maximum.reduce(own)
    low = np.minimum.reduce(seen.log_ratio, where=there, initial=math.inf)
    shift = high if math.isfinite(high) else 0.0
    ratios = np.exp(own - shift)
    log_sums = np.log(ratios @ ratios) + 2 * shift, np.log(np.add.reduce(ratios)) + shift
    return log_ratio, (*sums, *NO_SUMS[len(sums) :]), (high, -low, oldest), log_sums
