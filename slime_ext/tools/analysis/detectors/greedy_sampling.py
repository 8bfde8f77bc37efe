"""The finding ``greedy_sampling``."""

from __future__ import annotations

from dataclasses import fields

from slime_ext.tools.analysis.detectors.shared.contexts import by_context, by_text, texts_of
from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need_tokens
from slime_ext.tools.analysis.detectors.shared.explained import explained_by_tokens
from slime_ext.tools.analysis.detectors.shared.filled import (
    DOUBTED,
    NEARLY_ALL,
    Filled,
    Sure,
    is_inverted,
)
from slime_ext.tools.analysis.detectors.shared.twice import BFLOAT16, Twice
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.measure import Measure
from slime_ext.tools.analysis.records import DumpedRollout
from slime_ext.tools.analysis.tables import count_true, is_below


class Draws(Measure):
    """What tells greedy draws from draws of a policy, whatever was recorded for them.

    Args:
        unsure: tokens whose recorded probability is below UNSURE.
        unlikely: those below UNLIKELY.
        shared: tokens that another sample's token could equal, because both follow the same text.
        equal: sum over them of the share of the other samples' tokens that are equal.
        expected: sum of their probabilities, which is the mean of ``equal`` for draws of the recorded policy.
    """

    unsure: int = 0
    unlikely: int = 0
    shared: int = 0
    equal: float = 0.0
    expected: float = 0.0

    def add(self, part: DumpedRollout) -> None:
        probability = part.probability
        self.unsure += count_true(part.finite & is_below(probability, UNSURE))
        self.unlikely += count_true(part.finite & is_below(probability, UNLIKELY))
        at = texts_of(part).at
        if not len(at):
            return
        beside, same = ((runs.sizes_of_tokens() - 1).double() for runs in (by_context(part), by_text(part)))
        is_shared = beside > 0
        self.shared += count_true(is_shared)
        self.equal += float((same[is_shared] / beside[is_shared]).sum())
        self.expected += float(probability[at][is_shared].double().sum())


DETECTOR = Detector(
    severity="error",
    side="altered",
    group="spoilt",
    after=("positive_log_probs",),
    what="""
        the engine took the likeliest token (temperature 0, top-k 1), or every log-prob was filled in
        with 0
    """,
    asks="100 tokens",
    title="""
        {% if shared %}The sampler takes the likeliest token every time, so it samples greedily (temperature 0
        or top-k 1), and its log-probs do not show it. {%- else %} The sampler is sure of every token: it
        samples greedily, or its log-probs were filled in with 0.{% endif %}
    """,
    evidence="""
        {% if shared -%} After the same text, samples of a prompt go on with the same token in {{ equal |
        share(shared) }} of {{ shared }} tokens, but the recorded policy would draw the same one in {{
        expected | share(shared) }}. Only {{ unlikely }} of {{ unsure }} tokens with a probability below 0.5
        have one below 0.1. {%- else -%}
        {{ zeros | share(count) }} of the recorded log-probs are exactly 0. At {{ doubted |
        share(count) }} of the tokens the trainer's log-prob is below {{ limit }}; its mean over all
        tokens is {{ proximal | nats }}.{% endif %}
    """,
    threshold="""
        95% of the log-probs are exactly 0, and the trainer is unsure at 5% of the tokens; or 98% of 100
        tokens after shared texts are equal where the recorded policy expects at most 90%, and at most 20% of
        50 unsure tokens have a probability below 0.1
    """,
    ruled_out="A policy that is sure, because then the trainer would be sure, too.",
    fix="""
        Sample with --rollout-temperature 1, --rollout-top-p 1 and --rollout-top-k -1, because the
        likeliest token alone teaches nothing. If the responses of a prompt differ, sampling is right
        and the log-probs are missing: copy output_token_logprobs in the custom generate function.
        {%- if shared %} SGLang records a greedy request as if drawn: at temperature 1 alone or beside other
        greedy requests, and at its own temperature beside a random one, so the value depends on the batch.{%
        endif %}
    """,
)

GREEDY_TOKENS = 100  # tokens
DOUBTED_SHARE = (
    0.05  # share of tokens at which the trainer is unsure; flipped experts and tool output are rarer
)


UNSURE, UNLIKELY = 0.5, 0.1  # recorded probabilities
# Tokens after shared texts; share that is equal; largest expected share; unsure tokens; share of unlikely
# ones.
SHARED, EQUAL, EXPECTED, FEWEST, RARE = 100, 0.98, 0.9, 50, 0.2


def look(d: Diagnosis) -> Figures | None:
    """Finds log-probs that are all exactly 0 where the trainer is unsure, or tokens that are never drawn."""
    need_tokens(d, GREEDY_TOKENS)
    if is_inverted(d):
        return None
    count, zeros, doubted = d.sums.finite, d.of(Sure).tokens, d.of(Filled).doubted
    if zeros < NEARLY_ALL * count or doubted < DOUBTED_SHARE * count:
        return _never_drawn(d)
    proximal = d.sums.mean_proximal
    return {
        "shared": 0,
        "zeros": zeros,
        "doubted": doubted,
        "count": count,
        "limit": DOUBTED,
        "proximal": proximal,
        "explains": explained_by_tokens(d, *d.of(Filled).zeros.tolist()),
    }


def _never_drawn(d: Diagnosis) -> Figures | None:
    """Returns the figures if samples never part after the same text, and unlikely tokens never come.

    Of two tokens that are drawn from q after the same text, the second equals the first with the mean of
    q(first). Copies of one sample are equal, too, but hold unlikely tokens. A trainer that scores the same
    text differently each time is named first, because greedy sampling does not explain that.
    """
    draws, (count, _, trainer, *_) = d.of(Draws), d.of(Twice).sums.tolist()
    if trainer > BFLOAT16 * count:
        return None
    if draws.shared < SHARED or draws.equal < EQUAL * draws.shared or draws.unsure < FEWEST:
        return None
    if draws.expected > EXPECTED * draws.shared or draws.unlikely > RARE * draws.unsure:
        return None
    figures = {field.name: getattr(draws, field.name) for field in fields(draws)}
    return figures | {"explains": explained_by_tokens(d, *d.of(Filled).zeros.tolist())}
