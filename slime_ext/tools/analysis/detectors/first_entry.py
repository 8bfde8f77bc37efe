"""The finding ``first_entry``."""

from __future__ import annotations

import math
from statistics import median

from slime_ext.tools.analysis.detectors.shared.contexts import Context, Contexts
from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need
from slime_ext.tools.analysis.detectors.shared.explained import Explained, explained_by_fit
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="error",
    side="altered",
    group="spoilt",
    after=("positive_log_probs", "retokenised", "off_by_one", "greedy_sampling"),
    what="the log-probs are those of the likeliest token, the first entry of the engine's list",
    asks="prompts of which several samples share a text and go on with three different tokens",
    title="""
        The recorded log-probs are those of the likeliest token at each place, not of the token that was
        sampled.
    """,
    evidence="""
        In {{ alike }} of {{ contexts }} places where samples with the same text go on with different tokens,
        these have the same recorded log-prob, although the trainer's differ by {{ apart | nats }}. It is
        {{ near | nats }} from the trainer's log-prob of the likeliest of them (median).
    """,
    threshold="""
        in 90% of at least 10 such places the recorded log-probs are within 0.05 nats of each other, where the
        trainer's are more than 0.5 nats apart, and half of them are 0.1 nats from the trainer's largest
    """,
    ruled_out="""
        A value that was filled in, because it differs from place to place. A shift by one token, which was
        looked for first. Greedy sampling, because the samples go on with different tokens.
    """,
    fix="""
        Look for top_logprobs[0] (or the first key of a dict, or logprobs.content[i].top_logprobs[0]) where
        the sampled token's own log-prob is meant: SGLang's output_token_logprobs, vLLM's
        logprobs[i][token_id]. SGLang's list of the likeliest tokens need not hold the sampled one.
    """,
)
FEWEST, SHARE = 10, 0.9  # places; share of them
ALIKE, APART, NEAR = 0.05, 0.5, 0.1  # nats between recorded values; between the trainer's; to its largest


def look(d: Diagnosis) -> Figures | None:
    """Finds recorded log-probs that do not depend on the token, and are those of the likeliest."""
    rows = [row for row in d.of(Contexts).rows if max(row[1]) - min(row[1]) > APART]
    need(len(rows) >= FEWEST, f"three different tokens after the same text, in {FEWEST} contexts")
    alike = [row for row in rows if max(row[0]) - min(row[0]) <= ALIKE]
    if len(alike) < SHARE * len(rows):
        return None
    near = median(abs(max(trainer) - max(sampler)) for sampler, trainer in alike)
    if near > NEAR:
        return None
    return {
        "alike": len(alike),
        "contexts": len(rows),
        "apart": median(max(trainer) - min(trainer) for _, trainer in alike),
        "near": near,
        "explains": _explained([row for row in alike if abs(max(row[1]) - max(row[0])) <= NEAR]),
    }


def _explained(rows: list[Context]) -> Explained:
    """Returns the share of k3 that goes if the value is that of the likeliest token.

    Args:
        rows: places where some sample goes on with the likeliest token.
    """
    before = [sum(_k3(p - q) for q, p in zip(*row, strict=True)) for row in rows]
    after = [sum(_k3(max(p) - q) for q in sampler) for sampler, p in rows]
    whole, tokens = sum(before), sum(len(sampler) for sampler, _ in rows)
    share = 1 - sum(after) / whole
    squares = sum((rest - (1 - share) * far) ** 2 for far, rest in zip(before, after, strict=True))
    error = math.sqrt(squares) / whole
    # Places where both sides agree after all were chosen, so nothing else can show there.
    return explained_by_fit(share, error, sum(after) / tokens).of_any(whole / tokens)


def _k3(log_ratio: float) -> float:
    return math.expm1(log_ratio) - log_ratio
