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

from slime_ext.analysis.diagnosis import Diagnosis
from slime_ext.analysis.findings.detector import Detected, detector, nats, share, tokens
from slime_ext.analysis.findings.log_probs import SPOILT

FEWEST = 300  # tokens
EXPLAINED = 0.35  # share of the variance of l that the probability explains under a temperature
LOWEST, HIGHEST = 0.2, 5.0  # temperatures; noise looks like one of 0, a few odd tokens like one far off
LIKELY = 2  # bins of probability, above 0.56
LEANS = 0.5  # |mean l| over mean |l| where 3/4 of |l| has one sign
SURE = 6.0  # standard errors
# The same where it is known that temperatures differ: the sign alone tells of which kind.
DECIDED = 3.0
SMALL = 0.01  # nats, mean |l| that arithmetic alone may make
EVEN = 0.3  # of top-p: most that the largest 1% of l^2 may hold
# Mean l over log m. Beyond the first, something else is off too, such as the temperature; beyond the second,
# ratios spread so far that their mean is below 1 only because the large ones are rare.
ALONE, WHOLLY = 1.1, 2.0
APART = 0.05  # of the entropy
ALONE_TOKENS = 30  # kept sets of one token
OUTSIDE, ZEROS = 1e-3, 0.9  # share of tokens outside their set; of log-probs of 0 at sets of one token


def _entropies(d: Diagnosis) -> str:
    lacks = d.statistics.means["surprise"].count < FEWEST
    return f"the trainer's entropy at {FEWEST} tokens (slime: --use-rollout-entropy)" if lacks else ""


def _kept_sets(d: Diagnosis) -> str:
    if d.statistics.counts["alone"] >= ALONE_TOKENS:
        return ""
    return (
        "the sets that top-p, top-k or min-p left (slime: rollout_top_p_token_ids, written with "
        "--rollout-top-p below 1); where sampling is truncated and log-probs are those of the whole "
        "distribution, nobody can see it without them"
    )


@detector(
    "error",
    after=SPOILT,
    needs=_kept_sets,
    threshold="0.1% of the tokens outside their set; log-probs of 0 at 90% of the sets of one token",
    ruled_out="Other weights or rounding: renormalised to a set of one token, every policy has log-prob 0.",
)
def kept_mass(d: Diagnosis) -> Detected | None:
    """Finds sampled tokens outside the set that the engine kept, or a side whose log-probs are not
    renormalised to it.

    Over a kept set K of mass m = sum_K p the log-prob is log p - log m. The mass is in no dump, but where K
    is one token it equals p, and the log-prob of a side that renormalises is 0.
    """
    counts = d.statistics.counts
    known, alone = counts["known"], counts["alone"]
    if counts["outside"] > OUTSIDE * known:
        return Detected(
            title="Sampled tokens lie outside the set that the engine says it sampled from.",
            evidence=f"{counts['outside']} of {known} tokens ({share(counts['outside'], known)}).",
            fix=(
                "The kept sets belong to other positions: check how rollout_top_p_token_ids and _offsets "
                "are joined over turns and continued responses."
            ),
        )
    sides = [
        s
        for s, name in (("sampler", "alone_sampler"), ("trainer", "alone_trainer"))
        if counts[name] < ZEROS * alone
    ]
    if not sides:
        return None
    zeros = ", ".join(f"{share(counts[f'alone_{s}'], alone)} of the {s}'s" for s in ("sampler", "trainer"))
    both = len(sides) == 2
    return Detected(
        title=(
            "Sampling is truncated, and neither side's log-probs are those of what was sampled from."
            if both
            else f"The {sides[0]}'s log-probs are not renormalised to what top-p left, the other side's are."
        ),
        evidence=(
            f"At {alone} positions the kept set is one token, whose log-prob is then 0: {zeros} are. The "
            f"mean ratio over all {known} kept sets is {counts['mass'] / known:.3f}, the mass that was "
            "kept."
        ),
        fix=(
            "Replay the kept sets in the trainer (slime hands them on where --rollout-top-p is below 1), "
            "and have the engine return processed log-probs; or sample with --rollout-top-p 1 "
            "--rollout-top-k -1."
        ),
    )


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


def _is_scaled(d: Diagnosis) -> bool:
    """Whether the log-ratios are as between two temperatures."""
    if (d.sums.mean("absolute") or 0.0) < SMALL:
        return False
    temperature, leaning = implied_temperature(d), _leaning(d)
    if by_probability(d) < EXPLAINED or not LOWEST <= temperature <= HIGHEST:
        return False
    return leaning is None or math.copysign(leaning, leaning * (temperature - 1)) >= LEANS


