"""The trainer scores another text than the engine sampled: tokens that were decoded and encoded again, a
prompt or an earlier turn that only one side has."""

from __future__ import annotations

import math

from slime_ext.analysis.curves import NEAR
from slime_ext.analysis.diagnosis import Diagnosis
from slime_ext.analysis.findings.detector import Detected, detector, factor, nats
from slime_ext.analysis.findings.log_probs import SPOILT

FEWEST = 60  # tokens
TIMES, MATTERS, SURE = 3.0, 0.05, 6.0  # of mean |l| of a turn's begin; nats; standard errors


def _begins(d: Diagnosis) -> str:
    first, rest, later, _ = d.curves.column("part_of_turn", "count").tolist()
    return "" if min(first + rest, max(later, first)) >= FEWEST else f"{FEWEST} tokens at the begin of turns"


@detector(
    "error",
    after=SPOILT,
    needs=_begins,
    threshold=f"{TIMES:g} times the distance elsewhere, {MATTERS} nats more, by {SURE:g} standard errors",
    ruled_out=(
        "Errors that add up along the response: the tokens around the begin of the turn do not show them."
    ),
)
def prefix_mismatch(d: Diagnosis) -> Detected | None:
    """Finds that the begin of later turns (or of all responses) is a multiple as far off as the turn before
    it (or as the rest)."""
    first, rest, later, after = d.curves.tables["part_of_turn"].tolist()
    if later[0] >= FEWEST:
        other = [a + b for a, b in zip(first, rest, strict=True)]
        where, against = "The begin of later turns", "in the first turn"
    else:
        later, other = first, rest
        where, against = "The begin of the responses", "in the rest of them"
    if min(later[0], other[0]) < FEWEST:
        return None
    near, far = later[1] / later[0], other[1] / other[0]
    error = math.sqrt(later[2]) / later[0]
    if near < max(TIMES * far, far + MATTERS, far + SURE * error):
        return None
    tail = (
        f", {nats(after[1] / after[0])} further on in these turns"
        if after[0] and where.endswith("turns")
        else ""
    )
    return Detected(
        title=f"{where} is scored after another text than it was sampled after.",
        evidence=(
            f"Mean |log-ratio| {nats(near)} over the first {NEAR} tokens, {nats(far)} {against}: "
            f"{factor(near / max(far, 1e-12))}{tail}."
        ),
        fix=(
            "Compare the ids of the engine's request with the ids before this place in the sample: a chat "
            "template that drops earlier reasoning, a missing BOS, a tool's answer that was cut or "
            "tokenised otherwise, a prompt that was truncated on one side. Keep the ids of earlier turns "
            "as they were."
        ),
        ruled_out=f"Errors that add up along the response: right {against} the distance is only {nats(far)}.",
    )


DETECTORS = (prefix_mismatch,)
