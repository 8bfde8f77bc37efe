"""What one correction does, added up over parts of rollouts; tallies of several processes merge."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from slime_ext.analysis.document import Effect
from slime_ext.analysis.quantiles import BitHistogram
from slime_ext.analysis.records import DumpedRollout
from slime_ext.correction import Correction
from slime_ext.losses import Bounds

BOUNDS = Bounds()  # slime's --eps-clip
QUANTILES = {"p01": 0.01, "p50": 0.5, "p99": 0.99}
COUNTS = ("tokens", "kept_tokens", "sequences", "kept_sequences", "clipped_tokens")


@dataclass(frozen=True)
class TokenEffects:
    """What a correction does to each response token, [T] each; 0 or False at masked tokens."""

    weights: Tensor  # multiplies the loss; 0 at rejected tokens
    keep: Tensor  # bool, stays in the policy loss
    clipped: Tensor  # bool, where a bound changed a weight, or the surrogate clipped
    slope: Tensor | None  # d loss / d log target where target = proximal; None without advantages


@dataclass(frozen=True)
class SharedSums:
    """What the tallies of all corrections need of the same rollout, computed once."""

    rollout: DumpedRollout

    @cached_property
    def tokens(self) -> int:
        """Response tokens."""
        return int(self.rollout.mask.count_nonzero())

    @cached_property
    def responding(self) -> Tensor:
        """[S] bool, samples with a response token."""
        return self.samples_with(self.rollout.mask)

    def samples_with(self, flags: Tensor) -> Tensor:
        """[T] bool, false at masked tokens -> [S] bool, samples with such a token."""
        counts = torch.cat([torch.zeros(1, dtype=torch.int64), flags.view(torch.uint8).cumsum(0)])
        ends = torch.tensor([0, *self.rollout.lengths]).cumsum(0)
        return counts[ends[1:]] > counts[ends[:-1]]

    @cached_property
    def advantages(self) -> Tensor | None:
        """[T], 0 at masked tokens."""
        given = self.rollout.advantages
        return None if given is None else self.rollout.segments.zeroed(given)

    @cached_property
    def masses(self) -> tuple[float, float]:
        """Sum of A where A > 0, and of |A| where A < 0."""
        return masses_of(self.advantages)


def masses_of(advantages: Tensor) -> tuple[float, float]:
    """Sum of A where A > 0, and of |A| where A < 0."""
    total, size = total_of(advantages), total_of(advantages.abs())
    return (size + total) / 2, (size - total) / 2


@dataclass
class Tally:
    """What a correction does, added up over rollouts.

    Args:
        bounds: the host's clip range.
        lacked: why a rollout could not be counted.
        sums: counts and sums by name.
        rejected: label of a rollout -> positions of the wholly rejected sequences.
    """

    correction: Correction
    bounds: Bounds = BOUNDS
    lacked: str | None = None
    sums: Counter[str] = field(default_factory=Counter)
    weights: BitHistogram = field(default_factory=BitHistogram)
    rejected: dict[str, str] = field(default_factory=dict)

    def add(self, effects: TokenEffects, shared: SharedSums) -> None:
        """Counts what the correction does to some tokens."""
        kept, weights = int(effects.keep.count_nonzero()), effects.weights.double()
        keeps_all = kept == shared.tokens
        samples = shared.responding if keeps_all else shared.samples_with(effects.keep)
        self.sums.update(
            tokens=shared.tokens,
            kept_tokens=kept,
            clipped_tokens=int(effects.clipped.count_nonzero()),
            weight=float(weights.sum()),
            weight_squared=float(weights.dot(weights)),
            sequences=int(shared.responding.sum()),
            kept_sequences=int(samples.sum()),
        )
        self.weights.add_where(effects.weights, effects.keep, kept)
        if shared.advantages is not None:
            self._add_advantages(effects, shared, keeps_all)
        positions = shared.rollout.positions
        gone = sorted(positions[i] for i in (shared.responding & ~samples).nonzero()[:, 0].tolist())
        if gone:
            self._remember(shared.rollout.label, spans(gone))

    def _add_advantages(self, effects: TokenEffects, shared: SharedSums, keeps_all: bool) -> None:
        advantages, kept = shared.advantages, shared.masses
        if not keeps_all:
            kept = masses_of(advantages * effects.keep)
        self.sums.update(
            positive=shared.masses[0],
            kept_positive=kept[0],
            negative=shared.masses[1],
            kept_negative=kept[1],
            slope=total_of(effects.slope.abs()),
            advantage=sum(shared.masses),
        )

    def _remember(self, rollout: str, positions: str) -> None:
        before = self.rejected.get(rollout, "")
        self.rejected[rollout] = f"{before},{positions}" if before else positions

    def merge(self, other: Tally) -> None:
        """Adds what another tally of the same correction counted."""
        self.sums.update(other.sums)
        self.lacked = self.lacked or other.lacked
        self.weights.merge(other.weights)
        for rollout, positions in other.rejected.items():
            self._remember(rollout, positions)

    def effect(self, name: str, formula: str = "", source: str = "") -> Effect:
        """The row of the what-if table that follows from the sums."""
        plain = {"name": name, "formula": formula, "source": source, "numerator": self.correction.numerator}
        sums = self.sums
        if not sums["tokens"]:
            return Effect(**plain, unavailable=self.lacked or "the dump holds no response token")
        return Effect(
            **plain,
            **{key: sums[key] for key in COUNTS},
            weight_mean=_ratio(sums["weight"], sums["kept_tokens"]),
            weight_quantiles=self._quantiles(),
            ess=_ratio(sums["weight"] ** 2, sums["tokens"] * sums["weight_squared"]) or 0.0,
            kept_positive=_ratio(sums["kept_positive"], sums["positive"]),
            kept_negative=_ratio(sums["kept_negative"], sums["negative"]),
            gradient_scale=_ratio(sums["slope"], sums["advantage"]),
            rejected=self.rejected,
        )

    def _quantiles(self) -> dict[str, float]:
        found = self.weights
        if not self.sums["kept_tokens"]:
            return {}
        middle = {name: found.quantile(q) for name, q in QUANTILES.items()}
        return {"min": found.smallest, **middle, "max": found.largest}


def total_of(values: Tensor) -> float:
    """The sum of a tensor, added up in float64."""
    return float(values.double().sum())


def spans(numbers: list[int]) -> str:
    """Sorted integers as text of ranges.

    >>> spans([0, 1, 2, 7, 9, 10])
    '0-2,7,9-10'
    """
    runs: list[list[int]] = []
    for n in numbers:
        if runs and runs[-1][1] == n - 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(f"{a}-{b}" if b > a else f"{a}" for a, b in runs)


def _ratio(part: float, of: float) -> float | None:
    return part / of if of else None
