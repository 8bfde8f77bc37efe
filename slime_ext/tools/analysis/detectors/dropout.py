"""The finding ``dropout``."""

from __future__ import annotations

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures
from slime_ext.tools.analysis.detectors.shared.twice import NAMED, unrepeated
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="error",
    group="parts",
    after=NAMED,
    what="the trainer scores the same text differently each time: dropout",
    asks="samples of one prompt that begin with the same tokens",
    title="The trainer gives the same text different log-probs each time: dropout.",
    evidence="""
        {{ count | int }} tokens are in samples of one prompt that are equal up to there: the
        trainer's log-probs differ by {{ spread | nats }} between these samples, the sampler's by {{
        other | nats }}. Mean |log-ratio| there {{ absolute | nats }}.
    """,
    threshold="""
        40% of the mean |log-ratio| between samples that are equal so far, 0.01 nats, 3 times the sampler's
    """,
    ruled_out="""
        Rounded or old weights: they score one text the same each time. Packed samples that see each
        other: the first of each micro-batch is as far off.
    """,
    fix="""
        Set --attention-dropout 0 and --hidden-dropout 0, and put the model into eval for the log-prob
        pass. If it is, score one batch twice: kernels that are not deterministic show as well.
    """,
)


def look(d: Diagnosis) -> Figures | None:
    """Finds that the trainer differs between samples of the same tokens so far."""
    return unrepeated(d, "trainer")
