"""Says how much of the run's k3 a finding accounts for, and whether the rest is healthy.

A finding names tokens, samples, places, rollouts or a value that it predicts for each token. ``explained``
compares k3 of the named tokens with k3 of the others. ``explained_by_values`` takes the predicted values
out. ``explained_by_noise`` takes out noise that is the same in every rollout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from slime_ext.core.metrics.names import HEALTHY
from slime_ext.tools.analysis.detectors.shared.ends import Ends
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.rollouts import RolloutSummary, mean_k3

AGREES = HEALTHY["k3_kl"][1] or 0.0  # nats of k3, up to which the rest is healthy
VALUES = [0, 1, 4]  # columns of ``clipped``: count, l and k3
DIGITS = 6  # of a share; the order of rollouts changes later ones
FEW = 0.1  # share of the tokens that may be unlike all others
# Least share of a bound whose rest may be the scatter of the cause. A judgement: the bounds of the penalties
# and biases that benchmarks/faults plants are 0.27 and more, those of ids that are far off by chance 0.004.
LEAST = 0.1
SURE = 3.0  # standard errors by which noise of one size may differ between rollouts
# Errors of the model, which more samples do not lower. The k3 that far tokens would have without the cause is
# that of others, within a factor of 2 for two standard errors. No share is known better than by half a per
# cent. Of two correct engines, nobody knows how much noise they make, up to BFLOAT16_K3.
UNLIKE, LEAST_ERROR = 0.5, 0.005
BFLOAT16_K3 = 2e-3  # nats, largest k3 between two correct engines with the same weights in bfloat16


class K3(NamedTuple):
    """Mean k3 over some tokens: their number, the mean in nats and its standard error over samples."""

    tokens: int
    k3: float
    error: float

    @classmethod
    def of_rollouts(cls, rollouts: Sequence[RolloutSummary]) -> K3:
        """Returns mean k3 over some rollouts."""
        tokens = sum(s.tokens for s in rollouts)
        error = math.sqrt(sum((s.k3_error * s.k3 * s.tokens) ** 2 for s in rollouts)) / max(tokens, 1)
        return cls(tokens, mean_k3(rollouts), error)

    @classmethod
    def of_sums(cls, d: Diagnosis, tokens: float, k3: float) -> K3:
        """Returns mean k3 over some tokens, with the relative error of the whole run."""
        mean = max(k3, 0.0) / max(tokens, 1.0)
        return cls(int(tokens), mean, mean * _relative_error(d))


class Explained(NamedTuple):
    """The share of the run's k3 that goes if the tokens of a finding become like all others.

    Attributes:
        share: 0 to 1.
        error: its standard error, that of the model included.
        is_rest_healthy: whether k3 of the other tokens is healthy.
        is_bound: whether the cause also scatters l in a way that cannot be predicted. ``share`` is then the
            least that it explains, and the rest may be its scatter.
        is_most: whether ``share`` is the most that the cause explains, because the finding predicts no more
            than that rollouts are alike, or that later ones are further off.
        may_miss: whether other tokens may have the same cause and are not healthy. ``share`` is then the
            least that it explains.
    """

    share: float
    error: float
    is_rest_healthy: bool
    is_bound: bool = False
    is_most: bool = False
    may_miss: bool = False

    @property
    def is_cause(self) -> bool:
        """Whether nothing beside the cause is known to be wrong.

        A bound below LEAST leaves nearly all of k3 open, which no scatter of the cause makes.
        """
        return self.is_rest_healthy or (self.is_bound and self.share >= LEAST)

    def is_less_than(self, other: Explained) -> bool:
        """Returns whether this leaves an unhealthy rest, and another finding a healthy one.

        The other's share must be measured and not smaller.
        """
        is_open = not (self.is_rest_healthy or self.is_bound or self.is_most)
        return is_open and other.is_rest_healthy and not other.is_most and other.share >= self.share

    def of_chosen(self) -> Explained:
        """Returns the share of tokens that were chosen by how far off they are, or that a search found.

        Some of the others may have the same cause, of which healthy ones have little.
        """
        return self._open_above()._replace(may_miss=not self.is_rest_healthy)

    def of_scatter(self) -> Explained:
        """Returns the share as a bound, because the cause also scatters l in a way that is not predicted."""
        return self._open_above()._replace(is_bound=True)

    def of_any(self, k3: float) -> Explained:
        """Returns the share as the most that the cause explains.

        The noise of two correct engines, which nobody knows, is in it.

        Args:
            k3: mean over the run, nats.
        """
        unknown = min(BFLOAT16_K3 / k3, 1.0) if k3 else 1.0
        return self._replace(is_most=True, error=round(math.hypot(self.error, unknown / 2), DIGITS))

    def _open_above(self) -> Explained:
        """Returns the share with an error of which two reach 1."""
        return self._replace(error=round(max(self.error, (1 - self.share) / 2), DIGITS))

    def __str__(self) -> str:
        size = f"{self.share:.0%} ± {max(self.error, 0.01):.0%}"
        rest = "healthy"
        if self.is_bound or self.may_miss:
            size = f"at least {self.share:.0%}"
        if self.is_most:
            size = f"about {self.share:.0%}"
        if self.is_bound and not self.is_rest_healthy:
            rest = "the scatter that it makes, or has another cause"
        elif self.may_miss:
            rest = "not healthy, and has the same cause or another one"
        elif not self.is_rest_healthy:
            rest = "not healthy, so it has another cause as well"
        return f"This explains {size} of k3; the rest is {rest}."


def explained(far: K3, rest: K3) -> Explained:
    """Returns how much of k3 over both kinds of tokens is due to what makes some of them far off.

    If the far tokens had the k3 of the rest, the sum would be r (n + m) instead of f n + r m. If the rest
    has less than FEW of the tokens, it may be unlike all others: the far ones then get a healthy k3 at most.
    """
    n, m = far.tokens, rest.tokens
    whole = far.k3 * n + rest.k3 * m
    if not whole:
        return Explained(0.0, 0.0, True)
    usual = rest.k3 if m >= FEW * (n + m) else min(rest.k3, AGREES)
    share = n * (far.k3 - usual) / whole
    by_far = n * (rest.k3 * m + usual * n) / whole**2  # derivatives of the share
    by_rest = n * (far.k3 * (n + m) if usual == rest.k3 else (far.k3 - usual) * m) / whole**2
    unlike = UNLIKE * n * usual / whole  # the far tokens' own k3 without the cause
    result = _explained(share, math.hypot(by_far * far.error, by_rest * rest.error, unlike), rest.k3)
    return result if m >= FEW * (n + m) else result.of_any(whole / (n + m))


def whole_run(d: Diagnosis) -> tuple[float, float]:
    """Returns the number of tokens with both log-probs, and their sum of k3."""
    count, *_, k3 = d.of(Ends).total.tolist()
    return count, k3


def explained_by_tokens(d: Diagnosis, tokens: float, k3: float) -> Explained:
    """Returns how much of k3 is due to some tokens, from their number and sum of k3."""
    every, whole = whole_run(d)
    return explained(K3.of_sums(d, tokens, k3), K3.of_sums(d, every - tokens, whole - k3)).of_chosen()


def explained_by_values(d: Diagnosis, kinds: Tensor) -> Explained:
    """Returns the least share of k3 that goes if each kind of tokens gets the value of l that fits it best.

    The best value of l for n tokens is the log of their mean ratio, because sum e^(l - c) - 1 - (l - c) is
    least there. The log of the mean ratio, minus mean l, then remains of their mean k3.

    Args:
        kinds: [kinds, 3] number of tokens, sum l and sum k3.
    """
    known = kinds[kinds[:, 0] > 0]
    count, log_ratio, k3 = known.unbind(1)
    ratio = (1 + (k3 + log_ratio) / count).clamp_min(1e-30)
    left = (count * ratio.log() - log_ratio).clamp_min(0)
    return explained_by_rest(d, float(k3.sum()), float(left.sum())).of_scatter()


def explained_by_rest(d: Diagnosis, k3: float, left: float) -> Explained:
    """Returns the share of the run's k3 that goes with a cause of some tokens, of whose k3 a part is left.

    Args:
        k3: sum over the tokens that the cause acts on.
        left: their sum of k3 without the cause.
    """
    every, whole = whole_run(d)
    rest = max(whole - k3, 0.0) + left
    share = 1 - rest / whole if whole else 0.0
    # The relative errors of both sums are at most that of the whole, and the smaller, the more they share.
    error = math.sqrt(2) * share * (1 - share) * _relative_error(d)
    return _explained(share, error, rest / max(every, 1.0)).of_chosen()


def from_part(d: Diagnosis, share: float, error: float) -> Explained:
    """Returns a share of the run's k3 that was measured at a part of its tokens."""
    tokens, k3 = whole_run(d)
    return explained_by_fit(share, error, (1 - share) * k3 / max(tokens, 1.0))


