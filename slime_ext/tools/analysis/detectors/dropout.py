"""The finding ``dropout``."""

from __future__ import annotations

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures
from slime_ext.tools.analysis.detectors.shared.twice import NAMED, depends_on_length, unsteady
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="error",
    side="honest",
    group="parts",
    after=NAMED,
    what="the trainer scores the same text differently each time, as with dropout",
    asks="samples of one prompt that begin with the same tokens",
    title="The trainer gives the same text different log-probs each time, as with dropout.",
    evidence="""
        {{ count | int }} tokens have the same text before them in another sample of their prompt.
        There the trainer's log-probs differ by {{ spread | nats }} between these samples, the
        sampler's by {{ other | nats }}. The mean |log-ratio| there is {{ absolute | nats }}.
    """,
    threshold="""
        after the same text, log-probs differ by 40% of the mean |log-ratio|, by the 0.04 nats that
        bfloat16 makes, and by 3 times as much as the sampler's
    """,
    ruled_out="""
        Rounded or old weights, because they score the same text alike each time. Packed samples that
        see each other, because the first sample of each micro-batch is as far off.
    """,
    remedy="set --attention-dropout 0 and --hidden-dropout 0",
    fix="""
        Set --attention-dropout 0 and --hidden-dropout 0, and switch the model to eval mode for the
        log-prob pass. If that is done already, score one batch twice, because kernels that are not
        deterministic look the same.
    """,
)


def look(d: Diagnosis) -> Figures | None:
    """Finds that the trainer's log-probs of the same text differ between samples."""
    return None if depends_on_length(d) else unsteady(d, "trainer")
