"""The finding ``greedy_sampling``."""

from __future__ import annotations

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need_tokens
from slime_ext.tools.analysis.measures.detector_statistics import DOUBTED
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="error",
    group="spoilt",
    after=("positive_log_probs",),
    what="the likeliest token was taken (temperature 0, top-k 1), or every log-prob was filled in with 0",
    asks="100 tokens",
    title="The sampler is sure of every token: greedy sampling, or log-probs that were filled in with 0.",
    evidence="""
        {{ zeros | share(count) }} of the recorded log-probs are exactly 0; at {{ doubted | share(count)
        }} of the tokens the trainer's is below {{ limit }}, {{ proximal | nats }} on average.
    """,
    threshold="95% of the log-probs exactly 0, and 5% of the tokens at which the trainer is not sure",
    ruled_out="A policy that is sure: there the trainer is sure too.",
    fix="""
        Sample with --rollout-temperature 1, --rollout-top-p 1 and --rollout-top-k -1: temperature 0 and
        top-k 1 take the likeliest token, from which nothing is learnt. If the responses of a prompt
        differ, sampling is right and the log-probs are missing: copy output_token_logprobs in the custom
        generate function.
    """,
)

GREEDY_TOKENS = 100  # tokens
NEARLY_ALL = 0.95  # tokens with a behavior log-prob of 0
DOUBTED_SHARE = 0.05  # tokens of which the trainer is not sure; flipped experts and tool output are rarer


def look(d: Diagnosis) -> Figures | None:
    """Finds behavior log-probs that are nearly all exactly 0 where the trainer is often unsure."""
    need_tokens(d, GREEDY_TOKENS)
    count, zeros, doubted = d.sums["finite"], d.statistics.counts["zeros"], d.statistics.counts["doubted"]
    if zeros < NEARLY_ALL * count or doubted < DOUBTED_SHARE * count:
        return None
    proximal = d.sums.mean("proximal")
    return {"zeros": zeros, "doubted": doubted, "count": count, "limit": DOUBTED, "proximal": proximal}
