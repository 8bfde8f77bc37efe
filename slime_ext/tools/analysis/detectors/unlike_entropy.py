"""The finding ``unlike_entropy``."""

from __future__ import annotations

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need
from slime_ext.tools.analysis.detectors.shared.explained import explained_by_tokens
from slime_ext.tools.analysis.detectors.shared.sampling import FEWEST, SURE
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="error",
    side="either",  # the record is the trainer's policy, so its mean ratio is 1 whatever was drawn
    after=("spoilt", "other_policy", "parts"),
    what="the engine draws from a narrower or wider distribution than it records",
    asks="the trainer's entropy",
    title="""
        The sampler draws from a {{ "narrower" if surprise < 0 else "wider" }} distribution than it
        records.
    """,
    evidence="""
        Sampled tokens are {{ "likelier" if surprise < 0 else "less likely" }} than the recorded
        policy says: their mean -log-prob is {{ (entropy + surprise) | nats }}, but the entropy is {{
        entropy | nats }} ({{ "%.0f" | format(z | abs) }} standard errors apart).
    """,
    threshold="6 standard errors, 5% of the entropy, and twice the mean |log-ratio|",
    ruled_out="""
        Chance, because the mean -log-prob of sampled tokens is the entropy, up to the standard error.
        Two different policies, because their entropies would differ by less than this.
    """,
    fix="""
        Look for a temperature, top-p, top-k or min-p in the request's sampling_params, and compare
        them with the trainer's --rollout-temperature. The recorded log-probs and the trainer ignore
        it, so no ratio can show or correct it.
    """,
)

APART = 0.05  # share of the entropy
BEYOND = 2.0  # times mean |l|


def look(d: Diagnosis) -> Figures | None:
    """Finds a mean -log-prob of sampled tokens that is not the entropy, so another policy drew them."""
    surprise = d.means.surprise
    lacks = f"the trainer's entropy at {FEWEST} tokens (slime: --use-rollout-entropy)"
    need(surprise.count >= FEWEST, lacks)
    entropy = -(d.sums.mean_behavior or 0.0) - surprise.value
    # The entropy is the trainer's. If the policies differ, their entropies may differ, too.
    least = max(APART * entropy, BEYOND * (d.sums.mean_absolute or 0.0))
    if abs(surprise.z) < SURE or abs(surprise.value) < least:
        return None
    figures = {"surprise": surprise.value, "entropy": entropy, "z": surprise.z}
    return figures | {"explains": explained_by_tokens(d, 0, 0)}  # no ratio shows it
