"""The finding ``unlike_entropy``."""

from __future__ import annotations

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need
from slime_ext.tools.analysis.detectors.shared.sampling import FEWEST, SURE
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="error",
    after=("spoilt", "other_policy", "parts"),
    what="the engine draws from a narrower or wider distribution than the one it records",
    asks="the trainer's entropy",
    title="""
        The sampler draws from a {{ "narrower" if surprise < 0 else "wider" }} distribution than the one
        it records.
    """,
    evidence="""
        Sampled tokens are {{ "likelier" if surprise < 0 else "less likely" }} than the recorded policy
        says: mean -log-prob {{ (entropy + surprise) | nats }}, entropy {{ entropy | nats }} ({{ "%.0f" |
        format(z | abs) }} standard errors apart).
    """,
    threshold="6 standard errors, 5% of the entropy, and twice the mean |log-ratio|",
    ruled_out="""
        Chance: tokens are drawn with exactly the recorded entropy on average. Policies that differ: their
        entropies differ by less than this.
    """,
    fix="""
        A temperature, top-p, top-k or min-p acts on sampling, and neither the recorded log-probs nor the
        trainer know of it: no ratio can show or correct it. Compare the request's sampling_params with
        the trainer's --rollout-temperature.
    """,
)

APART = 0.05  # of the entropy
BEYOND = 2.0  # times mean |l|


def look(d: Diagnosis) -> Figures | None:
    """Finds a mean -log-prob of the sampled tokens that is not the entropy: another policy drew them."""
    surprise = d.statistics.means["surprise"]
    lacks = f"the trainer's entropy at {FEWEST} tokens (slime: --use-rollout-entropy)"
    need(surprise.count >= FEWEST, lacks)
    entropy = -(d.sums.mean("behavior") or 0.0) - surprise.value
    # The entropy is the trainer's: where the policies differ, so may their entropies.
    least = max(APART * entropy, BEYOND * (d.sums.mean("absolute") or 0.0))
    if abs(surprise.z) < SURE or abs(surprise.value) < least:
        return None
    return {"surprise": surprise.value, "entropy": entropy, "z": surprise.z}
