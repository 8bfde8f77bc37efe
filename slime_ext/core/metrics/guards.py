"""Checks that the metrics of an optimizer step stay in their ranges.

A guard has the range of one metric, and says what happens when the metric leaves it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from slime_ext.core.fields import check_fields
from slime_ext.core.metrics.names import PREFIX
from slime_ext.errors import expect

Action = Literal["warn", "metrics_only", "stop"]
AFTERWARDS = {
    "warn": "training goes on",
    "metrics_only": "from now on the host's loss stays unchanged, and only metrics are computed",
    "stop": "the run stops, because the guard's action is stop",
}


@dataclass(frozen=True)
class Guard:
    """A range for one metric, and what to do outside it.

    Args:
        min, max: the metric has to be in [min, max]; None: no bound on that side.
        steps: the guard acts after this many optimizer steps in a row outside the range.
        action: ``warn`` logs a line and training goes on. ``metrics_only`` leaves the host's loss unchanged
            from then on. ``stop`` ends the run.
    """

    min: float | None = None
    max: float | None = None
    steps: int = 1
    action: Action = "warn"

    def __post_init__(self) -> None:
        check_fields("", self)
        low, high = self.min, self.max
        why = "a guard without a bound never acts"
        expect((low, high) != (None, None), "min", "min or max or both", "neither", why)
        ordered = low is None or high is None or low <= high
        expect(ordered, "min", "min <= max", [low, high], "no value would pass")
        expect(self.steps >= 1, "steps", "a number >= 1", self.steps, "it counts optimizer steps")

    def holds(self, value: float) -> bool:
        """Tells whether a value is inside the range; NaN is outside."""
        return (self.min is None or value >= self.min) and (self.max is None or value <= self.max)

    @property
    def range(self) -> str:
        """The range as words, for messages."""
        sides = (("at least", self.min), ("at most", self.max))
        return " and ".join(f"{word} {bound:g}" for word, bound in sides if bound is not None)


DEFAULT: Mapping[str, Guard] = {"kept_fraction": Guard(min=0.1, steps=3)}


@dataclass
class Watch:
    """Counts how many optimizer steps in a row each guard's metric has been outside."""

    guards: Mapping[str, Guard] = field(default_factory=lambda: DEFAULT)
    outside: dict[str, int] = field(default_factory=dict)
    last: tuple[str, dict[str, int]] = ("", {})  # the latest step, and the counts before it

    def look(self, values: Mapping[str, float], where: str) -> Iterator[tuple[Action, str]]:
        """Yields the action and the message of each guard that acts.

        A guard acts after ``steps`` optimizer steps in a row outside its range, then after 2, 4, 8, ... times
        as many.

        Args:
            values: metrics by their full names.
            where: the name of the optimizer step, for the message. A second call with the same name replaces
                the first one.
        """
        latest, before = self.last
        self.outside = dict(before if where == latest else self.outside)
        self.last = (where, dict(self.outside))
        for name, guard in self.guards.items():
            value = values.get(PREFIX + name)
            if value is None:  # the metric was not measured, so the count neither grows nor restarts
                continue
            if guard.holds(value):
                self.outside.pop(name, None)
                continue
            count = self.outside[name] = self.outside.get(name, 0) + 1
            turns, rest = divmod(count, guard.steps)
            if not rest and turns & (turns - 1) == 0:
                yield guard.action, _line(name, guard, value, count, where)


def _line(name: str, guard: Guard, value: float, count: int, where: str) -> str:
    times = f"for {count} optimizer steps" if count > 1 else "in one optimizer step"
    what = f"expected {guard.range}, got {value:.4g} {times} ({where})"
    return f"{PREFIX}{name}: {what}: {AFTERWARDS[guard.action]}"
