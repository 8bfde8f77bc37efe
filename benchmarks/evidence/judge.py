"""Judges the runs of a panel: which arms collapsed or failed, and how surely."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.evidence.rows import Row
from benchmarks.evidence.settings import Judged, Primary, Scored, base, beside

EXACT, UNCORRECTED = "A", "B"
Rows = Mapping[str, Mapping[int, Row]]  # arm, or arm@variant -> seed -> row
RECORDED = 1e-4  # the last decimal of a score in a line; two rounded scores differ by at most this too much


@dataclass(frozen=True)
class Verdict:
    """The verdict on one arm.

    Attributes:
        collapsed: seeds that lost half of their peak, never began to learn, or diverged.
        failed: seeds that collapsed, or ended too far below the exact sampler.
        rescued: seeds that ended near the exact sampler, or above it.
        end: mean held-out exact match at the end, and its 95% interval.
        gap: mean of end - the exact sampler's end of the same seed, and its 95% interval.
        gain: mean of end - the uncorrected end of the same seed, and its 95% interval.
        p: p of the panel's test against the uncorrected arm, after Holm; None if it was not compared.
    """

    seeds: int
    collapsed: list[int]
    failed: list[int]
    rescued: list[int]
    end: tuple[float, float, float]
    gap: tuple[float, float, float] | None
    gain: tuple[float, float, float] | None
    p: float | None = None


def judge(rows: Rows, judged: Judged, by_ends: bool = False) -> dict[str, Verdict]:
    """Returns the verdict on each arm. Differences use the seeds that both arms have run.

    Args:
        by_ends: whether the test compares ends of the same seeds; else it compares numbers of failed seeds.
    """

    def of(cell: str, arm: str) -> Mapping[int, Row]:
        return rows.get(beside(cell, arm), {})

    verdicts = {
        cell: _verdict(seeds, of(cell, EXACT), of(cell, UNCORRECTED), judged) for cell, seeds in rows.items()
    }
    compared = [cell for cell in verdicts if base(cell) != UNCORRECTED and of(cell, UNCORRECTED)]
    if by_ends:
        raw = [randomised(gaps(rows[cell], of(cell, UNCORRECTED)).values()) for cell in compared]
    else:
        raw = [_p(verdicts[cell], verdicts[beside(cell, UNCORRECTED)]) for cell in compared]
    corrected = dict(zip(compared, holm(raw), strict=True))
    return {cell: Verdict(**{**vars(v), "p": corrected.get(cell)}) for cell, v in verdicts.items()}


@dataclass(frozen=True)
class Compared:
    """The result of a panel's primary comparison.

    Attributes:
        difference: mean over seeds of (end of the first arm - end of the second), and its 95% interval.
        p: p of the randomisation test of pairs.
        equal: whether the 90% interval of the difference lies within the margin.
    """

    seeds: int
    difference: tuple[float, float, float]
    p: float
    equal: bool


def compare(rows: Rows, primary: Primary, judged: Judged) -> Compared | None:
    """Makes the primary comparison on the seeds that all cells have run. Returns None if there are none."""
    ones, others = (best_of(rows, cells, primary.scored) for cells in primary.cells(rows))
    differences = [one - others[seed] for seed, one in ones.items() if seed in others]
    if not differences:
        return None
    _, low, high = bootstrap(differences, judged.resamples, share=0.9)
    equal = -primary.margin < low and high < primary.margin
    return Compared(
        len(differences), bootstrap(differences, judged.resamples), randomised(differences), equal
    )


def best_of(rows: Rows, cells: Sequence[str], whose: Scored = "served") -> dict[int, float]:
    """Returns seed -> end of the best cell. All other seeds choose the cell.

    A seed's best cell has the highest mean over the other seeds that all cells have run; of equal cells it is
    the first. So a seed's luck does not choose its own cell.

    Source: leave-one-out choice, Stone 1974, J. Royal Statistical Society B 36, p. 111.
    """
    scores = {
        cell: {seed: score for seed, row in rows[cell].items() if (score := row.scored(whose)) is not None}
        for cell in cells
    }
    seeds = [seed for seed in scores[cells[0]] if all(seed in of for of in scores.values())] if cells else []
    scores_of_best = {}
    for seed in seeds:
        others = [other for other in seeds if other != seed]
        totals = {cell: sum(of[other] for other in others) for cell, of in scores.items()}
        equal = max(totals.values()) - RECORDED * len(others)
        scores_of_best[seed] = scores[next(cell for cell in cells if totals[cell] >= equal)][seed]
    return scores_of_best


@dataclass(frozen=True)
class Sloped:
    """The growth of an arm's gain with k3 over a panel's variants.

    Attributes:
        slope: slope of (end - end of the other arm) on log k3 of the other arm, within seeds, and its 95%
            interval over seeds. The unit is held-out share per e-fold of k3.
        p: p of the randomisation test of the seeds' parts of the slope.
    """

    seeds: int
    runs: int
    slope: tuple[float, float, float]
    p: float


def sloped(rows: Rows, arm: str, against: str, judged: Judged) -> Sloped | None:
    """Fits the slope over the variants that both arms have run. Returns None if no seed has two variants.

    With x = log k3 and y = gain of variant v of seed s: sum_sv (x - mean_s x) y / sum_sv (x - mean_s x)^2.
    Seeds are blocks, so an effect of a seed on all its variants cancels. The test changes the signs of the
    seeds' numerators.
    """
    points: dict[int, list[tuple[float, float]]] = {}
    for cell, seeds in rows.items():
        if base(cell) != arm:
            continue
        others = rows.get(beside(cell, against), {})
        for seed, gain in gaps(seeds, others).items():
            points.setdefault(seed, []).append((math.log(others[seed].k3 or math.nan), gain))
    parts = [_parts(of_seed) for of_seed in points.values() if len(of_seed) > 1]
    if not parts:
        return None
    runs = sum(len(of_seed) for of_seed in points.values() if len(of_seed) > 1)
    return Sloped(len(parts), runs, _ratio(parts, judged.resamples), randomised(part[0] for part in parts))


def _parts(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Returns a seed's numerator and denominator of the slope."""
    middle = sum(x for x, _ in points) / len(points)
    return sum((x - middle) * y for x, y in points), sum((x - middle) ** 2 for x, _ in points)


