"""The sampler draws from another distribution than the one whose log-probs are compared.

What tells the cases apart is exact. If q is the distribution that was drawn from and recorded, the mean of
the ratio p / q over its tokens is 1 and the mean log-ratio is below 0 (Gibbs), whatever p is. A temperature
between the two keeps both. Recording another distribution than was drawn from (before temperature) breaks
both. Top-p and top-k leave p mass outside what was drawn from: the mean ratio is the mass that is left, m. If
that is all, the ratio is m in every context and the mean log-ratio is log m; a temperature besides takes it
further down.
"""

from __future__ import annotations

import math

from slime_ext.tools.analysis.findings.ages import UNTOLD, Lag, lag
from slime_ext.tools.analysis.findings.detector import Figures, need, need_tokens
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

FEWEST = 300  # tokens
EXPLAINED = 0.35  # share of the variance of l that the probability explains under a temperature
LOWEST, HIGHEST = 0.2, 5.0  # temperatures; noise looks like one of 0, a few odd tokens like one far off
LIKELY = 2  # bins of probability, above 0.56
RISES = 10.0  # times mean |l| of an earlier rollout: what acts on every token alike does not begin later
LEANS = 0.5  # |mean l| over mean |l| where 3/4 of |l| has one sign
SURE = 6.0  # standard errors
# The same where it is known that temperatures differ: the sign alone tells of which kind.
DECIDED = 3.0
SMALL = 0.01  # nats, mean |l| that arithmetic alone may make
EVEN = 0.3  # of top-p: most that the largest 1% of l^2 may hold
# Mean l over log m. Beyond the first, something else is off too, such as the temperature; beyond the second,
# ratios spread so far that their mean is below 1 only because the large ones are rare.
ALONE, WHOLLY = 1.1, 2.0
KEPT = (
    "what sampling left: sample a rollout with --rollout-top-p 1 --rollout-top-k -1, or record the kept sets"
)
APART = 0.05  # of the entropy
BEYOND = 2.0  # times mean |l|
ALONE_TOKENS = 30  # kept sets of one token
OUTSIDE, ZEROS = 1e-3, 0.9  # share of tokens outside their set; of log-probs of 0 at sets of one token


def kept_mass(d: Diagnosis) -> Figures | None:
    """Finds sampled tokens outside the set that the engine kept, or a side whose log-probs are not
    renormalised to it.

    Over a kept set K of mass m = sum_K p the log-prob is log p - log m. The mass is in no dump, but where K
    is one token it equals p, and the log-prob of a side that renormalises is 0.
    """
    counts = d.statistics.counts
    known, alone, outside = counts["known"], counts["alone"], counts["outside"]
    lacks = (
        "the sets that top-p, top-k or min-p left (slime: rollout_top_p_token_ids, written with "
        "--rollout-top-p below 1); where sampling is truncated and log-probs are those of the whole "
        "distribution, nobody can see it without them"
    )
    need(alone >= ALONE_TOKENS, lacks)
    if outside > OUTSIDE * known:
        return {"outside": outside, "known": known}
    zeros = {side: counts[f"alone_{side}"] for side in ("sampler", "trainer")}
    sides = [side for side, count in zeros.items() if count < ZEROS * alone]
    if not sides:
        return None
    mass = counts["mass"] / known
    return {"outside": 0, "sides": sides, "alone": alone, "known": known, "mass": mass, **zeros}


def by_probability(d: Diagnosis) -> float:
    """Share of the variance of the log-ratio that the behavior probability explains (correlation ratio)."""
    count, sums = d.curves.column("probability", "count"), d.curves.column("probability", "log_ratio")
    total, n = float(d.curves.column("probability", "squared").sum()), float(count.sum())
    if not n:
        return 0.0
    mean = float(sums.sum()) / n
    between = float((sums.square() / count.clamp_min(1)).sum()) - n * mean**2
    within = total - n * mean**2
    return between / within if within > 0 else 0.0


def implied_temperature(d: Diagnosis) -> float:
    """Sampling temperature over the trainer's, to first order: 1 + Var(l) / Cov(l, log q).

    At a temperature T, l = (T - 1) (log q + H) - KL with H the entropy of the context. H is the mean of
    -log q in it, so Cov(l, log q) = (T - 1) Var(log q + H) and Var(l) = (T - 1)^2 Var(log q + H), however
    much the entropies of contexts differ. Noise of the sampler's logits makes the tokens likelier that it
    favours: Cov(l, log q) = -Var(l), a temperature of 0.
    """
    count, x, y = (d.curves.column("probability", c) for c in ("count", "x", "log_ratio"))
    held = count > 0
    n = count[held]
    x, y = (x[held] / n).clamp_min(1e-30).log(), y[held] / n
    x_mean, y_mean = (n * x).sum() / n.sum(), (n * y).sum() / n.sum()
    covariance = float((n * (x - x_mean) * (y - y_mean)).sum())
    variance = float(d.curves.column("probability", "squared").sum() - n.sum() * y_mean.square())
    return 1 + variance / covariance if covariance else math.inf


