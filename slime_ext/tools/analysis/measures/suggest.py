"""Suggests thresholds for a rejection rate, from one histogram of each statistic over all files.

A token without a behavior log-prob is rejected at any threshold, and so is a sequence with such a token.
Neither counts as a unit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from slime_ext.ops import divergences
from slime_ext.tools.analysis.document import Suggestion
from slime_ext.tools.analysis.measures.histogram import Histogram
from slime_ext.tools.analysis.records import DumpedRollout

NEAR = 0.1  # log-ratio up to which the digits of ratio - 1 are kept
LARGEST = 87.0  # largest log-ratio l for which float32 holds e^l and e^-l


@dataclass(frozen=True)
class Rejection:
    """A rejection whose threshold is searched.

    Args:
        unit: what is rejected.
        statistic: returns a value >= 0 for each unit; large ones are rejected.
        step: name of the step in a configuration.
        fields: the other fields of the step.
        is_band: the statistic is |log-ratio|, and the step has ``low`` and ``high`` for the ratio.
    """

    name: str
    unit: Literal["token", "sequence"]
    statistic: Callable[[DumpedRollout], Tensor]
    fields: Mapping[str, str]
    step: str = "reject"
    is_band: bool = True

    def values(self, part: DumpedRollout) -> Tensor:
        """Returns the statistic of each unit whose response tokens have both log-probs, [U]."""
        values = self.statistic(part)
        if self.unit == "token":
            return values[part.finite]
        return values[part.responding & ~part.samples_with(part.mask & ~part.finite)]

    def bounds(self, threshold: float) -> dict[str, float] | None:
        """Returns ``low`` and ``high`` of the step; None if no configuration can hold them."""
        if self.is_band:
            if threshold >= LARGEST:
                return None
            return {"low": _ratio(-threshold), "high": _ratio(threshold)}
        most = divergences.LARGEST_AT_TOKEN.get(self.fields["statistic"], math.exp(LARGEST))
        return {"high": _rounded(threshold)} if threshold < most else None


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
    """A collector (see ``pipeline``) of the statistics of every rejection.

    Args:
        rate: largest share of the units to reject, in (0, 1); None: collect nothing.
    """

    def __init__(self, rate: float | None) -> None:
        self.rate = rate
        self.seen = [Histogram() for _ in REJECTIONS if rate]

    def add(self, rollout: DumpedRollout) -> None:
        """Counts the statistics of a rollout's tokens and sequences."""
        for part in rollout.parts():
            for rejection, values in zip(REJECTIONS, self.seen, strict=False):
                values.add(rejection.values(part))

    def merge(self, other: Ranking) -> None:
        """Adds the statistics of other rollouts."""
        for histogram, more in zip(self.seen, other.seen, strict=True):
            histogram.merge(more)

    def suggestions(self) -> tuple[Suggestion, ...]:
        """Returns, for every rejection, the threshold that drops the largest share up to the rate."""
        return tuple(suggestion for suggestion in self._by_name().values() if suggestion)

    def notes(self) -> tuple[str, ...]:
        """Returns which rejections have no threshold that a configuration can hold."""
        return tuple(
            f"no threshold is suggested for the {name}, because the policies are so far apart that no "
            "configuration can hold it"
            for name, suggestion in self._by_name().items()
            if suggestion is None
        )

    def _by_name(self) -> dict[str, Suggestion | None]:
        both = zip(REJECTIONS, self.seen, strict=False)
        return {one.name: self._suggestion(one, values) for one, values in both if values.counts.any()}

    def _suggestion(self, rejection: Rejection, values: Histogram) -> Suggestion | None:
        kept, gone, above = values.tail(self.rate)
        units = int(values.counts.sum())
        # A quarter of the way into the gap above (if there is one), so that rounding moves no unit across.
        gap = min(gone - kept, kept) if gone < math.inf else 0.0
        bounds = rejection.bounds(kept + gap / 4)
        if bounds is None:
            return None
        import yaml  # most runs ask for no suggestion

        config = {
            "use_tis": True,
            "custom_tis_function_path": "slime_ext.tis.correct",
            "slime_ext": {"steps": [{rejection.step: {**rejection.fields, **bounds}}]},
        }
        return Suggestion(
            name=rejection.name,
            unit=rejection.unit,
            wished=self.rate,
            reached=above / units,
            units=units,
            config=yaml.safe_dump(config, sort_keys=False, default_flow_style=None, width=100),
            **bounds,
        )


def _ratio(log_ratio: float) -> float:
    """Returns the ratio of a log-ratio with four digits; near 1, with four digits of its distance from 1.

    >>> _ratio(-80.0), _ratio(0.000123456)
    (1.805e-35, 1.0001235)
    """
    if abs(log_ratio) > NEAR:
        return _rounded(math.exp(log_ratio))
    return round(1 + _rounded(math.expm1(log_ratio)), 12)


def _rounded(value: float) -> float:
    """Rounds a number to four significant digits.

    >>> _rounded(0.00123456)
    0.001235
    """
    return float(f"{value:.4g}")
