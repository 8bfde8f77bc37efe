"""Adds up the effects of a correction over rollouts. Tallies of several processes can be merged."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from slime_ext.core.correction import Correction
from slime_ext.core.losses import Bounds
from slime_ext.ops.segments import selected
from slime_ext.tools.analysis.document import Effect
from slime_ext.tools.analysis.measures.histogram import Histogram
from slime_ext.tools.analysis.records import DumpedRollout, masses_of
from slime_ext.tools.analysis.tables import Additive, count_true, mean_of, selection

BOUNDS = Bounds()  # slime's --eps-clip
QUANTILES = {"p01": 0.01, "p50": 0.5, "p99": 0.99}


@dataclass(frozen=True)
class TokenEffects:
    """The effects of a correction on each response token, [T] each; 0 or False at masked tokens."""

    weights: Tensor  # multiply the loss; 0 at rejected tokens
    keep: Tensor  # bool, tokens that stay in the policy loss
    clipped: Tensor  # bool, tokens whose weight a bound changed, or that the surrogate clipped
    slope: Tensor | None  # d loss / d log target at target = proximal; None without advantages
    centering: Tensor | None = None  # what center adds to the loss, nats times the advantage


class Totals(Additive):
    """Sums over the tokens and sequences to which a correction was applied."""

    tokens: int = 0
    kept_tokens: int = 0
    clipped_tokens: int = 0
    sequences: int = 0
    kept_sequences: int = 0  # with a kept token
    weight: float = 0.0
    weight_squared: float = 0.0
    positive: float = 0.0  # A, over tokens with A > 0
    negative: float = 0.0  # |A|, over tokens with A < 0
    kept_positive: float = 0.0
    kept_negative: float = 0.0
    slope: float = 0.0  # |d loss / d log target|
    centering: float = 0.0  # what ``center`` adds to the loss, in size


@dataclass
class Tally:
    """The effects of a correction, added up over rollouts.

    Args:
        bounds: the host's clip range.
        lacked: why a rollout could not be counted.
        weights: of the kept tokens.
        rejected: rollout id -> positions of the sequences without a kept token.
    """

    correction: Correction
    bounds: Bounds = BOUNDS
    lacked: str | None = None
    totals: Totals = field(default_factory=Totals)
    weights: Histogram = field(default_factory=Histogram)
    rejected: dict[str, str] = field(default_factory=dict)

    def add(self, effects: TokenEffects, rollout: DumpedRollout) -> None:
        """Adds the effects of the correction on a rollout, on a part of one, or on joined rollouts."""
        totals = self.totals
        tokens, kept = count_true(rollout.mask), count_true(effects.keep)
        keeps_all = kept == tokens
        samples = rollout.responding if keeps_all else rollout.samples_with(effects.keep)
        totals.tokens += tokens
        totals.kept_tokens += kept
        totals.clipped_tokens += count_true(effects.clipped)
        for one in rollout.by_rollout(effects.weights):
            weights = one.to(
                torch.float64, copy=True
            )  # because bits of ``dot`` depend on where memory begins
            totals.weight += float(weights.sum())
            totals.weight_squared += float(weights.dot(weights))
        totals.sequences += int(rollout.responding.sum())
        totals.kept_sequences += int(samples.sum())
        self.weights.add(
            effects.weights if kept == effects.keep.numel() else selection(effects.weights, effects.keep)
        )
        if rollout.masses is not None:
            self._add_advantages(effects, rollout, keeps_all=keeps_all)
        gone = rollout.responding & ~samples
        if gone.any():
            flags = gone.split([one.count for one in rollout.rollouts])
            for one, of_one in zip(rollout.rollouts, flags, strict=True):
                if positions := [one.positions[i] for i in of_one.nonzero()[:, 0].tolist()]:
                    self._remember(str(one.rollout_id), spans(sorted(positions)))

    def _add_advantages(self, effects: TokenEffects, rollout: DumpedRollout, *, keeps_all: bool) -> None:
        totals, kept_masses = self.totals, rollout.masses
        if not keeps_all:
            credit = selected(rollout.advantages, effects.keep)
            kept_masses = [masses_of(one) for one in rollout.by_rollout(credit)]
        for (positive, negative), kept in zip(rollout.masses, kept_masses, strict=True):
            totals.positive += positive
            totals.negative += negative
            totals.kept_positive += kept[0]
            totals.kept_negative += kept[1]
        for slope in rollout.by_rollout(effects.slope.abs().double()):
            totals.slope += float(slope.sum())
        if effects.centering is not None:
            for centering in rollout.by_rollout(effects.centering.abs().double()):
                totals.centering += float(centering.sum())

    def _remember(self, rollout: str, positions: str) -> None:
        before = self.rejected.get(rollout, "")
        self.rejected[rollout] = f"{before},{positions}" if before else positions

    def merge(self, other: Tally) -> None:
        """Adds another tally of the same correction."""
        self.totals.merge(other.totals)
        self.lacked = self.lacked or other.lacked
        self.weights.merge(other.weights)
        for rollout, positions in other.rejected.items():
            self._remember(rollout, positions)

    def effect(self, name: str, formula: str = "", source: str = "") -> Effect:
        """Returns the row of the what-if table that follows from the sums."""
        plain = {"name": name, "formula": formula, "source": source, "numerator": self.correction.numerator}
        totals = self.totals
        if not totals.tokens:
            return Effect(**plain, unavailable=self.lacked or "the dump holds no response token")
        advantage = totals.positive + totals.negative
        return Effect(
            **plain,
            tokens=totals.tokens,
            kept_tokens=totals.kept_tokens,
            sequences=totals.sequences,
            kept_sequences=totals.kept_sequences,
            clipped_tokens=totals.clipped_tokens,
            weight_mean=mean_of(totals.weight, totals.kept_tokens),
            weight_quantiles=self._quantiles(),
            ess=mean_of(totals.weight**2, totals.tokens * totals.weight_squared) or 0.0,
            kept_positive=mean_of(totals.kept_positive, totals.positive),
            kept_negative=mean_of(totals.kept_negative, totals.negative),
            gradient_scale=mean_of(totals.slope, advantage),
            centering=mean_of(totals.centering, advantage) if self.correction.center else None,
            rejected=self.rejected,
        )

    def _quantiles(self) -> dict[str, float]:
        weights = self.weights
        if not self.totals.kept_tokens:
            return {}
        middle = dict(zip(QUANTILES, weights.quantiles(*QUANTILES.values()), strict=True))
        return {"min": weights.smallest, **middle, "max": weights.largest}


def spans(numbers: list[int]) -> str:
    """Returns sorted integers as text, in ranges.

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
