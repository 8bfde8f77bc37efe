"""How the log-ratio depends on something: one table of sums for each curve, over bins."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from slime_ext.analysis.document import Curve, Point
from slime_ext.analysis.records import DumpedRollout
from slime_ext.analysis.structure import tabulated
from slime_ext.ops.divergences import k3
from slime_ext.ops.segments import host_ints

PER_OCTAVE = 4  # bins of positions and lengths
PER_DECADE = 8  # bins of probabilities
COLUMNS = ("count", "x", "log_ratio", "absolute", "squared", "k3")
OUTCOMES = ("incorrect", "correct")


@dataclass(frozen=True)
class Axis:
    """What a curve runs over. ``x`` gives the value [T] of each token (NaN: not on this curve), or None
    where a dump lacks it; ``bin`` the bin of a value."""

    size: int
    x: Callable[[DumpedRollout], Tensor | None]
    bin: Callable[[Tensor], Tensor] = lambda x: x


def _octaves(x: Tensor) -> Tensor:
    """Positions 0, 1, 2, ... -> bins, 4 per octave of 1 + x."""
    return (1 + x).log2() * PER_OCTAVE


def _decades(x: Tensor) -> Tensor:
    """Probabilities -> bins, 8 per decade below 1."""
    return -x.log10() * PER_DECADE


def _position(part: DumpedRollout) -> Tensor:
    begins = host_ints([0, *part.lengths[:-1]], part.mask.device).cumsum(0)
    return torch.arange(part.size) - begins[part.segments.ids]


def _length(part: DumpedRollout) -> Tensor:
    return host_ints(part.lengths, part.mask.device)[part.segments.ids]


def _turn(part: DumpedRollout) -> Tensor:
    """[T] the number of the turn within its sample, from 0."""
    turns = part.segments.turn_ids
    first = torch.where(part.mask, turns, torch.iinfo(torch.int64).max)
    lowest = torch.full((part.count,), torch.iinfo(torch.int64).max).scatter_reduce(
        0, part.segments.ids, first, "amin"
    )
    return turns - lowest[part.segments.ids]


AXES: dict[str, Axis] = {
    "position": Axis(18 * PER_OCTAVE, _position, _octaves),
    "staleness": Axis(256, lambda part: part.ages),
    "probability": Axis(8 * PER_DECADE, lambda part: part.behavior.double().exp(), _decades),
    "length": Axis(18 * PER_OCTAVE, _length, _octaves),
    "turn": Axis(64, _turn),
}


@dataclass
class Curves:
    """For each curve the sums over the tokens in each of its bins, [bins, COLUMNS] float64."""

    tables: dict[str, Tensor] = field(
        default_factory=lambda: {
            **{
                name: torch.zeros(axis.size, len(COLUMNS), dtype=torch.float64) for name, axis in AXES.items()
            },
            "outcome": torch.zeros(len(OUTCOMES), len(COLUMNS), dtype=torch.float64),
        }
    )

    def add(self, part: DumpedRollout, midway: float = 0.0) -> None:
        """Adds the tokens of a part of a rollout.

        Args:
            midway: a sample with a reward above is correct.
        """
        values = _values(part)
        for name, axis in AXES.items():
            x = axis.x(part)
            if x is not None:
                self._count(name, part.compared(x).double(), values, axis.bin)
        if part.rewards is not None:
            rewards = part.compared(part.segments.expand(part.rewards))
            self._count(
                "outcome", torch.where(rewards.isfinite(), (rewards > midway).double(), torch.nan), values
            )

    def merge(self, other: Curves) -> None:
        """Adds the sums over other tokens."""
        for name, table in other.tables.items():
            self.tables[name] += table

    def _count(
        self, name: str, x: Tensor, values: Tensor, to_bin: Callable[[Tensor], Tensor] = lambda x: x
    ) -> None:
        table = self.tables[name]
        known = x.isfinite() & (x >= 0)
        if not known.all():
            x, values = x[known], values[:, known]
        index = to_bin(x).clamp(0, len(table) - 1).long()
        table += tabulated(index, [torch.ones_like(x), x, *values], len(table))

    def column(self, name: str, column: str) -> Tensor:
        """[bins] one column of a curve's sums."""
        return self.tables[name][:, COLUMNS.index(column)]

    def curve(self, name: str) -> Curve:
        """A curve with a point for each bin that holds tokens."""
        points = []
        for i, (count, x, log_ratio, absolute, *_) in enumerate(self.tables[name].tolist()):
            if count:
                label = OUTCOMES[i] if name == "outcome" else None
                mean, distance = log_ratio / count, absolute / count
                points.append(Point(x=x / count, count=int(count), mean=mean, absolute=distance, label=label))
        return Curve(name=name, points=tuple(points))

    def curves(self) -> tuple[Curve, ...]:
        """Every curve that has more than one point."""
        found = [self.curve(name) for name in self.tables]
        return tuple(c for c in found if len(c.points) > 1)


def midway(rollout: DumpedRollout) -> float:
    """The reward above which a sample counts as correct: halfway between the rollout's lowest and highest; 0
    if all are the same."""
    rewards = None if rollout.rewards is None else rollout.rewards[rollout.rewards.isfinite()]
    if rewards is None or not rewards.numel() or rewards.min() == rewards.max():
        return 0.0
    middle = float(rewards.min() + rewards.max()) / 2
    return middle if math.isfinite(middle) else 0.0


def _values(part: DumpedRollout) -> Tensor:
    """[COLUMNS - 2, finite tokens] float64: the log-ratio, its size, its square and k3, which are summed
    in every bin."""
    found = part.compared(part.log_ratio).double()
    return torch.stack([found, found.abs(), found.square(), k3(found)])
