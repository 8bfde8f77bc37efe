"""Thresholds for a wished rejection rate, from exact quantiles over all files.

Sequence statistics are kept, eight bytes for each sequence; token statistics are ranked by two histograms
(``ExactRank``), which takes a second pass over the files. A token without a behavior log-prob is rejected
whatever the threshold, and so is a sequence that has one: they count neither as units nor as rejected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import yaml
from torch import Tensor

from slime_ext.analysis.document import Suggestion
from slime_ext.analysis.quantiles import ExactRank
from slime_ext.analysis.records import Rollout
from slime_ext.errors import ConfigError
from slime_ext.ops import divergences

Read = Callable[[], Iterable[Rollout]]
Bound = tuple[float, float]  # the largest kept value and the smallest rejected one
DIGITS = 17  # of a float64
LARGEST = 700.0  # log-ratio whose ratio, and one over it, a float64 holds


@dataclass(frozen=True)
class Kind:
    """A rejection whose one threshold is searched: ``statistic`` of its units, >= 0, larger is worse."""

    name: str
    unit: Literal["token", "sequence"]
    statistic: Callable[[Rollout], Tensor]
    step: Mapping[str, Mapping[str, Any]]
    is_band: bool  # the statistic is |log-ratio|, the step wants low and high of the ratio

    def bounds(self, bound: Bound) -> dict[str, float] | None:
        """``low`` and ``high`` of the step for a threshold between the two values; None if no float64 holds
        it."""
        kept, gone = bound
        if kept >= (LARGEST if self.is_band else math.inf):
            return None
        if not self.is_band:
            return {"high": between(kept, gone)}
        gone = gone if math.isinf(gone) else min(gone, LARGEST)
        return {
            "low": between(math.exp(-kept), math.exp(-gone)),
            "high": between(math.exp(kept), math.exp(gone)),
        }


def _sequences(rollout: Rollout, values: Tensor) -> Tensor:
    """[S] -> those of the sequences whose every response token has a behavior log-prob."""
    has = rollout.segments.any(rollout.mask)
    return values[has & ~rollout.segments.any(~rollout.finite)]


def _tokens(rollout: Rollout, values: Tensor) -> Tensor:
    return values[rollout.finite]


def _mean_k3(rollout: Rollout) -> Tensor:
    return rollout.segments.mean(divergences.k3(rollout.log_ratio)).clamp(min=0)


GEOMETRIC = {"unit": "sequence", "statistic": "ratio", "aggregate": "mean"}
KINDS = (
    Kind(
        "geometric mean of the ratio",
        "sequence",
        lambda r: _sequences(r, r.segments.mean(r.log_ratio).abs()),
        {"reject": GEOMETRIC},
        True,
    ),
    Kind(
        "product of the ratios",
        "sequence",
        lambda r: _sequences(r, r.segments.sum(r.log_ratio).abs()),
        {"reject": {**GEOMETRIC, "aggregate": "sum"}},
        True,
    ),
    Kind(
        "mean k3",
        "sequence",
        lambda r: _sequences(r, _mean_k3(r)),
        {"reject": {**GEOMETRIC, "statistic": "k3"}},
        False,
    ),
    Kind(
        "worst token of a sequence",
        "sequence",
        lambda r: _sequences(r, r.segments.max(r.log_ratio.abs())),
        {"veto": {}},
        True,
    ),
    Kind(
        "ratio of a token",
        "token",
        lambda r: _tokens(r, r.log_ratio.abs()),
        {"reject": {"unit": "token", "statistic": "ratio"}},
        True,
    ),
    Kind(
        "probability difference of a token",
        "token",
        lambda r: _tokens(r, divergences.tv(r.proximal, r.behavior)),
        {"reject": {"unit": "token", "statistic": "tv"}},
        False,
    ),
)


@dataclass
class Kept:
    """Ranks sequences: one float64 each."""

    rate: float
    values: list[Tensor] = field(default_factory=list)

    def first(self, values: Tensor) -> None:
        """Keeps [N] values."""
        self.values.append(values.double())

    def merge(self, other: Kept) -> None:
        """Adds what another one kept."""
        self.values += other.values

    @property
    def total(self) -> int:
        """How many there are."""
        return sum(v.numel() for v in self.values)

    def result(self) -> tuple[float, float, int]:
        """As ``ExactRank.result``."""
        ordered = torch.cat(self.values).sort().values
        kept = ordered[len(ordered) - 1 - int(self.rate * len(ordered))]
        above = ordered[torch.searchsorted(ordered, kept, right=True) :]
        return float(kept), float(above[0]) if len(above) else math.inf, len(above)


class Ranking:
    """A collector (see ``pipeline``) that must see every rollout, and after ``again`` every one once more.

    Args:
        rate: wished share, in (0, 1).

    Raises:
        ConfigError: a rate outside (0, 1).
    """

    def __init__(self, rate: float) -> None:
        if not 0 < rate < 1:
            raise ConfigError(
                f"--suggest: expected a rate between 0 and 1, got {rate:g}: 0.01 rejects 1 in 100"
            )
        self.sequences = {kind.name: Kept(rate) for kind in KINDS if kind.unit == "sequence"}
        self.tokens = {kind.name: ExactRank(rate) for kind in KINDS if kind.unit == "token"}
        self.is_second = False

    def add(self, rollout: Rollout) -> None:
        """Looks at a rollout for the first or the second time."""
        for part in rollout.parts():
            for kind in KINDS:
                self._add(kind, part)

    def _add(self, kind: Kind, part: Rollout) -> None:
        if kind.unit == "sequence":
            if not self.is_second:
                self.sequences[kind.name].first(kind.statistic(part))
        elif self.is_second:
            self.tokens[kind.name].second(kind.statistic(part))
        else:
            self.tokens[kind.name].first(kind.statistic(part))

    def merge(self, other: Ranking) -> None:
        """Adds what another one saw in the same pass, of other rollouts."""
        for name, rank in self.tokens.items():
            rank.merge(other.tokens[name], self.is_second)
        for name, kept in self.sequences.items() if not self.is_second else ():
            kept.merge(other.sequences[name])

    def again(self) -> Ranking:
        """What the second pass starts with."""
        for rank in self.tokens.values():
            rank.choose()
        self.is_second = True
        return self

    def suggestions(self) -> tuple[Suggestion, ...]:
        """After the second pass: for every kind of rejection the threshold that drops the largest share of
        its units not above the rate."""
        return tuple(_suggestion(kind, rank, bounds) for kind, rank, bounds in self._found() if bounds)

    def notes(self) -> tuple[str, ...]:
        """Which kinds of rejection have no threshold that could be written down."""
        return tuple(
            f"suggest: {kind.name} is left out: its threshold is beyond what a float64 holds: the policies "
            "are too far apart"
            for kind, _, bounds in self._found()
            if bounds is None
        )

    def _found(self) -> Iterator[tuple[Kind, ExactRank | Kept, dict[str, float] | None]]:
        ranks = self.sequences | self.tokens
        for kind in KINDS:
            if ranks[kind.name].total:
                yield kind, ranks[kind.name], kind.bounds(ranks[kind.name].result()[:2])


def suggest(read: Read, rate: float) -> tuple[Suggestion, ...]:
    """Both passes in this process.

    Args:
        read: gives the rollouts again whenever it is called; it is called twice.
        rate: wished share, in (0, 1).

    Raises:
        ConfigError: a rate outside (0, 1).
    """
    ranking = Ranking(rate)
    for rollout in read():
        ranking.add(rollout)
    ranking.again()
    for rollout in read():
        ranking.add(rollout)
    return ranking.suggestions()


def _suggestion(kind: Kind, rank: ExactRank | Kept, bounds: Mapping[str, float]) -> Suggestion:
    ((name, fields),) = kind.step.items()
    config = {
        "use_tis": True,
        "custom_tis_function_path": "slime_ext.tis.correct",
        "slime_ext": {"steps": [{name: {**fields, **bounds}}]},
    }
    return Suggestion(
        name=kind.name,
        unit=kind.unit,
        wished=rank.rate,
        reached=rank.result()[2] / rank.total,
        units=rank.total,
        config=yaml.safe_dump(config, sort_keys=False, default_flow_style=None, width=100),
        **bounds,
    )


def between(kept: float, gone: float) -> float:
    """The number with the fewest digits that keeps ``kept`` and not ``gone``, a tenth of the way or more from
    both.

    >>> between(1.00123456, 1.00345678), between(0.9981, 0.9979)
    (1.002, 0.998)
    """
    if math.isinf(gone) or gone == 0:  # nothing lies beyond: a little room
        gone = kept * 1.1 if gone else kept / 1.1
        gone = gone or 1e-6
    low, high = sorted((kept + 0.1 * (gone - kept), kept + 0.6 * (gone - kept)))
    middle = kept + 0.25 * (gone - kept)
    for digits in range(1, DIGITS):
        number = float(f"{middle:.{digits}g}")
        if low <= number <= high:
            return number
    return middle
