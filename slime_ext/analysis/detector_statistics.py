"""What detectors look at beside the numbers and the curves: means with their errors, shifted log-probs,
weight versions, zeros that stand for log-probs. All of it adds up over rollouts and processes."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from slime_ext.analysis.measures import PER_DECADE, SMALLEST, Sums
from slime_ext.analysis.records import DumpedRollout
from slime_ext.analysis.structure import Structure, tabulated
from slime_ext.ops.divergences import k3

SHIFTS = (-2, -1, 1, 2)
QUANTITIES = ("ratio_minus_one", "log_ratio", "absolute", "surprise")
LARGEST_RATIO = 10.0  # a ratio counts as this much at most, so that one token does not make a mean
FURTHEST = 5.0  # nats, and a log-ratio in k3 as this much
EXACT = 1e-4  # nats; what arithmetic alone does to equal log-probs stays below
UNLIKELY = -2.0  # nats; top-p above 0.14 leaves nothing that unlikely alone
CLOSER = 0.5  # a shift explains a difference when it takes away half of it,
SURE = 3.0  # and, in one sequence, when that is this many standard errors
SURE_OF = -0.01  # nats; a policy that is so sure is mostly not so sure that its log-prob is exactly 0
DOUBTED = -0.25  # nats; where one side is sure in bfloat16, rounding alone leaves the other above
TOP = 0.01  # the share of tokens whose part in sum l^2 is remembered


class Mean(NamedTuple):
    """A mean over tokens with its standard error, for tokens that depend on each other within a sequence
    and not beyond."""

    value: float
    error: float
    count: int

    @property
    def z(self) -> float:
        """How many standard errors it is away from 0."""
        return (
            self.value / self.error if self.error else math.copysign(math.inf, self.value) * bool(self.value)
        )


@dataclass
class Means:
    """The sums from which ``Mean`` follows: per quantity sum a, sum a^2, sum a n over sequences (a is the
    quantity's sum over a sequence of n tokens), sum n and sum n^2."""

    sums: Tensor = field(default_factory=lambda: torch.zeros(len(QUANTITIES), 5, dtype=torch.float64))

    def add(self, part: DumpedRollout) -> None:
        """Adds the sequences of a part of a rollout."""
        ratio = part.log_ratio.clamp(max=math.log(LARGEST_RATIO))
        self._add("ratio_minus_one", torch.expm1(ratio), part.finite, part)
        self._add("log_ratio", part.log_ratio, part.finite, part)
        self._add("absolute", part.log_ratio.abs(), part.finite, part)
        if part.entropy is not None:
            known = part.finite & part.entropy.isfinite()
            self._add("surprise", torch.where(known, -part.behavior - part.entropy, 0), known, part)

    def _add(self, name: str, values: Tensor, counted: Tensor, part: DumpedRollout) -> None:
        total, n = part.segments.local_sums([torch.where(counted, values, 0), counted.float()])
        sums = (total.sum(), total.square().sum(), (total * n).sum(), n.sum(), n.square().sum())
        self.sums[QUANTITIES.index(name)] += torch.stack(sums)

    def __getitem__(self, name: str) -> Mean:
        total, square, cross, n, n_square = self.sums[QUANTITIES.index(name)].tolist()
        if not n:
            return Mean(0.0, 0.0, 0)
        mean = total / n
        return Mean(mean, math.sqrt(max(square - 2 * mean * cross + mean * mean * n_square, 0)) / n, int(n))


class VersionSums(NamedTuple):
    """Sums over those tokens of a rollout that one version of the weights sampled."""

    rollout_id: int
    version: int
    count: int
    log_ratio: float  # sum
    absolute: float  # sum |l|
    k3: float  # sum
    age: float = 0.0  # of the weights, as far as the rollout's files tell it; the newest's may be larger


class RolloutSummary(NamedTuple):
    """Size and mismatch of one rollout."""

    rollout_id: int
    tokens: int
    absolute: float  # mean |l|
    k3: float
    top_share: float  # of sum l^2, in the 1% of tokens with the largest |l|
    median: float  # of |l|
    version: int = -1  # newest of the weights that sampled, -1 for unknown
    length: float = 0.0  # mean response length
    pushed: float | None = None  # mean |log behavior - log first policy|, where the dump knows the first
    moved: float | None = None  # mean |log proximal - log first policy|


@dataclass
class DetectorStatistics:
    """Counts and sums of a run that the detectors look at beside the numbers and the curves.

    ``above`` and ``below`` count tokens with l beyond +-1e-4, ``zeros`` behavior log-probs that are exactly
    0, ``doubted`` those of them with a trainer's log-prob below -0.25, ``filled`` those with one below -2,
    ``sure`` tokens with such a one and a behavior log-prob above -0.01 but not 0, ``padded`` tokens whose
    behavior log-prob is exactly 0 beside another such while the trainer finds them unlikely, ``positive``
    log-probs above 0, ``silent`` sequences without any behavior log-prob, ``partial`` those that lack some.
    ``shifts`` holds count, sum |proximal_t - behavior_(t + shift)|, and sum |l| of the same tokens t and t +
    shift; ``shifted`` the sequences that a shift explains, each on its own. ``switched`` holds count, sum l,
    sum |l| and sum k3 of tokens after a change of weights inside their response, and of the same versions
    in responses without one.
    """

    means: Means = field(default_factory=Means)
    counts: Counter[str] = field(default_factory=Counter)
    shifts: Tensor = field(default_factory=lambda: torch.zeros(len(SHIFTS), 4, dtype=torch.float64))
    shifted: Tensor = field(default_factory=lambda: torch.zeros(len(SHIFTS), dtype=torch.float64))
    switched: Tensor = field(default_factory=lambda: torch.zeros(2, 4, dtype=torch.float64))
    versions: list[VersionSums] = field(default_factory=list)
    rollouts: list[RolloutSummary] = field(default_factory=list)
    structure: Structure = field(default_factory=Structure)
    reference: Tensor = field(default_factory=lambda: torch.zeros(3, dtype=torch.float64))  # as ``open``
    open: dict[int, Tensor] = field(default_factory=dict)  # of the rollout whose parts are being added
    near: float = 0.0  # sum k3 of that rollout

    def add(self, part: DumpedRollout) -> None:
        """Adds the tokens of a part of a rollout."""
        self.means.add(part)
        self.counts.update(_counts(part))
        for row, shift in enumerate(SHIFTS):
            self._add_shift(row, shift, part)
        self.near += float(_near(part.log_ratio).sum(dtype=torch.float64))
        self.structure.add(part)
        if part.reference is not None:
            known = part.finite & part.reference.isfinite()
            mine, theirs, first = (x[known].double() for x in (part.proximal, part.behavior, part.reference))
            self.reference += torch.stack(
                [known.sum(), (theirs - first).abs().sum(), (mine - first).abs().sum()]
            )
        if part.versions is not None:
            for version, sums in _by_version(part).items():
                self.open[version] = self.open.get(version, 0) + sums

    def _add_shift(self, row: int, shift: int, part: DumpedRollout) -> None:
        sums = _shifted(part, shift)
        self.shifts[row] += sums[:4].sum(1)
        self.shifted[row] += float(_is_explained(sums).sum())

    def close(self, rollout: DumpedRollout, sums: Sums) -> None:
        """Adds what can only be computed once all parts of a rollout were added.

        Args:
            sums: of this rollout alone.
        """
        if sums["finite"]:
            known, pushed, moved = self.reference.tolist()
            self.rollouts.append(
                RolloutSummary(
                    rollout.rollout_id,
                    int(sums["finite"]),
                    sums.mean("absolute") or 0.0,
                    self.near / sums["finite"],
                    *_tail(sums.histogram),
                    max(self.open, default=-1),
                    sums.mean("length", "sequences") or 0.0,
                    pushed / known if known else None,
                    moved / known if known else None,
                )
            )
        self.near = 0.0
        self.reference.zero_()
        self.structure.close(rollout)
        reference = _reference(rollout)
        for version, (every, after, pure) in sorted(self.open.items()):
            count, *rest = every.tolist()
            found = VersionSums(rollout.rollout_id, version, int(count), *rest, reference - version)
            self.versions.append(found)
            if after[0]:
                self.switched += torch.stack([after, pure])
        self.open.clear()

    @property
    def top_share(self) -> float:
        """The share of sum l^2 that the 1% of tokens with the largest |l| hold; the median over rollouts."""
        return median(rollout.top_share for rollout in self.rollouts) if self.rollouts else 0.0

    def merge(self, other: DetectorStatistics) -> None:
        """Adds the statistics of other rollouts."""
        self.means.sums += other.means.sums
        self.counts.update(other.counts)
        self.shifts += other.shifts
        self.shifted += other.shifted
        self.switched += other.switched
        self.versions += other.versions
        self.structure.merge(other.structure)
        self.rollouts = sorted([*self.rollouts, *other.rollouts], key=lambda s: s[:2])


def _near(log_ratio: Tensor) -> Tensor:
    """k3 of log-ratios, which count as 5 nats at most."""
    return k3(log_ratio.clamp(max=FURTHEST))


def _counts(part: DumpedRollout) -> dict[str, int]:
    found, mask = part.log_ratio, part.mask
    zero = mask & (part.behavior == 0)
    neighbour = zero[1:] & zero[:-1] & (part.segments.ids[1:] == part.segments.ids[:-1])
    nothing = torch.zeros_like(mask[:1])
    beside = torch.cat([neighbour, nothing]) | torch.cat([nothing, neighbour])
    length = part.segments.sum(mask.float())
    finite = part.segments.sum((mask & (part.behavior.abs() < torch.inf)).float())
    counted = {
        "above": found > EXACT,
        "below": found < -EXACT,
        "zeros": zero & part.finite,
        "doubted": zero & part.finite & (part.proximal < DOUBTED),
        "filled": zero & part.finite & (part.proximal < UNLIKELY),
        "sure": part.finite & ~zero & (part.behavior > SURE_OF) & (part.proximal < UNLIKELY),
        "padded": beside & (part.proximal < UNLIKELY) if part.size else zero,
        "positive": mask & (part.behavior > EXACT) & (part.behavior < torch.inf),
        "silent": (length > 0) & (finite == 0),
        "partial": (finite > 0) & (finite < length),
    }
    return {name: int(flags.sum()) for name, flags in counted.items()}


def _shifted(part: DumpedRollout, shift: int) -> Tensor:
    """[6, S] sums over tokens t whose place and the one ``shift`` tokens away are both in the sequence: their
    number, |proximal_t - behavior_(t + shift)|, |l| at t and |l| at t + shift, and the squares of what the
    first is below each of the other two."""
    ids, finite, s = part.segments.ids, part.finite, abs(shift)
    early, late = slice(None, -s), slice(s, None)
    here, there = (early, late) if shift > 0 else (late, early)
    both = finite[here] & finite[there] & (ids[here] == ids[there])
    sizes = part.log_ratio.abs()
    pairs = ((part.proximal[here] - part.behavior[there]).abs(), sizes[here], sizes[there])
    shifted, mine, other = (torch.where(both, size.double(), 0) for size in pairs)
    rows = (both.double(), shifted, mine, other, (mine - shifted).square(), (other - shifted).square())
    return part.segments.local_sums([torch.nn.functional.pad(row, (0, part.size - len(row))) for row in rows])


def _is_explained(sums: Tensor) -> Tensor:
    """Whether a shift explains each sequence, [S] bool: sequences in which the shifted log-probs are
    significantly closer than those at either place."""
    _, shifted, *own = sums
    near, squares = torch.stack(own[:2]), torch.stack(own[2:])
    return ((shifted < CLOSER * near) & (near - shifted >= SURE * squares.sqrt())).all(0)


def _by_version(part: DumpedRollout) -> dict[int, Tensor]:
    """version -> [3, 4]: all its tokens, those after a change of weights inside their response, and those of
    responses without one; of each count, sum l, sum |l|, sum k3."""
    versions, segments = part.versions, part.segments
    known = part.finite & (versions >= 0)
    first, last = -segments.max(-versions.double()), segments.max(versions.double())
    begins = _begins(versions, segments.ids)
    rows = (known, part.log_ratio, part.log_ratio.abs(), _near(part.log_ratio))
    values = torch.stack([torch.where(known, row, 0).double() for row in rows])
    sums = torch.from_numpy(numpy.add.reduceat(values.numpy(), begins.numpy(), axis=1))
    begins, sums = begins[sums[0] > 0], sums[:, sums[0] > 0]
    sample, version = segments.ids[begins], versions[begins]
    is_pure, is_last = (first == last)[sample], version == last[sample]
    numbers, index = version.unique(return_inverse=True)
    kinds = (torch.ones_like(is_pure), is_last & ~is_pure, is_pure)
    table = torch.stack([tabulated(index[kind], sums[:, kind], len(numbers)) for kind in kinds], 1)
    return dict(zip(numbers.tolist(), table, strict=True))


def _begins(versions: Tensor, ids: Tensor) -> Tensor:
    """Where runs of tokens begin that one version sampled in one sequence."""
    changes = (versions[1:] != versions[:-1]) | (ids[1:] != ids[:-1])
    return torch.cat([changes.new_ones(min(len(ids), 1)), changes]).nonzero()[:, 0]


def _reference(rollout: DumpedRollout) -> float:
    """The weight version from which the ages of a rollout are counted; 0 where no age is known."""
    if rollout.ages is None:
        return 0.0
    known = rollout.ages.isfinite()
    return float((rollout.ages[known] + rollout.versions[known]).max()) if known.any() else 0.0


def _tail(histogram: Tensor) -> tuple[float, float]:
    """From the histogram of log-ratios: the share of sum l^2 that the 1% of tokens with the largest |l|
    hold, and the median of |l|."""
    side = len(histogram) // 2
    counts = histogram[side:].clone()
    counts[1:] += histogram[:side].flip(0)
    sizes = 10.0 ** (SMALLEST + (torch.arange(len(counts), dtype=torch.float64) - 0.5) / PER_DECADE)
    sizes[0] = 0
    squares = (counts * sizes.square()).flip(0)
    reached = counts.flip(0).cumsum(0)
    wanted = TOP * float(counts.sum())
    whole = reached <= wanted
    rest = wanted - float(reached[whole][-1] if whole.any() else 0)
    edge = int(whole.sum())
    top = float(squares[whole].sum()) + rest * float(sizes.flip(0)[min(edge, len(sizes) - 1)].square())
    total = float(squares.sum())
    median = float(sizes[int((counts.cumsum(0) < counts.sum() / 2).sum())])
    return (top / total if total else 0.0), median
