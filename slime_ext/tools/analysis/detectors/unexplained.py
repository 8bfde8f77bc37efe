"""The finding ``unexplained``."""

from __future__ import annotations

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need_tokens
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="warning",
    after=("any cause",),
    what="the policies are far apart (mean |log-ratio| above 0.05) and none of the above explains it",
    asks="100 tokens",
    title="The policies are far apart, and no detector can tell why.",
    evidence="""
        Mean |log-ratio| {{ mean | nats }} ± {{ "%.1g" | format(error) }}, k3 {{ k3 | nats }}. Two engines
        in bfloat16 with the same weights stay below 0.05.
    """,
    threshold="0.05 nats, more than bfloat16 makes, by 3 standard errors",
    ruled_out="""
        Every detector above that could look found nothing; those that could not are in the table.
    """,
    fix="""
        Find the cause before you train on: score one fixed text with both sides (the same weights?),
        compare the request's sampling_params with the trainer's flags (temperature, top-p, penalties,
        logit bias), the tokens that are scored with those that the engine returned (chat template, text
        tokenised again), and where its log-probs begin. Read the worst tokens.
    """,
)

SURE = 3.0  # standard errors above it
FEWEST_TOKENS = 100  # tokens
UNEXPLAINED = 0.05  # nats, mean |l|; five times what bfloat16 makes, and more than a harmless lag of weights


def look(d: Diagnosis) -> Figures | None:
    """Finds a mean |log-ratio| that is significantly above what arithmetic makes."""
    need_tokens(d, FEWEST_TOKENS)
    mean, error, _ = d.statistics.means["absolute"]
    if mean - SURE * error < UNEXPLAINED:
        return None
    return {"mean": mean, "error": error, "k3": d.sums.mean("k3")}
