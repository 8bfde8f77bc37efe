"""Measures mean |l| in the first quarter of the response's tokens, the middle and the last."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from slime_ext.tools.analysis.detectors.shared.certainty import add_by_surprise
from slime_ext.tools.analysis.detectors.shared.explained import Explained, explained_by_tokens
from slime_ext.tools.analysis.measures.curves import POSITIONS, octaves_of_places
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.measure import Measure
from slime_ext.tools.analysis.records import SURPRISES, DumpedRollout
from slime_ext.tools.analysis.tables import zeros

TIMES, EQUALLY_CERTAIN = 2.5, 1.7  # late over early; the same ratio among equally certain tokens
SURE = 3.0  # standard errors
MORE, LEAST = 2.0, 0.02  # times what rollouts explain; share of the variance of |l|
AGREES, MANY = 0.1, 0.25  # l^2 over that of equally certain tokens; share of the l^2 that these would have


class Positions(Measure):
    """Sums by bin of the position and of -log behavior, [POSITIONS, SURPRISES, 4], of ``by_surprise``."""

    takes_joined: ClassVar[bool] = True
    version: ClassVar[int] = 2

    table: Tensor = field(default_factory=lambda: zeros(POSITIONS, SURPRISES, 4))

    def add(self, part: DumpedRollout) -> None:
        add_by_surprise(self.table, octaves_of_places(part), part)


class Along(NamedTuple):
    """Mean |l| of three parts of the response, and standard errors.

    ``first`` and ``last`` are mean |l| of the outer parts over that of all equally certain tokens.
    """

    early: float
    middle: float
    late: float
    first: float
    last: float
    early_error: float
    late_error: float


def along(d: Diagnosis) -> Along | None:
    """Returns mean |l| in three parts of the response; None if a part has no token."""
    curve = d.curves.position
    count, absolute, squared = curve.count, curve.absolute, curve.squared
    reached = count.cumsum(0) / count.sum()
    parts = (reached <= 0.25, (reached > 0.25) & (reached < 0.75), reached >= 0.75)
    counts = [float(count[part].sum()) for part in parts]
    if not all(counts):
        return None
    means = (float(absolute[part].sum()) / n for part, n in zip(parts, counts, strict=True))
    errors = (
        math.sqrt(float(squared[part].sum())) / n for part, n in zip(parts[::2], counts[::2], strict=True)
    )
    return Along(*means, *_over_equally_certain(d, parts[::2]), *errors)


def falls(d: Diagnosis) -> bool:
    """Returns whether equally certain tokens are further off early in the response than late."""
    drift = along(d)
    if drift is None or not drift.early:
        return False
    early = drift.first * drift.early_error / drift.early
    late = drift.last * drift.late_error / drift.late if drift.late else 0.0  # both sides are equal there
    return drift.first - drift.last >= SURE * math.hypot(early, late)


def explained_along(d: Diagnosis, *, grows: bool) -> Explained:
    """Returns the share of k3 by which three quarters of the tokens differ from the nearest quarter.

    These are all tokens after the first quarter by position, or all before the last quarter.
    """
    count, _, _, k3 = d.of(Positions).table.sum(1).unbind(1)
    reached = count.cumsum(0) / count.sum().clamp_min(1)
    is_far = reached > 0.25 if grows else reached < 0.75
    return explained_by_tokens(d, float(count[is_far].sum()), float(k3[is_far].sum()))


def rather_than_rollouts(d: Diagnosis) -> bool:
    """Returns whether |l| grows along the response rather than from rollout to rollout.

    Positions must explain more of its variance than rollouts do. If |l| grows along the response, it also
    grows over a run in which responses get longer.
    """
    drift = along(d)
    if drift is None or drift.late < TIMES * drift.early or drift.last < EQUALLY_CERTAIN * drift.first:
        return False
    curve = d.curves.position
    count, absolute, squared = curve.count, curve.absolute, curve.squared
    rollouts = torch.tensor([(s.tokens, s.tokens * s.absolute) for s in d.rollouts]).double()
    whole = float(absolute.sum()) ** 2 / max(float(count.sum()), 1.0)
    places, ids = (
        float((total.square() / n.clamp_min(1)).sum()) - whole
        for n, total in ((count, absolute), rollouts.unbind(1))
    )
    return places > MORE * ids and places > LEAST * (float(squared.sum()) - whole)


def agrees_at_places(d: Diagnosis) -> bool:
    """Returns whether tokens agree at many positions of the responses, and are far off at others.

    Other weights act on every token, and equally certain ones are about as far off at each position.
    """
    count, _, squared, _ = d.of(Positions).table.unbind(2)
    usual = (count * (squared.sum(0) / count.sum(0).clamp_min(1))).sum(1)
    return float(usual[squared.sum(1) <= AGREES * usual].sum()) >= MANY * float(usual.sum())


def _over_equally_certain(d: Diagnosis, parts: Iterable[Tensor]) -> Iterator[float]:
    """Yields mean |l| at some bins of position, over that of all equally certain tokens."""
    count, absolute, *_ = d.of(Positions).table.unbind(2)
    usual = count * (absolute.sum(0) / count.sum(0).clamp_min(1))
    for part in parts:
        yield float(absolute[part].sum()) / max(float(usual[part].sum()), 1e-30)
