"""What the tokens of one micro-batch add up to, column by column: token by token, or sequence by sequence
where all tokens of a sequence share what happened to them.

Sums over tokens are of two levels: blocks of 256 in the dtype of the log-ratios (float32 or more), the blocks
in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from slime_ext.correction import Outcome, Tokens
from slime_ext.metrics.bins import Places, curve_sums, places_of, sums_by_place
from slime_ext.metrics.layout import Layout
from slime_ext.ops import arrays
from slime_ext.ops.codes import count_flags
from slime_ext.ops.grid import host_numbers
from slime_ext.ops.segments import as_numbers, is_traced
from slime_ext.outcome import BEHAVIOR, BLOCK, EXCESS, K3, ROWS, WEIGHT

SIGNS = ((1,), (-1,))  # the smallest is the largest of the negated
# Ratios and weights beyond count as this much in the sums, whose squares stay finite so.
LARGEST = {torch.float64: 1e150, torch.float32: 1e17}


class Columns(NamedTuple):
    """Sums over tokens, of any dtype that holds them."""

    kept: Sequence[Tensor]  # finite and kept tokens, two numbers in parts
    rows: Sequence[Tensor]  # [1] each: excess, weight, k3, log behavior, and the squares of the first two
    acted: Tensor  # [F + 1] tokens that the layout's flags ask for, and 0
    ends: Sequence[Tensor]  # largest and smallest log-ratio, the latter negated, and largest weight
    curves: Sequence[Tensor] = ()


def columns_of(tokens: Tokens, outcome: Outcome, layout: Layout) -> Columns:
    """The columns of a micro-batch, in the fewest passes over its tokens."""
    if is_traced(outcome.log_ratio):
        return _traced(tokens, outcome, layout)
    if outcome.shared is None or layout.curves or not arrays.is_array(outcome.room):
        return _by_token(tokens, outcome, layout)
    return _by_sequence(tokens, outcome, layout)


def _traced(tokens: Tokens, outcome: Outcome, layout: Layout) -> Columns:
    """Plain operations, without a room, where a compiler records."""
    log_ratio, dtype = outcome.log_ratio, outcome.log_ratio.dtype
    ends = [torch.where(outcome.finite, sign * log_ratio, -torch.inf).amax(0, True) for (sign,) in SIGNS]
    excess, weight = (x.clamp(max=LARGEST[dtype]) for x in (outcome.excess, outcome.weights.to(dtype)))
    behavior = torch.where(outcome.finite, tokens.behavior.to(dtype), 0)
    rows = [excess, weight, excess - log_ratio, behavior, excess.square(), weight.square()]
    sums = [row.sum(dtype=torch.float64)[None] for row in rows]
    kept, acted = _traced_flags(tokens, outcome, layout)
    curves = curve_sums(tokens, outcome, rows) if layout.curves else ()
    return Columns((kept,), sums, acted, [*ends, outcome.weights.amax(0, True)], curves)


def _traced_flags(tokens: Tokens, outcome: Outcome, layout: Layout) -> tuple[Tensor, Tensor]:
    mask, acted = tokens.segments.mask, outcome.acted
    carried = [((acted & bits) != 0) & mask for _, bits in layout.flags]
    rows = (as_numbers(row, torch.float32) for row in (outcome.finite, outcome.keep, *carried))
    found = pad(torch.stack([row.sum(dtype=torch.float64) for row in rows]), (0, 1))
    return found[:2], found[2:]


def _by_token(tokens: Tokens, outcome: Outcome, layout: Layout) -> Columns:
    weights, room = outcome.weights, outcome.room
    ends = _ends(outcome), _largest(outcome)
    _fill(tokens, outcome)
    torch.clamp(weights, max=LARGEST[room.dtype], out=room[WEIGHT, : len(weights)])
    places = places_of(tokens, outcome.log_ratio.dtype) if layout.curves else None
    kept, acted = _flags(tokens, outcome, layout, places)
    kept, curves = (kept[0], ()) if places is None else sums_by_place(places, kept, room)
    if layout.curves and places is None:
        curves = curve_sums(tokens, outcome, [room[row] for row in (EXCESS, WEIGHT, K3, BEHAVIOR)])
    return Columns((kept,), _sums(room, WEIGHT), acted, ends, curves)


def _by_sequence(tokens: Tokens, outcome: Outcome, layout: Layout) -> Columns:
    """Weights and flags from what the tokens of a sequence share; log-ratios token by token. On a CPU: a
    device has little use for shorter tables."""
    ends = _ends(outcome), _largest(outcome)
    _fill(tokens, outcome)
    kept, weight, weight_squared, acted = _sums_by_sequence(outcome, _queries(layout))
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
    seen = tokens.behavior.detach().to(room.dtype)
    if arrays.is_array(seen):
        arrays.selected(finite, seen, room[BEHAVIOR])
    else:
        torch.where(finite, seen, log_ratio, out=room[BEHAVIOR])  # which is 0 elsewhere


def _ends(outcome: Outcome) -> Tensor:
    """[2] the largest log-ratio, and the negated smallest; works where nothing is written yet. NaN counts on
    devices alone: elsewhere the hook has stopped at it."""
    log_ratio, finite = outcome.log_ratio, outcome.finite
    rows = outcome.room[:2, : len(finite)]
    if arrays.is_array(log_ratio):
        return arrays.ends(finite, log_ratio, rows[0])
    torch.mul(log_ratio, host_numbers(SIGNS, rows), out=rows)
    torch.where(finite, rows, host_numbers(-math.inf, rows), out=rows)
    return rows.amax(1) if rows.numel() else host_numbers((-math.inf,) * 2, rows)


def _largest(outcome: Outcome) -> Tensor:
    """[1] the largest weight."""
    weights = outcome.weights
    return weights.amax(0, True) if len(weights) else host_numbers((-math.inf,), weights)


def _sums(room: Tensor, last: int) -> Sequence[Tensor]:
    """[1] each, sums of excess, weight, k3 and log behavior, and of the squares of the first two; without
    those of weights where their row is not the ``last``."""
    squared = room[EXCESS : last + 1]
    if arrays.is_array(room):
        blocks = room.new_empty(last + len(squared), room.shape[1] // BLOCK)
        torch.sum(_blocks(room[BEHAVIOR : last + 1]), 2, out=blocks[:last])
        arrays.add_squares(_blocks(squared), blocks[last:])
        behavior, k3, *others = blocks.sum(1, dtype=torch.float64).split(1)
        return (*others[: len(squared)], k3, behavior, *others[len(squared) :])
    torch.square(squared, out=room[:: ROWS - 1][: len(squared)])  # the first row and the last
    rows = room if last == WEIGHT else room[: last + 1]
    first, behavior, k3, *others = _blocks(rows).sum(2).sum(1, dtype=torch.float64).split(1)
    return (*others[: len(squared)], k3, behavior, first, *others[len(squared) :])


def _blocks(rows: Tensor) -> Tensor:
    return rows.view(len(rows), rows.shape[1] // BLOCK, BLOCK)


def _queries(layout: Layout) -> tuple[int, ...]:
    return (*(bits for _, bits in layout.flags), 0)


def _flags(tokens: Tokens, outcome: Outcome, layout: Layout, places: Places | None) -> tuple[Tensor, Tensor]:
    """[bins, 2] finite and kept tokens; [F + 1] those that the layout's flags ask for, and 0."""
    by = {} if places is None else {"place": places.index[0], "bins": places.bins}
    mask, queries = tokens.segments.mask, _queries(layout)
    return count_flags(
        outcome.acted, mask, outcome.finite, outcome.keep, queries, rejects=outcome.rejects, **by
    )
