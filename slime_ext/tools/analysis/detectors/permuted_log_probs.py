"""The finding ``permuted_log_probs``."""

from __future__ import annotations

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need
from slime_ext.tools.analysis.measures.by_sample import WINDOW
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="error",
    group="parts",
    after=("spoilt", "other_log_probs", "other_run"),
    what="log-probs belong to another position of the same response: a long shift, chunks in the wrong order",
    asks="samples of 12 tokens",
    title="""
        Stretches of the log-probs are at the wrong position of their response: chunks in the wrong
        order, or a shift of several tokens.
    """,
    evidence="""
        In {{ unrelated }} of {{ samples }} samples, the two sides' log-probs do not follow each other
        token by token. In these, {{ windows | int }} stretches of {{ size }} tokens are far off. {{
        fits | share(windows) }} of them fit the other side's log-probs elsewhere in the same sample,
        with less than a fifth of the distance.
    """,
    threshold="""
        a tenth of the samples has no correlation between both sides, and half of at least 20 far
        stretches in them fit at another position
    """,
    ruled_out="""
        Another text, old weights or noise, because none of them has the same log-probs in the same
        order elsewhere in the sample. A shift by one or two tokens was looked for first.
    """,
    fix="""
        Check how chunks of context-parallel ranks (zigzag or in order), of micro-batches or of a
        packed batch are joined, and undo the order in which the tokens were cut. Compare one sample
        with --context-parallel-size 1.
    """,
)
WINDOWS, FIT, SHARE = 20, 0.5, 0.1  # stretches; share that fits elsewhere; share of the samples


def look(d: Diagnosis) -> Figures | None:
    """Finds samples whose log-probs fit at other positions of the same sample."""
    samples = d.statistics.samples
    need(samples.correlated, "samples of 12 tokens")
    windows, fits = samples.moved.tolist()
    is_some = samples.unrelated >= SHARE * samples.correlated
    if not is_some or windows < WINDOWS or fits < FIT * windows:
        return None
    return {
        "unrelated": samples.unrelated,
        "samples": samples.correlated,
        "windows": windows,
        "fits": fits,
        "size": WINDOW,
    }
