"""Tokens in the response mask that no policy sampled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime_ext.analysis.document import Finding
from slime_ext.analysis.findings import Detector
from slime_ext.analysis.findings.words import share

if TYPE_CHECKING:
    from slime_ext.analysis.diagnosis import Diagnosis

FEWEST, LEAST = 4, 5e-4  # tokens, and their share


def tool_tokens(d: Diagnosis) -> Finding | None:
    """Runs of response tokens whose log-prob was filled in with 0."""
    padded = d.evidence.counts["padded"]
    if padded < max(FEWEST, LEAST * d.sums["tokens"]):
        return None
    return Finding(
        name="tool_tokens",
        severity="error",
        title="Tokens that the policy did not sample are trained on.",
        evidence=(
            f"{padded} response tokens ({share(padded, d.sums['tokens'])}) stand in runs whose recorded "
            "log-prob is exactly 0 while the trainer finds them unlikely: filled in, not sampled."
        ),
        fix=(
            "Tool output and environment turns belong outside the loss: set sample.loss_mask to 0 at these "
            "tokens in the custom generate function."
        ),
    )


# A shift puts the zeros of sure tokens on others, and code that makes one fills the gap with zeros.
BEFORE = ("positive_log_probs", "off_by_one", "greedy_sampling")
DETECTORS = (Detector("tool_tokens", tool_tokens, after=BEFORE),)
