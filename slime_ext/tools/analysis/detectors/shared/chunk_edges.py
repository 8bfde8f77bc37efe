"""Finds out whether only the first tokens of context-parallel chunks are far off.

The last position of a chunk predicts the first token of the next chunk, which another rank holds. If labels
are rolled within a chunk, that position scores a token of its chunk instead.
"""

from __future__ import annotations

from dataclasses import field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from slime_ext.tools.analysis.detectors.shared.clipped import COLUMNS, clipped
from slime_ext.tools.analysis.detectors.shared.ends import Ends
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.measure import Measure
from slime_ext.tools.analysis.records import DumpedRollout
from slime_ext.tools.analysis.tables import zeros
from slime_ext.tools.analysis.values import integers

CHUNKS = (2, 4, 8, 16)  # of a sequence: one for each context-parallel rank, or two in zigzag order
LEAST_TOKENS = 20  # first tokens of chunks
HELD, TIMES, MATTERS = 0.8, 5.0, 0.1  # share of sum l^2; times mean |l| elsewhere; nats of mean |l|
MOST_SHARE = 0.35  # of all tokens
# All chunks but the first, of each number of chunks: its index, and the number of the chunk.
INDEX = torch.tensor([index for index, count in enumerate(CHUNKS) for _ in range(1, count)])
NUMBERS = torch.tensor([number for count in CHUNKS for number in range(1, count)])
COUNTS = torch.tensor(CHUNKS)
TYPICAL = 0.3  # square of mean |l| over mean l^2, at these tokens; less if only a few of them are far off


class ChunkEdges(Measure):
    """Sums of ``clipped`` over the first tokens of all chunks but the first, [2, CHUNKS, COLUMNS].

    The first table is of sequences that are split evenly, the second of those padded to equal chunks.
    """

    takes_joined: ClassVar[bool] = True

    sums: Tensor = field(default_factory=lambda: zeros(2, len(CHUNKS), COLUMNS))

    def add(self, part: DumpedRollout) -> None:
        if not part.size or part.prompt_lengths is None:
            return
        lengths = part.response_lengths
        prompts = integers(part.prompt_lengths)[:, None]
        ends, whole = lengths.cumsum(0)[:, None], prompts + lengths[:, None]
        size, longer = whole // COUNTS, whole % COUNTS
        # Their first tokens in prompt and response, [S, starts]. If a sequence is split evenly, the first
        # ``whole % chunks`` chunks have one token more.
        even = size[:, INDEX] * NUMBERS + longer[:, INDEX].minimum(NUMBERS)
        padded = (size + (longer > 0))[:, INDEX] * NUMBERS
        columns, counts = clipped(part), [one.count for one in part.rollouts]
        # Of many short samples, most tokens are read several times, which is faster if the numbers of a token
        # are next to each other. Of long samples, few tokens are read, and copying all of them takes longer.
        rows = torch.stack(columns, 1) if even.numel() > part.size else None
        for table, first in zip(self.sums, (even, padded), strict=True):
            is_response = (first < whole) & (first >= prompts.clamp(min=1))
            at = (ends - whole + first).clamp(0, part.size - 1)
            for tokens, is_counted in zip(at.split(counts), is_response.split(counts), strict=True):
                if rows is None:
                    values = torch.stack([row[tokens] for row in columns], 2)
                else:
                    values = rows.index_select(0, tokens.view(-1)).view(*tokens.shape, COLUMNS)
                table.index_add_(0, INDEX, values.mul_(is_counted[..., None]).sum(0))


class Edges(NamedTuple):
    """The first tokens of chunks.

    Attributes:
        chunks: number of chunks of a sequence.
        tokens: their number; ``near`` and ``rest`` are mean |l| at them and elsewhere, nats.
        squared: their sum of l^2; ``held``: its share of that of all tokens.
        k3: their sum of k3, nats.
    """

    chunks: int
    tokens: float
    near: float
    rest: float
    squared: float
    held: float
    k3: float


def chunk_edges(d: Diagnosis) -> Edges | None:
    """Returns the first tokens of the chunks that hold the distance; None if no number of chunks does."""
    whole, best = d.of(Ends).total.tolist(), None
    for table in d.of(ChunkEdges).sums.tolist():
        for chunks, (count, _, absolute, squared, k3) in zip(CHUNKS, table, strict=True):
            others = whole[0] - count
            if count < LEAST_TOKENS or count > MOST_SHARE * whole[0] or squared < HELD * whole[3]:
                continue
            near, rest = absolute / count, (whole[2] - absolute) / others
            is_typical = near * near >= TYPICAL * squared / count
            if near < max(MATTERS, TIMES * rest) or not is_typical:
                continue
            edges = Edges(chunks, count, near, rest, squared, squared / whole[3], k3)
            explained = count * others / (count + others) * (near - rest) ** 2
            best = max(best or (explained, edges), (explained, edges))
    return best[1] if best else None
