"""The tokens of a call as numpy sees them, and what there is to know of each before any step."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch

from slime_ext.correction import Correction, Tokens
from slime_ext.ops import arrays, divergences
from slime_ext.ops.ratios import in_common, widened
from slime_ext.ops.statistics import sums_of_arrays


class Looked:
    """[T] each."""

    def __init__(self, correction: Correction, tokens: Tokens) -> None:
        numerator, behavior = in_common(correction.numerator_of(tokens), tokens.behavior)
        self.numerator = arrays.of(numerator)  # log-probs, nats; anything where not finite
        self.behavior = arrays.of(behavior)
        self.mask = arrays.of(tokens.segments.mask)
        self.finite = np.isfinite(self.behavior)  # response tokens with a finite behavior log-prob
        np.logical_and(self.finite, self.mask, out=self.finite)
        self.count = np.count_nonzero(self.finite)
        self.whole = self.count == len(self.finite)  # nearly always
        self.log_ratio = self.numerator - self.behavior  # 0 where not finite
        if not self.whole:
            arrays.masked(self.finite, self.log_ratio, self.log_ratio)
        self._advantages = tokens.advantages
        self._grid = tokens.segments.grid
        self.sequences = self._grid.count

    @cached_property
    def advantages(self) -> np.ndarray | None:
        """Anything at masked tokens."""
        return None if self._advantages is None else arrays.of(widened(self._advantages))

    @cached_property
    def excess(self) -> np.ndarray:
        """Ratio - 1."""
        return arrays.of(torch.from_numpy(self.log_ratio).expm1())

    @cached_property
    def ratio(self) -> np.ndarray:
        """0 where not finite."""
        return self.excess + self.finite.view(np.uint8) if not self.whole else self.ratio_or_one

    @cached_property
    def ratio_or_one(self) -> np.ndarray:
        """1 where not finite, as the log-ratio says."""
        return self.excess + self.log_ratio.dtype.type(1)

    def exponentials(self) -> np.ndarray:
        """``ratio_or_one`` for those who need no more of it."""
        return np.exp(self.log_ratio)

    def spread(self, values: np.ndarray | float) -> np.ndarray | float:
        """[S] -> [T]; one number for all stays what it is."""
        return np.repeat(values, self._grid.numbers) if np.ndim(values) else values

    def sums(self, names: list[str]) -> list[np.ndarray]:
        """[S] each, this rank's share of the sums of these quantities over every sequence."""
        return sums_of_arrays(names, self._value_of, self._grid)

    def _value_of(self, name: str) -> np.ndarray | None:
        """As ``Facts.value_of``; None: 1 at every token."""
        if name in ("count", "finite"):
            return None if self.whole else (self.mask if name == "count" else self.finite).view(np.uint8)
        if name == "ratio":
            return self.log_ratio
        if name == "advantage":
            return arrays.masked(self.mask, self.advantages)
        if name in divergences.OF_RATIO:
            return arrays.of(divergences.OF_RATIO[name](torch.from_numpy(self.log_ratio)))
        both = map(torch.from_numpy, (self.numerator, self.behavior))
        return np.where(self.finite, arrays.of(divergences.OF_BOTH[name](*both)), 0)
