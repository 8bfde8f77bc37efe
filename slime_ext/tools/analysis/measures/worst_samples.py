"""Keeps the samples and the tokens with the largest log-ratios, with their text."""

from __future__ import annotations

import math
from dataclasses import field, replace
from heapq import nlargest
from operator import attrgetter
from typing import Any, NamedTuple

import numpy
import torch

from slime_ext.tools.analysis.document import Span, Worst
from slime_ext.tools.analysis.records import DumpedRollout
from slime_ext.tools.analysis.tables import Additive, count_true
from slime_ext.tools.analysis.texts import decoder

KEPT = 10  # samples, and also tokens
AROUND = 8  # tokens on each side of a worst one
SPANS = 160  # tokens of a worst sample, around its worst one
TEXT = 600  # characters


class Seen(NamedTuple):
    """A sample or a token that may be among the largest at the end, when the few that are become ``Worst``.

    Args:
        fields: of ``Worst``, without the spans.
        ids: of the tokens of its spans; empty if the dump lacks them.
        log_ratios: l of these tokens, None where it is not known.
    """

    fields: dict[str, Any]
    ids: list[int]
    log_ratios: list[float | None]

    @property
    def size(self) -> float:
        """|l|, in nats."""
        return abs(self.fields["log_ratio"])


class WorstSamples(Additive):
    """A collector of the samples and the tokens with the largest log-ratios.

    Args:
        tokenizer: folder of the tokenizer, or None.
    """

    tokenizer: str | None = None
    samples: list[Seen] = field(default_factory=list)
    tokens: list[Seen] = field(default_factory=list)

    def add(self, part: DumpedRollout) -> None:
        """Looks for larger log-ratios in a part of a rollout."""
        totals = part.sample_sums[3]
        samples = [_sample(part, i, totals[i].item()) for i in _largest(totals, self.samples)]
        tokens = [_token(part, at) for at in _largest(part.log_ratio, self.tokens)]
        if samples or tokens:
            self.merge(WorstSamples(None, samples, tokens))

    def merge(self, other: WorstSamples) -> None:
        """Adds the samples and tokens of other rollouts."""
        self.samples = nlargest(KEPT, self.samples + other.samples, key=attrgetter("size"))
        self.tokens = nlargest(KEPT, self.tokens + other.tokens, key=attrgetter("size"))

    def largest_first(self) -> tuple[Worst, ...]:
        """Returns the samples, then the tokens, each with the largest log-ratio first."""
        return tuple(map(self._worst, (*self.samples, *self.tokens)))

    def _worst(self, seen: Seen) -> Worst:
        texts = decoder(self.tokenizer)(seen.ids) if seen.ids else []
        spans = tuple(
            Span(text=text, log_ratio=value) for text, value in zip(texts, seen.log_ratios, strict=True)
        )
        worst = Worst(**seen.fields, spans=spans)
        if worst.kind == "sequence":
            return worst
        return replace(worst, text="".join(span.text for span in spans))


def _sample(part: DumpedRollout, i: int, total: float) -> Seen:
    begin, length = sum(part.lengths[:i]), part.lengths[i]
    peak = int(numpy.abs(part.log_ratio.numpy()[begin : begin + length]).argmax())
    first = max(0, min(peak - SPANS // 2, length - SPANS))
    text = part.responses[i] if part.responses else ""
    fields = {"kind": "sequence", **_place(part, i), "log_ratio": total}
    fields["text"] = text if len(text) <= TEXT else f"{text[:TEXT]}…"
    return Seen(fields, *_tokens(part, begin + first, begin + min(first + SPANS, length)))


def _token(part: DumpedRollout, at: int) -> Seen:
    i = int(part.segments.ids.numpy()[at])
    begin = sum(part.lengths[:i])
    fields = {"kind": "token", **_place(part, i), "token": at - begin}
    fields["log_ratio"] = float(part.log_ratio[at])
    return Seen(
        fields, *_tokens(part, max(begin, at - AROUND), min(begin + part.lengths[i], at + AROUND + 1))
    )


def _tokens(part: DumpedRollout, first: int, last: int) -> tuple[list[int], list[float | None]]:
    """Returns the ids of some tokens and their l, None where it is not known; nothing without ids."""
    if part.tokens is None:
        return [], []
    ids, values, finite = (x.numpy()[first:last].tolist() for x in (part.tokens, part.log_ratio, part.finite))
    return ids, [value if known else None for value, known in zip(values, finite, strict=True)]


def _largest(values: torch.Tensor, kept: list[Seen]) -> list[int]:
    """Returns the places of the values that belong among the largest."""
    sizes, least = values.abs(), kept[-1].size if len(kept) >= KEPT else 0.0
    if not len(sizes) or sizes.max() <= least:
        return []
    top, places = sizes.topk(min(KEPT, len(sizes)))
    return places[: count_true(top > least)].tolist()  # the largest comes first


def _place(part: DumpedRollout, i: int) -> dict[str, Any]:
    reward = math.nan if part.rewards is None else part.rewards[i].item()
    return {
        "rollout_id": part.rollout_id,
        "position": part.positions[i],
        "tokens": part.lengths[i],
        "reward": None if math.isnan(reward) else reward,
    }
