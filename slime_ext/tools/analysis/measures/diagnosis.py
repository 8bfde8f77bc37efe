"""Collects everything from which numbers, curves and findings of the report follow."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from slime_ext.tools.analysis.document import Curve, Moment, Numbers
from slime_ext.tools.analysis.measures import versions
from slime_ext.tools.analysis.measures.curves import Curves, midway
from slime_ext.tools.analysis.measures.detector_statistics import DetectorStatistics
from slime_ext.tools.analysis.measures.layer_outputs import LayerDistance
from slime_ext.tools.analysis.measures.measure import Measure
from slime_ext.tools.analysis.measures.sums import Sums
from slime_ext.tools.analysis.measures.versions import VersionSums
from slime_ext.tools.analysis.measures.worst_samples import WorstSamples
from slime_ext.tools.analysis.readers.loss_calls import LossCall
from slime_ext.tools.analysis.records import DumpedRollout
from slime_ext.tools.analysis.tables import Additive

M = TypeVar("M", bound=Measure)


@dataclass
class Diagnosis(Additive):
    """A collector (see ``pipeline``) of everything that is measured in a run.

    These are sums, curves, statistics for detectors, worst samples, and the numbers of each rollout.
    """

    sums: Sums = field(default_factory=Sums)
    curves: Curves = field(default_factory=Curves)
    statistics: DetectorStatistics = field(default_factory=DetectorStatistics)
    own: dict[str, Measure] = field(default_factory=dict)  # class name -> what detectors add up themselves
    worsts: WorstSamples = field(default_factory=WorstSamples)
    timeline: list[Moment] = field(default_factory=list)
    unread: int = 0  # files, or parts of them, that could not be read
    flags: dict[str, Any] = field(default_factory=dict)  # of the run (see ``readers.flags``)
    calls: tuple[LossCall, ...] = ()  # from the first folder of the run that holds any
    layers: tuple[LayerDistance, ...] = ()  # from the first folder of the run with layer outputs

    def add(self, rollout: DumpedRollout) -> None:
        """Adds a rollout, part by part, so that temporary tensors stay small."""
        sums_of_rollout, by_version, before = Sums(), defaultdict(float), self.curves.certainty()
        for part in replace(rollout, midway=midway(rollout)).parts():
            sums_of_rollout.add(part)
            self.curves.add(part)
            self.worsts.add(part)
            for measure in self.own.values():
                measure.add(part)
            for version, sums in self.statistics.add(part).items():
                by_version[version] += sums
        self.statistics.close(rollout, sums_of_rollout, by_version, self.curves.certainty() - before)
        for measure in self.own.values():
            measure.close(rollout)
        self.sums.merge(sums_of_rollout)
        self.timeline.append(Moment(rollout_id=rollout.rollout_id, numbers=sums_of_rollout.numbers()))

    def merge(self, other: Diagnosis) -> None:
        """Adds the diagnosis of other rollouts."""
        super().merge(other)
        self.timeline.sort(key=lambda moment: moment.rollout_id)

    def of(self, kind: type[M]) -> M:
        """Returns the measure of this kind. The detector that asks must name it in ``reads``."""
        return self.own[kind.__name__]  # type: ignore[return-value]

    def _ages(self) -> dict[VersionSums, int]:
        known = float(self.curves.column("staleness", "x").sum())
        return {} if known else versions.since_seen(self.statistics.versions)

    def numbers(self) -> Numbers:
        """Returns the numbers over all rollouts."""
        return versions.with_age(self.sums.numbers(), self._ages())

    def moments(self) -> tuple[Moment, ...]:
        """Returns the numbers of each rollout, in order."""
        ages = self._ages()
        return tuple(
            moment.model_copy(update={"numbers": versions.with_age(moment.numbers, ages, moment.rollout_id)})
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
        return versions.rollouts_per_push(self.statistics.versions)

    def notes(self) -> tuple[str, ...]:
        """Returns how ages were counted, if the dumps do not hold them."""
        return (versions.NOTE,) if self._ages() else ()
