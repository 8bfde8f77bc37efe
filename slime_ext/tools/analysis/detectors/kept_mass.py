"""The finding ``kept_mass``."""

from __future__ import annotations

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need
from slime_ext.tools.analysis.detectors.shared.explained import VALUES, Explained
from slime_ext.tools.analysis.detectors.shared.kept_sets import Kept
from slime_ext.tools.analysis.detectors.shared.same_text import explained_by_masses
from slime_ext.tools.analysis.detectors.shared.surprise import BySurprise
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="error",
    side="altered",
    group="other_policy",
    after=("spoilt",),
    what="top-p, top-k or min-p: one side does not renormalise to the kept set, or samples lie outside it",
    asks="kept sets",
    title="""
        {% if outside -%} Sampled tokens lie outside the set that the engine says it sampled from. {%-
        elif sides | length == 2 -%} Sampling is truncated, and neither side's log-probs are
        renormalised to the kept set. {%- else -%} The {{ sides[0] }}'s log-probs are not renormalised
        to the kept set of top-p, and the other side's are. {%- endif %}
    """,
    evidence="""
        {% if outside -%} {{ outside }} of {{ known }} tokens ({{ outside | share(known) }}) lie
        outside their set. {%- else -%} At {{ alone }} positions the kept set is one token, whose
        renormalised log-prob is 0. It is 0 for {{ sampler | share(alone) }} of the sampler's
        log-probs, and for {{ trainer | share(alone) }} of the trainer's. The mean ratio over all {{
        known }} kept sets is {{ "%.3f" | format(mass) }}, which is the probability mass that was
        kept. {%- endif %}
    """,
    threshold="""
        0.1% of the tokens are outside their set; or a side has a log-prob of 0 at fewer than 90% of
        the sets of one token
    """,
    ruled_out="""
        Other weights or rounding, because every policy has log-prob 0 when it is renormalised to a
        set of one token.
    """,
    fix="""
        {% if outside -%} The kept sets belong to other positions: check how rollout_top_p_token_ids
        and _offsets are joined over turns and continued responses. {%- else -%} Replay the kept sets
        in the trainer (slime does if --rollout-top-p is below 1), and let the engine return processed
        log-probs. Or sample with --rollout-top-p 1 --rollout-top-k -1. {%- endif %}
    """,
)

ALONE_TOKENS = 30  # kept sets of one token
# Share of tokens outside their set; share of log-probs that are 0 at sets of one token.
OUTSIDE, ZEROS = 1e-3, 0.9


def look(d: Diagnosis) -> Figures | None:
    """Finds tokens outside the kept set, or a side that does not renormalise to it.

    Renormalised to a kept set K with mass m = sum_K p, the log-prob is log p - log m. No dump holds m. But if
    K is one token, then m = p, and the renormalised log-prob is 0.
    """
    kept = d.of(Kept)
    lacks = (
        "the kept sets of top-p, top-k or min-p (slime writes rollout_top_p_token_ids if --rollout-top-p is "
        "below 1); without them, nothing shows truncated sampling whose log-probs are those of the whole "
        "distribution"
    )
    need(kept.alone >= ALONE_TOKENS, lacks)
    if kept.outside > OUTSIDE * kept.known:
        return {"outside": kept.outside, "known": kept.known, "explains": _explains(d)}
    zeros = {"sampler": kept.sampler, "trainer": kept.trainer}
    sides = [side for side, count in zeros.items() if count < ZEROS * kept.alone]
    if not sides:
        return None
    mass = kept.mass / kept.known
    figures = {"outside": 0, "sides": sides, "alone": kept.alone, "known": kept.known, "mass": mass}
    return {**figures, **zeros, "explains": _explains(d)}


def _explains(d: Diagnosis) -> Explained:
    """Returns how much of k3 the kept masses explain, if they depend on the sampler's certainty."""
    return explained_by_masses(d, d.of(BySurprise).sums[:, VALUES])
