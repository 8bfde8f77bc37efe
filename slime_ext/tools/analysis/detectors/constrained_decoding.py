"""The finding ``constrained_decoding``."""

from __future__ import annotations

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need_tokens
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="error",
    group="spoilt",
    after=("positive_log_probs", "retokenised", "off_by_one", "greedy_sampling"),
    what="a grammar, a JSON schema or a list of choices restricts the sampler at some tokens",
    asks="20 tokens next to forced ones",
    title="""
        Constrained decoding: at some tokens the sampler may choose among few, and its log-probs are
        over these few.
    """,
    evidence="""
        {{ forced }} tokens have a probability of exactly 1 where the trainer is below 0.14. Within 3
        tokens of them the sampler is surer at {{ count | int }} others too: mean log-ratio {{ near |
        nats }}, {{ rest | nats }} elsewhere.
    """,
    threshold="mean |l| of 0.3 nats beside forced tokens, 5 times that elsewhere, 80% of it below 0",
    ruled_out="""
        Tool output or values that were filled in: the sampled tokens beside those agree with the
        trainer; here they are renormalised to few, too.
    """,
    fix="""
        Mask the tokens that a grammar forced (loss_mask 0), or record log-probs from before the
        grammar's mask; else the policy is trained on choices that it did not make. To be sure, sample
        one rollout without the grammar (response_format, json_schema, regex, tool_choice in
        sampling_params).
    """,
)
FEWEST, MATTERS, TIMES, LEANS = 20, 0.3, 5.0, 0.8  # tokens; nats; of mean |l| elsewhere; mean l over mean |l|


def look(d: Diagnosis) -> Figures | None:
    """Finds tokens beside exact zeros that the sampler was surer of than the trainer, too."""
    need_tokens(d, FEWEST)
    rest, near = d.statistics.shared.beside.tolist()
    if near[0] < FEWEST:
        return None
    size, usual = near[2] / near[0], rest[2] / max(rest[0], 1)
    if size < max(MATTERS, TIMES * usual) or near[1] > -LEANS * near[2]:
        return None
    return {
        "forced": d.statistics.counts["filled"],
        "count": near[0],
        "near": near[1] / near[0],
        "rest": usual,
    }
