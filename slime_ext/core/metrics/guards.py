"""Guards: metrics of an optimizer step that must stay in a range, and what happens when they do not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from slime_ext.core.metrics.names import PREFIX
from slime_ext.core.state import expect

Action = Literal["warn", "metrics_only", "stop"]
AFTERWARDS = {
    "warn": "training goes on",
    "metrics_only": "from now on the loss stays the host's, only metrics",
    "stop": "the run stops, as guards asks",
}


@dataclass(frozen=True)
class Guard:
    """A range for one metric.

    Args:
        min, max: the metric has to be in [min, max]; None: no bound on that side.
        steps: optimizer steps in a row outside before it acts.
        action: ``warn`` says so and goes on, ``metrics_only`` leaves the loss to the host from then on,
            ``stop`` ends the run.
    """

    min: float | None = None
    max: float | None = None
    steps: int = 1
    action: Action = "warn"

    def __post_init__(self) -> None:
        low, high = self.min, self.max
        expect((low, high) != (None, None), "min", "min or max or both", "neither", "it could not act")
        ordered = low is None or high is None or low <= high
        expect(ordered, "min", "min <= max", [low, high], "nothing would pass")
        expect(self.steps >= 1, "steps", "a number >= 1", self.steps, "counted in optimizer steps")

    def holds(self, value: float) -> bool:
        """Whether a value is inside; NaN is not."""
        return (self.min is None or value >= self.min) and (self.max is None or value <= self.max)

    @property
    def range(self) -> str:
        """As the messages say it."""
        sides = (("at least", self.min), ("at most", self.max))
        return " and ".join(f"{word} {bound:g}" for word, bound in sides if bound is not None)


DEFAULT: Mapping[str, Guard] = {"kept_fraction": Guard(min=0.1, steps=3)}


@dataclass
class Watch:
    """Counts the optimizer steps that each guard's metric has been outside."""

    guards: Mapping[str, Guard] = field(default_factory=lambda: DEFAULT)
    outside: dict[str, int] = field(default_factory=dict)
    last: tuple[str, dict[str, int]] = ("", {})  # the latest step, and the counts before it

    def look(self, values: Mapping[str, float], where: str) -> Iterator[tuple[Action, str]]:
        """Yields action and line of each guard that acts: after ``steps`` in a row, twice as many, ...

        Args:
            values: metrics by their full names.
            where: which step, for the message; repeating the latest step replaces it.
        """
        latest, before = self.last
        self.outside = dict(before if where == latest else self.outside)
        self.last = (where, dict(self.outside))
        for name, guard in self.guards.items():
            value = values.get(PREFIX + name)
            if value is None:  # not measured: neither in the row nor the end of it
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
