"""Finds a position before which mean l is below 0 and no response ends, as a minimum length makes it."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import field
from typing import NamedTuple

import torch
from torch import Tensor

from slime_ext.tools.analysis.detectors.shared.ages import Lag, lag
from slime_ext.tools.analysis.detectors.shared.along import Positions
from slime_ext.tools.analysis.detectors.shared.chunk_edges import chunk_edges
from slime_ext.tools.analysis.detectors.shared.signs import Signs
from slime_ext.tools.analysis.measures.curves import PER_OCTAVE
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.measure import Measure
from slime_ext.tools.analysis.records import DumpedRollout

TOKENS = 50  # on each side of the position
MATTERS, SURE = 3e-3, 6.0  # nats of mean l; standard errors
LARGEST = 1.5  # nats of mean l that masking one likely token makes; a grammar makes more
TIMES, LOUDER = 5.0, 4.0  # mean l and mean l^2 before the position, over those after it
BESIDE, KEEPS, GONE = 3, 0.4, 0.25  # bins; share of -mean l that remains up to the position, and after it
MOST = 0.5  # share of the tokens in responses that end otherwise
LEANS = 0.95  # share of the squared log-ratio of far tokens that is below 0
KINDS = 16  # last tokens of a part that are counted


class Endings(Measure):
    """Responses by their last token: its id, how many end with it, and the length of the shortest of them."""

    rows: list[tuple[int, int, int]] = field(default_factory=list)

    def add(self, part: DumpedRollout) -> None:
        lengths = part.response_lengths
        long = lengths > 0
        if part.tokens is None or not long.any():
            return
        last, lengths = part.tokens[(lengths.cumsum(0) - 1)[long]], lengths[long]
        ids, index, counts = last.unique(return_inverse=True, return_counts=True)
        shortest = torch.full_like(ids, int(lengths.max())).scatter_reduce(0, index, lengths, "amin")
        for at in counts.topk(min(KINDS, len(counts))).indices.tolist():
            self.rows.append((int(ids[at]), int(counts[at]), int(shortest[at])))

    @property
    def shortest(self) -> int:
        """The length of the shortest response that ends with the most frequent last token; 0: unknown."""
        counts: Counter[int] = Counter()
        for token, count, _ in self.rows:
            counts[token] += count
        end = max(counts, key=counts.__getitem__, default=None)
        return min((length for token, _, length in self.rows if token == end), default=0)


class Minimum(NamedTuple):
    """A position before which mean l is below 0 and no response ends.

    Attributes:
        begin: the first place at which a response may end.
        tokens, k3: number of tokens before it, and their sum of k3.
        near, rest: mean l before it and from there on.
        leans: share of the squared log-ratio of far tokens that is below 0.
        shortest: tokens of the shortest response that ends as most do.
        stopped: tokens of shorter ones.
    """

    begin: float
    tokens: float
    k3: float
    near: float
    rest: float
    leans: float
    shortest: float
    stopped: float


def minimum(d: Diagnosis) -> Minimum | None:
    """Returns the position, or None if there is none, or if old weights explain the distance.

    Old weights look the same if the first tokens change most, but they leave fresh tokens alone.
    """
    if lag(d) is Lag.EXPLAINS or chunk_edges(d):
        return None
    table, lengths = d.curves.position.table, d.curves.length.count
    below, above = d.of(Signs).far[:, 3].tolist()
    if not lengths.sum() or below < LEANS * (below + above):
        return None
    first, stopped = _first_end(d)
    whole, until, best = table.sum(0), table.cumsum(0), None
    for cut in table[:, 0].nonzero()[1:, 0].tolist():
        near, rest = until[cut - 1].tolist(), (whole - until[cut - 1]).tolist()
        explained = _step(near, rest) if _is_sharp(table, cut, near) else None
        if explained is not None and cut <= first + 1 and (best is None or explained > best[0]):
            best = explained, cut, near, rest
    if best is None:
        return None
    _, cut, near, rest = best
    return Minimum(
        begin=2 ** (cut / PER_OCTAVE) - 1,
        tokens=near[0],
        k3=float(d.of(Positions).table[:cut, :, 3].sum()),
        near=near[3] / near[0],
        rest=rest[3] / rest[0],
        leans=below / (below + above) if below + above else 1.0,
        shortest=2 ** (first / PER_OCTAVE) - 1,
        stopped=stopped,
    )


def _first_end(d: Diagnosis) -> tuple[int, float]:
    """Returns the bin of the shortest response that ends by itself, and the tokens of shorter ones.

    A stop string ends a response below the minimum, but the end token, which the minimum bans, does not.
    """
    lengths = d.curves.length.count
    first = int(lengths.nonzero()[0, 0])
    end = int(math.log2(1 + d.of(Endings).shortest) * PER_OCTAVE)
    shorter = float(lengths[:end].sum())
    return (end, shorter) if end > first and shorter <= MOST * float(lengths.sum()) else (first, 0.0)


def _is_sharp(table: Tensor, cut: int, near: list[float]) -> bool:
    """Returns whether mean l is below 0 up to the position, and near 0 after it.

    After another text it would fade instead.
    """
    last, then = table[cut - BESIDE : cut].sum(0).tolist(), table[cut : cut + BESIDE].sum(0).tolist()
    if not last[0] or not then[0]:
        return False
    lean = -last[3] / last[0]
    return lean >= KEEPS * -near[3] / near[0] and abs(then[3] / then[0]) <= GONE * lean


def _step(near: list[float], rest: list[float]) -> float | None:
    """Returns the sum of squares that two means explain; None unless mean l is below 0 only before."""
    (n, _, squared, signed, _), (m, _, other, usual, _) = near, rest
    if min(n, m) < TOKENS:
        return None
    lean, level = -signed / n, abs(usual / m)
    if lean > LARGEST or lean < max(MATTERS, TIMES * level) or signed > -SURE * squared**0.5:
        return None
    return n * m / (n + m) * (lean - level) ** 2 if squared / n >= LOUDER * other / m else None
