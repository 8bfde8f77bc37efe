"""The trainer scores another text than the engine sampled: tokens that were decoded and encoded again, a
prompt or an earlier turn that only one side has."""

from __future__ import annotations

import math

from slime_ext.tools.analysis.findings.detector import Figures, need
from slime_ext.tools.analysis.measures.curves import NEAR, beyond_certainty
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

FEWEST = 60  # tokens
TIMES, MATTERS, SURE = 3.0, 0.05, 6.0  # of mean |l| of a turn's begin; nats; standard errors
PREFIX_TOKENS, PREFIX_TIMES, PREFIX_MATTERS, PREFIX_SURE = 100, 3.0, 1e-3, 3.0  # as above, of k3
EVENED = 1.7  # the same over tokens of which the sampler was as sure


def stale_prefix(d: Diagnosis) -> Figures | None:
    """Finds that responses behind a cached prefix are a multiple as far off as others of their rollouts."""
    (n, near, _), (m, other, square) = (row[1:] for row in d.statistics.cached.tolist())
    is_enough = min(n, m) >= PREFIX_TOKENS
    need(is_enough, "prefix_cache_info of a rollout's samples, some with and some without a cached prefix")
    cached, fresh = other / m, near / n
    error = math.sqrt(square) / m  # over sequences
    if cached < max(PREFIX_TIMES * fresh, PREFIX_MATTERS) or cached - fresh < PREFIX_SURE * error:
        return None
    samples, of = int(d.statistics.cached[1, 0]), int(d.statistics.cached[:, 0].sum())
    return {"cached": cached, "fresh": fresh, "samples": samples, "of": of}


def prefix_mismatch(d: Diagnosis) -> Figures | None:
    """Finds that the begin of later turns (or of all responses) is a multiple as far off as the turn before
    it (or as the rest), also beside tokens of which the sampler was as sure."""
    tables = d.curves.by_surprise("part_of_turn")
    begin, rest, later, after = tables.sum(1).tolist()
    is_enough = min(begin[0] + rest[0], max(later[0], begin[0])) >= FEWEST
    need(is_enough, f"{FEWEST} tokens at the begin of turns")
    is_later = later[0] >= FEWEST
    here, there = (tables[2], tables[0] + tables[1]) if is_later else (tables[0], tables[1])
    begin, other = here.sum(0).tolist(), there.sum(0).tolist()
    if min(begin[0], other[0]) < FEWEST:
        return None
    near, far = begin[1] / begin[0], other[1] / other[0]
    error = math.sqrt(begin[2]) / begin[0]
    if near < max(TIMES * far, far + MATTERS, far + SURE * error):
        return None
    as_sure = beyond_certainty(here, there)
    if as_sure < EVENED:  # tokens that are less certain at the begin of a turn
        return None
    further = after[1] / after[0] if is_later and after[0] else None
    return {
        "near": near,
        "far": far,
        "after": further,
        "is_later": is_later,
        "tokens": NEAR,
        "as_sure": as_sure,
    }
