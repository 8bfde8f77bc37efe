"""Keeps the samples and the tokens with the largest log-ratios, with their text."""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import nlargest

import torch

from slime_ext.tools.analysis.document import Span, Worst
from slime_ext.tools.analysis.records import DumpedRollout
from slime_ext.tools.analysis.texts import decoder

KEPT = 10  # samples, and also tokens
AROUND = 8  # tokens on each side of a worst one
SPANS = 160  # tokens of a worst sample, around its worst one
TEXT = 600  # characters


@dataclass
class WorstSamples:
    """A collector of the samples and the tokens with the largest log-ratios.

    Args:
        tokenizer: folder of the tokenizer, or None.
    """

    tokenizer: str | None = None
    samples: list[Worst] = field(default_factory=list)
    tokens: list[Worst] = field(default_factory=list)

    def add(self, part: DumpedRollout) -> None:
        """Looks for larger log-ratios in a part of a rollout."""
        totals = part.segments.sum(part.log_ratio)
        samples = [self._sample(part, i, float(totals[i])) for i in _largest(totals, self.samples)]
        tokens = [self._token(part, at) for at in _largest(part.log_ratio, self.tokens)]
        self.merge(WorstSamples(None, samples, tokens))

    def merge(self, other: WorstSamples) -> None:
        """Adds the samples and tokens of other rollouts."""
        self.samples = nlargest(KEPT, self.samples + other.samples, key=_size)
        self.tokens = nlargest(KEPT, self.tokens + other.tokens, key=_size)

    def largest_first(self) -> tuple[Worst, ...]:
        """Returns the samples, then the tokens, each with the largest log-ratio first."""
        return (*self.samples, *self.tokens)

    def _sample(self, part: DumpedRollout, i: int, total: float) -> Worst:
        begin, length = sum(part.lengths[:i]), part.lengths[i]
        peak = int(part.log_ratio[begin : begin + length].abs().argmax())
        first = max(0, min(peak - SPANS // 2, length - SPANS))
        text = part.responses[i] if part.responses else ""
        return Worst(
            kind="sequence",
            **_place(part, i),
            log_ratio=total,
            text=text if len(text) <= TEXT else f"{text[:TEXT]}…",
            spans=self._spans(part, begin + first, begin + min(first + SPANS, length)),
        )

    def _token(self, part: DumpedRollout, at: int) -> Worst:
        i = int(part.segments.ids[at])
        begin = sum(part.lengths[:i])
        spans = self._spans(part, max(begin, at - AROUND), min(begin + part.lengths[i], at + AROUND + 1))
        return Worst(
            kind="token",
            **_place(part, i),
            token=at - begin,
            log_ratio=float(part.log_ratio[at]),
            text="".join(span.text for span in spans),
            spans=spans,
        )

    def _spans(self, part: DumpedRollout, first: int, last: int) -> tuple[Span, ...]:
        if part.tokens is None:
            return ()
        texts = decoder(self.tokenizer)(part.tokens[first:last].tolist())
        values, finite = part.log_ratio[first:last].tolist(), part.finite[first:last].tolist()
        return tuple(
            Span(text=text, log_ratio=value if known else None)
            for text, value, known in zip(texts, values, finite, strict=True)
        )


def _size(worst: Worst) -> float:
    return abs(worst.log_ratio)


def _largest(values: torch.Tensor, kept: list[Worst]) -> list[int]:
    """Returns the places of the values that belong among the largest."""
    top = values.abs().topk(min(KEPT, values.numel()))
    return top.indices[top.values > (_size(kept[-1]) if len(kept) >= KEPT else 0.0)].tolist()


def _place(part: DumpedRollout, i: int) -> dict:
    reward = None if part.rewards is None or part.rewards[i].isnan() else float(part.rewards[i])
    return {
        "rollout_id": part.rollout_id,
        "position": part.positions[i],
        "tokens": part.lengths[i],
        "reward": reward,
    }
