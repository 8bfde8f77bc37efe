"""Sums samples by every label of a dump, and draws samples again.

Samples that are drawn again show how far chance alone moves the numbers of a rollout.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import field
from functools import lru_cache
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from slime_ext.ops.segments import Segments, selected
from slime_ext.tools.analysis.records import DumpedRollout
from slime_ext.tools.analysis.tables import Additive, zeros
from slime_ext.tools.analysis.values import integers

REPLICATES = 64
HEAD = 16  # first tokens of a response, which samples of every shape have
# Labels whose samples are compared over these tokens only, because later tokens may be further off in all.
SHAPES = ("turns", "response length")
HIGHEST = 20.0  # nats; the square of a larger ratio might overflow
MOST = 64  # values of a label in a rollout; a label with more is ignored
LATER = 3  # turns or places in a micro-batch; higher numbers count as this one


class Part(NamedTuple):
    """Sums over the samples of a rollout that have one value of a label."""

    rollout_id: int
    label: str
    value: str
    samples: int
    tokens: int
    k3: float  # sum of ``near`` over tokens
    square: float  # sum over samples of (k3's sum)^2
    cross: float  # sum over samples of k3's sum times tokens
    lengths: float  # sum over samples of tokens^2
    log_ratio: float = 0.0  # sum
    absolute: float = 0.0  # sum |l|


def _octave(values: Sequence[int]) -> list[str]:
    octaves = {n: max(n, 1).bit_length() for n in set(values)}  # each number once, because many are equal
    names = {n: f"{1 << bits >> 1} to {(1 << bits) - 1} tokens" for n, bits in octaves.items()}
    return [names[n] for n in values]


def _versions(part: DumpedRollout) -> list[str] | None:
    if part.versions is None:
        return None
    return [f"{v:g}" if v == v else "without a number" for v in part.oldest_versions().tolist()]


def _turns(part: DumpedRollout) -> list[str] | None:
    most = part.reduced(numpy.maximum, selected(part.turns, part.mask).clamp_(max=LATER - 1), 0)
    names = [str(n + 1) for n in range(LATER)]
    return [names[n] for n in most.tolist()] if part.count else None


# Label -> its value for each sample, or None if a dump lacks it. The value "" means unknown.
LABELS: dict[str, Callable[[DumpedRollout], Sequence[str] | None]] = {
    "engine": lambda part: part.engines,
    "data-parallel rank": lambda part: None if part.ranks is None else [str(r) for r in part.ranks],
    "weight version": _versions,
    "status": lambda part: part.statuses or None,
    "place in the micro-batch": lambda part: (
        None if part.places is None else [str(min(p, LATER)) for p in part.places]
    ),
    "prefix": lambda part: None if part.cached is None else ["cached" if n else "fresh" for n in part.cached],
    "turns": _turns,
    "prompt length": lambda part: _octave(part.prompt_lengths),
    "response length": lambda part: _octave(part.lengths),
}


class BySample(Additive):
    """Sums over the samples of a run.

    Args:
        parts: sums by rollout, label and value.
        replicates: [REPLICATES, 4] number of tokens, and sums of k3, ratio and squared ratio, of samples that
            are drawn again with replacement (each has a Poisson weight of mean 1).
        of_rollout: [REPLICATES, 5] the same of the rollout that is being read, and its sum of |l|.
        open: sums by label and value of the rollout that is being read.
    """

    parts: list[Part] = field(default_factory=list)
    replicates: Tensor = field(default_factory=lambda: zeros(REPLICATES, 4))
    of_rollout: Tensor = field(default_factory=lambda: zeros(REPLICATES, 5))
    open: dict[tuple[str, str], numpy.ndarray] = field(default_factory=dict)

    def add(self, part: DumpedRollout) -> None:
        """Adds the samples of a part of a rollout."""
        count, absolute, _, log_ratio, _, near = part.sample_sums
        ratio = part.ratio_minus_one.clamp(max=math.expm1(HIGHEST)) + part.columns[0]
        ratios = part.sums([ratio, ratio.square()])
        draws = _draws((1 + part.rollout_id * 8191 + part.positions[0]) % (1 << 63), part.count)
        self.of_rollout += draws @ torch.stack([count, near, *ratios, absolute]).T
        rows = _rows(count, near, log_ratio, absolute)
        at = part.first_tokens(HEAD)
        begins = Segments.whole([min(length, HEAD) for length in part.lengths], part.mask[at])
        firsts = [part.columns[row][at] for row in (0, 1, 3, 5)]
        count, absolute, log_ratio, near = begins.local_sums(firsts)
        heads = _rows(count, near, log_ratio, absolute)
        for label, values_of in LABELS.items():
            values = values_of(part)
            if values is not None:
                self._add_label(label, values, heads if label in SHAPES else rows)

    def _add_label(self, label: str, values: Sequence[str], rows: Tensor) -> None:
        names = {value: i for i, value in enumerate(dict.fromkeys(values))}
        if len(names) > MOST or not any(names):
            return
        index = integers([names[value] for value in values])
        table = zeros(len(names), rows.shape[1]).index_add_(0, index, rows)
        for value, row in zip(names, table.numpy(), strict=True):  # rows of an array, in a tenth of the time
            if value:
                key = label, value
                self.open[key] = self.open[key] + row if key in self.open else row

    def close(self, rollout: DumpedRollout) -> tuple[float, float]:
        """Ends a rollout. Returns the standard errors of the logarithms of its mean k3 and mean |l|."""
        for (label, value), row in sorted(self.open.items()):
            samples, tokens, *rest = row.tolist()
            if samples:
                self.parts.append(Part(rollout.rollout_id, label, value, int(samples), int(tokens), *rest))
        tokens, k3, *_, absolute = self.of_rollout.unbind(1)
        errors = _log_error(k3, tokens), _log_error(absolute, tokens)
        self.replicates = self.replicates + self.of_rollout[:, :4]
        self.of_rollout, self.open = zeros(REPLICATES, 5), {}
        return errors

    def by_label(self) -> dict[str, dict[int, list[Part]]]:
        """Returns label -> rollout -> its parts."""
        parts_of: dict[str, dict[int, list[Part]]] = defaultdict(lambda: defaultdict(list))
        for part in self.parts:
            parts_of[part.label][part.rollout_id].append(part)
        return parts_of


@lru_cache(8)  # few, because those of 10,000 samples have 5 MB; runs that are compared draw the same
def _draws(seed: int, count: int) -> Tensor:
    """Returns how often each sample is drawn in each replicate, [REPLICATES, count] float64."""
    ones = torch.ones(REPLICATES, count, dtype=torch.float64)
    return torch.poisson(ones, generator=torch.Generator().manual_seed(seed))


def _rows(n: Tensor, k: Tensor, signed: Tensor, size: Tensor) -> Tensor:
    """Returns the numbers of ``Part`` from sums over some tokens of each sample, [S, 8]."""
    rows = torch.stack([torch.ones_like(n), n, k, k * k, k * n, n * n, signed, size], 1)
    return torch.where((n > 0)[:, None], rows, 0)


def _log_error(sums: Tensor, tokens: Tensor) -> float:
    """Returns the standard error of the logarithm of a mean over tokens, from samples drawn again."""
    known = (tokens > 0) & (sums > 0)
    return float((sums[known] / tokens[known]).log().std()) if int(known.sum()) > 2 else 0.0