def _leaning(d: Diagnosis) -> float | None:
    """Mean l over mean |l| of likely tokens. Between two temperatures it has one sign there, as log q + H
    > 0."""
    log_ratio, absolute = (
        float(d.curves.column("probability", c)[:LIKELY].sum()) for c in ("log_ratio", "absolute")
    )
    return log_ratio / absolute if absolute else None


def is_scaled(d: Diagnosis) -> bool:
    """Whether the log-ratios are as between two temperatures."""
    if (d.sums.mean("absolute") or 0.0) < SMALL or _began_later(d):
        return False
    temperature, leaning = implied_temperature(d), _leaning(d)
    if by_probability(d) < EXPLAINED or not LOWEST <= temperature <= HIGHEST:
        return False
    return leaning is None or math.copysign(leaning, leaning * (temperature - 1)) >= LEANS


def _began_later(d: Diagnosis) -> bool:
    """Whether a rollout as far off as the run is on average has an earlier one that was hardly off: as where
    weights lag, whose pushes take the distance away."""
    lowest, mean = math.inf, d.sums.mean("absolute") or 0.0
    for rollout in sorted(d.statistics.rollouts):
        if rollout.tokens >= FEWEST:
            if rollout.absolute >= max(mean, RISES * lowest):
                return True
            lowest = min(lowest, rollout.absolute)
    return False


def truncated_sampling(d: Diagnosis) -> Figures | None:
    """Finds a mean ratio significantly below 1 and a mean log-ratio that fits it: probabilities
    renormalised to a part of the vocabulary."""
    need_tokens(d, FEWEST)
    mean, above_1, counts = (
        d.sums.mean("log_ratio"),
        d.statistics.means["ratio_minus_one"],
        d.statistics.counts,
    )
    if mean > -SMALL or above_1.z > -SURE or d.statistics.top_share > EVEN or above_1.value <= -1:
        return None  # a mean ratio of 0: no truncation leaves nothing
    expected = math.log1p(above_1.value)
    if mean < WHOLLY * expected:
        return None
    is_more = mean <= ALONE * expected
    others = {"or_else": ("temperature",), "untold": KEPT} if is_more and is_scaled(d) else {}
    return others | {
        "below": counts["below"],
        "above": counts["above"],
        "count": d.sums["finite"],
        "ratio": 1 + above_1.value,
        "error": above_1.error,
        "is_more": is_more,
        "mean": mean,
        "expected": expected,
    }


def before_temperature(d: Diagnosis) -> Figures | None:
    """Finds log-ratios that are a function of the probability and whose means, and those of the ratio, are
    above what sampling allows."""
    need_tokens(d, FEWEST)
    log_ratio, above_1 = d.statistics.means["log_ratio"], d.statistics.means["ratio_minus_one"]
    if not is_scaled(d) or min(log_ratio.z, above_1.z) < DECIDED:
        return None
    ratio, explained = 1 + above_1.value, by_probability(d)
    return {"mean": log_ratio.value, "ratio": ratio, "error": above_1.error, "explained": explained}


def temperature(d: Diagnosis) -> Figures | None:
    """Finds log-ratios that are a function of the probability, with the means that sampling gives. Old
    weights look so too: they are looked at first."""
    need_tokens(d, FEWEST)
    if not is_scaled(d) or (why := lag(d)) is Lag.EXPLAINS:
        return None
    absolute = d.sums.mean("absolute")
    found = {"scale": implied_temperature(d), "explained": by_probability(d), "absolute": absolute}
    return found if why is Lag.RULED_OUT else found | {"or_else": ("stale_weights",), "untold": UNTOLD}


def unlike_entropy(d: Diagnosis) -> Figures | None:
    """Finds a mean -log-prob of the sampled tokens that is not the entropy: another policy drew them."""
    surprise = d.statistics.means["surprise"]
    lacks = f"the trainer's entropy at {FEWEST} tokens (slime: --use-rollout-entropy)"
    need(surprise.count >= FEWEST, lacks)
    entropy = -(d.sums.mean("behavior") or 0.0) - surprise.value
    # The entropy is the trainer's: where the policies differ, so may their entropies.
    least = max(APART * entropy, BEYOND * (d.sums.mean("absolute") or 0.0))
    if abs(surprise.z) < SURE or abs(surprise.value) < least:
        return None
    return {"surprise": surprise.value, "entropy": entropy, "z": surprise.z}
