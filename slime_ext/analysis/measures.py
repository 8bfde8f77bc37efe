"""Sums over response tokens and sequences from which the mismatch numbers follow; they add up over parts of a
rollout, rollouts and processes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from slime_ext.analysis.document import Bin, Numbers
from slime_ext.analysis.records import Rollout
from slime_ext.ops.divergences import k3

NAMES = (
    "tokens",  # response tokens
    "finite",  # of them, those with both log-probs finite: what every other sum is over
    "no_behavior",
    "no_proximal",
    "log_ratio",
    "absolute",
    "squared",
    "k3",
    "ratio",
    "ratio_squared",
    "behavior",
    "proximal",
    "sequences",
    "compared",  # of them, those with a token that counts
    "length",
    "rewarded",
    "reward",
    "aged",
    "age",
)
LEVELS = ("sequence", "geometric")
PER_DECADE, SMALLEST, DECADES = 256, -6, 8
PER_BAR = 8  # bins that a bar of the distribution joins
SIDE = DECADES * PER_DECADE  # bins of log-ratios on each side of 0, from 1e-6 to 100 nats
BINS = 2 * SIDE + 3  # and one around 0, one beyond each end


def _logs() -> Tensor:
    return torch.full((len(LEVELS), 2), -torch.inf, dtype=torch.float64)


@dataclass
class Sums:
    """What the numbers of a rollout, or of a run, are made of.

    Args:
        values: [NAMES] float64 sums.
        logs: [2, 2] float64, for the sequence and the geometric level the logs of sum x and sum x^2 over
            sequences, x the ratio of the level, which overflows where its log does not.
        histogram: of log-ratios, 256 bins per decade on both sides of 0.
        lowest, highest: extremes of the log-ratio, exact.
    """

    values: Tensor = field(default_factory=lambda: torch.zeros(len(NAMES), dtype=torch.float64))
    logs: Tensor = field(default_factory=_logs)
    histogram: Tensor = field(default_factory=lambda: torch.zeros(BINS, dtype=torch.float64))
    lowest: float = math.inf
    highest: float = -math.inf

    def add(self, part: Rollout) -> None:
        """Counts a part of a rollout."""
        found = part.log_ratio[part.finite].double()
        self.values += _values(part, found)
        self.histogram += torch.bincount(bins(found), minlength=len(self.histogram)).double()
        self.logs = torch.logaddexp(self.logs, _log_sums(part))
        if found.numel():
            low, high = found.aminmax()
            self.lowest, self.highest = min(self.lowest, float(low)), max(self.highest, float(high))

    def merge(self, other: Sums) -> None:
        """Adds what another one counted."""
        self.values += other.values
        self.histogram += other.histogram
        self.logs = torch.logaddexp(self.logs, other.logs)
        self.lowest, self.highest = min(self.lowest, other.lowest), max(self.highest, other.highest)

    def __getitem__(self, name: str) -> float:
        return float(self.values[NAMES.index(name)])

    def mean(self, name: str, over: str = "finite") -> float | None:
        """A sum over the tokens (or what ``over`` counts); None for none."""
        return self[name] / self[over] if self[over] else None

    def numbers(self) -> Numbers:
        """The numbers for the page and JSON."""
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
        """What there is of tokens with both log-probs."""
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
        """Log-ratio at rank ``q`` of the tokens, off by at most half a bin (0.5%), within the extremes."""
        below = list(accumulate(self.histogram.tolist()))
        index = next((i for i, c in enumerate(below) if c >= q * below[-1]), len(below) - 1)
        low, high = edges(index)
        return min(max((low + high) / 2, self.lowest), self.highest)  # an end without bound: the extreme

    def distribution(self) -> tuple[Bin, ...]:
        """The histogram in bars, from the first to the last that holds a token; the ends are the extremes."""
        bars = _bars(self.histogram)
        held = bars.nonzero()[:, 0].tolist()
        if not held:
            return ()
        found = [(*edges(i, PER_BAR), int(bars[i])) for i in range(held[0], held[-1] + 1)]
        return tuple(
            Bin(low=max(low, self.lowest), high=min(high, self.highest), count=count)
            if low < self.lowest or high > self.highest
            else Bin(low=low, high=high, count=count)
            for low, high, count in found
        )

    def _chi2(self, level: str) -> float | None:
        second = float(self.logs[LEVELS.index(level), 1])
        return _exp(second - math.log(self["compared"])) - 1 if math.isfinite(second) else None

    def _ess(self, level: str) -> float | None:
        first, second = self.logs[LEVELS.index(level)].tolist()
        return math.exp(2 * first - second - math.log(self["compared"])) if math.isfinite(second) else None


def bins(log_ratio: Tensor) -> Tensor:
    """[N] -> [N] int64, the histogram bin of each log-ratio."""
    distance = ((log_ratio.abs().log10() - SMALLEST) * PER_DECADE).floor().add(1).clamp(0, SIDE + 1)
    return distance.copysign(log_ratio).add(SIDE + 1).long()


def _bars(histogram: Tensor) -> Tensor:
    """[BINS] -> [BINS of PER_BAR times the width]."""
    below, above = histogram[1 : SIDE + 1], histogram[SIDE + 2 : -1]
    joined = [side.view(-1, PER_BAR).sum(1) for side in (below, above)]
    return torch.cat([histogram[:1], joined[0], histogram[SIDE + 1 : SIDE + 2], joined[1], histogram[-1:]])


def edges(index: int, joined: int = 1) -> tuple[float, float]:
    """Ends of a histogram bin of log-ratios, nats; of a bar, where ``joined`` bins are one.

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


def _values(part: Rollout, log_ratio: Tensor) -> Tensor:
    finite, mask = part.finite, part.mask
    ratio = log_ratio.exp()
    lengths = torch.tensor(part.lengths, dtype=torch.float64)
    responding = part.segments.sum(torch.ones_like(part.behavior)) > 0
    rewards = torch.zeros(0) if part.rewards is None else part.rewards[part.rewards.isfinite()]
    ages = torch.zeros(0) if part.ages is None else part.ages[mask & part.ages.isfinite()]
    found = (
        mask.sum(),
        finite.sum(),
        (mask & ~(part.behavior.abs() < torch.inf)).sum(),
        (mask & ~(part.proximal.abs() < torch.inf)).sum(),
        log_ratio.sum(),
        log_ratio.abs().sum(),
        log_ratio.square().sum(),
        k3(log_ratio).sum(),
        ratio.sum(),
        ratio.square().sum(),
        part.behavior[finite].sum(dtype=torch.float64),
        part.proximal[finite].sum(dtype=torch.float64),
        responding.sum(),
        (part.segments.sum(finite.float()) > 0).sum(),
        lengths[responding].sum(),
        torch.tensor(rewards.numel()),
        rewards.sum(dtype=torch.float64),
        torch.tensor(ages.numel()),
        ages.sum(dtype=torch.float64),
    )
    return torch.stack([x.double() for x in found])


def _log_sums(part: Rollout) -> Tensor:
    """[2, 2]: logs of the sums over sequences of the ratio and its square, sequence and geometric level."""
    segments = part.segments
    count = segments.sum(part.finite.double())
    total = segments.sum(part.log_ratio)[count > 0]
    levels = torch.stack([total, total / count[count > 0]])
    if not total.numel():
        return _logs()
    return torch.stack([levels.logsumexp(1), (2 * levels).logsumexp(1)], 1)


def _ess_token(first: float, second: float, count: float) -> float | None:
    """From the sums of the ratio and its square: one token outweighs all if the latter overflows, and nothing
    is known if it underflows."""
    if not second:
        return None
    return 1 / count if math.isinf(second) else first / count * (first / second)


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf
