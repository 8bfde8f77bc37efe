"""Thresholds for a wished rejection rate, from exact quantiles over all files.

Statistics are ranked by two histograms (``ExactRank``), which takes a second pass over the files. A token
without a behavior log-prob is rejected whatever the threshold, and so is a sequence that has one: they count
neither as units nor as rejected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import yaml
from torch import Tensor

from slime_ext.ops import divergences
from slime_ext.tools.analysis.document import Suggestion
from slime_ext.tools.analysis.measures.quantiles import ExactRank
from slime_ext.tools.analysis.records import DumpedRollout

DIGITS = 17  # of a float64
LARGEST = 87.0  # log-ratio whose ratio, and one over it, a configuration holds (float32)


@dataclass(frozen=True)
class Rejection:
    """A rejection whose one threshold is searched.

    Args:
        unit: what is rejected.
        statistic: gives a value >= 0 for each of them, of which the larger are rejected.
        step: the name of the step in a configuration; ``fields`` its other fields.
        is_band: the statistic is |log-ratio|, the step wants low and high of the ratio.
    """

    name: str
    unit: Literal["token", "sequence"]
    statistic: Callable[[DumpedRollout], Tensor]
    fields: Mapping[str, str]
    step: str = "reject"
    is_band: bool = True

    def values(self, part: DumpedRollout) -> Tensor:
        """[U] the statistic of the tokens with both log-probs, or of the sequences in which every response
        token has them."""
        found = self.statistic(part)
        if self.unit == "token":
            return found[part.finite]
        return found[part.responding & ~part.samples_with(part.mask & ~part.finite)]

    def bounds(self, kept: float, gone: float) -> dict[str, float] | None:
        """``low`` and ``high`` of the step for a threshold between the largest statistic that is kept and the
        smallest that is rejected; None if no configuration holds it."""
        most = (
            LARGEST if self.is_band else divergences.LARGEST.get(self.fields["statistic"], math.exp(LARGEST))
        )
        if kept >= most:
            return None
        if not self.is_band:
            return {"high": between(kept, min(gone, most))}
        gone = gone if math.isinf(gone) else min(gone, most)
        return {
            "low": between(math.exp(-kept), math.exp(-gone)),
            "high": between(math.exp(kept), math.exp(gone)),
        }


REJECTIONS = (
    Rejection(
        "geometric mean of the ratio",
        "sequence",
        lambda r: r.segments.mean(r.log_ratio).abs(),
        {"unit": "sequence", "statistic": "ratio", "aggregate": "mean"},
    ),
    Rejection(
        "product of the ratios",
        "sequence",
        lambda r: r.segments.sum(r.log_ratio).abs(),
        {"unit": "sequence", "statistic": "ratio", "aggregate": "sum"},
    ),
    Rejection(
        "mean k3",
        "sequence",
        lambda r: r.segments.mean(divergences.k3(r.log_ratio)).clamp(min=0),
        {"unit": "sequence", "statistic": "k3", "aggregate": "mean"},
        is_band=False,
    ),
    Rejection(
        "worst token of a sequence", "sequence", lambda r: r.segments.max(r.log_ratio.abs()), {}, "veto"
    ),
    Rejection(
        "ratio of a token",
        "token",
        lambda r: r.log_ratio.abs(),
        {"unit": "token", "statistic": "ratio"},
    ),
    Rejection(
        "probability difference of a token",
        "token",
        lambda r: divergences.tv(r.proximal, r.behavior),
        {"unit": "token", "statistic": "tv"},
        is_band=False,
    ),
)


class Ranking:
    """A collector (see ``pipeline``) that must see every rollout, and after ``again`` every one once more.

    Args:
        rate: share of the units that may be rejected, in (0, 1).
    """

    def __init__(self, rate: float) -> None:
        self.ranks = {rejection.name: ExactRank(rate) for rejection in REJECTIONS}
        self.is_second = False

    def add(self, rollout: DumpedRollout) -> None:
        """Ranks the statistics of a rollout's tokens and sequences, for the first or the second time."""
        count = ExactRank.second if self.is_second else ExactRank.first
        for part in rollout.parts():
            for rejection in REJECTIONS:
                count(self.ranks[rejection.name], rejection.values(part))

    def merge(self, other: Ranking) -> None:
        """Adds what another one saw in the same pass, of other rollouts."""
        for name, rank in self.ranks.items():
            rank.merge(other.ranks[name], self.is_second)

    def again(self) -> Ranking:
        """Begins the second pass."""
        for rank in self.ranks.values():
            rank.choose()
        self.is_second = True
        return self

    def suggestions(self) -> tuple[Suggestion, ...]:
        """After the second pass: for every rejection the threshold that drops the largest share of its units
        not above the rate."""
        return tuple(
            _suggestion(rejection, rank, bounds) for rejection, rank, bounds in self._found() if bounds
        )

    def notes(self) -> tuple[str, ...]:
        """Which rejections have no threshold that could be written down."""
        return tuple(
            f"suggest: {rejection.name} is left out: its threshold is beyond what a configuration holds: the "
            "policies are too far apart"
            for rejection, _, bounds in self._found()
            if bounds is None
        )

    def _found(self) -> Iterator[tuple[Rejection, ExactRank, dict[str, float] | None]]:
        for rejection in REJECTIONS:
            rank = self.ranks[rejection.name]
            if rank.total:
                yield rejection, rank, rejection.bounds(*rank.result()[:2])


def _suggestion(rejection: Rejection, rank: ExactRank, bounds: Mapping[str, float]) -> Suggestion:
    config = {
        "use_tis": True,
        "custom_tis_function_path": "slime_ext.tis.correct",
        "slime_ext": {"steps": [{rejection.step: {**rejection.fields, **bounds}}]},
    }
    return Suggestion(
        name=rejection.name,
        unit=rejection.unit,
        wished=rank.rate,
        reached=rank.result()[2] / rank.total,
        units=rank.total,
        config=yaml.safe_dump(config, sort_keys=False, default_flow_style=None, width=100),
        **bounds,
    )


def between(kept: float, gone: float) -> float:
    """The number with the fewest digits between ``kept`` and ``gone``, at least a tenth of the way from
    each.

    >>> between(1.00123456, 1.00345678), between(0.9981, 0.9979)
    (1.002, 0.998)
    """
    if math.isinf(gone) or gone == 0:  # nothing lies beyond it
        gone = kept * 1.1 if gone else kept / 1.1
        gone = gone or 1e-6
    low, high = sorted((kept + 0.1 * (gone - kept), kept + 0.6 * (gone - kept)))
    middle = kept + 0.25 * (gone - kept)
    for digits in range(1, DIGITS):
        number = float(f"{middle:.{digits}g}")
        if low <= number <= high:
            return number
    return middle
