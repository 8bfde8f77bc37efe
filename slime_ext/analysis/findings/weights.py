"""The engine's weights are not the trainer's: old ones, wrong ones after a resume, an old KV cache."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise, takewhile
from statistics import median
from typing import NamedTuple

from slime_ext.analysis.detector_statistics import RolloutSummary
from slime_ext.analysis.diagnosis import Diagnosis
from slime_ext.analysis.findings.detector import FEW, Detected, detector, factor, nats
from slime_ext.analysis.findings.log_probs import SPOILT
from slime_ext.analysis.findings.push import PUSHES
from slime_ext.analysis.findings.sampling import OTHER_POLICY
from slime_ext.analysis.findings.turns import prefix_mismatch
from slime_ext.analysis.versions import VersionSums

BEFORE = (*SPOILT, *OTHER_POLICY, prefix_mismatch)
FEWEST = 100  # tokens on each side
MATTERS = 1e-3  # nats of k3 that old weights must make
TIMES = 3.0  # as much as fresh ones
FIRST_TIMES, FIRST_MATTERS = 8.0, 5e-3
CACHE_TIMES, CACHE_MATTERS = 3.0, 2e-4  # of k3


class VersionMeans(NamedTuple):
    """Number of tokens, mean |l| and mean k3 over some versions of the weights."""

    count: int
    absolute: float
    k3: float

    @classmethod
    def of(cls, versions: list[VersionSums]) -> VersionMeans:
        count = sum(v.count for v in versions)
        return cls(count, *(sum(getattr(v, k) for v in versions) / max(count, 1) for k in ("absolute", "k3")))


def fresh_and_stale(versions: list[VersionSums]) -> tuple[list[VersionSums], list[VersionSums]]:
    """The sums over tokens of fresh weights and those over all others. Weights are fresh in the first
    rollout that they sampled, if they are its newest and not known to be old."""
    first: dict[int, int] = {}
    newest: dict[int, int] = {}
    for v in versions:
        first[v.version] = min(first.get(v.version, v.rollout_id), v.rollout_id)
        newest[v.rollout_id] = max(newest.get(v.rollout_id, v.version), v.version)
    fresh = [
        c for c in versions if (first[c.version], newest[c.rollout_id], 0) == (c.rollout_id, c.version, c.age)
    ]
    chosen = set(fresh)
    return fresh, [c for c in versions if c not in chosen]


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
    """Rollouts of which most tokens are known to come from old weights."""
    tokens: Counter[int] = Counter()
    for v in versions:
        tokens[v.rollout_id] += v.count if v.age > 0 else -v.count
    return {rollout_id for rollout_id, more in tokens.items() if more > 0}


def _four_rollouts(d: Diagnosis) -> str:
    enough = sum(s.tokens >= FEWEST for s in d.statistics.rollouts) >= 4
    return "" if enough else f"4 rollouts of {FEWEST} tokens"


def _ages_or_start(d: Diagnosis) -> str:
    fresh, stale = map(VersionMeans.of, fresh_and_stale(d.statistics.versions))
    if fresh.count + stale.count >= FEWEST:
        return ""
    starts = len(d.statistics.rollouts) >= 3 and d.statistics.rollouts[0].rollout_id == 0
    return "" if starts else "weight versions of the samples, or rollouts 0 to 2 of the run"


def _switches(d: Diagnosis) -> str:
    enough = min(d.statistics.switched[:, 0].tolist()) >= FEWEST
    return "" if enough else "weight versions by token, and a weight update inside responses"


@detector(
    "error",
    after=BEFORE,
    needs=_four_rollouts,
    threshold="k3 of the first rollouts 8 times that of the others, and 5e-3 nats",
    ruled_out=(
        "Staleness: most tokens of these rollouts are not known to be of older weights; numerics: the "
        "same engine agrees later."
    ),
)
def resumed_wrong_weights(d: Diagnosis) -> Detected | None:
    """Finds that k3 of the first rollouts is a multiple of that of the others."""
    rollouts = [s for s in d.statistics.rollouts if s.tokens >= FEWEST]
    bad, rest = _first_off(rollouts)
    if not bad or _aged(d.statistics.versions).issuperset(s.rollout_id for s in bad):
        return None
    worst, names = max(s.k3 for s in bad), ", ".join(str(s.rollout_id) for s in bad)
    times = factor(worst / rest) if rest else "infinitely many times"
    return Detected(
        title="The first rollouts after a start were sampled from other weights than the trainer's.",
        evidence=f"k3 {nats(worst)} in rollout {names}, {nats(rest)} in the others: {times} as much.",
        fix=(
            "After --load the engine still had the weights of --hf-checkpoint: push the trainer's weights "
            "before the first rollout, and check that --ref-load and --load name the checkpoint that is "
            "meant."
        ),
        rollouts=tuple(s.rollout_id for s in bad),
    )


@detector(
    "warning",
    after=(*BEFORE, *PUSHES, resumed_wrong_weights),
    needs=_ages_or_start,
    threshold="k3 of older weights 3 times that of fresh ones (or 6 times that of rollout 0), and 1e-3 nats",
    ruled_out=(
        "Numerics: fresh weights go through the same arithmetic, and their k3 is the one it is compared with."
    ),
)
def stale_weights(d: Diagnosis) -> Detected | None:
    """Finds that k3 of tokens of older weights is a multiple of that of fresh ones or of rollout 0, or
    that no weights are fresh."""
    fresh_sums, stale_sums = fresh_and_stale(d.statistics.versions)
    fresh, stale = VersionMeans.of(fresh_sums), VersionMeans.of(stale_sums)
    if min(fresh.count, stale.count) >= FEWEST and stale.k3 >= max(MATTERS, TIMES * fresh.k3):
        worst = max(
            (c for c in stale_sums if c.count >= FEWEST // 4), key=lambda c: c.k3 / c.count, default=None
        )
        at = (
            f", {nats(worst.k3 / worst.count)} in rollout {worst.rollout_id} (version {worst.version})"
            if worst
            else ""
        )
        return _stale(
            f"Tokens of weights that the trainer has moved on from: k3 {nats(stale.k3)}{at}; of fresh "
            f"weights {nats(fresh.k3)}.",
            tuple(sorted({c.rollout_id for c in stale_sums})),
        )
    return (_all_aged(stale_sums) if fresh.count < FEWEST else None) or _lagging(d)


def _all_aged(versions: list[VersionSums]) -> Detected | None:
    """The finding where no weights are fresh to compare with, but the dumps say how old they are."""
    aged = [c for c in versions if c.age > 0]
    found = VersionMeans.of(aged)
    if found.count < FEWEST or found.k3 < MATTERS:
        return None
    ages = f"{min(c.age for c in aged):g} to {max(c.age for c in aged):g}"
    return _stale(
        f"The weights are {ages} versions behind the trainer's: k3 {nats(found.k3)}. No token is of fresh "
        "weights to compare with: how much of it is numerics cannot be told.",
        tuple(sorted({c.rollout_id for c in aged})),
    )


def _lagging(d: Diagnosis) -> Detected | None:
    """The finding where weights lag from the start: the first rollout of a run has none of it yet."""
    rollouts = d.statistics.rollouts
    if len(rollouts) < 3 or rollouts[0].rollout_id != 0 or min(s.tokens for s in rollouts) < FEWEST:
        return None
    later = median(s.k3 for s in rollouts[1:])
    if later < max(MATTERS, 2 * TIMES * rollouts[0].k3):
        return None
    return _stale(
        f"k3 is {nats(rollouts[0].k3)} in rollout 0, where sampler and trainer have the same weights, and "
        f"{nats(later)} after it (median).",
        tuple(s.rollout_id for s in rollouts[1:]),
    )


def _stale(evidence: str, rollouts: tuple[int, ...]) -> Detected:
    return Detected(
        title="Responses come from older weights than the ones they train.",
        evidence=evidence,
        fix=(
            "Push weights more often (--update-weights-interval), bound the lag of an asynchronous run, "
            "reject old tokens (reject: {max_staleness: ...}) or correct for it: see what each correction "
            "would do. If no lag was meant, look whether the engine confirms its weight updates."
        ),
        rollouts=rollouts,
    )


@detector(
    "error",
    after=SPOILT,
    needs=_switches,
    threshold="k3 behind an update 3 times that of the same weights elsewhere, and 2e-4 nats",
    ruled_out="Stale weights: both sides of the comparison are of the same version.",
)
def stale_cache(d: Diagnosis) -> Detected | None:
    """Finds that k3 behind a weight update inside a response is a multiple of that of the same weights
    elsewhere."""
    (count, *_, after), (count_pure, *_, pure) = d.statistics.switched.tolist()
    k3_after, k3_pure = after / count, pure / count_pure
    if k3_after < max(CACHE_MATTERS, CACHE_TIMES * k3_pure):
        return None
    return Detected(
        title="After a weight update inside a response, the engine goes on with the KV cache of before.",
        evidence=(
            f"k3 {nats(k3_after)} at tokens behind an update inside their response, {nats(k3_pure)} at "
            "tokens of the same weights in responses without one: "
            f"{factor(k3_after / max(k3_pure, 1e-12))}."
        ),
        fix=(
            "Flush the cache when weights change and let running requests be prefilled again (SGLang: "
            "flush_cache, or abort and resume with the tokens so far)."
        ),
    )


DETECTORS = (*PUSHES, resumed_wrong_weights, stale_weights, stale_cache)
