"""The finding ``equal_columns``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need_tokens
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.measure import Measure
from slime_ext.tools.analysis.measures.rollouts import RolloutSummary
from slime_ext.tools.analysis.records import DumpedRollout
from slime_ext.tools.analysis.tables import count_true


class LastTokens(Measure):
    """Counts samples whose last tokens have the same log-probs on both sides, bit by bit.

    Only the last LAST tokens are read. Tokens of which the sampler is sure do not count, because both sides
    may round to the same number there.

    Args:
        tails: samples whose last FEWEST tokens or more are equal, while an earlier token differs.
        wholes: samples that are equal throughout.
        samples: those with FEWEST tokens that count.
        equal, differing: tokens that come before the last differing token of their sample.
    """

    takes_joined: ClassVar[bool] = True

    tails: int = 0
    wholes: int = 0
    samples: int = 0
    equal: int = 0
    differing: int = 0

    def add(self, part: DumpedRollout) -> None:
        if not part.size:
            return
        from_end = torch.arange(LAST)
        at = part.segments.bounds[1:, None] - 1 - from_end
        is_there = from_end < part.response_lengths[:, None]
        at = torch.where(is_there, at, 0)
        behavior, counts = part.behavior[at], is_there & part.finite[at]
        counts &= behavior < UNSURE
        is_equal = behavior == part.proximal[at]
        differing = (counts & ~is_equal).cumsum(1)
        alike = (counts & (differing == 0)).sum(1) >= FEWEST
        apart = part.sample_sums[1] > 0
        self.samples += count_true(counts.sum(1) >= FEWEST)
        self.tails += count_true(alike & apart)
        self.wholes += count_true(alike & ~apart)
        self.equal += count_true(counts & is_equal & (differing > 0))
        self.differing += count_true(counts & ~is_equal & (differing > 1))


DETECTOR = Detector(
    severity="warning",
    # Misplaced log-probs make the other rollouts differ, though both sides compute alike.
    after=("other_run", "positive_log_probs", "greedy_sampling", "other_log_probs", "permuted_log_probs"),
    explains=False,
    what="both sides' log-probs are bitwise equal: one is a copy, or both are computed alike",
    asks="100 tokens",
    title="""
        {% if tails is defined %}The last log-probs of both sides are the same, bit by bit, in {{ tails |
        share(samples) }} of the samples. {%- elif equal == every %}The log-probs of both sides are the same,
        bit by bit. {%- else %}In {{ equal }} of {{ every }} rollouts the log-probs of both sides are the
        same, bit by bit.{% endif %}
    """,
    evidence="""
        {% if tails is defined %}In {{ tails }} of {{ samples }} samples the last {{ fewest }} tokens or more
        are equal, and those before them differ. Of tokens before one that differs {{ chance | share(1) }} are
        equal. {%- else %}They are equal at all {{ tokens }} response tokens{{ "" if equal == every else " of
        these rollouts" }}.{% endif %}
    """,
    threshold="""
        a rollout of 100 tokens in which every log-ratio is exactly 0, while most are not 0 in another
        rollout, if there is one; or the last 4 tokens of 1% of the samples and at least 4, while at most a
        tenth of the tokens before one that differs are equal
    """,
    ruled_out="""
        {% if tails is defined -%} Sides that compute bitwise alike, because they would in the other samples,
        too, and from the first token on. {%- elif equal == every -%} Nothing, because sampler and trainer may
        compute bitwise alike (slime: --true-on-policy-mode). Any other pair of engines differs in the last
        bits. {%- else -%} Sides that compute bitwise alike, because in another rollout they differ at most
        tokens. {%- endif %}
    """,
    fix="""
        {%- if tails is defined %} Look for a list of the engine's log-probs that is shorter than the
        response, and for code that fills it up with the trainer's (NVIDIA/Megatron-LM#7015). The mismatch is
        unknown there: record the rest, or mask these tokens. {%- else %}
        Unless both sides are meant to be bitwise equal, one column is a copy of the other. Either the
        trainer used the sampler's log-probs (slime: --use-rollout-logprobs), or a script wrote one
        list under both names. The mismatch is then unknown: let the trainer score the tokens
        (--get-mismatch-metrics).{% endif %}
    """,
)

EQUAL_TOKENS = 100  # tokens
LAST, FEWEST, UNSURE = 8, 4, -0.01  # last tokens; those of them that count; nats
TAILS, SHARE, BY_CHANCE = 4, 0.01, 0.1  # samples; share of them; share of equal tokens in the others
ALIKE = 1e-6  # nats, mean |l|; below it whole rollouts may be equal by chance


def look(d: Diagnosis) -> Figures | None:
    """Finds rollouts or ends of samples in which the log-probs of both sides are equal, bit by bit."""
    need_tokens(d, EQUAL_TOKENS)
    equal = tuple(s.rollout_id for s in d.rollouts if not s.absolute and s.surprise)
    tokens = sum(s.tokens for s in d.rollouts if s.rollout_id in equal)
    every, others = len(d.rollouts), [s for s in d.rollouts if s.absolute]
    if tokens < EQUAL_TOKENS or (others and _equal_by_chance(others)):
        return _of_last_tokens(d.of(LastTokens))
    # Two engines may compute bitwise alike, at most tokens at least, from rollout 0 until weights differ.
    until = [s for s in d.rollouts if s.rollout_id <= equal[-1]]
    are_first = until[0].rollout_id == 0 and not any(s.median for s in until)
    severity = "note" if len(equal) == every or are_first else "warning"
    return {"tokens": tokens, "equal": len(equal), "every": every, "rollouts": equal, "severity": severity}


def _of_last_tokens(last: LastTokens) -> Figures | None:
    """Returns the figures if some samples are equal at their end alone.

    A token depends on all before it. So if both sides compute alike, they are equal until something else was
    computed, and not from some place on; only newer weights bring that about, and then other samples, all
    from these weights, are equal throughout.
    """
    others = last.equal + last.differing
    if last.tails < max(TAILS, SHARE * last.samples) or last.wholes > BY_CHANCE * last.tails:
        return None
    if others < EQUAL_TOKENS or last.equal > BY_CHANCE * others:
        return None
    chance = last.equal / others
    return {"tails": last.tails, "samples": last.samples, "chance": chance, "fewest": FEWEST}


def _equal_by_chance(others: Sequence[RolloutSummary]) -> bool:
    """Returns whether other rollouts differ so little that some may be equal by chance."""
    return max(s.absolute for s in others) < ALIKE or not any(s.median for s in others)
