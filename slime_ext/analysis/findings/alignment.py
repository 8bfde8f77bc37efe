"""Log-probs recorded for another token than their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime_ext.analysis.document import Finding
from slime_ext.analysis.evidence import CLOSER, SHIFTS
from slime_ext.analysis.findings import Detector
from slime_ext.analysis.findings.words import nats, share

if TYPE_CHECKING:
    from slime_ext.analysis.diagnosis import Diagnosis

FEWEST = 50  # tokens
SOME, PART = 2, 0.02  # sequences that are shifted when others are not, and their share


def off_by_one(d: Diagnosis) -> Finding | None:
    """Behavior log-probs that fit the token one or two places away better than their own: over all tokens, or
    in some of the sequences."""
    found = [
        (shifted / count, min(at, beside) / count, shift)
        for shift, (count, shifted, at, beside) in zip(SHIFTS, d.evidence.shifts.tolist(), strict=True)
        if count >= FEWEST
    ]
    distance, here, best = min(found, default=(0.0, 0.0, 0))
    if distance >= CLOSER * here:
        return _in_some(d)
    side = "before" if best < 0 else "after"
    return _shifted(
        f"The sampler's log-probs are shifted by {_tokens(best)}.",
        f"The trainer's log-prob of a token differs by {nats(here)} from the one recorded for it, by only "
        f"{nats(distance)} from the one recorded {abs(best)} {side} it.",
    )


def _in_some(d: Diagnosis) -> Finding | None:
    """Sequences of which each is closer when shifted, by itself."""
    count, best = max(zip(d.evidence.shifted.tolist(), SHIFTS, strict=True))
    every = d.sums["sequences"]
    if count < max(SOME, PART * every):
        return None
    return _shifted(
        f"In some responses the sampler's log-probs are shifted by {_tokens(best)}.",
        f"In {count:.0f} of {every:.0f} sequences ({share(count, every)}), each looked at by itself, the "
        f"trainer's log-probs are less than half as far from those recorded {abs(best)} "
        f"{'before' if best < 0 else 'after'} their token as from those recorded for it.",
    )


def _shifted(title: str, evidence: str) -> Finding:
    return Finding(
        name="off_by_one",
        severity="error",
        title=title,
        evidence=evidence,
        fix=(
            "Check what is cut off where prompt and response meet: the log-prob of token t is made by the "
            "logits at t - 1. In a custom generate function, take output_token_logprobs as it comes and "
            "append it in the order of the tokens, tool tokens included (as 0). Where only some responses "
            "are shifted: continued, aborted and multi-turn ones."
        ),
    )


def _tokens(shift: int) -> str:
    return f"{abs(shift)} token{'s' * (abs(shift) > 1)}"


DETECTORS = (Detector("off_by_one", off_by_one, after=("positive_log_probs",)),)
