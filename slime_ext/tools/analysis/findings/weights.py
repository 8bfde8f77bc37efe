"""The engine's weights are not the trainer's: old ones, wrong ones after a resume, an old KV cache."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise, takewhile
from statistics import median

from slime_ext.core.metrics.names import HEALTHY
from slime_ext.tools.analysis.findings.ages import UNTOLD, fresh_and_stale
from slime_ext.tools.analysis.findings.detector import FEW, Figures, need
from slime_ext.tools.analysis.findings.sampling import is_scaled
from slime_ext.tools.analysis.measures.detector_statistics import RolloutSummary
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.versions import VersionMeans, VersionSums

FEWEST = 100  # tokens on each side
MATTERS = 2e-3  # nats of k3 that old weights must make; a lag of one rollout that does no harm makes 1.5e-3
ALONE_MATTERS = 5e-3  # the same where no fresh ones are there to compare with; bfloat16 alone makes 1e-3
TIMES = 3.0  # as much as fresh ones
FIRST_TIMES, FIRST_MATTERS = 6.0, 5e-3
NOISY = 0.05  # nats, mean |l| that two engines in bfloat16 stay below
PUSHED = (
    "whether what is pushed is what the trainer has: record ref_log_probs (slime: --use-kl-loss with "
    "coefficient 0), or push before rollout 1 and compare a checksum"
)
CACHE_TIMES, CACHE_MATTERS = 3.0, 2e-4  # of k3


def _first_off(rollouts: list[RolloutSummary]) -> tuple[list[RolloutSummary], float]:
    """The first rollouts of the run, or after its weight versions began anew, in which the policies are far
    apart, at most a third of all, and the median k3 of the rest."""
    rest = median(s.k3 for s in rollouts[len(rollouts) // 3 :])
    limit = max(FIRST_MATTERS, FIRST_TIMES * rest)
    begins = [0, *(i for i, (a, b) in enumerate(pairwise(rollouts), 1) if 0 <= b.version < a.version)]
    bad = [s for begin in begins for s in takewhile(lambda s: s.k3 >= limit, rollouts[begin:])]
    is_few = len(bad) <= max(1, len(rollouts) // 3)
    return (bad if is_few and any(s.top_share < FEW for s in bad) else []), rest


def _aged(versions: list[VersionSums]) -> set[int]:
    tokens: Counter[int] = Counter()
    for v in versions:
        tokens[v.rollout_id] += v.count if v.age > 0 else -v.count
    return {rollout_id for rollout_id, more in tokens.items() if more > 0}


def resumed_wrong_weights(d: Diagnosis) -> Figures | None:
    """Finds that k3 of the first rollouts is a multiple of that of the others."""
    rollouts = [s for s in d.statistics.rollouts if s.tokens >= FEWEST]
    need(len(rollouts) >= 4, f"4 rollouts of {FEWEST} tokens")
    bad, rest = _first_off(rollouts)
    if not bad or _aged(d.statistics.versions).issuperset(s.rollout_id for s in bad):
        return None
    found = {"worst": max(s.k3 for s in bad), "rest": rest, "rollouts": tuple(s.rollout_id for s in bad)}
    if all(_is_start(s, rollouts) for s in bad[:1]):
        return found
    return found | {"or_else": ("stale_weights",), "untold": UNTOLD}


def _is_start(rollout: RolloutSummary, rollouts: list[RolloutSummary]) -> bool:
    """Whether the run or its engine started with a rollout, and not only the part of the run that is looked
    at."""
    return rollout.rollout_id == 0 or rollout is not rollouts[0]


def stale_weights(d: Diagnosis) -> Figures | None:
    """Finds that k3 of tokens of older weights is a multiple of that of fresh ones or of rollout 0, or
    that no weights are fresh. A note where nothing else can be the cause and k3 of all tokens is healthy: an
    asynchronous run lags."""
    found, all_tokens = _old_weights(d), d.sums.mean("k3") or 0.0
    if found is None or "or_else" in found or all_tokens > (HEALTHY["k3_kl"][1] or 0.0):
        return found
    return {**found, "all_tokens": all_tokens, "severity": "note"}


def _old_weights(d: Diagnosis) -> Figures | None:
    fresh_sums, stale_sums = fresh_and_stale(d.statistics.versions)
    fresh, stale = VersionMeans.of(fresh_sums), VersionMeans.of(stale_sums)
    starts = len(d.statistics.rollouts) >= 3 and d.statistics.rollouts[0].rollout_id == 0
    is_enough = fresh.count + stale.count >= FEWEST or starts
    need(is_enough, "weight versions of the samples, or rollouts 0 to 2 of the run")
    if min(fresh.count, stale.count) >= FEWEST and stale.k3 >= max(MATTERS, TIMES * fresh.k3):
        many = (c for c in stale_sums if c.count >= FEWEST // 4)
        worst = max(many, key=lambda c: c.k3 / c.count, default=None)
        return {"k3": stale.k3, "fresh": fresh.k3, "worst": worst, "rollouts": _ids(stale_sums)}
    alone = None
    if fresh.count < FEWEST:
        alone = _all_aged(stale_sums) or _held(stale_sums, d.statistics.rollouts)
    if alone and is_scaled(d):
        return {**alone, "or_else": ("temperature",), "untold": UNTOLD}
    return alone or _lagging(d.statistics.rollouts)


def _all_aged(versions: list[VersionSums]) -> Figures | None:
    aged = [c for c in versions if c.age > 0]
    found = VersionMeans.of(aged)
    if found.count < FEWEST or found.k3 < ALONE_MATTERS:
        return None
    ages = [c.age for c in aged]
    return {"k3": found.k3, "newest": min(ages), "oldest": max(ages), "rollouts": _ids(aged)}


def _held(old: list[VersionSums], rollouts: list[RolloutSummary]) -> Figures | None:
    """The finding where most tokens are of a version that had sampled an earlier rollout, and none is known
    to be fresh."""
    found = VersionMeans.of(old)
    if found.count < FEWEST or 2 * found.count < sum(s.tokens for s in rollouts) or found.k3 < ALONE_MATTERS:
        return None
    versions = sorted({v.version for v in old})
    return {"k3": found.k3, "held": versions, "rollouts": _ids(old)}


def _lagging(rollouts: list[RolloutSummary]) -> Figures | None:
    """The finding where weights lag from the start: the first rollout of a run has none of it yet."""
    if len(rollouts) < 3 or rollouts[0].rollout_id != 0 or min(s.tokens for s in rollouts) < FEWEST:
        return None
    first, later = rollouts[0].k3, median(s.k3 for s in rollouts[1:])
    if later < max(MATTERS, TIMES * first):
        return None
    found = {"k3": first, "later": later, "rollouts": tuple(s.rollout_id for s in rollouts[1:])}
    if rollouts[1].version <= rollouts[0].version or rollouts[0].version < 0:
        return found
    noise = ("quantised",) if rollouts[0].absolute >= NOISY else ()  # before any lag
    return found | {"or_else": ("growing_mismatch", "partial_push", *noise), "untold": PUSHED}


def _ids(versions: list[VersionSums]) -> tuple[int, ...]:
    return tuple(sorted({c.rollout_id for c in versions}))


def stale_cache(d: Diagnosis) -> Figures | None:
    """Finds that k3 behind a weight update inside a response is a multiple of that of the same weights
    elsewhere."""
    (count, *_, after), (count_pure, *_, pure) = d.statistics.switched.tolist()
    is_enough = min(count, count_pure) >= FEWEST
    need(is_enough, "weight versions by token, and a weight update inside responses")
    k3_after, k3_pure = after / count, pure / count_pure
    if k3_after < max(CACHE_MATTERS, CACHE_TIMES * k3_pure):
        return None
    return {"after": k3_after, "pure": k3_pure}
