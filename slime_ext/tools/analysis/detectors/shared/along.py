"""Mean |l| along the response: its first quarter of tokens by position, the middle, and the last quarter."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

TIMES, EVENED = 2.5, 1.7  # late over early; the same over tokens of which the sampler was as sure
MORE, LEAST = 2.0, 0.02  # of what rollouts explain; of the variance of |l|


class Along(NamedTuple):
    """Mean |l| of the three parts; that of the first and last over tokens of which the sampler was as sure;
    standard errors of the first and last."""

    early: float
    middle: float
    late: float
    first: float
    last: float
    early_error: float
    late_error: float


def along(d: Diagnosis) -> Along | None:
    """None where the parts cannot be cut."""
    count, absolute, squared = (d.curves.column("position", c) for c in ("count", "absolute", "squared"))
    reached = count.cumsum(0) / count.sum()
    parts = (reached <= 0.25, (reached > 0.25) & (reached < 0.75), reached >= 0.75)
    if not all(float(count[part].sum()) for part in parts):
        return None
    means = (float(absolute[part].sum() / count[part].sum()) for part in parts)
    errors = (math.sqrt(float(squared[part].sum())) / float(count[part].sum()) for part in parts[::2])
    return Along(*means, *(_evened(d, part) for part in parts[::2]), *errors)


def rather_than_rollouts(d: Diagnosis) -> bool:
    """Whether |l| grows along the response, and the place explains more of it than the rollout does: the
    share of its variance that lies between places, against the share between rollouts.

    Such a distance grows over a run, too, while responses get longer.
    """
    found = along(d)
    if found is None or found.late < TIMES * found.early or found.last < EVENED * found.first:
        return False
    count, absolute, squared = (d.curves.column("position", c) for c in ("count", "absolute", "squared"))
    rollouts = torch.tensor([(s.tokens, s.tokens * s.absolute) for s in d.statistics.rollouts]).double()
    whole = float(absolute.sum()) ** 2 / max(float(count.sum()), 1.0)
    places, ids = (
        float((total.square() / n.clamp_min(1)).sum()) - whole
        for n, total in ((count, absolute), rollouts.unbind(1))
    )
    return places > MORE * ids and places > LEAST * (float(squared.sum()) - whole)


def _evened(d: Diagnosis, part: Tensor) -> float:
    """Mean |l| of the tokens at some bins of position, over that of all tokens which were as sure as they."""
    count, absolute = d.curves.by_surprise("drift")[..., :2].unbind(2)
    usual = absolute.sum(0) / count.sum(0).clamp_min(1)
    return float(absolute[part].sum() / (count * usual)[part].sum().clamp_min(1e-30))
