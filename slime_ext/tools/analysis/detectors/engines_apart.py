"""The finding ``engines_apart``."""

from __future__ import annotations

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures
from slime_ext.tools.analysis.detectors.shared.twice import NAMED, unrepeated
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="error",
    says="symptom",
    group="parts",
    after=NAMED,
    what="the sampler scores the same text differently in different samples: engines that are not alike",
    asks="samples of one prompt that begin with the same tokens",
    title="The sampler gives the same text different log-probs each time: its engines are not alike.",
    evidence="""
        {{ count | int }} tokens are in samples of one prompt that are equal up to there: the
        sampler's log-probs differ by {{ spread | nats }} between these samples, the trainer's by {{
        other | nats }}. Mean |log-ratio| there {{ absolute | nats }}.
    """,
    threshold="""
        40% of the mean |log-ratio| between samples that are equal so far, 0.01 nats, 3 times the trainer's
    """,
    ruled_out="Rounded weights: they score one text the same each time. The trainer: it does.",
    fix="""
        Ask each engine for the log-probs of one fixed text: one with other weights, or kernels that
        depend on the batch, shows at once. Record the engine in sample.metadata, and the next analysis
        names it.
    """,
)


def look(d: Diagnosis) -> Figures | None:
    """Finds that the sampler differs between samples of the same tokens so far."""
    return unrepeated(d, "sampler")
