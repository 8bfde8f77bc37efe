"""The finding ``repeated_routes``."""

from __future__ import annotations

from dataclasses import field
from typing import ClassVar

import torch
from torch import Tensor

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need
from slime_ext.tools.analysis.detectors.shared.experts import Routing
from slime_ext.tools.analysis.detectors.shared.explained import explained_by_tokens
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.measure import Measure
from slime_ext.tools.analysis.records import DumpedRollout
from slime_ext.tools.analysis.tables import zeros


class Rows(Measure):
    """Samples whose experts repeat, their tokens, and samples in which only the prompt has them.

    ``recurring`` counts the samples in which a stretch of experts comes again at other tokens, ``whole``
    those in which it is the first one. ``sums`` is [2], the number of tokens of all these samples and their
    sum of k3.
    """

    version: ClassVar[int] = 2

    samples: int = 0
    tokens: int = 0
    prompts: int = 0
    recurring: int = 0
    recurring_tokens: int = 0
    whole: int = 0
    sums: Tensor = field(default_factory=lambda: zeros(2))

    def add(self, part: DumpedRollout) -> None:
        if part.odd_experts is not None:
            count, *_, near = part.sample_sums
            self.sums += torch.stack([count, near])[:, torch.tensor(part.odd_experts) > 0].sum(1)

    def close(self, rollout: DumpedRollout) -> None:
        self.samples += rollout.routing.get("repeated", 0)
        self.tokens += rollout.routing.get("repeated_tokens", 0)
        self.prompts += rollout.routing.get("repeated_prompt", 0)
        self.recurring += rollout.routing.get("again", 0)
        self.recurring_tokens += rollout.routing.get("again_tokens", 0)
        self.whole += rollout.routing.get("again_whole", 0)


DETECTOR = Detector(
    severity="error",
    side="either",  # the experts show it, whatever the log-probs are
    group="experts",
    after=("spoilt",),
    what="the sampler's recorded experts are the same row over many tokens, or a stretch comes again",
    asks="rollout_routed_experts",
    title="""
        {% if recurring -%} The recorded experts belong to other tokens: {{ "the first ones" if whole else
        "some" }} come again later in the same sample. {%- else -%} The recorded experts repeat: many tokens
        in a row have the same ones in all layers.{% endif %}
    """,
    evidence="""
        {% if recurring -%} In {{ recurring }} of {{ routed }} samples with experts ({{ recurring |
        share(routed) }}), the experts of {{ (tokens / recurring) | int }} tokens in a row come again at
        other tokens, equal in all layers{% if whole %}; in {{ whole }} of them from the first token of
        the prompt on{% endif %}. {%- else -%} In {{ repeated }} of {{ routed }} samples with experts ({{
        repeated | share(routed) }}), the same experts repeat over {{ (tokens / repeated) | int }} tokens
        on average{% if prompt == repeated %}, only in the prompt {%- elif prompt %}; in {{ prompt }} of
        them only in the prompt{% endif %}.{% endif %}
    """,
    threshold="""
        in 2 samples and 2% of all, the experts of every layer stay the same at 8 steps to a different
        token in a row, and at 4 times as many as in the sample's next longest run; or they come again at so
        many other tokens in a row that chance makes it in at most one of 1000 samples
    """,
    ruled_out="""
        {% if recurring -%} Text that comes again, because only rows of other tokens count. {%- else -%}
        Routing that flips, because it changes single tokens, not one row for a block. Text that
        repeats one token and is therefore routed alike, because only steps to a different token
        count.{% endif %}
    """,
    fix="""
        Do not replay these experts, because the trainer would use the wrong ones. {%- if recurring %}
        Check how the answers of a request that is aborted and resumed are joined: the last one has the
        experts of all tokens, so they must replace those of the first part (verl-project/verl#6029). As a
        test, sample one rollout without partial rollouts. {%- else %} Check how the engine collects them
        if a prompt is prefilled in chunks or a buffer is reused (sgl-project/sglang#36404), and update
        the engine. As a test, sample one rollout with chunked prefill off (--sglang-chunked-prefill-size
        -1).{% endif %}
    """,
)
FEWEST, SHARE = 2, 0.02


def look(d: Diagnosis) -> Figures | None:
    """Finds samples with many equal rows of experts, or with a stretch of them that comes again."""
    routed, rows = d.of(Routing).routed, d.of(Rows)
    need(routed, "the sampler's experts (slime, miles: --use-rollout-routing-replay)")
    if max(rows.samples, rows.recurring) < max(FEWEST, SHARE * routed):
        return None
    is_recurring = rows.recurring > rows.samples
    figures = {
        "repeated": rows.samples,
        "routed": routed,
        "tokens": rows.recurring_tokens if is_recurring else rows.tokens,
        "prompt": rows.prompts,
        "recurring": rows.recurring if is_recurring else 0,
        "whole": rows.whole,
        "is_proven": True,  # rows of other tokens are equal in all layers
    }
    count, distance = rows.sums.tolist()
    return figures | {"explains": explained_by_tokens(d, count, distance)} if count else figures
