"""The finding ``soft_cap``."""

from __future__ import annotations

import math

from slime_ext.tools.analysis.detectors.shared.ages import Lag, lag
from slime_ext.tools.analysis.detectors.shared.bends import bend, has_contexts
from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need
from slime_ext.tools.analysis.detectors.shared.explained import explained_by_fit
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="error",
    side="honest",
    group="other_policy",
    after=("spoilt", "kept_mass", "scaled_log_probs"),
    what="one side caps the logits softly (cap * tanh(logit / cap)), the other does not or does it otherwise",
    asks="prompts of which several samples share a text and go on with three different tokens",
    title="{{ title }}",
    evidence="""
        After the same text, the log-ratios of different tokens differ by {{ before | nats }}. A soft cap of
        about {{ "%.2g" | format(cap) }} leaves {{ bent | nats }} of that, the best temperature {{ straight |
        nats }} ({{ tokens }} tokens beyond two of each context).
    """,
    threshold="""
        with a level for each context, a soft cap leaves at most 40% of the residual of a temperature, which
        leaves more than 0.03 nats; old weights do not explain the distance
    """,
    ruled_out="""
        A temperature, because differences of log-probs would be proportional, with one factor at every
        logit. Old weights, noise or lower precision, because no function of the logit explains them.
    """,
    remedy="give both sides the same final_logit_softcapping",
    fix="""
        Compare final_logit_softcapping (and attn_logit_softcapping) of the model's config.json with what each
        side computes: cap * tanh(logit / cap), before the temperature. Fused cross-entropy kernels and
        converted checkpoints have left it out.
    """,
)
TITLES = {
    "engine lacks": "The trainer caps the logits softly, the engine does not.",
    "engine caps": "The engine caps the logits softly, the trainer does not.",
    "trainer differs": (
        "The trainer's soft cap of the logits has another formula than the engine's: as logit * tanh(logit / "
        "cap) instead of cap * tanh(logit / cap)."
    ),
}


def look(d: Diagnosis) -> Figures | None:
    """Finds log-ratios after the same text that bend with the logit."""
    need(has_contexts(d), "three different tokens after the same text, in 24 contexts")
    fit = bend(d)
    if fit is None or not fit.is_bent or lag(d) is Lag.EXPLAINS:
        return None
    share = min(max(1 - (fit.bent / fit.before) ** 2, 0.0), 1.0) if fit.before else 0.0
    error = (1 - share) * math.sqrt(2 / fit.tokens)
    explains = explained_by_fit(share, error, fit.bent**2 / 2)  # k3 of a residual in nats
    return {**fit._asdict(), "title": TITLES[fit.side], "explains": explains}
