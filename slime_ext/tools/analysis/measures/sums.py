"""Sums tokens and sequences, from which k3, chi^2 and effective sample sizes follow.

Sums add up over parts of a rollout, rollouts and processes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from slime_ext.tools.analysis.document import Bin, Numbers
from slime_ext.tools.analysis.measures.histogram import Histogram
from slime_ext.tools.analysis.records import DumpedRollout
from slime_ext.tools.analysis.tables import Additive, are_equal, count_true, mean_of, selection


@dataclass
class SequenceRatios:
    """Sums of one importance ratio per sequence.

    A ratio may overflow where its log does not, so the logs of the sums are kept.

    Args:
        logs: [2] float64, the logs of the sum of the ratios and of the sum of their squares.
    """

    logs: Tensor = field(default_factory=lambda: torch.full((2,), -torch.inf, dtype=torch.float64))

    def add(self, log_ratios: Tensor) -> None:
        """Adds sequences, [S] float64 logs of their ratios."""
        logs = torch.stack([log_ratios, 2 * log_ratios]).logsumexp(1)
        self.logs = torch.logaddexp(self.logs, logs)

    def merge(self, other: SequenceRatios) -> None:
        """Adds the sums over other sequences."""
        self.logs = torch.logaddexp(self.logs, other.logs)

    def chi2(self, count: int) -> float | None:
        """Returns the mean of the squared ratio over ``count`` sequences, minus 1."""
        square = float(self.logs[1])
        return _exp(square - math.log(count)) - 1 if math.isfinite(square) else None

    def ess(self, count: int) -> float | None:
        """Returns the effective sample size as a share of ``count`` sequences."""
        total, square = self.logs.tolist()
        return math.exp(2 * total - square - math.log(count)) if math.isfinite(square) else None


class Sums(Additive):
    """Sums over tokens and sequences of a rollout, or of a run.

    Only response tokens count. Sums of values are over the tokens whose value is known.
    """

    tokens: int = 0
    finite: int = 0  # tokens with both log-probs, over which the next eight fields sum
    log_ratio: float = 0.0
    absolute: float = 0.0  # |l|
    k3: float = 0.0
    ratio: float = 0.0
    ratio_squared: float = 0.0
    behavior: float = 0.0  # log-prob of the sampler
    proximal: float = 0.0  # log-prob of the trainer
    differing: int = 0  # tokens with l != 0
    sequences: int = 0  # with a response token
    length: int = 0  # response tokens of these sequences, masked ones too
    compared: int = 0  # sequences with a token in ``finite``
    rewarded: int = 0  # samples with a reward
    reward: float = 0.0
    aged: int = 0  # tokens with the age of their weights
    age: float = 0.0
    headed: int = 0  # tokens with the sampler's head
    kl: float = 0.0
    tail: float = 0.0
    histogram: Histogram = field(default_factory=Histogram)  # of log-ratios
    sequence_ratios: SequenceRatios = field(default_factory=SequenceRatios)  # e^(sum of l)
    geometric_ratios: SequenceRatios = field(default_factory=SequenceRatios)  # e^(mean of l)

    def add(self, part: DumpedRollout) -> None:
        """Adds the tokens and sequences of a part of a rollout."""
        mask, finite = part.mask, part.finite
        counts, absolute, _, log_ratio, distance, _ = part.sample_sums
        ratio = part.columns[3].exp() * part.columns[0]
        self.tokens += count_true(mask)
        self.finite += count_true(finite)
        self.log_ratio += float(log_ratio.sum())
        self.absolute += float(absolute.sum())
        self.k3 += float(distance.sum())
        self.ratio += float(ratio.sum())
        self.ratio_squared += float(ratio.square().sum())
        self.behavior += float(part.compared(part.behavior).double().sum())
        self.proximal += float(part.compared(part.proximal).double().sum())
        self.differing += part.size - count_true(are_equal(part.log_ratio, 0))
        self.sequences += count_true(part.responding)
        self.length += int(part.response_lengths[part.responding].sum())
        if part.rewards is not None:
            rewards = part.rewards[part.rewards.isfinite()]
            self.rewarded += len(rewards)
            self.reward += float(rewards.double().sum())
        if part.ages is not None:
            is_known = mask & (part.ages >= 0)
            self.aged += count_true(is_known)
            self.age += float(torch.where(is_known, part.ages, 0).double().sum())
        if part.kl is not None and part.tail is not None:
            is_known = mask & part.kl.isfinite()
            self.headed += count_true(is_known)
            self.kl += float(torch.where(is_known, part.kl, 0).double().sum())
            self.tail += float(torch.where(is_known, part.tail, 0).double().sum())
        self.histogram.add(part.log_ratio if part.has_all else selection(part.log_ratio, finite))
        is_compared = counts > 0
        self.compared += count_true(is_compared)
        self.sequence_ratios.add(log_ratio[is_compared])
        self.geometric_ratios.add((log_ratio / counts)[is_compared])

    @property
    def mean_log_ratio(self) -> float | None:
        """The mean of l over tokens with both log-probs; None without such a token."""
        return mean_of(self.log_ratio, self.finite)

    @property
    def mean_absolute(self) -> float | None:
        """The mean of |l|; None without a token that has both log-probs."""
        return mean_of(self.absolute, self.finite)

    @property
    def mean_k3(self) -> float | None:
        """The mean of k3; None without a token that has both log-probs."""
        return mean_of(self.k3, self.finite)

    @property
    def mean_behavior(self) -> float | None:
        """The sampler's mean log-prob; None without a token that has both log-probs."""
        return mean_of(self.behavior, self.finite)

    @property
    def mean_proximal(self) -> float | None:
        """The trainer's mean log-prob; None without a token that has both log-probs."""
        return mean_of(self.proximal, self.finite)

    def numbers(self) -> Numbers:
        """Returns the numbers that follow from the sums."""
        always = Numbers(
            tokens=self.tokens,
            sequences=self.sequences,
            nonfinite=self.tokens - self.finite,
            reward=mean_of(self.reward, self.rewarded),
            response_length=mean_of(self.length, self.sequences),
            staleness=mean_of(self.age, self.aged),
            kl=mean_of(self.kl, self.headed),
            tail=mean_of(self.tail, self.headed),
        )
        return replace(always, **self._compared()) if self.finite else always

    def _compared(self) -> dict[str, float | None]:
        low, middle, high = self.histogram.quantiles(0.01, 0.5, 0.99)
        return {
            "mean": self.mean_log_ratio,
            "absolute": self.mean_absolute,
            "k3": self.mean_k3,
            "log_ratio_max": max(self.histogram.largest, -self.histogram.smallest),
            "differing_fraction": self.differing / self.finite,
            "chi2_token": self.ratio_squared / self.finite - 1,
            "chi2_sequence": self.sequence_ratios.chi2(self.compared),
            "ess_token": _ess_token(self.ratio, self.ratio_squared, self.finite),
            "ess_geometric": self.geometric_ratios.ess(self.compared),
            "ess_sequence": self.sequence_ratios.ess(self.compared),
            "perplexity_behavior": _exp(-self.behavior / self.finite),
            "perplexity_proximal": _exp(-self.proximal / self.finite),
            "ratio_p01": _exp(low),
            "ratio_p50": _exp(middle),
            "ratio_p99": _exp(high),
        }

    def distribution(self) -> tuple[Bin, ...]:
        """Returns the histogram in bars, from the first to the last with a token."""
        return tuple(Bin(low=low, high=high, count=count) for low, high, count in self.histogram.bars())


def _ess_token(first: float, second: float, count: int) -> float | None:
    """Returns the effective sample size from the sums of the ratio and its square.

    It is that of one token if the square overflows, and None if it underflows.
    """
    if not second:
        return None
    return 1 / count if math.isinf(second) else first / count * (first / second)


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf
