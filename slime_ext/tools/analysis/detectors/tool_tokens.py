"""The finding ``tool_tokens``."""

from __future__ import annotations

import math

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="error",
    group="spoilt",
    after=("positive_log_probs", "retokenised", "off_by_one", "greedy_sampling", "constrained_decoding"),
    what="the response mask holds tokens that the policy did not sample",
    asks="",
    title="The loss trains on tokens that the policy did not sample.",
    evidence="""
        The recorded log-prob of {{ filled }} response tokens ({{ filled | share(tokens) }}) is
        exactly 0 although the trainer finds them unlikely, so they were filled in, not sampled.
    """,
    threshold="4 tokens and 0.05% in runs, or 0.5% of the tokens as single ones",
    ruled_out="""
        A faulty engine that is sure of its tokens, because it would be nearly sure, not exactly, and
        hardly any of these log-probs lie between -0.01 and 0.
    """,
    fix="""
        Exclude tool output and environment turns from the loss: set sample.loss_mask to 0 at these
        tokens in the custom generate function.
    """,
)

MORE, SURE = 0.1, 3.0  # share of unlikely tokens above that among sampled ones; standard errors
FILLED_TOKENS, FILLED_SHARE = 4, 5e-4  # tokens in runs, and their share
# Single zeros are filled in if they are this share of the tokens, and this share of the tokens at which only
# the sampler is sure. A wrong engine is mostly nearly sure, not exactly.
ALONE_SHARE, EXACT_SHARE = 5e-3, 0.9


def look(d: Diagnosis) -> Figures | None:
    """Finds response tokens whose log-prob was filled in with 0.

    Such zeros are in runs, which sampling does not make, or there are many of them but hardly any log-probs
    that are nearly 0.
    """
    filled, padded, sure = (d.statistics.counts[name] for name in ("filled", "padded", "sure"))
    tokens = d.sums["tokens"]
    if _are_sampled(d):
        return None
    are_in_runs = padded >= max(FILLED_TOKENS, FILLED_SHARE * tokens)
    are_many = filled >= max(FILLED_TOKENS, ALONE_SHARE * tokens, EXACT_SHARE * (filled + sure))
    return {"filled": filled, "tokens": tokens} if are_in_runs or are_many else None


def _are_sampled(d: Diagnosis) -> bool:
    """Returns whether tokens with a log-prob of 0 were sampled.

    If so, among tokens at which the trainer is unsure, they are as likely for it as others.
    """
    names = ("doubted", "filled", "recorded_doubted", "recorded_unlikely")
    zeros, unlikely, others, usual = (d.statistics.counts[name] for name in names)
    if not zeros or not others:
        return False
    unlikely_zeros, unlikely_others = unlikely / zeros, usual / others
    error = math.sqrt(unlikely_others * (1 - unlikely_others) / zeros)
    return unlikely_zeros < unlikely_others + max(MORE, SURE * error)
