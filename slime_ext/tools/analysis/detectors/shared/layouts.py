"""Tests whether the trainer's log-probs fit in the order of another context-parallel layout.

Context parallelism cuts a text into 2 cp chunks. A rank holds two neighbours (contiguous) or chunk i and
chunk 2 cp - 1 - i (zigzag). If chunks in one layout are joined as if they were in the other, every chunk but
the first moves. The text is a micro-batch, a sample with its prompt, or a response alone.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, product
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from slime_ext.ops.divergences import is_log_prob, k3
from slime_ext.tools.analysis.detectors.shared.explained import AGREES, RESTORED, restored
from slime_ext.tools.analysis.detectors.shared.unrelated import relation_of
from slime_ext.tools.analysis.measures.measure import Measure
from slime_ext.tools.analysis.records import MOST_K3, DumpedRollout
from slime_ext.tools.analysis.tables import zeros

TRIED = 4  # micro-batches of a rollout
TESTED = 2048  # tokens of a micro-batch on which every layout is tested; the best is tested on all
ELSEWHERE, LEAST = 0.2, 24  # share of the distance that may remain; tokens that a layout moves
FIT = 0.6  # share of the tested micro-batches
SOME = 0.1  # share of a part's samples with a distance that looks like another text's
CP_SIZES = (2, 4, 8)
TEXTS = ("sample", "response", "micro-batch")


class Layout(NamedTuple):
    """An order of chunks: the text that is cut, and whether contiguous chunks were joined as zigzag ones."""

    text: str
    cp: int
    is_contiguous: bool

    @property
    def order(self) -> Tensor:
        """The chunk that is found at each place, [2 cp]."""
        return _order_of(self.cp, self.is_contiguous)


@functools.cache
def _order_of(cp: int, is_contiguous: bool) -> Tensor:
    contiguous = [[2 * rank, 2 * rank + 1] for rank in range(cp)]
    zigzag = [[rank, 2 * cp - 1 - rank] for rank in range(cp)]
    held, joined = (contiguous, zigzag) if is_contiguous else (zigzag, contiguous)
    order = torch.empty(2 * cp, dtype=torch.int64)
    order[list(chain.from_iterable(joined))] = torch.tensor(list(chain.from_iterable(held)))
    return order


LAYOUTS = tuple(Layout(*one) for one in product(TEXTS, CP_SIZES, (True, False)))


class Layouts(Measure):
    """Micro-batches that another layout puts back in order.

    Args:
        sums: [LAYOUTS, RESTORED] of micro-batches that fit best in each layout.
        tried: number of micro-batches that were tested.
        far: sum of k3 over all micro-batches that are far off, nats.
        open: [S, 3] whether it is far off, number of tokens and sum of k3 of each sample, for each part of
            the rollouts that are being read, in their order.
    """

    takes_joined: ClassVar[bool] = True

    sums: Tensor = field(default_factory=lambda: zeros(len(LAYOUTS), RESTORED))
    tried: int = 0
    far: float = 0.0
    open: list[Tensor] = field(default_factory=list)

    @property
    def fit(self) -> int | None:
        """The layout that puts most micro-batches back in order; None if most fit in none."""
        index = int(self.sums[:, 0].argmax())
        count = float(self.sums[index, 0])
        return index if count and count >= FIT * self.tried else None

    def add(self, part: DumpedRollout) -> None:
        relation = relation_of(part)
        count, *_, near = part.sample_sums
        is_far = (relation.apart & ~relation.related).double()
        self.open.append(torch.stack([is_far, count, near], 1))

    def close(self, rollout: DumpedRollout) -> None:
        tables = torch.cat(self.open)
        table, self.open = tables[: rollout.count], [tables[rollout.count :]]
        if not table[:, 0].any():
            return
        samples = dict(zip(rollout.positions, table.tolist(), strict=True))
        if sum(is_far for is_far, *_ in samples.values()) <= SOME * len(samples):
            return
        far = []
        for batch in _batches(rollout):
            rows = [samples[rollout.positions[i]] for i in batch]
            tokens, distance = (sum(row[column] for row in rows) for column in (1, 2))
            if distance > AGREES * tokens:
                self.far += distance
                far.append((-sum(row[0] for row in rows), batch))
        for _, batch in sorted(far)[:TRIED]:
            self.tried += 1
            fit = _best(_Batch.of(rollout, batch))
            if fit is not None:
                self.sums[fit[0]] += fit[1]


def _batches(rollout: DumpedRollout) -> list[list[int]]:
    """Returns the samples of each micro-batch in order; each sample alone if the dump does not tell."""
    if rollout.batches is None or rollout.places is None:
        return [[i] for i in range(rollout.count)]
    batches: dict[int, list[int]] = {}
    for i in sorted(range(rollout.count), key=rollout.places.__getitem__):
        batches.setdefault(rollout.batches[i], []).append(i)
    return list(batches.values())


@dataclass(frozen=True)
class _Batch:
    """The response tokens of a micro-batch, in order.

    Args:
        behavior, proximal: [T] log-probs.
        finite: [T] bool, whether both are log-probs.
        sample: [T] which sample of the micro-batch a token is in.
        within: [T] place of each token in its response.
        prompts, lengths: [S] tokens of each prompt and response.
    """

    behavior: Tensor
    proximal: Tensor
    finite: Tensor
    sample: Tensor
    within: Tensor
    prompts: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, rollout: DumpedRollout, samples: list[int]) -> _Batch:
        every = rollout.response_lengths
        begins, lengths = (every.cumsum(0) - every)[samples], every[samples]
        sample = torch.arange(len(samples)).repeat_interleave(lengths)
        within = torch.arange(len(sample)) - (lengths.cumsum(0) - lengths)[sample]
        at = begins[sample] + within
        behavior, proximal = rollout.behavior[at].double(), rollout.proximal[at].double()
        finite = rollout.mask[at] & is_log_prob(behavior) & (proximal.abs() < torch.inf)
        prompts = torch.tensor(rollout.prompt_lengths)[samples]
        return cls(behavior, proximal, finite, sample, within, prompts, lengths)

    def rows(self, text: str, shift: int) -> tuple[Tensor, Tensor]:
        """Returns the row of each token, [T], and the number of rows of each text, of texts in a row.

        Args:
            shift: 1 if a token's log-prob lies in the row of the token before, which predicts it.
        """
        if text == "response":
            return torch.arange(len(self.sample)), self.lengths
        sizes = self.prompts + self.lengths
        within = (self.prompts[self.sample] + self.within - shift).clamp_min(0)
        rows = (sizes.cumsum(0) - sizes)[self.sample] + within
        return rows, sizes if text == "sample" else sizes.sum(0, keepdim=True)

    def k3(self, proximal: Tensor, behavior: Tensor) -> Tensor:
        """Returns k3 of each pair of log-probs, with an upper bound."""
        return k3(proximal - behavior).clamp(max=MOST_K3)


def _best(batch: _Batch) -> tuple[int, Tensor] | None:
    """Returns the layout that puts most of a micro-batch back in order, and its RESTORED sums."""
    count = len(batch.sample)
    some = torch.arange(0, count, max(count // TESTED, 1))
    distance = (batch.proximal - batch.behavior).abs()
    best: tuple[float, int, Tensor] | None = None
    for index, at, source in _orders(batch, some):
        moved = (at != source) & batch.finite[at] & batch.finite[source]
        at, source = at[moved], source[moved]
        if len(at) < LEAST:
            continue
        apart = float((batch.proximal[at] - batch.behavior[source]).abs().mean())
        least = min(float(distance[at].mean()), float(distance[source].mean()))
        if apart < ELSEWHERE * least and (best is None or apart < best[0]):
            best = apart, index, _restored(batch, at, source)
    return None if best is None else best[1:]


def _orders(batch: _Batch, some: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yields a layout, the place of some tokens, and the place of the token whose log-prob each of them has.

    Chunks may be as even as possible, or equal after padding, and a log-prob may lie in the row of its own
    token or of the one before. An order that another one equals comes once.
    """
    rows_of = functools.cache(batch.rows)
    for index, layout in enumerate(LAYOUTS):
        if layout.text == "micro-batch" and len(batch.lengths) == 1:
            continue  # its text is that of the sample
        for shift, is_even in product((1,) if layout.text == "response" else (1, 0), (False, True)):
            rows, sizes = rows_of(layout.text, shift)
            if is_even and not (sizes % (2 * layout.cp)).any():
                continue  # nothing is padded
            source = _source(rows[some], sizes, layout.order, is_even=is_even)
            place = torch.searchsorted(rows, source).clamp(max=len(rows) - 1)
            is_response = rows[place] == source
            yield index, some[is_response], place[is_response]


