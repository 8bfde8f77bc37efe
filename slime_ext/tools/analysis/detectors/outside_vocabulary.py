"""The finding ``outside_vocabulary``."""

from __future__ import annotations

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="error",
    explains=False,
    what="token ids that the model has no row for",
    asks="a tokenizer, or the run's flags",
    title="Token ids were sampled that the model has no row for.",
    evidence="""
        {{ count }} response tokens ({{ count | share(tokens) }}), in {{ samples }} of {{ sequences | int
        }} sequences ({{ samples | share(sequences) }}), have an id of {{ vocabulary }} or more, or below
        -1; the ids are 0 to {{ vocabulary - 1 }}.
    """,
    threshold="one token",
    ruled_out="Special tokens: their ids are counted.",
    fix="""
        The embedding is padded (--make-vocab-size-divisible-by) and the engine samples rows of the
        padding: mask their logits, or load the checkpoint with its own vocabulary. Else the dump is of
        another model, or its tokenizer.
    """,
)


def look(d: Diagnosis) -> Figures | None:
    """Finds token ids that the model has no row for."""
    vocabulary, counts = d.statistics.ids, d.statistics.counts
    lacks = (
        "the number of token ids: --tokenizer, the tokenizer/ of slime's dumps, or args.json with vocab_size "
        "or hf_checkpoint in the run's folder"
    )
    need(vocabulary is not None, lacks)
    if not counts["beyond"]:
        return None
    return {
        "count": counts["beyond"],
        "tokens": d.sums["tokens"],
        "samples": counts["beyond_in"],
        "sequences": d.sums["sequences"],
        "vocabulary": vocabulary,
    }
