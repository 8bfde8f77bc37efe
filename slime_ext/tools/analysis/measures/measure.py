"""Defines a measure: what a detector adds up over a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, TypeVar

from slime_ext.tools.analysis.records import DumpedRollout
from slime_ext.tools.analysis.tables import Additive

R = TypeVar("R")


class Measure(Additive):
    """Sums over a run, as a dataclass whose fields add up over parts, rollouts and processes.

    A measure that one detector reads is in that detector's file. A measure that several detectors read is in
    ``detectors/shared``. Being defined there registers it, and ``Diagnosis.of`` returns it.

    Attributes:
        version: raise it whenever the sums of the same dump change, because
            benchmarks/faults/figures.json.gz keeps the sums of recorded dumps.
    """

    version: ClassVar[int] = 1

    @classmethod
    def of_run(cls, vocabulary: int | None) -> Measure:
        """Returns an empty measure of a run.

        Args:
            vocabulary: size of the model's vocabulary; None: unknown.
        """
        return cls()

    def add(self, part: DumpedRollout) -> None:
        """Adds a part of a rollout: some of its samples.

        If ``takes_joined`` is true, the part may also be several small rollouts, which saves time. Then add
        numbers up by ``part.tabulate`` or as integers, do not read ``part.rollout_id``, and note that
        ``part.groups`` of different rollouts may have the same numbers.
        """

    def close(self, rollout: DumpedRollout) -> None:
        """Adds what only the whole rollout tells. It is called once, after all parts were added."""


def once_per_part(function: Callable[[DumpedRollout], R]) -> Callable[[DumpedRollout], R]:
    """Makes a function of a part keep its result, because several measures ask for it."""
    name = f"{function.__module__}.{function.__qualname__}"

    def of_part(part: DumpedRollout) -> R:
        results = vars(part)  # as a cached property does, so a result lives as long as its part
        if name not in results:
            results[name] = function(part)
        return results[name]

    of_part.__doc__ = function.__doc__
    return of_part
