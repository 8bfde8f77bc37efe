"""The finding ``position_drift``."""

from __future__ import annotations

import math

from slime_ext.tools.analysis.detectors.shared.along import EQUALLY_CERTAIN, TIMES, along, explained_along
from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need_tokens
from slime_ext.tools.analysis.detectors.shared.kinds import rather_than_position
from slime_ext.tools.analysis.measures.curves import PER_OCTAVE
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="warning",
    side="honest",
    after=(
        "spoilt",
        "prefixes",
        "pushes",
        "layer",
        "kv_precision",
        "stale_weights",
        "parts",
        "experts",
        "other_policy",
        "prompt_cut",
    ),
    what="the mismatch grows along the response",
    asks="400 tokens",
    title="The mismatch grows along the response.",
    evidence="""
        Mean |log-ratio| {{ early | nats }} in the first quarter of the tokens by position, {{ middle
        | nats }} in the middle, {{ late | nats }} in the last quarter ({{ (late / [early, 1e-12] |
        max) | factor }}).
    """,
    threshold="""
        the last quarter of the tokens by position has 2.5 times the mean |log-ratio| of the first and
        0.05 nats, by 6 standard errors, and the middle is between
    """,
    ruled_out="""
        A step at one position (kv_precision) and a step at a turn (prefix_mismatch), which were
        looked for first. Tokens that are less certain later, because among equally certain tokens the
        late ones are still further off.
    """,
    remedy="compare the rotary settings, the attention window and the dtype of the KV cache of both sides",
    fix="""
        Look for errors that add up in the engine: an fp8 KV cache, other rotary settings (base,
        scaling, maximum length), a sliding window, or recurrent layers in low precision. A
        repetition, presence or frequency penalty in sampling_params looks the same, because it
        reaches more tokens in longer responses: turn it off. Prefer geometric or token corrections,
        because sequence-level ratios suffer most.
    """,
)

DRIFT_TOKENS = 400  # tokens
DRIFT_SURE = 6.0  # standard errors
DRIFT_MATTERS = 0.05  # nats, what bfloat16 alone stays below
LEVEL = 3.0  # standard errors that the end may be below the middle, because a window may be full
ABOVE = 1.2  # late mean |l| over that of all equally certain tokens


def look(d: Diagnosis) -> Figures | None:
    """Finds a mean |log-ratio| that is several times as large late in the responses as early."""
    need_tokens(d, DRIFT_TOKENS)
    drift = along(d)
    if drift is None or not drift.early <= drift.middle <= drift.late + LEVEL * drift.late_error:
        return None
    if drift.late < max(DRIFT_MATTERS, TIMES * drift.early):
        return None
    if drift.last < max(ABOVE, EQUALLY_CERTAIN * drift.first):  # later tokens are less certain
        return None
    if drift.late - drift.early < DRIFT_SURE * drift.late_error:  # only a few late tokens are far off
        return None
    explains = explained_along(d, grows=True)
    if rather_than_position(d, explains, _reach_middle(d)):
        return None
    return {"early": drift.early, "middle": drift.middle, "late": drift.late, "explains": explains}


def _reach_middle(d: Diagnosis) -> float:
    """Returns how many samples have the place before which half of the tokens lie, or less."""
    count = d.curves.position.count
    at = int((count.cumsum(0) < count.sum() / 2).sum())
    places = math.ceil(2 ** ((at + 1) / PER_OCTAVE)) - math.ceil(2 ** (at / PER_OCTAVE))  # of the bin
    return float(count[at]) / max(places, 1)