def _ratio(parts: Sequence[tuple[float, float]], resamples: int) -> tuple[float, float, float]:
    """Returns the ratio of the sums, and its 95% percentile interval over resampled seeds."""
    draw, ratios = random.Random(0), []
    for _ in range(resamples):
        above, below = zip(*draw.choices(parts, k=len(parts)), strict=True)
        ratios.append(sum(above) / sum(below))
    ratios.sort()
    low, high = (ratios[int(quantile * resamples)] for quantile in (0.025, 0.975))
    above, below = zip(*parts, strict=True)
    return sum(above) / sum(below), low, high


def _verdict(
    of: Mapping[int, Row], exact: Mapping[int, Row], uncorrected: Mapping[int, Row], judged: Judged
) -> Verdict:
    collapsed = [seed for seed, row in of.items() if _collapsed(row, exact.get(seed), judged)]
    below, gains = gaps(of, exact), gaps(of, uncorrected)
    return Verdict(
        seeds=len(of),
        collapsed=collapsed,
        failed=[s for s in of if s in collapsed or below.get(s, 0.0) <= -judged.worse_than_exact_by],
        rescued=[s for s, gap in below.items() if gap >= -judged.rescued_within],
        end=bootstrap([row.end for row in of.values()], judged.resamples),
        gap=bootstrap(list(below.values()), judged.resamples) if below else None,
        gain=bootstrap(list(gains.values()), judged.resamples) if gains else None,
    )


def gaps(of: Mapping[int, Row], other: Mapping[int, Row]) -> dict[int, float]:
    """Returns seed -> end of the first arm - end of the second.

    It has the seeds that both have run.
    """
    return {seed: row.end - other[seed].end for seed, row in of.items() if seed in other}


def _collapsed(row: Row, exact: Row | None, judged: Judged) -> bool:
    if row.stopped or fell(row.heldout, judged.below_own_peak, judged.for_steps, judged.peak_at_least):
        return True
    peak = max(value for _, value in row.heldout)
    return exact is not None and peak <= judged.below_end_of_exact * exact.end


def fell(curve: Sequence[tuple[int, float]], share: float, steps: int, least: float = 0.0) -> bool:
    """Whether a curve stays below `share` of its peak so far for `steps`.

    The curve has pairs (optimizer step, value).

    A peak below `least` does not count.

    >>> fell([(0, 0.1), (20, 0.8), (40, 0.3), (60, 0.2)], 0.5, 20)
    True
    >>> fell([(0, 0.1), (20, 0.8), (40, 0.3), (60, 0.7)], 0.5, 20)
    False
    """
    peak, since = 0.0, None
    for step, value in curve:
        peak = max(peak, value)
        since = (step if since is None else since) if peak >= least and value < share * peak else None
        if since is not None and step - since >= steps:
            return True
    return False


