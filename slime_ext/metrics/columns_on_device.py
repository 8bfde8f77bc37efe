"""The columns of a micro-batch on a device: rows of one table, added up at once.

Sums are of two levels: blocks of 256 in the dtype of the log-ratios (float32 or more), the blocks in float64.
PyTorch would copy the table into float64 first if asked to add it there at once.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from slime_ext.correction import Outcome, Tokens
from slime_ext.metrics.bins import announce_curves, sums_by_product
from slime_ext.metrics.columns import BLOCK, LARGEST, Columns, queries_of
from slime_ext.metrics.layout import Layout

CURVES = 5  # the first rows, as CURVE_COLUMNS has them
FINITE, KEPT, EXCESS, WEIGHT, K3, BEHAVIOR, SQUARES = range(CURVES + 2)
FLAGS = SQUARES + 2  # of excess and weight
ACTED = {torch.uint8: np.uint8, torch.int32: np.int32}  # dtypes of what acted


def announce_queries(tokens: Tokens, layout: Layout) -> None:
    """Has what ``on_device`` reads wait for the first copy of the call."""
    parcel, queries = tokens.segments.parcel, queries_of(layout)
    for dtype, kind in ACTED.items():
        carried = int(np.iinfo(kind).max)  # a byte has none of the higher bits
        values = [query & carried for query in queries]
        parcel.add((queries, dtype), lambda values=values, kind=kind: np.array(values, kind))
    if layout.curves:
        announce_curves(tokens)


def on_device(tokens: Tokens, outcome: Outcome, layout: Layout) -> Columns:
    """In few operations."""
    announce_queries(tokens, layout)
    size, flags = outcome.log_ratio.numel(), len(layout.flags) + 1
    table = outcome.log_ratio.new_empty(FLAGS + flags, -(-size // BLOCK) * BLOCK)
    table[:, size:].zero_()
    rows, lost = table[:, :size], ~outcome.finite
    ends = _ends(outcome, lost, rows)
    _fill(tokens, outcome, rows)
    bits = tokens.segments.parcel.take((queries_of(layout), outcome.acted.dtype))[:, None]
    _fill_flags(tokens.segments.mask, outcome.acted, lost, bits, rows[FLAGS:])
    sums = table.view(len(table), -1, BLOCK).sum(2).sum(1, dtype=torch.float64)
    kept, excess, weight, k3, behavior, *squares, acted = sums.split((2, 1, 1, 1, 1, 1, 1, flags))
    curves = sums_by_product(tokens, rows[:CURVES], rows[BEHAVIOR]) if layout.curves else ()
    return Columns((kept,), (excess, weight, k3, behavior, *squares), acted, (ends,), curves)


def _ends(outcome: Outcome, lost: Tensor, rows: Tensor) -> Tensor:
    """[3]; works in the first rows. NaN counts: the hook will stop at it."""
    log_ratio = outcome.log_ratio
    if not log_ratio.numel():
        return log_ratio.new_full((3,), -math.inf)
    found = torch.stack([log_ratio, -log_ratio, outcome.weights], out=rows[:3])
    found[:2].masked_fill_(lost, -math.inf)
    return found.amax(1)


def _fill(tokens: Tokens, outcome: Outcome, rows: Tensor) -> None:
    """Writes all rows but those of flags."""
    log_ratio, finite, most = outcome.log_ratio, outcome.finite, LARGEST[rows.dtype]
    rows[FINITE].copy_(finite)
    rows[KEPT].copy_(outcome.keep)
    torch.clamp(outcome.excess, max=most, out=rows[EXCESS])
    torch.clamp(outcome.weights, max=most, out=rows[WEIGHT])
    torch.sub(rows[EXCESS], log_ratio, out=rows[K3])
    behavior = tokens.behavior.detach().to(rows.dtype)
    torch.where(finite, behavior, log_ratio, out=rows[BEHAVIOR])  # which is 0 elsewhere
    torch.square(rows[EXCESS : WEIGHT + 1], out=rows[SQUARES:FLAGS])


def _fill_flags(mask: Tensor, acted: Tensor, lost: Tensor, bits: Tensor, out: Tensor) -> None:
    """Writes 1 at the response tokens on which any bit of a query [Q, 1] is set; bit 0 stands for every
    token without a finite behavior log-prob, whether ``acted`` carries it or not."""
    torch.logical_and((acted | lost) & bits, mask, out=out)
