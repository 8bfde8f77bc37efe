"""The finding ``tool_tokens``."""

from __future__ import annotations

import math

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="error",
    group="spoilt",
    after=("positive_log_probs", "retokenised", "off_by_one", "greedy_sampling", "constrained_decoding"),
    what="tokens that the policy did not sample are in the response mask",
    asks="",
    title="Tokens that the policy did not sample are trained on.",
    evidence="""
        The recorded log-prob of {{ filled }} response tokens ({{ filled | share(tokens) }}) is exactly 0
        while the trainer finds them unlikely: filled in, not sampled.
    """,
    threshold="4 tokens and 0.05% in runs, or 0.5% that stand alone",
    ruled_out="""
        An engine that errs is nearly sure, not exactly: hardly any of these log-probs lie between -0.01
        and 0.
    """,
    fix="""
        Tool output and environment turns belong outside the loss: set sample.loss_mask to 0 at these
        tokens in the custom generate function.
    """,
)

MORE, SURE = 0.1, 3.0  # share of unlikely tokens, above that of sampled ones; standard errors
FILLED_TOKENS, FILLED_SHARE = 4, 5e-4  # tokens in runs, and their share
# Zeros that stand alone are filled in if they are this share of the tokens, and nearly all of the tokens of
# which the sampler is sure and the trainer is not: an engine that errs is mostly nearly sure, not exactly.
ALONE_SHARE, EXACT_SHARE = 5e-3, 0.9


def look(d: Diagnosis) -> Figures | None:
    """Finds response tokens whose log-prob was filled in with 0: such zeros stand in runs, which sampling
    does not make, or alone but often, with hardly any log-probs that are nearly 0."""
    filled, padded, sure = (d.statistics.counts[name] for name in ("filled", "padded", "sure"))
    tokens = d.sums["tokens"]
    if _are_sampled(d):
        return None
    stand_in_runs = padded >= max(FILLED_TOKENS, FILLED_SHARE * tokens)
    stand_alone = filled >= max(FILLED_TOKENS, ALONE_SHARE * tokens, EXACT_SHARE * (filled + sure))
    return {"filled": filled, "tokens": tokens} if stand_in_runs or stand_alone else None


def _are_sampled(d: Diagnosis) -> bool:
    """Whether tokens with a log-prob of 0 of which the trainer is not sure are as likely as others of which
    it is not: then they were sampled, and their log-probs were lost."""
    names = ("doubted", "filled", "recorded_doubted", "recorded_unlikely")
    zeros, unlikely, others, usual = (d.statistics.counts[name] for name in names)
    if not zeros or not others:
        return False
    mine, theirs = unlikely / zeros, usual / others
    error = math.sqrt(theirs * (1 - theirs) / zeros)
    return mine < theirs + max(MORE, SURE * error)
