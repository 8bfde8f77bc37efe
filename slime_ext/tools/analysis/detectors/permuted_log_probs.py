"""The finding ``permuted_log_probs``."""

from __future__ import annotations

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need
from slime_ext.tools.analysis.measures.by_sample import WINDOW
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="error",
    group="parts",
    after=("spoilt", "other_log_probs", "other_run"),
    what="log-probs belong to another place of the same response: a long shift, chunks in the wrong order",
    asks="samples of 12 tokens",
    title="""
        Stretches of the log-probs are at another place of their response: chunks in the wrong order, or a
        shift of several tokens.
    """,
    evidence="""
        In {{ unrelated }} of {{ samples }} samples, the two sides' log-probs do not follow each other token
        by token. Of {{ windows | int }} stretches of {{ size }} tokens that are far off in these, {{ fits |
        share(windows) }} fit the other side's log-probs elsewhere in the same sample, with less than a
        fifth of the distance.
    """,
    threshold="""
        half of at least 20 stretches that are far off fit at another place; a tenth of the samples
    """,
    ruled_out="""
        Another text, old weights, noise: none has the same log-probs in the same order a few tokens on. A
        shift by one or two tokens was looked for first.
    """,
    fix="""
        Look at how chunks of context-parallel ranks (zigzag or in order), of micro-batches or of a packed
        batch are joined: compare one sample with --context-parallel-size 1. Undo the order in which the
        tokens were cut.
    """,
)
WINDOWS, FIT, SHARE = 20, 0.5, 0.1  # stretches; share that fits elsewhere; of the samples


def look(d: Diagnosis) -> Figures | None:
    """Finds samples whose log-probs do not fit in place, and whose stretches fit elsewhere."""
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