@detector(
    "error",
    after=(*SPOILT, kept_mass),
    needs=tokens(FEWEST),
    threshold="a mean ratio below 1 by 6 standard errors with a mean log-ratio that fits it",
    ruled_out="Other weights: the mean ratio over what a policy sampled is 1 whatever the trainer's weights.",
)
def truncated_sampling(d: Diagnosis) -> Detected | None:
    """Finds a mean ratio significantly below 1 and a mean log-ratio that fits it: probabilities
    renormalised to a part of the vocabulary."""
    mean, above_1 = d.sums.mean("log_ratio"), d.statistics.means["ratio_minus_one"]
    if mean > -SMALL:
        return None
    if above_1.z > -SURE or d.statistics.top_share > EVEN or mean < WHOLLY * math.log1p(above_1.value):
        return None
    return Detected(
        title="The sampler's log-probs are renormalised to the tokens that top-p or top-k left.",
        evidence=(
            f"{share(d.statistics.counts['below'], d.sums['finite'])} of the tokens are less likely for "
            f"the trainer, {share(d.statistics.counts['above'], d.sums['finite'])} more. The mean ratio is "
            f"{1 + above_1.value:.4f} ± {above_1.error:.1g} instead of 1: the probability mass that was "
            f"sampled from.{_besides(mean, math.log1p(above_1.value))}"
        ),
        fix=(
            "Sample with --rollout-top-p 1 --rollout-top-k -1, or replay the sampling mask in the trainer "
            "(slime: rollout_top_p_token_ids). Min-p does the same."
        ),
    )


def _besides(mean: float, expected: float) -> str:
    if mean > ALONE * expected:
        return ""
    return (
        f" That alone would make a mean log-ratio of {nats(expected)}; it is {nats(mean)}: the "
        "temperatures differ besides. Compare them too (--rollout-temperature, generation_config.json)."
    )


@detector(
    "error",
    after=(*SPOILT, kept_mass, truncated_sampling),
    needs=tokens(FEWEST),
    threshold=(
        "mean ratio above 1 and mean log-ratio above 0 by 3 standard errors, 35% of the variance by "
        "probability"
    ),
    ruled_out="Staleness or rounding: over what the recorded policy sampled neither can be above.",
)
def before_temperature(d: Diagnosis) -> Detected | None:
    """Finds log-ratios that are a function of the probability and whose means, and those of the ratio, are
    above what sampling allows."""
    log_ratio, above_1 = d.statistics.means["log_ratio"], d.statistics.means["ratio_minus_one"]
    if not _is_scaled(d) or min(log_ratio.z, above_1.z) < DECIDED:
        return None
    return Detected(
        title="The sampler's log-probs are from before the temperature (or another processor) was applied.",
        evidence=(
            "The recorded policy is not the one that sampled: its mean log-ratio is "
            f"+{nats(log_ratio.value)}, its mean ratio {1 + above_1.value:.3f} ± {above_1.error:.1g}; "
            f"sampled from, they would be below 0 and 1. {share(by_probability(d), 1)} of the variance of "
            "the log-ratio follows from the probability."
        ),
        fix=(
            "Have the engine return log-probs after temperature (SGLang: do not set "
            "SGLANG_RETURN_ORIGINAL_LOGPROB; vLLM: logprobs_mode=processed_logprobs)."
        ),
    )


@detector(
    "error",
    after=(*SPOILT, kept_mass, truncated_sampling, before_temperature),
    needs=tokens(FEWEST),
    threshold="35% of the variance of the log-ratio explained by the probability, one sign at likely tokens",
    ruled_out="Rounding and staleness have no preferred sign at likely tokens.",
)
def temperature(d: Diagnosis) -> Detected | None:
    """Finds log-ratios that are a function of the probability, with the means that sampling gives."""
    if not _is_scaled(d):
        return None
    scale = implied_temperature(d)
    sharper = "lower" if scale < 1 else "higher"
    return Detected(
        title=f"The sampler runs at a {sharper} temperature than the trainer scores with.",
        evidence=(
            f"{share(by_probability(d), 1)} of the variance of the log-ratio follows from the probability "
            f"of the token alone, as at about {scale:.2g} times the trainer's temperature. Mean "
            f"|log-ratio| {nats(d.sums.mean('absolute'))}."
        ),
        fix=(
            "Use one temperature for both: the trainer divides its logits by --rollout-temperature; a "
            "temperature in sampling_params of a custom generate function, or in the model's "
            "generation_config.json, reaches the sampler alone."
        ),
    )


@detector(
    "error",
    after=(*SPOILT, kept_mass, truncated_sampling, before_temperature, temperature),
    needs=_entropies,
    threshold="6 standard errors and 5% of the entropy",
    ruled_out="Chance: tokens are drawn with exactly the recorded entropy on average.",
)
def unlike_entropy(d: Diagnosis) -> Detected | None:
    """Finds a mean -log-prob of the sampled tokens that is not the entropy: another policy drew them."""
    surprise = d.statistics.means["surprise"]
    entropy = -(d.sums.mean("behavior") or 0.0) - surprise.value
    if abs(surprise.z) < SURE or abs(surprise.value) < APART * entropy:
        return None
    side, word = ("narrower", "likelier") if surprise.value < 0 else ("wider", "less likely")
    return Detected(
        title=f"The sampler draws from a {side} distribution than the one it records.",
        evidence=(
            f"Sampled tokens are {word} than the recorded policy says: mean -log-prob "
            f"{nats(entropy + surprise.value)}, entropy {nats(entropy)} ({abs(surprise.z):.0f} standard "
            "errors apart)."
        ),
        fix=(
            "A temperature, top-p, top-k or min-p acts on sampling, and neither the recorded log-probs "
            "nor the trainer know of it: no ratio can show or correct it. Compare the request's "
            "sampling_params with the trainer's --rollout-temperature."
        ),
    )


OTHER_POLICY = (kept_mass, truncated_sampling, before_temperature, temperature)
DETECTORS = (*OTHER_POLICY, unlike_entropy)
