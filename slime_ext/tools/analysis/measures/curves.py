"""Sums the log-ratio over the bins of each curve, such as position or probability."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import get_args

import torch
from torch import Tensor

from slime_ext.tools.analysis.document import Curve, CurveName, Point
from slime_ext.tools.analysis.records import SURPRISES, TOKEN_COLUMNS, DumpedRollout
from slime_ext.tools.analysis.tables import Additive, tabulated, zeros

PER_OCTAVE = 4  # bins of positions and lengths
PER_DECADE = 8  # bins of probabilities
POSITIONS = 18 * PER_OCTAVE  # bins
COLUMNS = (*TOKEN_COLUMNS[:4], "x")
OUTCOMES = ("incorrect", "correct")
# Absolute positions (prompt and response) in a block; the last block holds all later ones.
BLOCK, BLOCKS = 16, 2048
NEAR = 8  # first tokens of a turn that count as its start
PARTS = ("start of the first turn", "rest of the first turn", "start of later turns", "rest of later turns")


@dataclass(frozen=True)
class Axis:
    """The horizontal axis of a curve.

    ``x`` returns the value of each token [T] (NaN: not on this curve), or None if a dump lacks it. ``bin``
    returns the bin of a value.
    """

    size: int
    x: Callable[[DumpedRollout], Tensor | None]
    bin: Callable[[Tensor], Tensor] = lambda x: x


def _octaves(x: Tensor) -> Tensor:
    return (1 + x).log2() * PER_OCTAVE


def _decades(x: Tensor) -> Tensor:
    return -x.log10() * PER_DECADE


def _by_surprise(bins: Tensor, part: DumpedRollout) -> Tensor:
    """Returns one number for a bin and the bin of -log behavior, [T]."""
    return bins.floor() * SURPRISES + part.surprise


def _length(part: DumpedRollout) -> Tensor:
    return part.segments.expand(torch.tensor(part.lengths))


def _absolute(part: DumpedRollout) -> Tensor:
    return part.segments.within + part.segments.expand(torch.tensor(part.prompt_lengths))


def _part_of_turn(part: DumpedRollout) -> Tensor:
    """Returns which of PARTS each response token is in, [T]."""
    turns = part.segments.turn_ids
    begins = (turns.diff(prepend=turns.new_zeros(1)) > 0).nonzero()[:, 0]  # where each turn begins
    begins = torch.cat([begins, begins.new_zeros(1)])
    is_begin = torch.arange(part.size) - begins[turns - 1] < NEAR
    return 2 * (part.turns > 0).long() + (~is_begin).long()


def _outcome(part: DumpedRollout) -> Tensor | None:
    if part.rewards is None:
        return None
    correct = torch.where(part.rewards.isfinite(), (part.rewards > part.midway).double(), torch.nan)
    return part.segments.expand(correct)


AXES: dict[str, Axis] = {
    "position": Axis(POSITIONS, lambda part: part.segments.within, _octaves),
    "staleness": Axis(256, lambda part: part.ages),
    "probability": Axis(8 * PER_DECADE, lambda part: part.compared(part.behavior).exp(), _decades),
    "length": Axis(18 * PER_OCTAVE, _length, _octaves),
    "turn": Axis(64, lambda part: part.turns),
    "outcome": Axis(len(OUTCOMES), _outcome),
    # Only for the detectors: position, absolute position and place in a turn, each combined with the bin of
    # -log behavior; whether both sides chose the same experts.
    "drift": Axis(
        POSITIONS * SURPRISES,
        lambda part: _by_surprise(_octaves(part.segments.within).clamp(max=POSITIONS - 1), part),
    ),
    "block": Axis(
        BLOCKS * SURPRISES,
        lambda part: _by_surprise((_absolute(part) / BLOCK).clamp(max=BLOCKS - 1), part),
    ),
    "part_of_turn": Axis(len(PARTS) * SURPRISES, lambda part: _by_surprise(_part_of_turn(part), part)),
    "overlap": Axis(2, lambda part: part.overlap),
}


@dataclass
class Curves(Additive):
    """The sums over the tokens in each bin of each curve, [bins, COLUMNS] float64."""

    tables: dict[str, Tensor] = field(
        default_factory=lambda: {name: zeros(axis.size, len(COLUMNS)) for name, axis in AXES.items()}
    )

    def add(self, part: DumpedRollout) -> None:
        """Adds the tokens of a part of a rollout."""
        for name, axis in AXES.items():
            x = axis.x(part)
            if x is not None:
                index = axis.bin(x.float()).clamp(0, axis.size - 1).nan_to_num(axis.size).long()
                count, *others = part.columns[:4]
                rows = (count, *others, (x * count).nan_to_num(0))
                self.tables[name] += tabulated(index, rows, axis.size)

    def column(self, name: str, column: str) -> Tensor:
        """Returns one column of a curve's sums, [bins]."""
        return self.tables[name][:, COLUMNS.index(column)]

    def by_surprise(self, name: str) -> Tensor:
        """Returns a table that is combined with bins of -log behavior, [bins, SURPRISES, COLUMNS]."""
        return self.tables[name].view(-1, SURPRISES, len(COLUMNS))

    def certainty(self) -> Tensor:
        """Returns number and sum |l| of the tokens by bin of -log behavior, [SURPRISES, 2]."""
        return self.by_surprise("part_of_turn").sum(0)[:, :2]

    def curve(self, name: str) -> Curve:
        """Returns a curve with a point for each bin that holds tokens."""
        points = []
        for i, (count, absolute, _, log_ratio, x) in enumerate(self.tables[name].tolist()):
            if count:
                label = OUTCOMES[i] if name == "outcome" else None
                mean, distance = log_ratio / count, absolute / count
                points.append(Point(x=x / count, count=int(count), mean=mean, absolute=distance, label=label))
        return Curve(name=name, points=tuple(points))

    def curves(self) -> tuple[Curve, ...]:
        """Returns every curve of the document that has more than one point."""
        curves = [self.curve(name) for name in get_args(CurveName)]
        return tuple(c for c in curves if len(c.points) > 1)


def beyond_certainty(part: Tensor, others: Tensor) -> float:
    """Returns mean |l| of some tokens over that of equally certain other tokens.

    Bins of certainty that the other tokens lack are left out.

    Args:
        part, others: [SURPRISES, COLUMNS] sums over both kinds of tokens.
    """
    (n, absolute), (m, usual) = part[:, :2].unbind(1), others[:, :2].unbind(1)
    both = (n > 0) & (m > 0)
    expected = (n * usual / m)[both].sum()
    return float(absolute[both].sum() / expected) if expected > 0 else math.inf


def midway(rollout: DumpedRollout) -> float:
    """Returns the reward above which a sample counts as correct.

    It is halfway between the rollout's lowest and highest reward, or 0 if all are the same.
    """
    rewards = None if rollout.rewards is None else rollout.rewards[rollout.rewards.isfinite()]
    if rewards is None or not rewards.numel() or rewards.min() == rewards.max():
        return 0.0
    middle = float(rewards.min() + rewards.max()) / 2
    return middle if math.isfinite(middle) else 0.0
