"""Collects what detectors read besides numbers and curves.

These are means with their errors, counts of odd values, shifted log-probs, weight versions, kept sets,
experts and dropped samples. All of it adds up over rollouts and processes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from statistics import median
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from slime_ext.tools.analysis.measures.by_sample import BySample
from slime_ext.tools.analysis.measures.estimators import Estimators
from slime_ext.tools.analysis.measures.histogram import Histogram
from slime_ext.tools.analysis.measures.shared_by import SharedBy
from slime_ext.tools.analysis.measures.shifts import SHIFTS, aligned, explains, moved_turns, shifted_sums
from slime_ext.tools.analysis.measures.sums import Sums
from slime_ext.tools.analysis.measures.versions import VersionSums, by_version
from slime_ext.tools.analysis.records import DumpedRollout
from slime_ext.tools.analysis.tables import Additive, zeros

QUANTITIES = ("ratio_minus_one", "log_ratio", "absolute", "surprise")
LARGEST_RATIO = 10.0  # larger ratios count as this, so that no single token determines a mean
EXACT = 1e-4  # nats; rounding moves equal log-probs by less
ZERO = 1e-3  # nats; a log-prob that is renormalised to a single token is closer to 0
UNLIKELY = -2.0  # nats; top-p above 0.14 never keeps such a token alone
SURE_OF = -0.01  # nats; a policy that is as sure as this seldom has a log-prob of exactly 0
DOUBTED = -0.25  # nats; if one side is sure, rounding to bfloat16 alone leaves the other above this
MIXER = 0x1E3779B97F4A7C15  # an odd number with irregular bits, for hashes
BOTH_CACHED = 50  # least tokens in a rollout, with and without a cached prefix
TOP = 0.01  # share of the tokens, with the largest |l|, whose share of sum l^2 is kept
KINDS = 8  # sentinels of which a part of a rollout keeps the counts
ABOUT = ("length", "reward", "position", "age")


class Mean(NamedTuple):
    """A mean over tokens with its standard error; only tokens of the same sequence may be dependent."""

    value: float
    error: float
    count: int

    @property
    def z(self) -> float:
        """The number of standard errors between the mean and 0."""
        return (
            self.value / self.error if self.error else math.copysign(math.inf, self.value) * bool(self.value)
        )


@dataclass
class Means(Additive):
    """The sums from which ``Mean`` follows.

    For each quantity these are sum a, sum a^2, sum a n, sum n and sum n^2 over sequences, where a is the sum
    of the quantity over a sequence of n tokens.
    """

    sums: Tensor = field(default_factory=lambda: zeros(len(QUANTITIES), 5))

    def add(self, part: DumpedRollout) -> None:
        """Adds the sequences of a part of a rollout."""
        count, absolute, _, log_ratio, *_ = part.columns
        ratio_minus_one = torch.expm1(part.log_ratio.clamp(max=math.log(LARGEST_RATIO)))
        *totals, n = part.segments.local_sums([ratio_minus_one.double(), log_ratio, absolute, count])
        quantities = [(total, n) for total in totals]
        if part.entropy is not None:
            known = part.finite & part.entropy.isfinite()
            surprise = torch.where(known, -part.behavior - part.entropy, 0)
            quantities.append(tuple(part.segments.local_sums([surprise, known.float()])))
        for row, (total, n) in enumerate(quantities):
            sums = (total.sum(), total.square().sum(), (total * n).sum(), n.sum(), n.square().sum())
            self.sums[row] += torch.stack(sums)

    def __getitem__(self, name: str) -> Mean:
        total, square, cross, n, n_square = self.sums[QUANTITIES.index(name)].tolist()
        if not n:
            return Mean(0.0, 0.0, 0)
        mean = total / n
        return Mean(mean, math.sqrt(max(square - 2 * mean * cross + mean * mean * n_square, 0)) / n, int(n))


class RolloutSummary(NamedTuple):
    """Size and mismatch of one rollout."""

    rollout_id: int
    tokens: int
    absolute: float  # mean |l|
    k3: float
    top_share: float  # of sum l^2, in the 1% of tokens with the largest |l|
    median: float  # of |l|
    version: int = -1  # newest version that sampled, -1 if unknown
    length: float = 0.0  # mean response length
    pushed: float | None = None  # mean |log behavior - log first policy|, None if unknown
    moved: float | None = None  # mean |log proximal - log first policy|
    reward: float | None = None  # mean over sequences
    error: float = 0.0  # standard error of ``reward``
    surprise: float = 0.0  # mean -log behavior
    certainty: Sequence[Sequence[float]] = ()  # number and sum |l| of the tokens, by bin of -log behavior
    wobble: float = 0.0  # standard error of log(mean k3), from samples drawn again
    truncated: float = 0.0  # share of the samples that were cut at the limit
    equal: float = 0.0  # share of the tokens whose log-prob is that of the first policy, bit by bit
    sway: float = 0.0  # standard error of log(mean |l|)
    length_error: float = 0.0  # standard error of ``length``, over prompts where they are known
    truncated_error: float = 0.0  # standard error of ``truncated``, over prompts where they are known
    independent: int = 0  # number of the prompts, or of the samples where prompts are not known


@dataclass
class DetectorStatistics(Additive):
    """Counts and sums of a run that detectors read besides numbers and curves.

    Args:
        vocabulary: size of the vocabulary; None: unknown.
    """

    vocabulary: InitVar[int | None] = None
    means: Means = field(default_factory=Means)
    # Counts of _odd_values and _outside; of turns, and of "moved" turns (see shifts.moved_turns); of samples;
    # and retold and left_out of DumpedRollout.
    counts: Counter[str] = field(default_factory=Counter)
    shifts: Tensor = field(default_factory=lambda: zeros(len(SHIFTS), 4))  # sums of shifted_sums
    shifted: Tensor = field(default_factory=lambda: zeros(len(SHIFTS)))  # sequences that a shift explains
    # Count, sum l, sum |l| and sum k3 of tokens after a change of weights inside their response, and of
    # tokens of the same versions in responses without a change.
    switched: Tensor = field(default_factory=lambda: zeros(2, 4))
    versions: list[VersionSums] = field(default_factory=list)
    rollouts: list[RolloutSummary] = field(default_factory=list)
    shared: SharedBy = field(default_factory=SharedBy)
    samples: BySample = field(default_factory=BySample)
    estimators: Estimators = field(default_factory=Estimators)

    def __post_init__(self, vocabulary: int | None) -> None:
        self.ids = vocabulary

    def add(self, part: DumpedRollout) -> dict[int, Tensor]:
        """Adds the tokens of a part of a rollout. Returns its sums by version."""
        self.means.add(part)
        self.counts.update(_odd_values(part))
        self.shared.add(part)
        self.samples.add(part)
        shifts = torch.zeros(part.count, dtype=torch.int64)
        for row, shift in enumerate(SHIFTS):
            sums, is_explained = shifted_sums(part, shift)
            self.shifts[row] += sums.sum(1)
            self.shifted[row] += is_explained.sum()
            if explains(sums.sum(1)):
                shifts[:] = shift
            shifts[is_explained] = shift
        self.counts["turns"] += int(part.segments.turn_ids[-1:].sum())
        self.counts["moved"] += moved_turns(part)
        if part.tokens is not None and self.ids is not None:
            self.counts.update(_outside(part, self.ids))
        if part.versions is None:
            return {}
        return by_version(aligned(part, shifts) if shifts.any() else part)

    def close(
        self, rollout: DumpedRollout, sums: Sums, versions: dict[int, Tensor], certainty: Tensor
    ) -> None:
        """Ends a rollout: adds what is known only after all of its parts were added.

        Args:
            sums, versions, certainty: of this rollout alone.
        """
        (wobble, sway), size = self.samples.close(rollout), max(rollout.count, 1)
        is_cut = [status == "truncated" for status in rollout.statuses or [""] * rollout.count]
        self.estimators.add(rollout)
        if sums["finite"]:
            self.rollouts.append(
                RolloutSummary(
                    rollout.rollout_id,
                    int(sums["finite"]),
                    sums.mean("absolute") or 0.0,
                    _k3(sums, versions),
                    *_tail(sums.histogram),
                    max(versions, default=-1),
                    sums.mean("length", "sequences") or 0.0,
                    sums.mean("pushed", "referenced"),
                    sums.mean("moved", "referenced"),
                    sums.mean("reward", "rewarded"),
                    _error(sums["rewarded"], sums["reward"], sums["reward_squared"]),
                    -(sums.mean("behavior") or 0.0),
                    certainty.tolist(),
                    wobble,
                    sum(is_cut) / size,
                    sums.mean("unmoved", "referenced") or 0.0,
                    sway,
                    _error_of_mean(rollout, rollout.lengths)[0],
                    *_error_of_mean(rollout, is_cut),
                )
            )
        newest = rollout.newest or 0
        for version, (every, after, pure) in sorted(versions.items()):
            count, log_ratio, absolute, near, *squares = every.tolist()
            sums = int(count), log_ratio, absolute, near, newest - version, *squares
            self.versions.append(VersionSums(rollout.rollout_id, version, *sums))
            if after[0]:
                self.switched += torch.stack([after, pure])[:, :4]
        for name in ("retold", "left_out"):
            self.counts[name] += getattr(rollout, name)
        self.counts["samples"] += rollout.count

    @property
    def top_share(self) -> float:
        """The share of sum l^2 that the 1% of tokens with the largest |l| hold; the median over rollouts."""
        return median(rollout.top_share for rollout in self.rollouts) if self.rollouts else 0.0

    def evened(self) -> list[float]:
        """Returns mean |l| of each rollout, adjusted to the run's mix of certainty.

        So prompts with certain answers do not make a rollout look better.
        """
        if not self.rollouts:
            return []
        count, absolute = torch.tensor([s.certainty for s in self.rollouts], dtype=torch.float64).unbind(2)
        usual = absolute.sum(0) / count.sum(0).clamp_min(1)
        mean = absolute.sum() / count.sum().clamp_min(1)
        return (mean * absolute.sum(1) / (count @ usual).clamp_min(1e-30)).tolist()

    def merge(self, other: DetectorStatistics) -> None:
        """Adds the statistics of other rollouts."""
        super().merge(other)
        self.rollouts.sort(key=lambda s: s[:2])


def _k3(sums: Sums, versions: dict[int, Tensor]) -> float:
    """Returns mean k3 of a rollout, by versions if known, because they undo a shift of log-probs."""
    count, _, _, near, *_ = sum((every for every, *_ in versions.values()), zeros(7)).tolist()
    return near / count if count else sums["near"] / sums["finite"]


def _error(count: float, total: float, square: float) -> float:
    if not count:
        return 0.0
    mean = total / count
    return math.sqrt(max(square / count - mean * mean, 0.0) / count)  # ** would raise on overflow


def _error_of_mean(rollout: DumpedRollout, values: Sequence[float]) -> tuple[float, int]:
    """Returns the standard error of a mean over samples, and the number of independent values.

    The samples are those with a response. Answers to one prompt count as one value.
    """
    means = torch.tensor(values, dtype=torch.float64)[rollout.responding]
    if rollout.groups is not None:
        _, index, counts = torch.tensor(rollout.groups)[rollout.responding].unique(
            return_inverse=True, return_counts=True
        )
        means = torch.zeros(len(counts), dtype=torch.float64).index_add_(0, index, means) / counts
    return float(means.std()) / math.sqrt(len(means)) if len(means) > 1 else 0.0, len(means)


def _outside(part: DumpedRollout, vocabulary: int) -> dict[str, int]:
    is_outside = part.mask & ((part.tokens >= vocabulary) | (part.tokens < -1))  # -1: not in the dump
    return {"beyond": int(is_outside.count_nonzero()), "beyond_in": int(part.samples_with(is_outside).sum())}


def _odd_values(part: DumpedRollout) -> dict[str, int]:
    """Counts tokens and sequences with odd values.

    A token is in doubt if the trainer's log-prob is below -0.25, and unlikely if it is below -2:

        above, below: l above 1e-4, or below -1e-4
        zeros: behavior log-prob of exactly 0
        doubted: zeros in doubt
        filled: zeros that are unlikely
        padded: unlikely zeros beside another zero
        sure: unlikely, with a behavior log-prob above -0.01 but not 0
        recorded_doubted, recorded_unlikely: tokens in doubt, or unlikely, that are not zeros
    """
    log_ratio, mask, is_unlikely = part.log_ratio, part.mask, part.proximal < UNLIKELY
    zero = mask & (part.behavior == 0)
    both = zero & part.finite
    beside = torch.zeros_like(zero)
    neighbour = zero[1:] & zero[:-1] & (part.segments.ids[1:] == part.segments.ids[:-1])
    beside[1:] |= neighbour
    beside[:-1] |= neighbour
    return counted(
        above=log_ratio > EXACT,
        below=log_ratio < -EXACT,
        zeros=both,
        doubted=both & (part.proximal < DOUBTED),
        filled=both & is_unlikely,
        sure=part.finite & ~zero & (part.behavior > SURE_OF) & is_unlikely,
        recorded_doubted=part.finite & ~zero & (part.proximal < DOUBTED),
        recorded_unlikely=part.finite & ~zero & is_unlikely,
        padded=beside & is_unlikely,
    )


def counted(**flags: Tensor) -> dict[str, int]:
    """Returns how many flags of each name are set."""
    return {name: int(of_one.count_nonzero()) for name, of_one in flags.items()}


def _tail(histogram: Histogram) -> tuple[float, float]:
    """Returns the share of sum l^2 in the top 1% of tokens, and the median |l|."""
    counts, sizes = histogram.sizes()
    reached, squares = ([0, *x.flip(0).cumsum(0).tolist()] for x in (counts, counts * sizes.square()))
    top = numpy.interp(TOP * reached[-1], reached, squares)  # all tokens of a bucket count alike
    middle = float(sizes[int((counts.cumsum(0) < counts.sum() / 2).sum())])
    return (float(top) / squares[-1] if squares[-1] else 0.0), middle