def _p(one: Verdict, other: Verdict) -> float:
    return fisher(len(one.failed), one.seeds, len(other.failed), other.seeds)


def fisher(a: int, of_a: int, b: int, of_b: int) -> float:
    """Returns the two-sided p of Fisher's exact test.

    p is the probability of a table at most as likely as this one, given the margins.

    Args:
        a, of_a: the number of trials with the outcome, and of all trials, in the first group.
        b, of_b: the same in the second group.

    Source: Fisher 1935, The Design of Experiments, chapter 2.

    >>> round(fisher(3, 4, 1, 4), 4)
    0.4857
    """
    both, total = a + b, of_a + of_b

    def probability(x: int) -> float:
        return math.comb(of_a, x) * math.comb(of_b, both - x) / math.comb(total, both)

    possible = [probability(x) for x in range(max(0, both - of_b), min(of_a, both) + 1)]
    return min(1.0, sum(p for p in possible if p <= probability(a) * (1 + 1e-9)))


def randomised(differences: Iterable[float]) -> float:
    """Returns the two-sided p of Fisher's randomisation test of pairs.

    p is the share of the 2^n choices of signs whose sum is at least as far from 0 as that of the differences.
    Sums that rounded scores cannot tell apart count as equally far.

    Source: Fisher 1935, The Design of Experiments, chapter 3.

    >>> randomised([0.1, 0.2, 0.3, 0.4])
    0.125
    """
    return _randomised(tuple(differences))


@functools.cache  # as of `bootstrap`
def _randomised(pairs: tuple[float, ...]) -> float:
    # Scores are shares of 128 questions, so sums often tie, and rounded scores part them. A pair whose sign
    # differs between two sums counts twice in their difference, and so does its error.
    least = abs(sum(pairs)) - 2 * RECORDED * len(pairs)
    # Sum pairs of 2^(n/2) sorted sums instead of 2^n, because 24 seeds would have 16 million.
    ones, others = (_signed_sums(half) for half in (pairs[::2], pairs[1::2]))
    below = np.searchsorted(others, -least - ones, "right")
    above = len(others) - np.searchsorted(others, least - ones, "left")
    return int((below + above).sum()) / (len(ones) * len(others)) if least > 0 else 1.0


def _signed_sums(values: Sequence[float]) -> np.ndarray:
    sums = np.zeros(1)
    for value in values:
        sums = np.concatenate([sums + value, sums - value])
    return np.sort(sums)


def holm(ps: Sequence[float]) -> list[float]:
    """Returns each p after Holm's step-down correction for the number of comparisons.

    Source: Holm 1979, Scandinavian Journal of Statistics 6, p. 65.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    corrected, largest = [0.0] * len(ps), 0.0
    for rank, place in enumerate(sorted(range(len(ps)), key=lambda i: ps[i])):
        largest = max(largest, min(1.0, (len(ps) - rank) * ps[place]))
        corrected[place] = largest
    return corrected


def bootstrap(
    values: Sequence[float], resamples: int, seed: int = 0, share: float = 0.95
) -> tuple[float, float, float]:
    """Returns the mean, and the ends of its bootstrap interval.

    The interval contains `share` of the means of `resamples` samples with replacement. By default, its ends
    are the 2.5% and 97.5% quantiles.

    Source: Efron 1979, Annals of Statistics 7, p. 1 (percentile interval).
    """
    return _bootstrapped(tuple(values), resamples, seed, share)


@functools.cache  # because pages, tables and tests ask for the same intervals
def _bootstrapped(
    values: tuple[float, ...], resamples: int, seed: int, share: float
) -> tuple[float, float, float]:
    n, numbers = len(values), np.array(values)
    sums = sum(numbers[drawn] for drawn in _drawn(n, resamples, seed))  # in the order of plain loops
    means = np.sort(sums / n)
    low, high = (float(means[int(quantile * resamples)]) for quantile in ((1 - share) / 2, (1 + share) / 2))
    return sum(values) / n, low, high


@functools.cache
def _drawn(n: int, resamples: int, seed: int) -> np.ndarray:
    """Which of n values each resample has, in columns; drawn once for all samples of n values."""
    draw = random.Random(seed)
    return np.array([draw.choices(range(n), k=n) for _ in range(resamples)]).T
