"""Compares tokens of which the sampler was equally certain."""

from __future__ import annotations

import math

from torch import Tensor

from slime_ext.tools.analysis.records import SURPRISES, DumpedRollout
from slime_ext.tools.analysis.tables import Rows


def add_by_surprise(table: Tensor, places: Tensor, part: DumpedRollout) -> None:
    """Adds tokens to a table by their place and by the bin of -log behavior.

    Args:
        table: [places, SURPRISES, 4] number of tokens, sum |l|, sum l^2 and sum k3.
        places: [T]; places behind the table count as its last.
    """
    index = places.clamp(0, len(table) - 1).int() * SURPRISES + part.surprise
    rows = (part.columns[i] for i in (0, 1, 2, 5))
    pairs = {(0, 3): part.pairs[0], (1, 2): part.pairs[1]}
    part.tabulate(table, index, Rows.of(rows, pairs))


def beyond_certainty(part: Tensor, others: Tensor) -> float:
    """Returns mean |l| of some tokens over that of equally certain other tokens.

    Bins of certainty that the other tokens lack are left out.

    Args:
        part, others: [SURPRISES, 4] sums over both kinds of tokens, as ``by_surprise`` returns them.
    """
    (n, absolute), (m, usual) = part[:, :2].unbind(1), others[:, :2].unbind(1)
    both = (n > 0) & (m > 0)
    expected = (n * usual / m)[both].sum()
    return float(absolute[both].sum() / expected) if expected > 0 else math.inf
