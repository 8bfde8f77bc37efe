"""The finding ``kept_mass``."""

from __future__ import annotations

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="error",
    group="other_policy",
    after=("spoilt",),
    what="top-p, top-k or min-p: a side does not renormalise to the kept set, or samples lie outside it",
    asks="kept sets",
    title="""
        {% if outside -%} Sampled tokens lie outside the set that the engine says it sampled from. {%-
        elif sides | length == 2 -%} Sampling is truncated, and neither side's log-probs are those of what
        was sampled from. {%- else -%} The {{ sides[0] }}'s log-probs are not renormalised to what top-p
        left, the other side's are. {%- endif %}
    """,
    evidence="""
        {% if outside -%} {{ outside }} of {{ known }} tokens ({{ outside | share(known) }}). {%- else -%}
        At {{ alone }} positions the kept set is one token, whose log-prob is then 0: {{ sampler |
        share(alone) }} of the sampler's, {{ trainer | share(alone) }} of the trainer's are. The mean
        ratio over all {{ known }} kept sets is {{ "%.3f" | format(mass) }}, the mass that was kept. {%-
        endif %}
    """,
    threshold="0.1% of the tokens outside their set; log-probs of 0 at 90% of the sets of one token",
    ruled_out="""
        Other weights or rounding: renormalised to a set of one token, every policy has log-prob 0.
    """,
    fix="""
        {% if outside -%} The kept sets belong to other positions: check how rollout_top_p_token_ids and
        _offsets are joined over turns and continued responses. {%- else -%} Replay the kept sets in the
        trainer (slime hands them on where --rollout-top-p is below 1), and have the engine return
        processed log-probs; or sample with --rollout-top-p 1 --rollout-top-k -1. {%- endif %}
    """,
)

ALONE_TOKENS = 30  # kept sets of one token
OUTSIDE, ZEROS = 1e-3, 0.9  # share of tokens outside their set; of log-probs of 0 at sets of one token


def look(d: Diagnosis) -> Figures | None:
    """Finds sampled tokens outside the set that the engine kept, or a side whose log-probs are not
    renormalised to it.

    Over a kept set K of mass m = sum_K p the log-prob is log p - log m. The mass is in no dump, but where K
    is one token it equals p, and the log-prob of a side that renormalises is 0.
    """
    counts = d.statistics.counts
    known, alone, outside = counts["known"], counts["alone"], counts["outside"]
    lacks = (
        "the sets that top-p, top-k or min-p left (slime: rollout_top_p_token_ids, written with "
        "--rollout-top-p below 1); where sampling is truncated and log-probs are those of the whole "
        "distribution, nobody can see it without them"
    )
    need(alone >= ALONE_TOKENS, lacks)
    if outside > OUTSIDE * known:
        return {"outside": outside, "known": known}
    zeros = {side: counts[f"alone_{side}"] for side in ("sampler", "trainer")}
    sides = [side for side, count in zeros.items() if count < ZEROS * alone]
    if not sides:
        return None
    mass = counts["mass"] / known
    return {"outside": 0, "sides": sides, "alone": alone, "known": known, "mass": mass, **zeros}
