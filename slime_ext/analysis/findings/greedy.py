"""Sampling that left nothing to chance, or log-probs that nobody recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime_ext.analysis.document import Finding
from slime_ext.analysis.evidence import DOUBTED
from slime_ext.analysis.findings import Detector
from slime_ext.analysis.findings.words import nats, share

if TYPE_CHECKING:
    from slime_ext.analysis.diagnosis import Diagnosis

FEWEST = 100  # tokens
NEARLY_ALL = 0.95  # tokens with a behavior log-prob of 0
OFTEN = 0.05  # tokens of which the trainer is not sure; flipped experts and tool output are rarer


def greedy_sampling(d: Diagnosis) -> Finding | None:
    """Nearly every behavior log-prob is exactly 0, where the trainer is often unsure."""
    count, zeros, doubted = d.sums["finite"], d.evidence.counts["zeros"], d.evidence.counts["doubted"]
    if count < FEWEST or zeros < NEARLY_ALL * count or doubted < OFTEN * count:
        return None
    return Finding(
        name="greedy_sampling",
        severity="error",
        title="The sampler is sure of every token: greedy sampling, or log-probs that were filled in with 0.",
        evidence=(
            f"{share(zeros, count)} of the recorded log-probs are exactly 0; at {share(doubted, count)} of "
            f"the tokens the trainer's is below {DOUBTED}, {nats(d.sums.mean('proximal'))} on average."
        ),
        fix=(
            "Sample with --rollout-temperature 1, --rollout-top-p 1 and --rollout-top-k -1: temperature 0 "
            "and top-k 1 take the likeliest token, from which nothing is learnt. If the responses of a "
            "prompt differ, sampling is right and the log-probs are missing: copy output_token_logprobs in "
            "the custom generate function."
        ),
    )


DETECTORS = (Detector("greedy_sampling", greedy_sampling, after=("positive_log_probs",)),)
