"""The finding ``constrained_decoding``."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from slime_ext.tools.analysis.detectors.shared.clipped import COLUMNS, clipped
from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need_tokens
from slime_ext.tools.analysis.detectors.shared.filled import Filled, filled
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.measure import Measure
from slime_ext.tools.analysis.records import DumpedRollout
from slime_ext.tools.analysis.tables import tabulated, zeros

REACH = 3  # tokens on each side of one with a log-prob of exactly 0


@dataclass
class Beside(Measure):
    """Sums of ``clipped`` over tokens away from filled zeros, and beside one, [2, COLUMNS].

    Tokens whose log-prob is 0 are in neither.
    """

    sums: Tensor = field(default_factory=lambda: zeros(2, COLUMNS))

    def add(self, part: DumpedRollout) -> None:
        self.sums += tabulated(_beside(part), clipped(part), 2)


def _beside(part: DumpedRollout) -> Tensor:
    """Returns the row of ``Beside`` of each token, [T]; 2 if its log-prob is exactly 0."""
    forced = filled(part)
    near, ids = forced.clone(), part.segments.ids
    for step in range(1, REACH + 1):
        same = ids[step:] == ids[:-step]
        near[step:] |= forced[:-step] & same
        near[:-step] |= forced[step:] & same
    return torch.where(part.mask & (part.behavior == 0), 2, near.long())


DETECTOR = Detector(
    severity="error",
    group="spoilt",
    after=("positive_log_probs", "retokenised", "off_by_one", "greedy_sampling"),
    what="a grammar, a JSON schema or a list of choices restricts the sampler at some tokens",
    asks="20 tokens next to forced ones",
    title="""
        Constrained decoding: at some tokens the sampler may choose among few tokens, and its
        log-probs are normalised over these few.
    """,
    evidence="""
        {{ forced }} tokens have a probability of exactly 1 where the trainer is below 0.14. Near them
        (3 tokens) the sampler is also surer than the trainer at {{ count | int }} other tokens: their
        mean log-ratio is {{ near | nats }}; elsewhere the mean |log-ratio| is {{ rest | nats }}.
    """,
    threshold="""
        beside forced tokens, mean |l| is 0.3 nats and 5 times that elsewhere, and mean l is below
        -0.8 times mean |l|
    """,
    ruled_out="""
        Tool output or filled-in values, because the sampled tokens beside those agree with the
        trainer, and here they do not.
    """,
    fix="""
        Mask the tokens that a grammar forced (loss_mask 0). Otherwise the policy trains on choices
        that it did not make, and no engine records log-probs from before the grammar's mask. To be
        sure, sample one rollout without the grammar (response_format, json_schema, regex, tool_choice
        in sampling_params).
    """,
)
# Tokens; nats; over mean |l| elsewhere; -mean l over mean |l|.
FEWEST, MATTERS, TIMES, LEANS = 20, 0.3, 5.0, 0.8


def look(d: Diagnosis) -> Figures | None:
    """Finds tokens beside filled zeros at which the sampler is also surer than the trainer."""
    need_tokens(d, FEWEST)
    rest, near = d.of(Beside).sums.tolist()
    if near[0] < FEWEST:
        return None
    size, usual = near[2] / near[0], rest[2] / max(rest[0], 1)
    if size < max(MATTERS, TIMES * usual) or near[1] > -LEANS * near[2]:
        return None
    return {
        "forced": d.of(Filled).unlikely,
        "count": near[0],
        "near": near[1] / near[0],
        "rest": usual,
    }
