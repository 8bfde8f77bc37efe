"""The same weights in other arithmetic: errors that add up, experts that are routed differently, quantised
engines; and what none of the detectors explains."""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import median

from torch import Tensor

from slime_ext.tools.analysis.findings.ages import UNTOLD, fresh_and_stale
from slime_ext.tools.analysis.findings.detector import FEW, Figures, need_tokens
from slime_ext.tools.analysis.findings.sampling import by_probability
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.versions import VersionMeans

DRIFT_TOKENS = 400  # tokens
DRIFT_SURE = 6.0  # standard errors
DRIFT_TIMES, DRIFT_MATTERS = 2.5, 0.05  # of mean |l|, late over early; nats, what bfloat16 alone stays below
EVENED, ABOVE = 1.7, 1.2  # the same over tokens of which the sampler was as sure; late over all such
FEWEST = 300  # tokens
# nats, mean |l|. Two engines in bfloat16 stay below: 0.01 in small models, 0.027 in SmolLM2, whose logits of
# 16 to 32 are rounded to 1/8.
NOISY = 0.05
LOUD = 0.1  # nats, so much that even likely tokens are far off
GROWS = 1.3  # |l| of unlikely tokens over |l| of likely ones
# nats; what no rounding makes: four bits per weight (32 of one scale) make 0.35 in the tests' models, 0.74 in
# SmolLM2. From LOUDER on it may be other weights.
TOO_LOUD, LOUDER = 1.0, 0.5
LEVEL = 1.5  # the largest mean |l| of a rollout over the smallest, of noise that no push takes away
UNTOLD_WEIGHTS = (
    "whether pushes change it: analyse rollouts 0 to 2 of the run, with weight versions that advance"
)
BIASED = 0.3  # share of the variance that the probability may explain
FAR, QUIET = 0.5, 0.02  # nats, of flips: the size of the 1% of the tokens that hold FEW, the median of |l|
LIKELY, UNLIKELY = 1, 8  # bins of probability: above 0.75, below 0.1
FEWEST_TOKENS = 100  # tokens
UNEXPLAINED = 0.05  # nats, mean |l|; five times what bfloat16 makes, and more than a harmless lag of weights
SURE = 3.0  # standard errors above it


def position_drift(d: Diagnosis) -> Figures | None:
    """Finds a mean |log-ratio| that is a multiple late in the responses of what it is early."""
    need_tokens(d, DRIFT_TOKENS)
    count, absolute, squared = (d.curves.column("position", c) for c in ("count", "absolute", "squared"))
    reached = count.cumsum(0) / count.sum()
    parts = (reached <= 0.25, (reached > 0.25) & (reached < 0.75), reached >= 0.75)
    if not all(float(count[part].sum()) for part in parts):
        return None
    early, middle, late = (float(absolute[part].sum() / count[part].sum()) for part in parts)
    if late < max(DRIFT_MATTERS, DRIFT_TIMES * early) or not early <= middle <= late:
        return None
    if _evened(d, parts[2]) < max(ABOVE, EVENED * _evened(d, parts[0])):  # later tokens are less certain
        return None
    error = math.sqrt(float(squared[parts[2]].sum())) / float(count[parts[2]].sum())
    if late - early < DRIFT_SURE * error:  # a few tokens far off, that happen to come late
        return None
    return {"early": early, "middle": middle, "late": late}


def _evened(d: Diagnosis, part: Tensor) -> float:
    """Mean |l| of the tokens at some bins of position, over that of all tokens which were as sure as they."""
    count, absolute = d.curves.by_surprise("drift")[..., :2].unbind(2)
    usual = absolute.sum(0) / count.sum(0).clamp_min(1)
    return float(absolute[part].sum() / (count * usual)[part].sum().clamp_min(1e-30))


def routing_flips(d: Diagnosis) -> Figures | None:
    """Finds that 1% of the tokens hold nearly all of the squared log-ratio, while the others agree."""
    need_tokens(d, FEWEST)
    held, size = d.statistics.top_share, median(s.median for s in d.statistics.rollouts)
    far = math.sqrt((d.sums.mean("squared") or 0.0) * held / 0.01)
    if held < FEW or size > QUIET or far < FAR:
        return None
    return {
        "held": held,
        "far": far,
        "size": size,
        "lowest": d.sums.histogram.smallest,
        "highest": d.sums.histogram.largest,
    }


def quantised(d: Diagnosis) -> Figures | None:
    """Finds unbiased noise above that of bfloat16 which grows as the probability falls. Old weights may look
    so too: only tokens that are not of such are judged."""
    need_tokens(d, FEWEST)
    distance, is_known = _without_age(d)
    doubt = 0.0 if is_known else SURE * d.statistics.means["absolute"].error
    if not NOISY + doubt <= distance < TOO_LOUD or by_probability(d) > BIASED:
        return None
    likely, unlikely = _by_bins(d, slice(LIKELY)), _by_bins(d, slice(UNLIKELY, None))
    grows = likely is not None and unlikely is not None and unlikely >= GROWS * likely
    if d.statistics.top_share >= FEW or not (grows or distance >= LOUD):
        return None
    found = {"distance": distance, "likely": likely, "unlikely": unlikely}
    if distance >= LOUDER and not _stays(d):
        return found | {"or_else": ("resumed_wrong_weights",), "untold": UNTOLD_WEIGHTS}
    return found if is_known else found | {"or_else": ("stale_weights",), "untold": UNTOLD}


def _stays(d: Diagnosis) -> bool:
    """Whether the distance is the same in rollouts from 0 on whose weight versions advance: other weights
    would have gone with the first push."""
    rollouts, evened = d.statistics.rollouts, d.statistics.evened()
    is_pushed = all(b.version > a.version >= 0 for a, b in pairwise(rollouts))
    begins = len(rollouts) >= 3 and rollouts[0].rollout_id == 0
    return begins and is_pushed and max(evened) <= LEVEL * min(evened)


def _without_age(d: Diagnosis) -> tuple[float, bool]:
    """Mean |l| of tokens that fresh weights sampled, 0 where all of it may come from old weights; and whether
    they are known to be fresh."""
    first = d.statistics.rollouts[:1]
    fresh, stale = map(VersionMeans.of, fresh_and_stale(d.statistics.versions))
    if first and first[0].rollout_id == 0:  # where nothing is stale
        return min(first[0].absolute, fresh.absolute if fresh.count >= FEWEST else math.inf), True
    if fresh.count >= FEWEST:
        return fresh.absolute, False
    return (0.0 if stale.count >= FEWEST else d.sums.mean("absolute") or 0.0), False


def _by_bins(d: Diagnosis, bins: slice) -> float | None:
    count, absolute = (d.curves.column("probability", name)[bins].sum() for name in ("count", "absolute"))
    return float(absolute / count) if count else None


def unexplained(d: Diagnosis) -> Figures | None:
    """Finds a mean |log-ratio| that is significantly above what arithmetic makes."""
    need_tokens(d, FEWEST_TOKENS)
    mean, error, _ = d.statistics.means["absolute"]
    if mean - SURE * error < UNEXPLAINED:
        return None
    return {"mean": mean, "error": error, "k3": d.sums.mean("k3")}
