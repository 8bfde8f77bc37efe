"""The finding ``position_drift``."""

from __future__ import annotations

from slime_ext.tools.analysis.detectors.shared.along import EVENED, TIMES, along
from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need_tokens
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="warning",
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
        Mean |log-ratio| {{ early | nats }} in the first quarter of the tokens by position, {{ middle |
        nats }} in the middle, {{ late | nats }} in the last ({{ (late / [early, 1e-12] | max) | factor
        }}).
    """,
    threshold="""
        the last quarter of the tokens by position 2.5 times the first and 0.05 nats, by 6 standard
        errors, rising between
    """,
    ruled_out="""
        A step at one position (kv_precision) and a step at a turn (prefix_mismatch) were looked for
        first. Tokens that are less certain later: among tokens of equal certainty, the late ones
        are still further off.
    """,
    fix="""
        Errors that add up: a KV cache in fp8, other rotary settings (base, scaling, maximum length)
        or a sliding window in the engine, recurrent layers in low precision. Sequence-level ratios
        suffer most: prefer geometric or token corrections. A repetition, presence or frequency
        penalty in sampling_params looks alike, because it reaches more tokens the longer a response
        gets: turn it off.
    """,
)

DRIFT_TOKENS = 400  # tokens
DRIFT_SURE = 6.0  # standard errors
DRIFT_MATTERS = 0.05  # nats, what bfloat16 alone stays below
LEVEL = 3.0  # standard errors that the end may lie below the middle: a window is full from some place on
ABOVE = 1.2  # |l| late over that of all tokens of which the sampler was as sure


def look(d: Diagnosis) -> Figures | None:
    """Finds a mean |log-ratio| that is a multiple late in the responses of what it is early."""
    need_tokens(d, DRIFT_TOKENS)
    found = along(d)
    if found is None or not found.early <= found.middle <= found.late + LEVEL * found.late_error:
        return None
    if found.late < max(DRIFT_MATTERS, TIMES * found.early):
        return None
    if found.last < max(ABOVE, EVENED * found.first):  # later tokens are less certain
        return None
    if found.late - found.early < DRIFT_SURE * found.late_error:  # a few tokens far off, that come late
        return None
    return {"early": found.early, "middle": found.middle, "late": found.late}
