"""Tests whether log-probs were cut from the end of rows that are padded on the right.

Samples of a batch are padded to the longest. Whoever takes the last R values of the row of R response tokens
gets values of later tokens, and of the padding: those of a sample lie as many places early as it is shorter
than the longest. That number follows from the lengths, so that nothing is searched for but the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from itertools import product
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from slime_ext.ops.divergences import k3
from slime_ext.tools.analysis.detectors.shared.explained import AGREES
from slime_ext.tools.analysis.measures.measure import Measure
from slime_ext.tools.analysis.records import MOST_K3, DumpedRollout
from slime_ext.tools.analysis.tables import any_true, count_true, zeros

# Neighbouring samples that may be one batch; 0: the micro-batches of the dump, or the whole rollout.
SIZES = (0, 2, 4, 8, 16, 32)
SIDES = ("trainer", "sampler")
# Tokens whose value is another token's; share of their distance that may remain; nats, mean |l| in place.
LEAST, ELSEWHERE, FAR = 12, 0.2, 0.2
MOST = 1.0  # nats, larger |l| count as this, so that no single far token looks like a cut


class PutBack(NamedTuple):
    """Sums over the tokens whose value is that of another token, if one side was cut so.

    Attributes:
        side, size: indices of SIDES and SIZES.
        tokens: their number.
        in_place, apart: sum of |l| as recorded and put back, nats, each at most MOST.
        before, after: the same of k3.
        short, far: number of all tokens of samples that are shorter than the longest, and their sum of k3.
    """

    side: int
    size: int
    tokens: float
    in_place: float
    apart: float
    before: float
    after: float
    short: float
    far: float


class Padded(Measure):
    """How well the log-probs of one side fit the tokens that a cut from the end gives them.

    Args:
        sums: [2, SIZES, 7] the sums of ``PutBack`` over rollouts that are far off, by the side that was cut
            and the size of a batch.
        tokens, k3: number of tokens and sum of k3 of the rollout that is being read.
    """

    version: ClassVar[int] = 2

    sums: Tensor = field(default_factory=lambda: zeros(2, len(SIZES), len(PutBack._fields) - 2))
    tokens: int = 0
    k3: float = 0.0

    @property
    def fit(self) -> PutBack | None:
        """The side and the batch that remove most of the distance; None if none of them fits."""
        every = (
            PutBack(side, size, *self.sums[side, size].tolist())
            for side, size in product(range(len(SIDES)), range(len(SIZES)))
        )
        fits = [
            one
            for one in every
            if one.tokens >= LEAST
            and one.in_place >= FAR * one.tokens
            and one.apart < ELSEWHERE * one.in_place
        ]
        return max(fits, key=lambda one: one.in_place - one.apart, default=None)

    def add(self, part: DumpedRollout) -> None:
        self.tokens += count_true(part.finite)
        self.k3 += float(part.columns[-1].sum())

    def close(self, rollout: DumpedRollout) -> None:
        is_far = self.k3 > AGREES * self.tokens  # beyond that of two engines that agree
        self.tokens, self.k3 = 0, 0.0
        if not is_far:
            return
        lengths = rollout.response_lengths
        by_batch: dict[bytes, Tensor] = {}  # because several sizes may be that of the whole rollout
        for size, batch in _batches(rollout):
            longest = torch.zeros(int(batch.max()) + 1, dtype=torch.int64)
            longest = longest.scatter_reduce(0, batch, lengths, "amax")
            early = longest[batch] - lengths
            if not any_true(early):  # lengths are equal: nothing lies too early
                continue
            key = early.numpy().tobytes()
            if key not in by_batch:
                by_batch[key] = _put_back(rollout, rollout.segments.expand(early))
            self.sums[:, size] += by_batch[key]


def _batches(rollout: DumpedRollout) -> Iterator[tuple[int, Tensor]]:
    """Yields the index of each size, and the batch of each sample in it, [S]."""
    for index, size in enumerate(SIZES):
        if size:
            yield index, torch.arange(rollout.count) // size
        elif rollout.batches is not None:
            yield index, torch.tensor(rollout.batches)
        else:
            yield index, torch.zeros(rollout.count, dtype=torch.int64)


def _put_back(rollout: DumpedRollout, early: Tensor) -> Tensor:
    """Returns the sums of ``PutBack`` by the side that was cut, [2, 7].

    Args:
        early: [T] how many places too early the log-probs of a side lie.
    """
    lengths = rollout.segments.expand(rollout.response_lengths)
    at = ((early > 0) & (rollout.segments.within + early < lengths)).nonzero()[:, 0]
    source = at + early[at].long()
    usable = rollout.finite[at] & rollout.finite[source]
    at, source = at[usable], source[usable]
    behavior, proximal = rollout.behavior.double(), rollout.proximal.double()
    put_back = proximal[at] - behavior[source], proximal[source] - behavior[at]
    count, *_, near = rollout.columns[:, at].sum(1)
    short, *_, far = rollout.columns[:, early > 0].sum(1)
    in_place, *apart = (x.abs().clamp(max=MOST).sum() for x in (rollout.log_ratio[at].double(), *put_back))
    after = (k3(x).clamp(max=MOST_K3).sum() for x in put_back)
    rows = [(count, in_place, a, near, b, short, far) for a, b in zip(apart, after, strict=True)]
    return torch.stack([torch.stack(row) for row in rows])
