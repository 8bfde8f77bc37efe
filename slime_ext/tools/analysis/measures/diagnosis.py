"""Collects everything from which numbers, curves and findings of the report follow."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import field, replace
from typing import Any, TypeVar

from torch import Tensor

from slime_ext.tools.analysis.document import Curve, Moment, Numbers
from slime_ext.tools.analysis.measures import versions
from slime_ext.tools.analysis.measures.by_sample import BySample
from slime_ext.tools.analysis.measures.curves import Curves, midway
from slime_ext.tools.analysis.measures.layer_outputs import LayerDistance
from slime_ext.tools.analysis.measures.means import Means
from slime_ext.tools.analysis.measures.measure import Measure
from slime_ext.tools.analysis.measures.rollouts import RolloutSummary, RolloutSums, summary_of
from slime_ext.tools.analysis.measures.shifts import aligned, shifts_of
from slime_ext.tools.analysis.measures.sums import Sums
from slime_ext.tools.analysis.measures.versions import VersionSums, by_version
from slime_ext.tools.analysis.measures.worst_samples import WorstSamples
from slime_ext.tools.analysis.readers.loss_calls import LossCall
from slime_ext.tools.analysis.records import DumpedRollout
from slime_ext.tools.analysis.tables import Additive

M = TypeVar("M", bound=Measure)


class Diagnosis(Additive):
    """A collector (see ``pipeline``) of everything that is measured in a run.

    These are the sums that every run has, what the detectors add up themselves, worst samples, and the
    numbers of each rollout.
    """

    sums: Sums = field(default_factory=Sums)
    curves: Curves = field(default_factory=Curves)
    means: Means = field(default_factory=Means)
    rollouts: list[RolloutSummary] = field(default_factory=list)
    versions: list[VersionSums] = field(default_factory=list)
    samples: BySample = field(default_factory=BySample)
    measures: dict[str, Measure] = field(default_factory=dict)  # class name -> what detectors add up
    worsts: WorstSamples = field(default_factory=WorstSamples)
    timeline: list[Moment] = field(default_factory=list)
    unread: int = 0  # files, or parts of them, that could not be read
    flags: dict[str, Any] = field(default_factory=dict)  # of the run (see ``readers.flags``)
    calls: tuple[LossCall, ...] = ()  # from the first folder of the run that holds any
    layers: tuple[LayerDistance, ...] = ()  # from the first folder of the run with layer outputs

    def add(self, rollout: DumpedRollout) -> None:
        """Adds a rollout, or several that are joined."""
        collectors = (self.curves, self.worsts, self.means, self.samples, *self.measures.values())
        if not rollout.joined:
            self._add(replace(rollout, midway=midway(rollout)), collectors)
            return
        for collector in collectors:
            if collector.takes_joined:
                collector.add(rollout)
        rollout.share()
        others = [collector for collector in collectors if not collector.takes_joined]
        shifts = shifts_of(rollout).shifts.split([one.count for one in rollout.joined])
        for one, of_one in zip(rollout.joined, shifts, strict=True):
            self._add(one, others, of_one)

    def _add(self, rollout: DumpedRollout, collectors: Sequence[Any], shifts: Tensor | None = None) -> None:
        """Adds a rollout, part by part, so that temporary tensors stay small.

        Args:
            shifts: [S] those of ``shifts_of``; None: not known yet.
        """
        sums, of_rollout, of_version = Sums(), RolloutSums(), defaultdict(float)
        for part in rollout.parts():
            for collector in (sums, of_rollout, *collectors):
                collector.add(part)
            if part.versions is not None:
                moved = shifts_of(part).shifts if shifts is None else shifts
                in_place = aligned(part, moved) if moved.any() else part
                for version, of_part in by_version(in_place).items():
                    of_version[version] += of_part
        errors = self.samples.close(rollout)
        for measure in self.measures.values():
            measure.close(rollout)
        if sums.finite:
            self.rollouts.append(summary_of(rollout.rollout_id, sums, of_rollout, of_version, errors))
        newest = rollout.newest or 0
        for version, of_all in sorted(of_version.items()):
            count, log_ratio, absolute, near, *squares = of_all.tolist()
            ages = newest - version
            counted = VersionSums(
                rollout.rollout_id, version, int(count), log_ratio, absolute, near, ages, *squares
            )
            self.versions.append(counted)
        self.sums.merge(sums)
        self.timeline.append(Moment(rollout_id=rollout.rollout_id, numbers=sums.numbers()))

    def merge(self, other: Diagnosis) -> None:
        """Adds the diagnosis of other rollouts."""
        super().merge(other)
        self.rollouts.sort(key=lambda summary: summary[:2])
        self.timeline.sort(key=lambda moment: moment.rollout_id)

    def of(self, kind: type[M]) -> M:
        """Returns the measure of this kind."""
        return self.measures[kind.__name__]  # type: ignore[return-value]

    def _ages(self) -> dict[VersionSums, int]:
        known = float(self.curves.staleness.x.sum())
        return {} if known else versions.since_seen(self.versions)

    def _bounds(self) -> dict[VersionSums, versions.Bounds]:
        return versions.bounds(self.versions) if self._ages() else {}

    def numbers(self) -> Numbers:
        """Returns the numbers over all rollouts."""
        return versions.with_age(self.sums.numbers(), self._bounds())

    def moments(self) -> tuple[Moment, ...]:
        """Returns the numbers of each rollout, in order."""
        ages = self._bounds()
        return tuple(
            replace(moment, numbers=versions.with_age(moment.numbers, ages, moment.rollout_id))
            for moment in self.timeline
        )

    def all_curves(self) -> tuple[Curve, ...]:
        """Returns every curve that has points."""
        curves, ages = self.curves.curves(), self._ages()
        if not ages:
            return curves
        return (*(c for c in curves if c.name != "staleness"), versions.curve(ages))

    def rollouts_per_push(self) -> int | None:
        """Returns the rollouts from one push of weights to the next; None if the dumps do not tell them."""
        return versions.rollouts_per_push(self.versions)

    def notes(self) -> tuple[str, ...]:
        """Returns how ages are bounded, if the dumps do not hold them."""
        return (versions.NOTE,) if self._ages() else ()
