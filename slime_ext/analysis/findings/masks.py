"""Tokens in the response mask that no policy sampled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime_ext.analysis.document import Finding
from slime_ext.analysis.findings import Detector
from slime_ext.analysis.findings.words import share

if TYPE_CHECKING:
    from slime_ext.analysis.diagnosis import Diagnosis

FEWEST, LEAST = 4, 5e-4  # tokens in runs, and their share
ALONE = (
    5e-3  # share of tokens that may stand alone: one of them may be an engine that errs and is sure of it,
)
EXACT = 0.9  # which is then mostly nearly sure, not exactly


def _are_filled_in(d: Diagnosis) -> bool:
    """Zeros in runs, which sampling does not make, or a share of single ones with next to nothing near 0."""
    counts, tokens = d.evidence.counts, d.sums["tokens"]
    if counts["padded"] >= max(FEWEST, LEAST * tokens):
        return True
    is_exact = counts["filled"] >= EXACT * (counts["filled"] + counts["sure"])
    return is_exact and counts["filled"] >= max(FEWEST, ALONE * tokens)


def tool_tokens(d: Diagnosis) -> Finding | None:
    """Response tokens whose log-prob was filled in with 0."""
    if not _are_filled_in(d):
        return None
    filled = d.evidence.counts["filled"]
    return Finding(
        name="tool_tokens",
        severity="error",
        title="Tokens that the policy did not sample are trained on.",
        evidence=(
            f"The recorded log-prob of {filled} response tokens ({share(filled, d.sums['tokens'])}) is "
            "exactly 0 while the trainer finds them unlikely: filled in, not sampled."
        ),
        fix=(
            "Tool output and environment turns belong outside the loss: set sample.loss_mask to 0 at these "
            "tokens in the custom generate function."
        ),
    )


# A shift puts the zeros of sure tokens on others, and code that makes one fills the gap with zeros.
BEFORE = ("positive_log_probs", "off_by_one", "greedy_sampling")
DETECTORS = (Detector("tool_tokens", tool_tokens, after=BEFORE),)
