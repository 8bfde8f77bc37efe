"""Errors that add up along a response."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from slime_ext.analysis.document import Finding
from slime_ext.analysis.findings import SPOILT, Detector
from slime_ext.analysis.findings.words import factor, nats

if TYPE_CHECKING:
    from slime_ext.analysis.diagnosis import Diagnosis

FEWEST = 400  # tokens
SURE = 6.0  # standard errors
TIMES, MATTERS = 2.5, 0.015  # of mean |l|, late over early; nats


def position_drift(d: Diagnosis) -> Finding | None:
    """Mean |log-ratio| of late positions a multiple of that of early ones."""
    count, absolute, squared = (d.curves.column("position", c) for c in ("count", "absolute", "squared"))
    if count.sum() < FEWEST:
        return None
    reached = count.cumsum(0) / count.sum()
    parts = (reached <= 0.25, (reached > 0.25) & (reached < 0.75), reached >= 0.75)
    if not all(float(count[part].sum()) for part in parts):
        return None
    early, middle, late = (float(absolute[part].sum() / count[part].sum()) for part in parts)
    if late < max(MATTERS, TIMES * early) or not early <= middle <= late:
        return None
    error = math.sqrt(float(squared[parts[2]].sum())) / float(count[parts[2]].sum())
    if late - early < SURE * error:  # a few tokens far off, that happen to come late
        return None
    return Finding(
        name="position_drift",
        severity="warning",
        title="The mismatch grows along the response.",
        evidence=(
            f"Mean |log-ratio| {nats(early)} in the first quarter of the tokens by position, {nats(middle)} "
            f"in the middle, {nats(late)} in the last ({factor(late / max(early, 1e-12))})."
        ),
        fix=(
            "Errors that add up: a KV cache in fp8, other rotary settings (base, scaling, maximum length) "
            "or a sliding window in the engine, recurrent layers in low precision. Sequence-level ratios "
            "suffer most: prefer geometric or token corrections. A repetition, presence or frequency "
            "penalty in sampling_params looks alike, as it reaches more tokens the longer a response gets: "
            "turn it off."
        ),
    )


DETECTORS = (Detector("position_drift", position_drift, after=SPOILT),)
