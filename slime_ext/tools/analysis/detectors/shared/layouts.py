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

import numpy
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
    def order(self) -> numpy.ndarray:
        """The chunk that is found at each place, [2 cp]."""
        return _order_of(self.cp, self.is_contiguous)


@functools.cache
def _order_of(cp: int, is_contiguous: bool) -> numpy.ndarray:
    contiguous = [[2 * rank, 2 * rank + 1] for rank in range(cp)]
    zigzag = [[rank, 2 * cp - 1 - rank] for rank in range(cp)]
    held, joined = (contiguous, zigzag) if is_contiguous else (zigzag, contiguous)
    order = numpy.empty(2 * cp, dtype=numpy.int64)
    order[list(chain.from_iterable(joined))] = list(chain.from_iterable(held))
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

    def rows(self, text: str, shift: int) -> numpy.ndarray:
        """Returns the row of each token, [T], counted over all texts.

        Args:
            shift: 1 if a token's log-prob lies in the row of the token before, which predicts it.
        """
        if text == "response":
            return numpy.arange(len(self.sample))
        sizes = self.prompts + self.lengths
        within = (self.prompts[self.sample] + self.within - shift).clamp_min(0)
        return ((sizes.cumsum(0) - sizes)[self.sample] + within).numpy()

    def sizes(self, text: str) -> numpy.ndarray:
        """Returns the number of rows of each text, of texts in a row."""
        sizes = self.lengths if text == "response" else self.prompts + self.lengths
        return (sizes.sum(0, keepdim=True) if text == "micro-batch" else sizes).numpy()

    def k3(self, proximal: Tensor, behavior: Tensor) -> Tensor:
        """Returns k3 of each pair of log-probs, with an upper bound."""
        return k3(proximal - behavior).clamp(max=MOST_K3)


def _best(batch: _Batch) -> tuple[int, Tensor] | None:
    """Returns the layout that puts most of a micro-batch back in order, and its RESTORED sums.

    It computes with arrays, because most micro-batches are small, and a call then takes a third of the time.
    """
    count = len(batch.sample)
    if count < LEAST:
        return None
    some = numpy.arange(0, count, max(count // TESTED, 1))
    behavior, proximal, finite = (x.numpy() for x in (batch.behavior, batch.proximal, batch.finite))
    with numpy.errstate(invalid="ignore"):  # infinite log-probs, which are not finite
        distance = numpy.abs(proximal - behavior)
    best: tuple[float, int, numpy.ndarray, numpy.ndarray] | None = None
    is_whole = finite.all()
    for index, at, source in _orders(batch, some):
        moved = at != source
        if not is_whole:
            moved &= finite[at] & finite[source]
        if numpy.count_nonzero(moved) < LEAST:
            continue
        at, source = at[moved], source[moved]
        apart = numpy.abs(proximal[at] - behavior[source]).sum()
        least = min(distance[at].sum(), distance[source].sum())
        if apart < ELSEWHERE * least and (best is None or apart / len(at) < best[0]):
            best = apart / len(at), index, at, source
    if best is None:
        return None
    _, index, at, source = best
    return index, _restored(batch, torch.from_numpy(at), torch.from_numpy(source))


def _orders(batch: _Batch, some: numpy.ndarray) -> Iterator[tuple[int, numpy.ndarray, numpy.ndarray]]:
    """Yields a layout, the place of some tokens, and the place of the token whose log-prob each of them has.

    Chunks may be as even as possible, or equal after padding, and a log-prob may lie in the row of its own
    token or of the one before. An order that another one equals comes once.
    """
    rows_of, sizes_of = functools.cache(batch.rows), functools.cache(batch.sizes)
    cuts_of = functools.cache(lambda text, count, is_even: _cuts(sizes_of(text), count, is_even=is_even))
    for index, layout in enumerate(LAYOUTS):
        if layout.text == "micro-batch" and len(batch.lengths) == 1:
            continue  # its text is that of the sample
        count, sizes = 2 * layout.cp, sizes_of(layout.text)
        cuts = [cuts_of(layout.text, count, is_even) for is_even in (False, True)]
        if cuts[1] is None:  # nothing is padded
            cuts.pop()
        chunks = [_chunks(sizes, *cut, layout.order) for cut in cuts]
        for shift, (begins, moves) in product((1,) if layout.text == "response" else (1, 0), chunks):
            rows = rows_of(layout.text, shift)
            of_some = rows[some]
            source = of_some + moves[begins.searchsorted(of_some, "right") - 1]
            place = numpy.minimum(rows.searchsorted(source), len(rows) - 1)
            is_response = rows[place] == source
            yield index, some[is_response], place[is_response]


def _cuts(sizes: numpy.ndarray, count: int, *, is_even: bool) -> tuple[numpy.ndarray, numpy.ndarray] | None:
    """Returns the length and the first row of each chunk of each text, [S, count].

    None if the chunks are to be as even as possible, and they are equal without padding.

    Args:
        sizes: [S] number of rows of each text.
        is_even: whether the first chunks are one row longer than the last; else the text is padded.
    """
    each, longer = numpy.divmod(sizes[:, None], count)
    if is_even and not longer.any():
        return None
    lengths = each + (numpy.arange(count) < longer if is_even else longer > 0)
    lengths = numpy.broadcast_to(lengths, (len(sizes), count))
    return lengths, lengths.cumsum(1) - lengths


def _chunks(
    sizes: numpy.ndarray, lengths: numpy.ndarray, starts: numpy.ndarray, order: numpy.ndarray
) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Returns the row at which each chunk begins, and how far from there its values were taken, [S * K].

    Args:
        sizes: [S] number of rows of each text.
        lengths, starts: [S, K] of ``_cuts``.
        order: [K] the chunk that is found at each place.
    """
    lengths, starts = lengths[:, order], starts[:, order]
    joined = lengths.cumsum(1) - lengths
    # Padding ends a text, and the next text begins where this one's rows end.
    edges = (sizes.cumsum() - sizes)[:, None] + numpy.minimum(joined, sizes[:, None])
    return edges.ravel(), (starts - joined).ravel()


def _restored(batch: _Batch, at: Tensor, source: Tensor) -> Tensor:
    """Returns the RESTORED sums of a micro-batch if the log-probs at some places belong to other tokens."""
    finite = batch.finite
    before = batch.k3(batch.proximal[finite], batch.behavior[finite])
    after = batch.k3(batch.proximal[at], batch.behavior[source])
    return restored(before, float(after.mean()))
