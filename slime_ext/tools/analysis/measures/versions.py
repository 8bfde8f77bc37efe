"""Sums tokens by the version of the weights that sampled them.

slime's dumps hold the version of the sampling weights, but not the trainer's. Within a rollout all tokens may
then have the same version, however old it is. Over a run, the age of a version is the number of rollouts
since it first sampled.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from itertools import groupby, pairwise
from operator import attrgetter
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from slime_ext.tools.analysis.document import Curve, Numbers, Point
from slime_ext.tools.analysis.measures.measure import once_per_part
from slime_ext.tools.analysis.records import DumpedRollout
from slime_ext.tools.analysis.tables import numbered, run_begins, run_sums, tabulated

RECORD = "record them with --custom-rollout-log-function-path slime_ext.host.log_rollout"
NOTE = f"the dumps hold no ages: versions only bound the rollouts trained since; to know ages, {RECORD}"


class VersionSums(NamedTuple):
    """Sums over the tokens of a rollout that one version of the weights sampled."""

    rollout_id: int
    version: int
    count: int
    log_ratio: float  # sum
    absolute: float  # sum |l|
    k3: float  # sum, of ``near``
    age: int = 0  # of the weights, relative to the newest version that sampled in the rollout
    # Sums over stretches of one version in a sample: (sum k3)^2, sum k3 times tokens, tokens^2.
    square: float = 0.0
    cross: float = 0.0
    lengths: float = 0.0


class VersionMeans(NamedTuple):
    """Number of tokens of some versions, means over them, and the standard error of k3 over samples."""

    count: int
    log_ratio: float
    absolute: float
    k3: float
    error: float

    @classmethod
    def of(cls, versions: list[VersionSums]) -> VersionMeans:
        count = max(n := sum(v.count for v in versions), 1)
        mean = sum(v.k3 for v in versions) / count
        variance = sum(v.square - 2 * mean * v.cross + mean * mean * v.lengths for v in versions)
        log_ratio, absolute = (sum(getattr(v, of) for v in versions) / count for of in cls._fields[1:3])
        return cls(n, log_ratio, absolute, mean, math.sqrt(max(variance, 0.0)) / count)

    @property
    def relative_error(self) -> float:
        """The standard error of the logarithm of k3."""
        return self.error / self.k3 if self.k3 else 0.0


class Stretches(NamedTuple):
    """Stretches of tokens that one version of the weights sampled in a sample, if the version is known.

    Attributes:
        begins: the first token of each, [N].
        sums: number of tokens, sum l, sum |l| and sum k3 of each, [4, N].
        numbers: the versions in rising order.
        index: which of them each stretch is of, [N].
    """

    begins: Tensor
    sums: Tensor
    numbers: Tensor
    index: Tensor


@once_per_part
def stretches(part: DumpedRollout) -> Stretches:
    """Returns the stretches of a part that have a token with both log-probs."""
    begins = run_begins(part.versions, part.segments.ids)
    count, absolute, _, log_ratio, _, near = part.columns
    sums, versions = run_sums((count, log_ratio, absolute, near), begins), part.versions[begins]
    is_known = (sums[0] > 0) & (versions >= 0)
    if not is_known.all():
        begins, sums, versions = begins[is_known], sums[:, is_known], versions[is_known]
    numbers, index = numbered(versions)
    return Stretches(begins, sums, numbers, index)


def by_version(part: DumpedRollout) -> dict[int, Tensor]:
    """Returns the sums over the tokens of each version, [7].

    They are count, sum l, sum |l|, sum k3, and the last three fields of ``VersionSums``.
    """
    _, sums, numbers, index = stretches(part)
    n, *_, k3 = sums
    sums = torch.cat([sums, torch.stack([k3 * k3, k3 * n, n * n])])
    table = tabulated(index, sums, len(numbers))
    return dict(zip(numbers.tolist(), table, strict=True))


def since_seen(versions: Iterable[VersionSums]) -> dict[VersionSums, int]:
    """Returns the age of each version in each rollout, in rollouts since it first sampled.

    Empty if no version sampled two rollouts. If the newest version falls to where the run began or below, the
    job was resumed and its counter began again, so its versions are other ones.
    """
    ages: dict[VersionSums, int] = {}
    first: dict[int, int] = {}  # version -> rollout that it first sampled
    began = newest = -1
    for rollout_id, group in groupby(sorted(versions), key=attrgetter("rollout_id")):
        of_rollout = list(group)
        before, newest = newest, of_rollout[-1].version
        if not ages or (newest < before and newest <= began):
            first, began = {}, newest
        ages |= {sums: rollout_id - first.setdefault(sums.version, rollout_id) for sums in of_rollout}
    return ages if any(ages.values()) else {}


def rollouts_per_push(versions: Iterable[VersionSums]) -> int | None:
    """Returns the median number of rollouts from one newest version to the next.

    None if fewer than two pushes are seen, or if rollouts are missing.
    """
    newest = {sums.rollout_id: sums.version for sums in sorted(versions)}
    ids = list(newest)
    if any(later != rollout_id + 1 for rollout_id, later in pairwise(ids)):
        return None
    changes = [later for rollout_id, later in pairwise(ids) if newest[later] != newest[rollout_id]]
    between = [later - rollout_id for rollout_id, later in pairwise(changes)]
    return round(median(between)) if between else None


def curve(ages: dict[VersionSums, int]) -> Curve:
    """Returns the mean log-ratio at each age, as the curve ``staleness``."""
    points = []
    for age in sorted(set(ages.values())):
        same = VersionMeans.of([sums for sums, other in ages.items() if other == age])
        points.append(Point(x=age, count=same.count, mean=same.log_ratio, absolute=same.absolute))
    return Curve(name="staleness", points=tuple(points))


class Bounds(NamedTuple):
    """The fewest and the most rollouts that were trained since a version's weights; None: not bounded."""

    least: int
    most: int | None