def explained_by_fit(share: float, error: float, rest: float) -> Explained:
    """Returns a share that goes with fitted values; a part of what is left may be due to the fit.

    Args:
        rest: mean k3 of what is left, nats.
    """
    return _explained(share, math.hypot(error, UNLIKE * (1 - share)), rest).of_chosen()


def explained_by_noise(d: Diagnosis, rollouts: Sequence[RolloutSummary]) -> Explained:
    """Returns the largest share of k3 that noise of one size in all rollouts makes.

    What a rollout has more than the smallest of all, beyond its standard error, has another cause.
    """
    known = [s for s in rollouts if s.k3 > 0]
    level = min((s.k3 * math.exp(SURE * s.k3_error) for s in known), default=0.0)
    rest = sum(max(s.k3 * math.exp(-SURE * s.k3_error) - level, 0.0) * s.tokens for s in known)
    tokens = sum(s.tokens for s in known)
    whole = mean_k3(known) * tokens
    share = 1 - rest / whole if whole else 0.0
    error = math.sqrt(2) * share * (1 - share) * _relative_error(d)
    return _explained(share, error, rest / max(tokens, 1)).of_any(mean_k3(known)).of_chosen()


RESTORED = 5  # columns of ``restored``


def restored(before: Tensor, after: float) -> Tensor:
    """Returns sums over a sample or a micro-batch whose log-probs were put back, [RESTORED].

    They are 1, the number of tokens, the sum of k3 as recorded, the sum that goes, and its square.

    Args:
        before: [T] k3 of the tokens as recorded, nats.
        after: mean k3 of those that could be put back.
    """
    whole = float(before.sum())
    gone = whole - after * len(before)
    return torch.tensor([1, len(before), whole, gone, gone * gone], dtype=torch.float64)


