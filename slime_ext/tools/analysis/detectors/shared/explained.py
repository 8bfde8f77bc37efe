"""Says how much of the run's k3 a finding accounts for, and whether the rest is healthy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from slime_ext.core.metrics.names import HEALTHY
from slime_ext.tools.analysis.measures.rollouts import RolloutSummary, mean_k3

AGREES = HEALTHY["k3_kl"][1] or 0.0  # nats of k3, up to which the rest is healthy
DIGITS = 6  # of a share; the order of rollouts changes later ones


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


class Explained(NamedTuple):
    """The share of the run's k3 that goes if the tokens of a finding become like all others.

    Attributes:
        share: 0 to 1.
        error: its standard error.
        is_rest_healthy: whether k3 of the other tokens is healthy.
    """

    share: float
    error: float
    is_rest_healthy: bool

    def __str__(self) -> str:
        rest = "healthy" if self.is_rest_healthy else "not healthy, so it has another cause as well"
        return f"This explains {self.share:.0%} ± {self.error:.0%} of k3; the rest is {rest}."


def explained(far: K3, rest: K3) -> Explained:
    """Returns how much of k3 over both kinds of tokens is due to what makes some of them far off.

    If the far tokens had the k3 of the rest, the sum would be r (n + m) instead of f n + r m.
    """
    n, m = far.tokens, rest.tokens
    whole = far.k3 * n + rest.k3 * m
    if not whole:
        return Explained(0.0, 0.0, True)
    share = n * (far.k3 - rest.k3) / whole
    by_far = n * rest.k3 * (n + m) / whole**2  # derivatives of the share
    by_rest = n * far.k3 * (n + m) / whole**2
    error = math.hypot(by_far * far.error, by_rest * rest.error)
    return Explained(round(min(max(share, 0.0), 1.0), DIGITS), round(error, DIGITS), rest.k3 <= AGREES)


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
    return Explained(round(share, DIGITS), round(error, DIGITS), (k3 - removed) / max(tokens, 1) <= AGREES)
