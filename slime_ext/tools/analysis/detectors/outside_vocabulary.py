"""The finding ``outside_vocabulary``."""

from __future__ import annotations

from dataclasses import InitVar

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.measure import Measure
from slime_ext.tools.analysis.records import DumpedRollout
from slime_ext.tools.analysis.tables import count_true


class Beyond(Measure):
    """Numbers of response tokens outside the vocabulary, and of samples with such a token.

    Args:
        vocabulary: number of ids that the model has; None: unknown.
    """

    vocabulary: InitVar[int | None] = None
    tokens: int = 0
    samples: int = 0

    def __post_init__(self, vocabulary: int | None) -> None:
        self.size = vocabulary

    @classmethod
    def of_run(cls, vocabulary: int | None) -> Measure:
        return cls(vocabulary)

    def add(self, part: DumpedRollout) -> None:
        if part.tokens is not None and self.size is not None:
            is_outside = part.mask & ((part.tokens >= self.size) | (part.tokens < -1))  # -1: not in the dump
            self.tokens += count_true(is_outside)
            self.samples += int(part.samples_with(is_outside).sum())


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
    beyond = d.of(Beyond)
    lacks = (
        "the size of the vocabulary: --tokenizer, the tokenizer/ of slime's dumps, or args.json in the run's "
        "folder with vocab_size or hf_checkpoint"
    )
    need(beyond.size is not None, lacks)
    if not beyond.tokens:
        return None
    return {
        "count": beyond.tokens,
        "tokens": d.sums.tokens,
        "samples": beyond.samples,
        "sequences": d.sums.sequences,
        "vocabulary": beyond.size,
    }