def _source(rows: Tensor, sizes: Tensor, order: Tensor, *, is_even: bool) -> Tensor:
    """Returns the row from which the value of each row was taken, [T].

    Args:
        rows: [T] rows, counted over all texts.
        sizes: [S] number of rows of each text.
        order: [K] the chunk that is found at each place.
        is_even: whether the first chunks are one row longer than the last; else the text is padded.
    """
    count = len(order)
    each = sizes // count if is_even else (sizes + count - 1) // count
    longer = sizes % count if is_even else torch.zeros_like(sizes)
    lengths = each[:, None] + (torch.arange(count) < longer[:, None])
    starts = lengths.cumsum(1) - lengths
    lengths, starts = lengths[:, order], starts[:, order]
    joined = lengths.cumsum(1) - lengths
    # Padding ends a text, and the next text begins where this one's rows end.
    edges = (sizes.cumsum(0) - sizes)[:, None] + joined.minimum(sizes[:, None])
    chunk = torch.searchsorted(edges.flatten(), rows, right=True) - 1
    return rows + (starts - joined).flatten()[chunk]


def _restored(batch: _Batch, at: Tensor, source: Tensor) -> Tensor:
    """Returns the RESTORED sums of a micro-batch if the log-probs at some places belong to other tokens."""
    finite = batch.finite
    before = batch.k3(batch.proximal[finite], batch.behavior[finite])
    after = batch.k3(batch.proximal[at], batch.behavior[source])
    return restored(before, float(after.mean()))