def explained_by_order(sums: Tensor, far: float, rollouts: Sequence[RolloutSummary]) -> Explained:
    """Returns how much of a run's k3 goes if its misplaced log-probs are put back.

    Args:
        sums: [RESTORED] of the samples or micro-batches that were put back.
        far: sum of k3 over all that are as far off, nats; those that were not tried count alike.
        rollouts: of the run.
    """
    count, _, before, gone, square = sums.tolist()
    tokens, k3 = sum(s.tokens for s in rollouts), sum(s.tokens * s.k3 for s in rollouts)
    if not before or not k3:
        return Explained(0.0, 0.0, is_rest_healthy=True)
    removed = far * gone / before
    spread = max(square / max(count, 1) - (gone / max(count, 1)) ** 2, 0.0)
    share = min(max(removed / k3, 0.0), 1.0)
    error = (1 - share) * math.sqrt(count * spread) / before
    return _explained(share, error, (k3 - removed) / max(tokens, 1)).of_chosen()


def _explained(share: float, error: float, rest: float) -> Explained:
    """Returns a share with few digits; the rest is healthy if its mean k3 is.

    Args:
        rest: mean k3 of the rest, nats.
    """
    error = math.hypot(error, LEAST_ERROR)
    return Explained(round(min(max(share, 0.0), 1.0), DIGITS) + 0.0, round(error, DIGITS), rest <= AGREES)


def _relative_error(d: Diagnosis) -> float:
    """Returns the standard error of the logarithm of the run's mean k3, from samples drawn again."""
    tokens, k3, *_ = d.samples.replicates.unbind(1)
    known = (tokens > 0) & (k3 > 0)
    return float((k3[known] / tokens[known]).log().std()) if int(known.sum()) > 2 else 0.0