def bounds(versions: Iterable[VersionSums]) -> dict[VersionSums, Bounds]:
    """Bounds the age of each version in each rollout, in rollouts trained since its weights.

    Weights existed when they first sampled, so they are at least as old as the rollouts since. Weights that
    came ``n`` pushes after those of rollout 0 have seen ``n`` rollouts at least, so in rollout r they are at
    most r - n rollouts old. If the newest version falls, its counter may have begun again, and with it which
    weights a number means: both counts start there. The weights of that rollout may be the run's first ones,
    because an engine that is restarted may load these.

    No dump shows a restart while the first version still samples. There is no upper bound without rollout 0,
    nor if versions grow faster than rollouts.
    """
    bounds_of: dict[VersionSums, Bounds] = {}
    first: dict[int, int] = {}  # version -> rollout that it first sampled
    began = newest = began_at = 0
    is_bounded = True
    for rollout_id, group in groupby(sorted(versions), key=attrgetter("rollout_id")):
        of_rollout = list(group)
        before, newest = newest, of_rollout[-1].version
        if not bounds_of:
            began, is_bounded = newest, rollout_id == 0
        elif newest < before:
            first, began, began_at = {}, newest, rollout_id
        is_bounded &= newest - began <= rollout_id - began_at
        for sums in of_rollout:
            least = rollout_id - first.setdefault(sums.version, rollout_id)
            bounds_of[sums] = Bounds(least, rollout_id - max(sums.version - began, 0))
    if is_bounded:
        return bounds_of
    return {sums: Bounds(bound.least, None) for sums, bound in bounds_of.items()}


def with_age(numbers: Numbers, ages: dict[VersionSums, Bounds], rollout_id: int | None = None) -> Numbers:
    """Returns the numbers of one rollout, or of all, with bounds of the mean age of their tokens.

    Args:
        ages: the bounds for each version in each rollout. If empty, the numbers stay as they are.
    """
    counted = [(sums.count, bound) for sums, bound in ages.items() if rollout_id in (None, sums.rollout_id)]
    if not counted:
        return numbers
    tokens = max(sum(count for count, _ in counted), 1)
    least = sum(count * bound.least for count, bound in counted) / tokens
    most = None
    if all(bound.most is not None for _, bound in counted):
        most = sum(count * (bound.most or 0) for count, bound in counted) / tokens
    return replace(numbers, staleness=None, least_staleness=least, most_staleness=most)
