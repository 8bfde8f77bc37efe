"""Log-probs recorded for another token than their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime_ext.analysis.document import Finding
from slime_ext.analysis.evidence import SHIFTS
from slime_ext.analysis.findings import Detector
from slime_ext.analysis.findings.words import nats

if TYPE_CHECKING:
    from slime_ext.analysis.diagnosis import Diagnosis

CLOSER = 0.5  # a shift explains the difference when it takes away half of it
FEWEST = 50  # tokens


def off_by_one(d: Diagnosis) -> Finding | None:
    """Behavior log-probs that fit the token one or two places away better than their own."""
    found = [
        (shifted / count, min(at, beside) / count, shift)
        for shift, (count, shifted, at, beside) in zip(SHIFTS, d.evidence.shifts.tolist(), strict=True)
        if count >= FEWEST
    ]
    distance, here, best = min(found, default=(0.0, 0.0, 0))
    if distance >= CLOSER * here:
        return None
    where = "before" if best < 0 else "after"
    return Finding(
        name="off_by_one",
        severity="error",
        title=f"The sampler's log-probs are shifted by {abs(best)} token{'s' * (abs(best) > 1)}.",
        evidence=(
            f"The trainer's log-prob of a token differs by {nats(here)} from the one recorded for it, by "
            f"only {nats(distance)} from the one recorded {abs(best)} {where} it."
        ),
        fix=(
            "Check what is cut off where prompt and response meet: the log-prob of token t is made by the "
            "logits at t - 1. In a custom generate function, take output_token_logprobs as it comes and "
            "append it in the order of the tokens, tool tokens included (as 0)."
        ),
    )


DETECTORS = (Detector("off_by_one", off_by_one, after=("tool_tokens", "positive_log_probs")),)
