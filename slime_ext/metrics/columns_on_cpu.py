"""The columns of a micro-batch on a CPU, where numpy sees the tokens: token by token, or sequence by sequence
where all tokens of a sequence share what happened to them.

Sums over tokens are of two levels: blocks of 256 in the dtype of the log-ratios (float32 or more), the blocks
in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from slime_ext.correction import Outcome, Tokens
from slime_ext.metrics.bins import Places, places_of, sums_by_place
from slime_ext.metrics.columns import LARGEST, Columns, queries_of
from slime_ext.metrics.layout import Layout
from slime_ext.ops import arrays
from slime_ext.ops.codes import count_flags
from slime_ext.ops.uploads import host_numbers
from slime_ext.outcome import BEHAVIOR, BLOCK, EXCESS, K3, WEIGHT


def on_cpu(tokens: Tokens, outcome: Outcome, layout: Layout) -> Columns:
    """In the fewest passes over the tokens."""
    together = outcome.shared is not None and not layout.curves
    return (_by_sequence if together else _by_token)(tokens, outcome, layout)


def _by_token(tokens: Tokens, outcome: Outcome, layout: Layout) -> Columns:
    weights, room = outcome.weights, outcome.room
    ends = _ends(outcome)
    _fill(tokens, outcome)
    torch.clamp(weights, max=LARGEST[room.dtype], out=room[WEIGHT, : len(weights)])
    if not layout.curves:
        kept, acted = _flags(tokens, outcome, layout, None)
        return Columns((kept[0],), _sums(room, WEIGHT), acted, ends)
    places = places_of(tokens, outcome.log_ratio.dtype)
    kept, acted = _flags(tokens, outcome, layout, places)
    kept, curves = sums_by_place(places, kept, room)
    return Columns((kept,), _sums(room, WEIGHT), acted, ends, curves)


def _by_sequence(tokens: Tokens, outcome: Outcome, layout: Layout) -> Columns:
    """Weights and flags from what the tokens of a sequence share; log-ratios token by token."""
    ends = _ends(outcome)
    _fill(tokens, outcome)
    kept, weight, weight_squared, acted = _sums_by_sequence(outcome, queries_of(layout))
    excess, k3, behavior, excess_squared = _sums(outcome.room, EXCESS)
    rows = (excess, weight, k3, behavior, excess_squared, weight_squared)
    return Columns((arrays.counted(outcome.finite), kept), rows, acted, ends)


def _sums_by_sequence(outcome: Outcome, queries: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Over the response tokens: [1] those that are kept, their weights and the squares of these; [Q] those
    with any bit of a query."""
    shared, keep = outcome.shared, outcome.sequences.keep
    carried = torch.iinfo(shared.acted.dtype).max  # a byte has none of the higher bits
    bits = host_numbers(tuple((query & carried,) for query in queries), shared.acted)
    rows = (1 if shared.weights is None else 3), len(queries)
    table = shared.count.new_empty(sum(rows), len(keep))
    own, acted = table.split(rows)
    own[0].copy_(keep)
    if shared.weights is not None:
        most = host_numbers(LARGEST[outcome.room.dtype], shared.weights)
        torch.minimum(torch.where(keep, shared.weights, 0), most, out=own[1])
        torch.square(own[1], out=own[2])
    torch.gt(shared.acted & bits, 0, out=acted)
    own, acted = torch.mv(table, shared.count).split(rows)
    kept, *of_weights = own.split(1)
    return kept, *(of_weights or (kept, kept)), acted


def _fill(tokens: Tokens, outcome: Outcome) -> None:
    """Writes excess, k3 and log behavior into the outcome's room."""
    log_ratio, finite = outcome.log_ratio, outcome.finite
    room = outcome.room[:, : len(finite)]
    room[EXCESS].clamp_(max=LARGEST[room.dtype])
    torch.sub(room[EXCESS], log_ratio, out=room[K3])
    arrays.selected(finite, tokens.behavior.detach().to(room.dtype), room[BEHAVIOR])


def _ends(outcome: Outcome) -> tuple[Tensor, Tensor]:
    """Works where log behavior will be."""
    weights, room = outcome.weights, outcome.room
    largest = weights.amax(0, True) if len(weights) else host_numbers((-math.inf,), weights)
    return arrays.ends(outcome.finite, outcome.log_ratio, room[BEHAVIOR, : len(weights)]), largest


def _sums(room: Tensor, last: int) -> Sequence[Tensor]:
    """[1] each, sums of excess, weight, k3 and log behavior, and of the squares of the first two; without
    those of weights where their row is not the ``last``."""
    squared = room[EXCESS : last + 1]
    blocks = room.new_empty(last + 1 + len(squared), room.shape[1] // BLOCK)
    torch.sum(_blocks(room[: last + 1]), 2, out=blocks[: last + 1])
    arrays.add_squares(_blocks(squared), blocks[last + 1 :])
    behavior, k3, *others = blocks.sum(1, dtype=torch.float64).split(1)
    return (*others[: len(squared)], k3, behavior, *others[len(squared) :])


def _blocks(rows: Tensor) -> Tensor:
    return rows.view(len(rows), rows.shape[1] // BLOCK, BLOCK)


def _flags(tokens: Tokens, outcome: Outcome, layout: Layout, places: Places | None) -> tuple[Tensor, Tensor]:
    """[bins, 2] finite and kept tokens; [F + 1] those that the layout's flags ask for, and 0."""
    by = {} if places is None else {"place": places.index[0], "bins": places.bins}
    mask, queries = tokens.segments.mask, queries_of(layout)
    return count_flags(
        outcome.acted, mask, outcome.finite, outcome.keep, queries, rejects=outcome.rejects, **by
    )
