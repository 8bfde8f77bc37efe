"""The trainer scores another text than the engine sampled: tokens that were decoded and encoded again, a
prompt or an earlier turn that only one side has."""

from __future__ import annotations

import math

from slime_ext.analysis.diagnosis import Diagnosis
from slime_ext.analysis.findings.detector import Detected, detector, factor, nats, share
from slime_ext.analysis.structure import NEAR

MOVED, MOVED_SHARE = 3, 0.02  # turns of which the later part is shifted
FEWEST = 60  # tokens
TIMES, MATTERS, SURE = 3.0, 0.05, 6.0  # of mean |l| of a turn's begin; nats; standard errors


def _some_turns(d: Diagnosis) -> str:
    return "" if d.statistics.structure.counts["turns"] >= MOVED else f"{MOVED} turns of responses"


def _begins(d: Diagnosis) -> str:
    first, rest, later, _ = d.statistics.structure.turns[:, 0].tolist()
    return "" if min(first + rest, max(later, first)) >= FEWEST else f"{FEWEST} tokens at the begin of turns"


@detector(
    "error",
    needs=_some_turns,
    threshold=(
        f"{MOVED} turns and {share(MOVED_SHARE, 1)} of all; in each, a part of at least 6 tokens by 5 "
        "standard errors"
    ),
    ruled_out=(
        "A wrong slice of the engine's lists (off_by_one) shifts a response from its first token on; here an "
        "earlier part of the same sample fits its own log-probs."
    ),
)
def retokenised(d: Diagnosis) -> Detected | None:
    """Finds turns whose log-probs fit their tokens up to some place, and tokens one or two places away from
    there on; or samples whose tokens differ between the rollout dump and the train dump."""
    counts = d.statistics.structure.counts
    turns, moved, retold = counts["turns"], counts["moved"], counts["retold"]
    if moved < max(MOVED, MOVED_SHARE * turns) and not retold:
        return None
    differ = (
        f" {retold} samples have other tokens in the train dump than in the rollout dump." if retold else ""
    )
    return Detected(
        title="The tokens that are trained on are not those that were sampled: text was tokenised again.",
        evidence=(
            f"In {moved} of {turns} turns ({share(moved, turns)}) the log-probs fit the tokens up to a "
            "place, and "
            f"from there on those one or two places away.{differ}"
        ),
        fix=(
            "Do not decode a turn and encode its text again: append the ids that the engine returned "
            "(SGLang: "
            "output_ids or output_token_logprobs; vLLM: return_token_ids), and join prompts of later "
            "turns from ids."
        ),
    )


@detector(
    "error",
    after=(retokenised,),
    needs=_begins,
    threshold=f"{TIMES:g} times the distance elsewhere, {MATTERS} nats more, by {SURE:g} standard errors",
    ruled_out=(
        "Errors that add up along the response: the tokens around the begin of the turn do not show them."
    ),
)
def prefix_mismatch(d: Diagnosis) -> Detected | None:
    """Finds that the begin of later turns (or of all responses) is a multiple as far off as the turn before
    it (or as the rest)."""
    first, rest, later, after = d.statistics.structure.turns.tolist()
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
            "Compare the ids of the engine's request with the ids before this place in the sample: a "
            "chat template "
            "that drops earlier reasoning, a missing BOS, a tool's answer that was cut or tokenised "
            "otherwise, a "
            "prompt that was truncated on one side. Keep the ids of earlier turns as they were."
        ),
        ruled_out=f"Errors that add up along the response: right {against} the distance is only {nats(far)}.",
    )


DETECTORS = (retokenised, prefix_mismatch)
