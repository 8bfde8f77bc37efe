"""Sums the log-ratio over the bins of each curve of the document, such as position or probability."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from slime_ext.tools.analysis.document import Curve, CurveName, Point
from slime_ext.tools.analysis.measures.measure import once_per_part
from slime_ext.tools.analysis.records import DumpedRollout
from slime_ext.tools.analysis.tables import Additive, Rows, bins_of, zeros

PER_OCTAVE = 4  # bins of positions and lengths
PER_DECADE = 8  # bins of probabilities
POSITIONS = 18 * PER_OCTAVE  # bins
OUTCOMES = ("incorrect", "correct")


class Bins(Additive):
    """Sums over the tokens in each bin of a curve.

    Args:
        table: [bins, 5] float64. The columns are count, sum |l|, sum l^2, sum l, and sum x, where x is the
            horizontal axis of the curve.
    """

    table: Tensor

    @classmethod
    def empty(cls, size: int) -> Bins:
        """Returns so many bins without a token."""
        return cls(zeros(size, 5))

    def add(self, part: DumpedRollout, per: Literal["token", "sample"], x: Tensor, bins: Tensor) -> None:
        """Adds N tokens, or N samples whose tokens have the same x.

        Args:
            x: [N] the value on the horizontal axis; NaN: not on this curve.
            bins: [N] the bin of that value, a float that is rounded down.
        """
        count, absolute, squared, log_ratio = (part.columns if per == "token" else part.sample_sums)[:4]
        rows = (
            count,
            absolute,
            squared,
            log_ratio,
            x.to(torch.float64, copy=True).mul_(count).nan_to_num_(0),
        )
        rows = Rows.of(rows, {(1, 2): part.pairs[1]} if per == "token" else {})
        part.tabulate(self.table, bins_of(bins, len(self.table)), rows, per)

    @property
    def count(self) -> Tensor:
        """The number of tokens in each bin, [bins]."""
        return self.table[:, 0]

    @property
    def absolute(self) -> Tensor:
        """The sum of |l| in each bin, [bins]."""
        return self.table[:, 1]

    @property
    def squared(self) -> Tensor:
        """The sum of l^2 in each bin, [bins]."""
        return self.table[:, 2]

    @property
    def log_ratio(self) -> Tensor:
        """The sum of l in each bin, [bins]."""
        return self.table[:, 3]

    @property
    def x(self) -> Tensor:
        """The sum of x in each bin, [bins]."""
        return self.table[:, 4]

    def points(self, labels: Sequence[str] = ()) -> tuple[Point, ...]:
        """Returns a point for each bin that holds tokens.

        Args:
            labels: of the bins; by default they have none.
        """
        points = []
        for i, (count, absolute, _, log_ratio, x) in enumerate(self.table.tolist()):
            if count:
                label = labels[i] if labels else None
                mean, distance = log_ratio / count, absolute / count
                points.append(Point(x=x / count, count=int(count), mean=mean, absolute=distance, label=label))
        return tuple(points)


class Curves(Additive):
    """The sums of every curve of the document."""

    takes_joined: ClassVar[bool] = True

    position: Bins = field(default_factory=lambda: Bins.empty(POSITIONS))
    staleness: Bins = field(default_factory=lambda: Bins.empty(256))
    probability: Bins = field(default_factory=lambda: Bins.empty(8 * PER_DECADE))
    length: Bins = field(default_factory=lambda: Bins.empty(18 * PER_OCTAVE))
    turn: Bins = field(default_factory=lambda: Bins.empty(64))
    outcome: Bins = field(default_factory=lambda: Bins.empty(len(OUTCOMES)))

    def add(self, part: DumpedRollout) -> None:
        """Adds the tokens of a part of a rollout."""
        turns = part.turns.float()
        self.position.add(part, "token", part.segments.within, octaves_of_places(part))
        if part.ages is not None:
            self.staleness.add(part, "token", part.ages, part.ages)
        probability = part.probability
        self.probability.add(part, "token", probability, probability.log10().mul_(-PER_DECADE))
        lengths = part.response_lengths.float()
        self.length.add(part, "sample", lengths, octaves(lengths))
        self.turn.add(part, "token", turns, turns)
        if part.rewards is not None:
            limits = [x for one in part.joined for x in [midway(one)] * one.count] or part.midway
            is_better = part.rewards > torch.tensor(limits, dtype=torch.float64)
            is_right = torch.where(part.rewards.isfinite(), is_better.double(), torch.nan)
            self.outcome.add(part, "sample", is_right, is_right)

    def curves(self) -> tuple[Curve, ...]:
        """Returns every curve that has more than one point."""
        points: dict[CurveName, tuple[Point, ...]] = {
            "position": self.position.points(),
            "staleness": self.staleness.points(),
            "probability": self.probability.points(),
            "length": self.length.points(),
            "turn": self.turn.points(),
            "outcome": self.outcome.points(OUTCOMES),
        }
        return tuple(Curve(name=name, points=some) for name, some in points.items() if len(some) > 1)


@once_per_part
def octaves_of_places(part: DumpedRollout) -> Tensor:
    """Returns ``octaves`` of each token's place in its response, [T]; each place is computed once."""
    return octaves(torch.arange(max(part.lengths, default=0))).index_select(0, part.segments.within)


def octaves(positions: Tensor) -> Tensor:
    """Returns the bins of positions or lengths, [N], as floats that are rounded down."""
    return (1 + positions).log2() * PER_OCTAVE


def midway(rollout: DumpedRollout) -> float:
    """Returns the reward above which a sample counts as correct.

    It is halfway between the rollout's lowest and highest reward, or 0 if all are the same.
    """
    rewards = None if rollout.rewards is None else rollout.rewards[rollout.rewards.isfinite()]
    if rewards is None or not rewards.numel() or rewards.min() == rewards.max():
        return 0.0
    middle = float(rewards.min() + rewards.max()) / 2
    return middle if math.isfinite(middle) else 0.0
