"""Adds up the effects of a correction over rollouts. Tallies of several processes can be merged."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor

from slime_ext.core.correction import Correction
from slime_ext.core.losses import Bounds
from slime_ext.tools.analysis.document import Effect
from slime_ext.tools.analysis.measures.histogram import Histogram
from slime_ext.tools.analysis.records import DumpedRollout, masses_of

BOUNDS = Bounds()  # slime's --eps-clip
QUANTILES = {"p01": 0.01, "p50": 0.5, "p99": 0.99}
COUNTS = ("tokens", "kept_tokens", "sequences", "kept_sequences", "clipped_tokens")


@dataclass(frozen=True)
class TokenEffects:
    """The effects of a correction on each response token, [T] each; 0 or False at masked tokens."""

    weights: Tensor  # multiply the loss; 0 at rejected tokens
    keep: Tensor  # bool, tokens that stay in the policy loss
    clipped: Tensor  # bool, tokens whose weight a bound changed, or that the surrogate clipped
    slope: Tensor | None  # d loss / d log target at target = proximal; None without advantages
    centering: Tensor | None = None  # what center adds to the loss, nats times the advantage


@dataclass
class Tally:
    """The effects of a correction, added up over rollouts.

    Args:
        bounds: the host's clip range.
        lacked: why a rollout could not be counted.
        sums: counts and sums by name.
        rejected: rollout id -> positions of the sequences without a kept token.
    """

    correction: Correction
    bounds: Bounds = BOUNDS
    lacked: str | None = None
    sums: Counter[str] = field(default_factory=Counter)
    weights: Histogram = field(default_factory=Histogram)
    rejected: dict[str, str] = field(default_factory=dict)

    def add(self, effects: TokenEffects, rollout: DumpedRollout) -> None:
        """Adds the effects of the correction on a rollout, or on a part of one."""
        tokens, kept = int(rollout.mask.count_nonzero()), int(effects.keep.count_nonzero())
        weights, keeps_all = effects.weights.double(), kept == tokens
        samples = rollout.responding if keeps_all else rollout.samples_with(effects.keep)
        self.sums.update(
            tokens=tokens,
            kept_tokens=kept,
            clipped_tokens=int(effects.clipped.count_nonzero()),
            weight=float(weights.sum()),
            weight_squared=float(weights.dot(weights)),
            sequences=int(rollout.responding.sum()),
            kept_sequences=int(samples.sum()),
        )
        self.weights.add(effects.weights if kept == effects.keep.numel() else effects.weights[effects.keep])
        if rollout.masses is not None:
            every = rollout.masses
            some = every if keeps_all else masses_of(torch.where(effects.keep, rollout.advantages, 0))
            self.sums.update(
                positive=every[0],
                kept_positive=some[0],
                negative=every[1],
                kept_negative=some[1],
                slope=float(effects.slope.abs().double().sum()),
                advantage=sum(every),
            )
        if effects.centering is not None:
            self.sums.update(centering=float(effects.centering.abs().double().sum()))
        gone = (rollout.responding & ~samples).nonzero()[:, 0].tolist()
        if gone:
            self._remember(str(rollout.rollout_id), spans(sorted(rollout.positions[i] for i in gone)))

    def _remember(self, rollout: str, positions: str) -> None:
        before = self.rejected.get(rollout, "")
        self.rejected[rollout] = f"{before},{positions}" if before else positions

    def merge(self, other: Tally) -> None:
        """Adds another tally of the same correction."""
        self.sums.update(other.sums)
        self.lacked = self.lacked or other.lacked
        self.weights.merge(other.weights)
        for rollout, positions in other.rejected.items():
            self._remember(rollout, positions)

    def effect(self, name: str, formula: str = "", source: str = "") -> Effect:
        """Returns the row of the what-if table that follows from the sums."""
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
            centering=_ratio(sums["centering"], sums["advantage"]) if "centering" in sums else None,
            rejected=self.rejected,
        )

    def _quantiles(self) -> dict[str, float]:
        weights = self.weights
        if not self.sums["kept_tokens"]:
            return {}
        middle = {name: weights.quantile(q) for name, q in QUANTILES.items()}
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


def _ratio(part: float, of: float) -> float | None:
    return part / of if of else None
