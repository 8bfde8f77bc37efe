"""Sums over response tokens and sequences -> the mismatch numbers: k3, chi^2, effective sample sizes.

Sums add up over parts of a rollout, rollouts and processes.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor

from slime_ext.tools.analysis.document import Bin, Numbers
from slime_ext.tools.analysis.records import TOKEN_COLUMNS, DumpedRollout

LEVELS = ("sequence", "geometric")
PER_DECADE, SMALLEST, DECADES = 256, -6, 8
PER_BAR = 8  # bins that a bar of the distribution joins
SIDE = DECADES * PER_DECADE  # bins of log-ratios on each side of 0, from 1e-6 to 100 nats
BINS = 2 * SIDE + 3  # and one around 0, one beyond each end


def _logs() -> Tensor:
    return torch.full((len(LEVELS), 2), -torch.inf, dtype=torch.float64)


@dataclass
class Sums:
    """Sums over tokens and sequences of a rollout, or of a run.

    Args:
        values: name -> sum, as ``_sums`` names them.
        logs: [2, 2] float64, for the sequence and the geometric level the logs of sum x and sum x^2 over
            sequences, x the importance ratio of the level, which overflows where its log does not.
        histogram: of log-ratios, 256 bins per decade on both sides of 0.
        lowest, highest: extremes of the log-ratio, exact.
    """

    values: Counter[str] = field(default_factory=Counter)
    logs: Tensor = field(default_factory=_logs)
    histogram: Tensor = field(default_factory=lambda: torch.zeros(BINS, dtype=torch.float64))
    lowest: float = math.inf
    highest: float = -math.inf

    def add(self, part: DumpedRollout) -> None:
        """Adds the tokens and sequences of a part of a rollout."""
        found = part.columns[TOKEN_COLUMNS.index("log_ratio")]
        self.values.update(_sums(part))
        self.histogram += torch.bincount(bins(found), minlength=len(self.histogram)).double()
        self.histogram[SIDE + 1] -= part.size - int(part.finite.count_nonzero())  # whose l is 0 by name alone
        self.logs = torch.logaddexp(self.logs, _log_sums(part))
        known = found if part.has_all else found[part.finite]
        if known.numel():
            low, high = known.aminmax()
            self.lowest, self.highest = min(self.lowest, float(low)), max(self.highest, float(high))

    def merge(self, other: Sums) -> None:
        """Adds the sums over other tokens."""
        self.values.update(other.values)
        self.histogram += other.histogram
        self.logs = torch.logaddexp(self.logs, other.logs)
        self.lowest, self.highest = min(self.lowest, other.lowest), max(self.highest, other.highest)

    def __getitem__(self, name: str) -> float:
        return self.values[name]

    def mean(self, name: str, over: str = "finite") -> float | None:
        """A sum divided by the number of tokens with both log-probs, or by the sum that ``over`` names;
        None for none."""
        return self[name] / self[over] if self[over] else None

    def numbers(self) -> Numbers:
        """The numbers that follow from the sums."""
        count = self["finite"]
        always = Numbers(
            tokens=int(self["tokens"]),
            sequences=int(self["sequences"]),
            nonfinite=int(self["tokens"] - count),
            reward=self.mean("reward", "rewarded"),
            response_length=self.mean("length", "sequences"),
            staleness=self.mean("age", "aged"),
        )
        return always.model_copy(update=self._compared(count)) if count else always

    def _compared(self, count: float) -> dict[str, float | None]:
        """The numbers that need tokens with both log-probs."""
        first, second = self["ratio"], self["ratio_squared"]
        return dict(
            mean=self.mean("log_ratio"),
            absolute=self.mean("absolute"),
            k3=self.mean("k3"),
            chi2_token=second / count - 1,
            chi2_sequence=self._chi2("sequence"),
            ess_token=_ess_token(first, second, count),
            ess_geometric=self._ess("geometric"),
            ess_sequence=self._ess("sequence"),
            perplexity_behavior=_exp(-(self.mean("behavior") or 0)),
            perplexity_proximal=_exp(-(self.mean("proximal") or 0)),
            **{f"ratio_p{q:02d}": _exp(self.quantile(q / 100)) for q in (1, 50, 99)},
        )

    def quantile(self, q: float) -> float:
        """The log-ratio at a share ``q`` of the tokens, off by at most half a bin (0.5%), within the
        extremes."""
        below = self.histogram.cumsum(0)
        low, high = edges(int(torch.searchsorted(below, q * below[-1])))
        return min(max((low + high) / 2, self.lowest), self.highest)  # an end without bound: the extreme

    def distribution(self) -> tuple[Bin, ...]:
        """The histogram in bars, from the first to the last that holds a token."""
        bars = _bars(self.histogram)
        held = bars.nonzero()[:, 0].tolist()
        if not held:
            return ()
        found = [(*edges(i, PER_BAR), int(bars[i])) for i in range(held[0], held[-1] + 1)]
        return tuple(
            Bin(low=max(low, self.lowest), high=min(high, self.highest), count=count)
            for low, high, count in found
        )

    def _chi2(self, level: str) -> float | None:
        second = float(self.logs[LEVELS.index(level), 1])
        return _exp(second - math.log(self["compared"])) - 1 if math.isfinite(second) else None

    def _ess(self, level: str) -> float | None:
        first, second = self.logs[LEVELS.index(level)].tolist()
        return math.exp(2 * first - second - math.log(self["compared"])) if math.isfinite(second) else None


def bins(log_ratio: Tensor) -> Tensor:
    """The histogram bin of each log-ratio, [N] -> [N] int64."""
    distance = ((log_ratio.abs().log10() - SMALLEST) * PER_DECADE).floor().add(1).clamp(0, SIDE + 1)
    return distance.copysign(log_ratio).add(SIDE + 1).long()


def _bars(histogram: Tensor) -> Tensor:
    """Joins the bins of a histogram to bars of PER_BAR times the width."""
    below, above = histogram[1 : SIDE + 1], histogram[SIDE + 2 : -1]
    joined = [side.view(-1, PER_BAR).sum(1) for side in (below, above)]
    return torch.cat([histogram[:1], joined[0], histogram[SIDE + 1 : SIDE + 2], joined[1], histogram[-1:]])


def edges(index: int, joined: int = 1) -> tuple[float, float]:
    """The two ends of a histogram bin of log-ratios, nats; of a bar, where ``joined`` bins are one.

    >>> [round(x, 7) for x in edges(SIDE + 1)]
    [-1e-06, 1e-06]
    """
    count = SIDE // joined
    side = index - count - 1
    if not side:
        return -(10.0**SMALLEST), 10.0**SMALLEST
    near, far = (10 ** (SMALLEST + (abs(side) - k) * joined / PER_DECADE) for k in (1, 0))
    far = math.inf if abs(side) > count else far
    return (near, far) if side > 0 else (-far, -near)


def _sums(part: DumpedRollout) -> dict[str, float]:
    """The sums over a part of a rollout."""
    mask, finite, columns = part.mask, part.finite, dict(zip(TOKEN_COLUMNS, part.columns, strict=True))
    ratio = columns["log_ratio"].exp() * columns.pop("count")
    sums = {
        "tokens": mask,  # response tokens
        "finite": finite,  # of them, those with both log-probs finite
        "no_behavior": mask & ~(part.behavior.abs() < torch.inf),
        "no_proximal": mask & ~(part.proximal.abs() < torch.inf),
        **columns,
        "ratio": ratio,
        "ratio_squared": ratio.square(),
        "behavior": part.compared(part.behavior).double(),
        "proximal": part.compared(part.proximal).double(),
        "sequences": part.responding,
        "compared": part.samples_with(finite),
        "length": torch.tensor(part.lengths, dtype=torch.float64)[part.responding],
    }
    if part.rewards is not None:
        is_known = part.rewards.isfinite()
        rewards = part.rewards[is_known].double()
        sums |= {"rewarded": is_known, "reward": rewards, "reward_squared": rewards.square()}
    if part.ages is not None:
        is_known = mask & (part.ages >= 0)
        sums |= {"aged": is_known, "age": torch.where(is_known, part.ages, 0).double()}
    if part.reference is not None:
        is_known = finite & part.reference.isfinite()
        apart = ((side - part.reference).abs().double() for side in (part.behavior, part.proximal))
        pushed, moved = (torch.where(is_known, distance, 0) for distance in apart)
        sums |= {"referenced": is_known, "pushed": pushed, "moved": moved}
    return {
        name: float(row.count_nonzero() if row.dtype == torch.bool else row.sum())
        for name, row in sums.items()
    }


def _log_sums(part: DumpedRollout) -> Tensor:
    """[2, 2] for the sequence and the geometric level the logs of sum x and sum x^2 over sequences, x the
    importance ratio."""
    total, count = part.segments.local_sums([part.log_ratio, part.finite.to(part.log_ratio.dtype)])
    levels = torch.stack([total, total / count])[:, count > 0]
    return torch.stack([levels.logsumexp(1), (2 * levels).logsumexp(1)], 1)


def _ess_token(first: float, second: float, count: float) -> float | None:
    """Effective sample size from the sums of the ratio and its square: of one token if the square
    overflows, unknown if it underflows."""
    if not second:
        return None
    return 1 / count if math.isinf(second) else first / count * (first / second)


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf
