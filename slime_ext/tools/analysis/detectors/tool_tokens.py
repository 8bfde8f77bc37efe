"""The finding ``tool_tokens``."""

from __future__ import annotations

import math
from typing import ClassVar

import torch

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures
from slime_ext.tools.analysis.detectors.shared.explained import explained_by_tokens
from slime_ext.tools.analysis.detectors.shared.filled import DOUBTED, UNLIKELY, Filled, Outside, is_inverted
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.measure import Measure
from slime_ext.tools.analysis.records import DumpedRollout
from slime_ext.tools.analysis.tables import any_true, count_true, is_above, is_below


class Doubtful(Measure):
    """Numbers of tokens at which the trainer is unsure, beside those of ``Filled``.

    Args:
        padded: unlikely tokens with a log-prob of 0, beside another log-prob of 0 in their sample.
        nearly: unlikely tokens with a log-prob of the sampler above -0.01, but not 0.
        recorded_doubted: tokens below DOUBTED whose log-prob of the sampler is not 0.
        recorded_unlikely: the same below UNLIKELY.
    """

    takes_joined: ClassVar[bool] = True

    padded: int = 0
    nearly: int = 0
    recorded_doubted: int = 0
    recorded_unlikely: int = 0

    def add(self, part: DumpedRollout) -> None:
        zero, is_unlikely = part.mask & part.is_zero, is_below(part.proximal, UNLIKELY)
        if any_true(zero):
            beside = torch.zeros_like(zero)
            neighbour = zero[1:] & zero[:-1] & (part.segments.ids[1:] == part.segments.ids[:-1])
            beside[1:] |= neighbour
            beside[:-1] |= neighbour
            self.padded += count_true(beside & is_unlikely)
        recorded = part.finite & ~zero
        self.nearly += count_true(recorded & is_above(part.behavior, SURE_OF) & is_unlikely)
        self.recorded_doubted += count_true(recorded & is_below(part.proximal, DOUBTED))
        self.recorded_unlikely += count_true(recorded & is_unlikely)


DETECTOR = Detector(
    severity="error",
    side="altered",
    group="spoilt",
    after=("positive_log_probs", "retokenised", "off_by_one", "greedy_sampling", "constrained_decoding"),
    what="the response mask holds tokens that the policy did not sample",
    asks="",
    title="""
        The loss trains on tokens that the policy did not sample{% if recorded is defined %}, and on no
        others: the mask is inverted{% endif %}.
    """,
    evidence="""
        The recorded log-prob of {{ filled }} response tokens ({{ filled | share(tokens) }}) is
        exactly 0 although the trainer finds them unlikely, so they were filled in, not sampled.
        {%- if recorded is defined %} All others are outside the mask, where {{ recorded }} tokens have a
        log-prob.{% endif %}
    """,
    threshold="""
        4 tokens and 0.05% in runs, and half of those at which only the sampler is sure; or 0.5% of the
        tokens as single ones, and 90% of those; or 95% of at least 50 tokens in the mask, while 95% of at
        least 50 outside it have another log-prob
    """,
    ruled_out="""
        A faulty engine that is sure of its tokens, because it would be nearly sure, not exactly, and
        hardly any of these log-probs lie between -0.01 and 0.
    """,
    remedy="set sample.loss_mask to 0 at these tokens",
    fix="""
        {% if recorded is defined %}Swap the ones and zeros of sample.loss_mask: 1 is a token that the policy
        sampled (mll-lab-nu/RAGEN#71).{% else %}Exclude tool output and environment turns from the loss: set
        sample.loss_mask to 0 at these tokens in the custom generate function.{% endif %}
    """,
)

SURE_OF = -0.01  # nats; a policy that is as sure as this seldom has a log-prob of exactly 0
MORE, SURE = 0.1, 3.0  # share of unlikely tokens above that among sampled ones; standard errors
FILLED_TOKENS, FILLED_SHARE = 4, 5e-4  # tokens in runs, and their share
# Single zeros are filled in if they are this share of the tokens, and this share of the tokens at which only
# the sampler is sure. A wrong engine is mostly nearly sure, not exactly.
ALONE_SHARE, EXACT_SHARE = 5e-3, 0.9
# The same share for zeros in runs. A policy that is sure has zeros beside zeros, too, and a trainer that is
# wrong at some tokens meets more values that are nearly 0.
IN_RUNS_SHARE = 0.5


def look(d: Diagnosis) -> Figures | None:
    """Finds response tokens whose log-prob was filled in with 0.

    Such zeros are in runs, which sampling does not make, or there are many of them but hardly any log-probs
    that are nearly 0. If the mask has no other tokens, it is inverted.
    """
    filled, doubtful = d.of(Filled).unlikely, d.of(Doubtful)
    tokens, explains = d.sums.tokens, explained_by_tokens(d, *d.of(Filled).zeros.tolist())
    if is_inverted(d):
        recorded = {"recorded": d.of(Outside).recorded}
        return recorded | {"filled": filled, "tokens": tokens, "explains": explains}
    if _are_sampled(d):
        return None
    sure = filled + doubtful.nearly
    are_in_runs = doubtful.padded >= max(FILLED_TOKENS, FILLED_SHARE * tokens)
    are_in_runs &= filled >= IN_RUNS_SHARE * sure
    are_many = filled >= max(FILLED_TOKENS, ALONE_SHARE * tokens, EXACT_SHARE * sure)
    if not are_in_runs and not are_many:
        return None
    return {"filled": filled, "tokens": tokens, "explains": explains}


def _are_sampled(d: Diagnosis) -> bool:
    """Returns whether tokens with a log-prob of 0 were sampled.

    If so, among tokens at which the trainer is unsure, they are as likely for it as others.
    """
    zeros, others = d.of(Filled), d.of(Doubtful)
    if not zeros.doubted or not others.recorded_doubted:
        return False
    unlikely_zeros = zeros.unlikely / zeros.doubted
    unlikely_others = others.recorded_unlikely / others.recorded_doubted
    error = math.sqrt(unlikely_others * (1 - unlikely_others) / zeros.doubted)
    return unlikely_zeros < unlikely_others + max(MORE, SURE * error)
