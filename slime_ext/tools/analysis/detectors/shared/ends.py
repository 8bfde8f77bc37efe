"""Sums tokens by their place from the end of the response."""

from __future__ import annotations

from dataclasses import field
from typing import ClassVar

import numpy
from torch import Tensor

from slime_ext.tools.analysis.detectors.shared.clipped import COLUMNS, clipped
from slime_ext.tools.analysis.measures.measure import Measure
from slime_ext.tools.analysis.records import DumpedRollout
from slime_ext.tools.analysis.tables import zeros
from slime_ext.tools.analysis.values import integers

ENDS = 16  # tokens from the end of a response; the last place holds all earlier tokens


class Ends(Measure):
    """Sums of ``clipped`` by place from the end, [2, ENDS, COLUMNS].

    The first table is of responses that ended by themselves, the second of those that were cut at the limit.
    """

    takes_joined: ClassVar[bool] = True
    version: ClassVar[int] = 2

    sums: Tensor = field(default_factory=lambda: zeros(2, ENDS, COLUMNS))

    def add(self, part: DumpedRollout) -> None:
        if part.size:
            part.tabulate(self.sums, _place(part), clipped(part))

    @property
    def total(self) -> Tensor:
        """The sums over all tokens, [COLUMNS]."""
        return self.sums.sum((0, 1))


def _place(part: DumpedRollout) -> Tensor:
    """Returns the row of each token in the two tables, [T]."""
    cut = integers([status == "truncated" for status in part.statuses or [""] * part.count])
    place = part.segments.expand(cut * ENDS + ENDS - 1)
    lengths, ends = part.response_lengths.numpy().clip(max=ENDS - 1), part.segments.bounds[1:].numpy()
    firsts = (ends - lengths).repeat(lengths)  # of the last tokens of each response
    at = firsts + numpy.arange(len(firsts)) - (lengths.cumsum() - lengths).repeat(lengths)
    place.numpy()[at] -= ENDS - (ends.repeat(lengths) - at)
    return place
