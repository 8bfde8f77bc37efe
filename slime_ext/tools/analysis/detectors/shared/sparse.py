"""Finds a few tokens that are far off while all others agree."""

from __future__ import annotations

import math
from statistics import median

from slime_ext.tools.analysis.detectors.shared.along import Positions
from slime_ext.tools.analysis.detectors.shared.detector import FEW, Figures, need_tokens
from slime_ext.tools.analysis.detectors.shared.ends import Ends
from slime_ext.tools.analysis.detectors.shared.explained import explained_by_tokens
from slime_ext.tools.analysis.detectors.shared.kinds import side_by_side
from slime_ext.tools.analysis.detectors.shared.signs import Signs
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.rollouts import top_share

NAMED = (  # findings and groups that also have few far tokens, and say what these share
    "spoilt",
    "other_policy",
    "prefixes",
    "pushes",
    "resumed_wrong_weights",
    "layer",
    "stale_weights",
    "stale_cache",
    "expert_routing",
    "parts",
    "experts",
)
FEWEST = 300  # tokens
FAR, QUIET = 0.5, 0.02  # nats: least root mean square of l in the largest 1%; largest median of |l|
# Share of tokens beyond 0.5 nats; their share of sum l^2; their mean |l|, nats.
MOST, HOLD, LARGE = 0.05, 0.9, 2.0
TOKENS, HALF = 20, 0.5  # tokens of a place; share of them, and of l^2
SURE = 4.0  # standard errors by which more samples agree than by chance
BOTH = 0.1  # share of sum l^2 of far tokens that lies on the other side of 0


def sparse(d: Diagnosis) -> Figures | None:
    """Returns the figures if few tokens hold nearly all of the squared log-ratio, else None."""
    need_tokens(d, FEWEST)
    held, size = top_share(d.rollouts), median(s.median for s in d.rollouts)
    far = math.sqrt(float(d.curves.position.squared.sum()) / d.sums.finite * held / 0.01)
    counts, signed, _, squares, k3 = d.of(Signs).far.unbind(1)
    below, above = squares.tolist()
    some, whole = float(counts.sum()), float(d.of(Ends).total[3])
    is_some = some <= MOST * d.sums.finite and below + above >= HOLD * whole and some > 0
    is_some = is_some and float(signed.abs().sum()) >= LARGE * some
    if size > QUIET or far < FAR or (held < FEW and not is_some):
        return None
    if _are_of_samples(d, some) or _are_of_places(d):
        return None
    whole = below + above
    lowest, highest = d.sums.histogram.smallest, d.sums.histogram.largest
    is_both = min(below, above) >= BOTH * whole if whole else lowest < -FAR < FAR < highest
    return {
        "held": held,
        "far": far,
        "size": size,
        "lowest": lowest,
        "highest": highest,
        "is_both": is_both,
        "is_below": below > above if whole else -lowest > highest,
        "explains": explained_by_tokens(d, some, float(k3.sum())),
    }


def _are_of_samples(d: Diagnosis, far: float) -> bool:
    """Returns whether far tokens share their samples, because more samples have none than by chance.

    A token that is far off by chance lies in a sample in proportion to its length. If lengths are spread as
    widely as those of an exponential distribution, 1 / (1 + m) of the samples have none, at m for each.
    """
    kinds = side_by_side(d)
    if kinds is None:
        return False
    by_chance = d.sums.sequences / (1 + far / d.sums.sequences)
    return kinds.near[0] - by_chance >= SURE * math.sqrt(by_chance)


def _are_of_places(d: Diagnosis) -> bool:
    """Returns whether far tokens share their places, because most tokens there are far.

    If a few tokens of a place are far, the square of their mean is a small share of their mean square.
    """
    count, absolute, squared, _ = d.of(Positions).table.sum(1).unbind(1)
    is_far = (count >= TOKENS) & (absolute >= FAR * count) & (absolute.square() >= HALF * count * squared)
    return float(squared[is_far].sum()) >= HALF * float(squared.sum())
