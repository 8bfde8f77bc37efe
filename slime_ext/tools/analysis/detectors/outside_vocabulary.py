"""The finding ``outside_vocabulary``."""

from __future__ import annotations

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="error",
    explains=False,
    what="sampled token ids are outside the model's vocabulary",
    asks="a tokenizer, or the run's flags",
    title="The sampler drew token ids that are outside the model's vocabulary.",
    evidence="""
        {{ count }} response tokens ({{ count | share(tokens) }}), in {{ samples }} of {{ sequences |
        int }} sequences ({{ samples | share(sequences) }}), have an id of {{ vocabulary }} or more,
        or below -1. The model's ids are 0 to {{ vocabulary - 1 }}.
    """,
    threshold="one token",
    ruled_out="Special tokens, because their ids are counted as part of the vocabulary.",
    fix="""
        The embedding may be padded (--make-vocab-size-divisible-by), and the engine samples padding
        rows: mask their logits, or load the checkpoint with its original vocabulary. Otherwise the
        dump or the tokenizer belongs to another model.
    """,
)


def look(d: Diagnosis) -> Figures | None:
    """Finds token ids outside the model's vocabulary."""
    vocabulary, counts = d.statistics.ids, d.statistics.counts
    lacks = (
        "the size of the vocabulary: --tokenizer, the tokenizer/ of slime's dumps, or args.json in the run's "
        "folder with vocab_size or hf_checkpoint"
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
