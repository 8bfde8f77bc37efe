"""The finding ``position_drift``."""

from __future__ import annotations

import math

from torch import Tensor

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need_tokens
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="warning",
    after=("spoilt", "prefixes", "pushes", "layer", "kv_precision", "stale_weights"),
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
        first. Tokens that are less certain later: of tokens that are as sure the late ones are still
        further off.
    """,
    fix="""
        Errors that add up: a KV cache in fp8, other rotary settings (base, scaling, maximum length) or a
        sliding window in the engine, recurrent layers in low precision. Sequence-level ratios suffer
        most: prefer geometric or token corrections. A repetition, presence or frequency penalty in
        sampling_params looks alike, as it reaches more tokens the longer a response gets: turn it off.
    """,
)

DRIFT_TOKENS = 400  # tokens
DRIFT_SURE = 6.0  # standard errors
DRIFT_TIMES, DRIFT_MATTERS = 2.5, 0.05  # of mean |l|, late over early; nats, what bfloat16 alone stays below
EVENED, ABOVE = 1.7, 1.2  # the same over tokens of which the sampler was as sure; late over all such


def look(d: Diagnosis) -> Figures | None:
    """Finds a mean |log-ratio| that is a multiple late in the responses of what it is early."""
    need_tokens(d, DRIFT_TOKENS)
    count, absolute, squared = (d.curves.column("position", c) for c in ("count", "absolute", "squared"))
    reached = count.cumsum(0) / count.sum()
    parts = (reached <= 0.25, (reached > 0.25) & (reached < 0.75), reached >= 0.75)
    if not all(float(count[part].sum()) for part in parts):
        return None
    early, middle, late = (float(absolute[part].sum() / count[part].sum()) for part in parts)
    if late < max(DRIFT_MATTERS, DRIFT_TIMES * early) or not early <= middle <= late:
        return None
    if _evened(d, parts[2]) < max(ABOVE, EVENED * _evened(d, parts[0])):  # later tokens are less certain
        return None
    error = math.sqrt(float(squared[parts[2]].sum())) / float(count[parts[2]].sum())
    if late - early < DRIFT_SURE * error:  # a few tokens far off, that happen to come late
        return None
    return {"early": early, "middle": middle, "late": late}


def _evened(d: Diagnosis, part: Tensor) -> float:
    """Mean |l| of the tokens at some bins of position, over that of all tokens which were as sure as they."""
    count, absolute = d.curves.by_surprise("drift")[..., :2].unbind(2)
    usual = absolute.sum(0) / count.sum(0).clamp_min(1)
    return float(absolute[part].sum() / (count * usual)[part].sum().clamp_min(1e-30))
