"""The finding ``greedy_sampling``."""

from __future__ import annotations

from dataclasses import dataclass

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need_tokens
from slime_ext.tools.analysis.detectors.shared.filled import DOUBTED, Filled
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.measure import Measure
from slime_ext.tools.analysis.records import DumpedRollout


@dataclass
class Sure(Measure):
    """Number of tokens with both log-probs whose log-prob of the sampler is exactly 0."""

    tokens: int = 0

    def add(self, part: DumpedRollout) -> None:
        self.tokens += int((part.finite & (part.behavior == 0)).sum())


DETECTOR = Detector(
    severity="error",
    group="spoilt",
    after=("positive_log_probs",),
    what="""
        the engine took the likeliest token (temperature 0, top-k 1), or every log-prob was filled in
        with 0
    """,
    asks="100 tokens",
    title="The sampler is sure of every token: it samples greedily, or its log-probs were filled in with 0.",
    evidence="""
        {{ zeros | share(count) }} of the recorded log-probs are exactly 0. At {{ doubted |
        share(count) }} of the tokens the trainer's log-prob is below {{ limit }}; its mean over all
        tokens is {{ proximal | nats }}.
    """,
    threshold="95% of the log-probs are exactly 0, and the trainer is unsure at 5% of the tokens",
    ruled_out="A policy that is sure, because then the trainer would be sure, too.",
    fix="""
        Sample with --rollout-temperature 1, --rollout-top-p 1 and --rollout-top-k -1, because the
        likeliest token alone teaches nothing. If the responses of a prompt differ, sampling is right
        and the log-probs are missing: copy output_token_logprobs in the custom generate function.
    """,
)

GREEDY_TOKENS = 100  # tokens
NEARLY_ALL = 0.95  # share of tokens with a behavior log-prob of 0
DOUBTED_SHARE = (
    0.05  # share of tokens at which the trainer is unsure; flipped experts and tool output are rarer
)


def look(d: Diagnosis) -> Figures | None:
    """Finds behavior log-probs that are nearly all exactly 0 where the trainer is often unsure."""
    need_tokens(d, GREEDY_TOKENS)
    count, zeros, doubted = d.sums.finite, d.of(Sure).tokens, d.of(Filled).doubted
    if zeros < NEARLY_ALL * count or doubted < DOUBTED_SHARE * count:
        return None
    proximal = d.sums.mean_proximal
    return {"zeros": zeros, "doubted": doubted, "count": count, "limit": DOUBTED, "proximal": proximal}
