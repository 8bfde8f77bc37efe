"""What one correction does, added up over parts of rollouts; tallies of several processes merge."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from slime_ext.analysis.document import Effect
from slime_ext.analysis.quantiles import BitHistogram
from slime_ext.analysis.records import Rollout
from slime_ext.correction import Correction
from slime_ext.losses import Bounds

BOUNDS = Bounds()  # slime's --eps-clip
QUANTILES = {"p01": 0.01, "p50": 0.5, "p99": 0.99}
COUNTS = ("tokens", "kept_tokens", "sequences", "kept_sequences", "clipped_tokens")
SUMS = ("weight", "square", "up", "up_kept", "down", "down_kept", "slope", "advantage")


@dataclass(frozen=True)
class Applied:
    """What a correction does to each response token, [T] each, 0 or False at masked ones."""

    weights: Tensor  # multiplies the loss; 0 at rejected tokens
    keep: Tensor  # bool, stays in the policy loss
    clipped: Tensor  # bool, where a bound changed a weight, or the surrogate clipped
    slope: Tensor | None  # d loss / d log target where target = proximal; None without advantages


@dataclass(frozen=True)
class Seen:
    """What every tally needs of the same rollout, or of whole samples of one, computed once."""

    rollout: Rollout

    @cached_property
    def tokens(self) -> int:
        """Response tokens."""
        return int(self.rollout.mask.sum())

    @cached_property
    def has(self) -> Tensor:
        """[S] bool, samples with a response token."""
        return self.some(self.rollout.mask)

    def some(self, flags: Tensor) -> Tensor:
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
        return self.mass_of(self.advantages)

    @staticmethod
    def mass_of(advantages: Tensor) -> tuple[float, float]:
        """As ``masses``, of any advantages."""
        total, size = total_of(advantages), total_of(advantages.abs())
        return (size + total) / 2, (size - total) / 2


@dataclass
class Tally:
    """What a correction does, added up; two tallies of the same correction merge."""

    correction: Correction
    bounds: Bounds = BOUNDS  # the host's clip range
    lacked: str | None = None  # why a rollout could not be counted
    tokens: int = 0
    kept_tokens: int = 0
    sequences: int = 0
    kept_sequences: int = 0
    clipped_tokens: int = 0
    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SUMS, 0.0))
    weights: BitHistogram = field(default_factory=BitHistogram)
    rejected: dict[str, str] = field(default_factory=dict)

    def add(self, applied: Applied, seen: Seen) -> None:
        """Counts what the correction does to some tokens."""
        kept = int(applied.keep.sum())
        self.tokens += seen.tokens
        self.kept_tokens += kept
        self.clipped_tokens += int(applied.clipped.sum())
        weights = applied.weights.double()
        self.sums["weight"] += float(weights.sum())
        self.sums["square"] += float(weights.dot(weights))
        self.weights.add_where(applied.weights, applied.keep, kept)
        if seen.advantages is not None:
            self._advantages(applied, seen, kept == seen.tokens)
        self._sequences(applied.keep, seen, kept == seen.tokens)

    def _advantages(self, applied: Applied, seen: Seen, keeps_all: bool) -> None:
        up, down = seen.masses
        kept = seen.masses
        if not keeps_all:
            kept = seen.mass_of(seen.advantages * applied.keep)
        found = (up, kept[0], down, kept[1], total_of(applied.slope.abs()), total_of(seen.advantages.abs()))
        for name, value in zip(SUMS[2:], found, strict=True):
            self.sums[name] += value

    def _sequences(self, keep: Tensor, seen: Seen, keeps_all: bool) -> None:
        kept = seen.has if keeps_all else seen.some(keep)
        self.sequences += int(seen.has.sum())
        self.kept_sequences += int(kept.sum())
        positions = seen.rollout.positions
        gone = sorted(positions[i] for i in (seen.has & ~kept).nonzero()[:, 0].tolist())
        if gone:
            self._remember(seen.rollout.label, spans(gone))

    def _remember(self, rollout: str, positions: str) -> None:
        before = self.rejected.get(rollout)
        self.rejected[rollout] = positions if before is None else f"{before},{positions}"

    def merge(self, other: Tally) -> None:
        """Adds what another tally counted."""
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in SUMS:
            self.sums[name] += other.sums[name]
        self.lacked = self.lacked or other.lacked
        self.weights.merge(other.weights)
        for rollout, positions in other.rejected.items():
            self._remember(rollout, positions)

    def effect(self, name: str, formula: str = "", source: str = "") -> Effect:
        """The numbers for the page."""
        plain = {"name": name, "formula": formula, "source": source, "numerator": self.correction.numerator}
        if not self.tokens:
            return Effect(**plain, unavailable=self.lacked or "the dump holds no response token")
        sums = self.sums
        return Effect(
            **plain,
            **{key: getattr(self, key) for key in COUNTS if key in Effect.model_fields},
            weight_mean=_ratio(sums["weight"], self.kept_tokens),
            weight_quantiles=self._quantiles(),
            ess=_ratio(sums["weight"] ** 2, self.tokens * sums["square"]) or 0.0,
            kept_positive=_ratio(sums["up_kept"], sums["up"]),
            kept_negative=_ratio(sums["down_kept"], sums["down"]),
            gradient_scale=_ratio(sums["slope"], sums["advantage"]),
            rejected=self.rejected,
        )

    def _quantiles(self) -> dict[str, float]:
        found = self.weights
        if not self.kept_tokens:
            return {}
        middle = {name: found.quantile(q) for name, q in QUANTILES.items()}
        return {"min": found.smallest, **middle, "max": found.largest}


def total_of(values: Tensor) -> float:
    """The sum, added up in float64."""
    return float(values.sum(dtype=torch.float64))


def spans(numbers: list[int]) -> str:
    """Sorted integers as ranges.

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
