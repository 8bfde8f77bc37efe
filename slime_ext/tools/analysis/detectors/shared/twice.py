"""What each side says of text that stands in several samples of a prompt."""

from __future__ import annotations

from statistics import median

from slime_ext.tools.analysis.detectors.shared.detector import FEW, Figures, need
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

# Findings with which one text has other log-probs each time, too.
NAMED = ("spoilt", "other_policy", "other_log_probs", "part_of_run", "packing_leak", "repeated_routes")
DENSE = 0.03  # median |l| over the mean
SURE = 6.0  # standard errors of the mean ratio above 1, which no policy makes over what was sampled
FEWEST, HELD, MATTERS, TIMES = 40, 0.4, 0.01, 3.0  # tokens; of mean |l|; nats; of the other side's


def unrepeated(d: Diagnosis, side: str) -> Figures | None:
    """How much a side's log-probs of the same text differ, if that holds most of the distance."""
    count, sampler, trainer, absolute = d.statistics.shared.twice[1].tolist()
    need(count >= FEWEST, f"{FEWEST} tokens in samples of one prompt that are equal up to there")
    spread, other = (sampler, trainer) if side == "sampler" else (trainer, sampler)
    samples = d.statistics.samples
    is_other = _are_above_one(d) if side == "trainer" else _are_few(d)
    if is_other or samples.unrelated > samples.related:  # the log-probs of another text
        return None
    if spread < max(MATTERS * count, HELD * absolute, TIMES * other) or d.statistics.top_share >= FEW:
        return None
    return {"count": count, "spread": spread / count, "other": other / count, "absolute": absolute / count}


def _are_above_one(d: Diagnosis) -> bool:
    """Whether the mean ratio is above 1: the trainer's log-probs are not those of the sampled tokens."""
    return d.statistics.means["ratio_minus_one"].z >= SURE


def _are_few(d: Diagnosis) -> bool:
    """Whether most tokens agree, as where single log-probs were overwritten."""
    middle = median(s.median for s in d.statistics.rollouts)
    return middle < DENSE * (d.sums.mean("absolute") or 0.0)
