"""The finding ``resumed_wrong_weights``."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise, takewhile
from statistics import median

from slime_ext.tools.analysis.detectors.shared.ages import UNTOLD
from slime_ext.tools.analysis.detectors.shared.began import began_by_k3, dated
from slime_ext.tools.analysis.detectors.shared.detector import FEW, Detector, Figures, need
from slime_ext.tools.analysis.detectors.shared.explained import K3, explained
from slime_ext.tools.analysis.detectors.shared.kinds import whole_prompts
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.rollouts import RolloutSummary, mean_k3
from slime_ext.tools.analysis.measures.versions import VersionSums

DETECTOR = Detector(
    severity="error",
    side="honest",
    after=("spoilt", "other_policy", "prefixes", "parts", "experts"),
    what="the first rollouts after a start or a resume come from other weights than the trainer's",
    asks="4 rollouts",
    title="""
        {% if or_else is defined %}The first rollouts of the dump are far off, and the others agree. {%-
        else %}The first rollouts after a start were sampled from other weights than the trainer's. {%-
        endif %}
    """,
    evidence="""
        k3 is {{ worst | nats }} in rollout {{ rollouts | join(", ") }} and {{ rest | nats }} in the
        others: {{ (worst / rest) | factor if rest else "infinitely many times" }} as much.{{ dated }}
    """,
    threshold="""
        k3 of the first rollouts is 6 times the median of the others and 5e-3 nats, and 3 times the
        mean of all others by 2 standard errors over samples
    """,
    ruled_out="""
        Old weights, because most tokens of these rollouts are not known to come from older versions.
        Numerics, because the same engine agrees later.
    """,
    remedy="push the trainer's weights after a resume, before the first rollout",
    fix="""
        After --load the engine still had the weights of --hf-checkpoint. Push the trainer's weights
        before the first rollout, and check that --ref-load and --load name the intended checkpoint.
    """,
)

FEWEST = 100  # tokens on each side
FIRST_TIMES, FIRST_MATTERS = 6.0, 5e-3  # times the median k3 of the others; nats of k3
STEP = 2.0  # times the k3 of the next rollout
SURE, LEAST = 2.0, 3.0  # standard errors to subtract; times the mean k3 of all others, after that


def _first_off(rollouts: list[RolloutSummary]) -> tuple[list[RolloutSummary], float]:
    """Returns the first rollouts that are far off, and the median k3 of the others.

    These are at the start of the run, or after its weight versions start again, and at most a third of all.
    """
    rest = median(s.k3 for s in rollouts[len(rollouts) // 3 :])
    limit = max(FIRST_MATTERS, FIRST_TIMES * rest)
    begins = [0, *(i for i, (a, b) in enumerate(pairwise(rollouts), 1) if 0 <= b.version < a.version)]
    far = [s for begin in begins for s in takewhile(lambda s: s.k3 >= limit, rollouts[begin:])]
    is_few = len(far) <= max(1, len(rollouts) // 3)
    return (far if is_few and any(s.top_share < FEW for s in far) else []), rest


def _aged(versions: list[VersionSums]) -> set[int]:
    tokens: Counter[int] = Counter()
    for v in versions:
        tokens[v.rollout_id] += v.count if v.age > 0 else -v.count
    return {rollout_id for rollout_id, more in tokens.items() if more > 0}


def look(d: Diagnosis) -> Figures | None:
    """Finds that k3 of the first rollouts is several times that of the others."""
    rollouts = [s for s in d.rollouts if s.tokens >= FEWEST]
    need(len(rollouts) >= 4, f"4 rollouts of {FEWEST} tokens")
    far, rest = _first_off(rollouts)
    if not far or _aged(d.versions).issuperset(s.rollout_id for s in far):
        return None
    if whole_prompts(d):  # some prompts agree in every rollout, as no prompt does under other weights
        return None
    others = [s for s in rollouts if s not in far]
    rest = mean_k3(others)
    if max(s.k3 * math.exp(-SURE * s.k3_error) for s in far) < LEAST * rest:  # sampling noise may explain it
        return None
    if any(not _ends(a, b) for a, b in pairwise(rollouts) if a in far and b not in far):
        return None
    rollout_ids = tuple(s.rollout_id for s in far)
    figures = {
        "worst": max(s.k3 for s in far),
        "rest": rest,
        "rollouts": rollout_ids,
        "dated": dated(d, began_by_k3(rollouts, rollout_ids)),
        "explains": explained(K3.of_rollouts(far), K3.of_rollouts(others)),
    }
    if all(_is_start(s, rollouts) for s in far[:1]):
        return figures
    return figures | {"or_else": ("stale_weights",), "untold": (UNTOLD,)}


def _ends(last: RolloutSummary, following: RolloutSummary) -> bool:
    """Returns whether the distance is gone in the next rollout; if it fades, it has another cause."""
    error = math.hypot(last.k3_error, following.k3_error)
    return last.k3 >= LEAST * following.k3 * math.exp(-SURE * error) and last.k3 >= STEP * following.k3


def _is_start(rollout: RolloutSummary, rollouts: list[RolloutSummary]) -> bool:
    """Returns whether the run or its engine started with this rollout.

    Otherwise it may only be the first rollout of an analysed part of the run.
    """
    return rollout.rollout_id == 0 or rollout is not rollouts[0]
