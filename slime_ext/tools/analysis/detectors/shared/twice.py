"""Compares the log-probs that each side gives to the same text in several samples of a prompt."""

from __future__ import annotations

from statistics import median

from slime_ext.tools.analysis.detectors.shared.detector import FEW, Figures, need
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

# Findings and groups that also make the log-probs of the same text differ.
NAMED = ("spoilt", "other_policy", "other_log_probs", "part_of_run", "packing_leak", "repeated_routes")
DENSE = 0.03  # median |l| over mean |l|
SURE = 6.0  # standard errors of the mean ratio above 1, which no policy makes at sampled tokens
FEWEST, HELD, MATTERS, TIMES = 40, 0.4, 0.01, 3.0  # tokens; share of mean |l|; nats; times the other side's


def unrepeated(d: Diagnosis, side: str) -> Figures | None:
    """Returns how much a side's log-probs of the same text differ, if that explains the distance."""
    count, sampler, trainer, absolute = d.statistics.shared.twice[1].tolist()
    need(count >= FEWEST, f"{FEWEST} tokens with the same text before them in another sample of their prompt")
    spread, other = (sampler, trainer) if side == "sampler" else (trainer, sampler)
    samples = d.statistics.samples
    is_other = _are_above_one(d) if side == "trainer" else _are_few(d)
    if is_other or samples.unrelated > samples.related:  # the log-probs of another text
        return None
    if spread < max(MATTERS * count, HELD * absolute, TIMES * other) or d.statistics.top_share >= FEW:
        return None
    return {"count": count, "spread": spread / count, "other": other / count, "absolute": absolute / count}


def _are_above_one(d: Diagnosis) -> bool:
    """Returns whether the mean ratio is above 1, so that log-probs belong to other tokens."""
    return d.statistics.means["ratio_minus_one"].z >= SURE


def _are_few(d: Diagnosis) -> bool:
    """Returns whether most tokens agree, so that only some log-probs were overwritten."""
    middle = median(s.median for s in d.statistics.rollouts)
    return middle < DENSE * (d.sums.mean("absolute") or 0.0)
