"""The finding ``engines_apart``."""

from __future__ import annotations

from slime_ext.tools.analysis.detectors.shared.along import agrees_at_places
from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures
from slime_ext.tools.analysis.detectors.shared.twice import NAMED, unsteady
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="error",
    side="either",  # a symptom
    says="symptom",
    group="parts",
    after=NAMED,
    what="the sampler scores the same text differently in different samples",
    asks="samples of one prompt that begin with the same tokens",
    title="The sampler gives the same text different log-probs each time.",
    evidence="""
        {{ count | int }} tokens have the same text before them in another sample of their prompt.
        There the sampler's log-probs differ by {{ spread | nats }} between these samples (variance {{
        "%.2g" | format(variance) }} nats^2), the trainer's by {{ other | nats }}. The mean |log-ratio| there
        is {{ absolute | nats }}.
    """,
    threshold="""
        after the same text and from the same weight version, log-probs differ by 40% of the mean
        |log-ratio|, by the 0.04 nats that bfloat16 makes, and by 3 times as much as the trainer's; or their
        squares do, and the variance is 2e-3 nats^2, unless samples are of two kinds
    """,
    ruled_out="""
        Rounded weights, because they score the same text alike each time. The trainer, because its
        log-probs of the same text agree.
    """,
    fix="""
        Ask each engine for the log-probs of one fixed text. An engine with other weights, or with
        kernels that depend on the batch, shows at once. Record the engine in sample.metadata, so that
        the next analysis names it.
    """,
)


def look(d: Diagnosis) -> Figures | None:
    """Finds that the sampler's log-probs of the same text differ between samples."""
    figures = unsteady(d, "sampler")
    return None if figures is None or agrees_at_places(d) else figures
