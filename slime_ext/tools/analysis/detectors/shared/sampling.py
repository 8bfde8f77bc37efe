"""Tests whether the sampler draws from another distribution than the compared log-probs describe.

The tests are exact. If tokens are drawn from q and q is recorded, the mean of the ratio p / q is 1, and the
mean log-ratio is below 0 (Gibbs), for any p. This holds between two temperatures as well. If another
distribution than q is recorded (from before the temperature), neither holds. Top-p and top-k leave some mass
of p outside the kept set, so the mean ratio is the mass m that is kept. If nothing else differs, the ratio is
m in every context and the mean log-ratio is log m; if temperatures also differ, it is lower.
"""

from __future__ import annotations

import math

from slime_ext.tools.analysis.detectors.shared.detector import Margin
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

FEWEST = 300  # tokens
EXPLAINED = 0.35  # share of the variance of l that the probability explains, if temperatures differ
LOWEST, HIGHEST = 0.2, 5.0  # temperatures; noise looks like 0, a few odd tokens like an extreme one
LIKELY = 2  # bins of probability above 0.56
RISES = 10.0  # times mean |l| of an earlier rollout; a temperature acts from the first rollout on
LEANS = 0.5  # |mean l| over mean |l|; 3/4 of |l| then has one sign
SURE = 6.0  # standard errors
SMALL = 0.01  # nats, mean |l| that rounding alone may make


def by_probability(d: Diagnosis) -> float:
    """Returns the share of the variance of l that the behavior probability explains (correlation ratio)."""
    curve = d.curves.probability
    count, sums = curve.count, curve.log_ratio
    total, n = float(curve.squared.sum()), float(count.sum())
    if not n:
        return 0.0
    mean = float(sums.sum()) / n
    between = float((sums.square() / count.clamp_min(1)).sum()) - n * mean**2
    within = total - n * mean**2
    return between / within if within > 0 else 0.0


def margin(d: Diagnosis) -> Margin:
    """Returns the share of ``by_probability``, with the error of a squared correlation, and its limit."""
    share = by_probability(d)
    return Margin(share, 2 * math.sqrt(share) * (1 - share) / math.sqrt(max(d.sums.finite, 1)), EXPLAINED)


def implied_temperature(d: Diagnosis) -> float:
    """Returns the sampler's temperature over the trainer's, to first order: 1 + Var(l) / Cov(l, log q).

    At a temperature T, l = (T - 1) (log q + H) - KL, where H is the entropy of the context. H is the mean of
    -log q there, so Cov(l, log q) = (T - 1) Var(log q + H) and Var(l) = (T - 1)^2 Var(log q + H), even if the
    entropies of contexts differ. Noise in the sampler's logits makes the drawn tokens likelier for it:
    Cov(l, log q) = -Var(l), which looks like a temperature of 0.
    """
    curve = d.curves.probability
    count, x, y = curve.count, curve.x, curve.log_ratio
    held = count > 0
    n = count[held]
    x, y = (x[held] / n).clamp_min(1e-30).log(), y[held] / n
    x_mean, y_mean = (n * x).sum() / n.sum(), (n * y).sum() / n.sum()
    covariance = float((n * (x - x_mean) * (y - y_mean)).sum())
    variance = float(curve.squared.sum() - n.sum() * y_mean.square())
    return 1 + variance / covariance if covariance else math.inf


def _leaning(d: Diagnosis) -> float | None:
    """Returns mean l over mean |l| of likely tokens; None without such tokens.

    Between two temperatures l has one sign there, because log q + H > 0.
    """
    curve = d.curves.probability
    log_ratio, absolute = float(curve.log_ratio[:LIKELY].sum()), float(curve.absolute[:LIKELY].sum())
    return log_ratio / absolute if absolute else None


def is_scaled(d: Diagnosis) -> bool:
    """Returns whether the log-ratios look as if the temperatures differed."""
    if (d.sums.mean_absolute or 0.0) < SMALL or began_later(d):
        return False
    temperature, leaning = implied_temperature(d), _leaning(d)
    if by_probability(d) < EXPLAINED or not LOWEST <= temperature <= HIGHEST:
        return False
    return leaning is None or math.copysign(leaning, leaning * (temperature - 1)) >= LEANS


def began_later(d: Diagnosis, fewest: int = FEWEST) -> bool:
    """Returns whether a far rollout comes after a rollout that was hardly off.

    This happens if weights lag, because pushes remove the distance. A setting of the sampler or of its cache
    acts from the first rollout on.

    Args:
        fewest: tokens that a rollout needs.
    """
    lowest, mean = math.inf, d.sums.mean_absolute or 0.0
    for rollout in sorted(d.rollouts):
        if rollout.tokens >= fewest:
            if rollout.absolute >= max(mean, RISES * lowest):
                return True
            lowest = min(lowest, rollout.absolute)
    return False
