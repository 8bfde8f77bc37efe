"""Ages of weights where a dump names the weights but not the trainer's own version.

slime's dumps do. Within a rollout all weights may then have the same version, however old it is; over a run
their age is the number of rollouts since they were first seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from slime_ext.analysis.detector_statistics import VersionSums
from slime_ext.analysis.document import Curve, Moment, Point

NOTE = "ages are counted in rollouts since the first one that the weights sampled; the dumps do not tell them"


def since_seen(versions: Iterable[VersionSums]) -> dict[VersionSums, int]:
    """How many rollouts old the weights are in each rollout, counted from the first one that they
    sampled; empty if no version sampled two rollouts."""
    ordered = sorted(versions)
    first: dict[int, int] = {}
    ages = {sums: sums.rollout_id - first.setdefault(sums.version, sums.rollout_id) for sums in ordered}
    return ages if any(ages.values()) else {}


def curve(ages: dict[VersionSums, int]) -> Curve:
    """The mean log-ratio at each age, as the curve ``staleness``."""
    points = []
    for age in sorted(set(ages.values())):
        same = [sums for sums, other in ages.items() if other == age]
        count = sum(sums.count for sums in same)
        mean, distance = (sum(getattr(sums, k) for sums in same) / count for k in ("log_ratio", "absolute"))
        points.append(Point(x=age, count=count, mean=mean, absolute=distance))
    return Curve(name="staleness", points=tuple(points))


def mean(ages: dict[VersionSums, int], rollout_id: int | None = None) -> float:
    """Mean age over the tokens of one rollout, or of all rollouts."""
    found = [(sums.count, age) for sums, age in ages.items() if rollout_id in (None, sums.rollout_id)]
    return sum(count * age for count, age in found) / max(sum(count for count, _ in found), 1)


def timeline(moments: Sequence[Moment], ages: dict[VersionSums, int]) -> list[Moment]:
    """The moments of the timeline with the mean age of their tokens."""
    return [
        m.model_copy(update={"numbers": m.numbers.model_copy(update={"staleness": mean(ages, m.rollout_id)})})
        for m in moments
    ]
