"""What the tokens of one micro-batch add up to, column by column: the columns, and how they are summed where
a compiler records; ``columns_on_device`` does it on a device, ``measure_on_cpu`` all at once on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from slime_ext.correction import Outcome, Tokens
from slime_ext.metrics.bins import traced_sums
from slime_ext.metrics.layout import Layout
from slime_ext.ops.segments import as_numbers

BLOCK = 256  # tokens that are added in the log-ratio's own dtype; blocks are added in float64
# Ratios and weights beyond count as this much in the sums, whose squares stay finite so.
LARGEST = {torch.float64: 1e150, torch.float32: 1e17}


class Columns(NamedTuple):
    """Sums over tokens, of any dtype that holds them."""

    kept: Sequence[Tensor]  # finite and kept tokens, two numbers in parts
    rows: Sequence[Tensor]  # [1] each: excess, weight, k3, log behavior, and the squares of the first two
    acted: Tensor  # [F + 1] tokens that the layout's flags ask for, and 0
    ends: Sequence[Tensor]  # three numbers in parts: largest log-ratio, negated smallest, largest weight
    curves: Sequence[Tensor] = ()


def queries_of(layout: Layout) -> tuple[int, ...]:
    """[F + 1] the bits of the layout's flags, and 0."""
    return (*(bits for _, bits in layout.flags), 0)


def traced(tokens: Tokens, outcome: Outcome, layout: Layout) -> Columns:
    """Plain operations, without a room."""
    log_ratio, dtype = outcome.log_ratio, outcome.log_ratio.dtype
    ends = [torch.where(outcome.finite, sign * log_ratio, -torch.inf).amax(0, True) for sign in (1, -1)]
    excess, weight = (x.clamp(max=LARGEST[dtype]) for x in (outcome.excess, outcome.weights.to(dtype)))
    behavior = torch.where(outcome.finite, tokens.behavior.to(dtype), 0)
    rows = [excess, weight, excess - log_ratio, behavior, excess.square(), weight.square()]
    sums = [row.sum(dtype=torch.float64)[None] for row in rows]
    kept, acted = _flags(tokens, outcome, layout)
    curves = traced_sums(tokens, outcome, rows) if layout.curves else ()
    return Columns((kept,), sums, acted, [*ends, outcome.weights.amax(0, True)], curves)


def _flags(tokens: Tokens, outcome: Outcome, layout: Layout) -> tuple[Tensor, Tensor]:
    mask, acted = tokens.segments.mask, outcome.acted
    carried = [((acted & bits) != 0) & mask for _, bits in layout.flags]
    rows = (as_numbers(row, torch.float32) for row in (outcome.finite, outcome.keep, *carried))
    found = pad(torch.stack([row.sum(dtype=torch.float64) for row in rows]), (0, 1))
    return found[:2], found[2:]
