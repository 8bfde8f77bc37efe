"""The finding ``stale_weights``."""

from __future__ import annotations

import math
from statistics import fmean, median

from slime_ext.tools.analysis.detectors.shared.ages import (
    CERTAIN,
    FEWEST,
    MATTERS,
    SURE,
    TIMES,
    UNTOLD,
    fresh_and_stale,
    older_are_far,
)
from slime_ext.tools.analysis.detectors.shared.along import rather_than_rollouts
from slime_ext.tools.analysis.detectors.shared.began import Began, began_by_k3, dated
from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, Untold, need
from slime_ext.tools.analysis.detectors.shared.explained import K3, explained, explained_by_tokens
from slime_ext.tools.analysis.detectors.shared.healthy import is_healthy
from slime_ext.tools.analysis.detectors.shared.kinds import side_by_side
from slime_ext.tools.analysis.detectors.shared.push import RISES, STILL
from slime_ext.tools.analysis.detectors.shared.sampling import is_scaled
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.rollouts import RolloutSummary, equally_certain, mean_k3
from slime_ext.tools.analysis.measures.versions import VersionMeans, VersionSums

DETECTOR = Detector(
    severity="warning",
    side="either",  # old and new weights differ also where both records are shifted
    after=(
        "other_run",
        "positive_log_probs",
        "retokenised",
        "greedy_sampling",
        "tool_tokens",
        "other_policy",
        "prefixes",
        "pushes",
        "resumed_wrong_weights",
        "parts",
        "experts",
        "mixed_policies",
    ),
    what="responses come from older weights; a note if the dump records it and only k3 is not healthy",
    asks="versions, or rollout 0",
    title="""
        {%- if or_else is defined %} k3 is {{ k3 | nats }} {%- if later is defined %} in rollout 0 and {{
        later | nats }} after it. {%- else %}, and no token is known to come from fresh weights. {%- endif
        %} {%- else %} {%- if is_guess is defined %} A guess: responses {%- else %} Responses {%- endif %}
        come from older weights than the ones that train on them. {%- endif %}
    """,
    evidence="""
        {% if oldest is defined -%} The weights are {{ "%g" | format(newest) }} to {{ "%g" |
        format(oldest) }} versions behind the trainer's, and k3 is {{ k3 | nats }}. No token comes from
        fresh weights, so nothing tells how much of it is numerics. {%- elif held is defined -%} Version
        {{ held | join(", ") }} sampled several rollouts, and k3 is {{ k3 | nats }} at tokens of weights
        that had sampled an earlier rollout. No token is known to come from fresh weights, so nothing
        tells how much of it is numerics or another fault. Rollout 0, or a rollout just after a push,
        would tell. {%- elif later is defined -%} k3 is {{ k3 | nats }} in rollout 0, where sampler and
        trainer have the same weights, and {{ later | nats }} after it.{{ dated }} {%- if or_else is not
        defined %} No weight version confirms this, and anything else that begins with training looks the
        same. {%- endif %} {%- else -%} k3 is {{ k3 | nats }} on tokens from old weights and {{ fresh |
        nats }} on tokens from current ones {%- if worst %} (worst: {{ (worst.k3 / worst.count) | nats }}
        in rollout {{ worst.rollout_id }}, version {{ worst.version }}){% endif %}. {%- endif %} {%- if
        all_tokens is defined %} Over all tokens it is {{ all_tokens | nats }}, and chi^2 and effective
        sample size are healthy.{% endif %}
    """,
    threshold="""
        k3 of older weights is 3 times that of fresh ones (or that of rollout 0), 1.5 times after
        subtracting 2 standard errors over samples, and 2e-3 nats; a note if chi^2 and effective sample
        size of all tokens are healthy, and the rest of k3 (k3 itself, if the dump records no lag)
    """,
    ruled_out="""
        {%- if oldest is defined or held is defined %} Nothing, because no token is known to come from
        fresh weights. {%- else %} Numerics, because fresh weights go through the same arithmetic, and
        their k3 is much smaller. {%- endif %}
    """,
    remedy="push weights more often, or bound the lag",
    fix="""
        {% if all_tokens is defined %}Nothing yet, if this lag is meant. What follows is for a lag that is
        not, and for numbers outside their healthy ranges. {% endif %}If rollouts share a push, push more
        often (--update-weights-interval). Otherwise bound the lag of an asynchronous run, reject old tokens
        (reject: {max_staleness: ...}), or correct for the lag: see what each correction would do. If no lag
        was meant, check whether the engine confirms its weight updates.
    """,
)

ALONE_MATTERS = 5e-3  # nats of k3 if no fresh weights can be compared; bfloat16 alone makes 1e-3
NOISY = 0.05  # nats, mean |l| that two engines in bfloat16 stay below
OTHER = 0.5  # nats, k3 of rollout 0 from which on its weights differ, so that it cannot be the start of a lag
RETURNS = 6.0  # times the k3 of a later rollout, after subtracting standard errors
# Rollouts since the onset; mean |l| of the later half of them over that of the first, from which it grows. A
# part that never arrives makes at least the root of 3, because the weights of three rollouts are missing, and
# a step makes 1. The limit is halfway between their logarithms, 0.27 from each. The median error of a rollout
# is 0.09 in the runs of benchmarks/faults.
AFTER, GROWS = 3, 3**0.25
SAMPLED = Untold("which weights sampled the far rollouts", "look at the log of the pushes before them")
PUSHED = Untold(
    "whether the pushed weights are those of the trainer",
    "record ref_log_probs (slime: --use-kl-loss with coefficient 0), or push before rollout 1 and compare a "
    "checksum",
)
ROUNDED = Untold(
    "whether the noise that rollout 0 has already grows by itself",
    "sample rollouts 0 to 2 without fp8 or int8 weights and KV cache",
)


def look(d: Diagnosis) -> Figures | None:
    """Finds that k3 of older weights is several times that of fresh ones.

    It also finds that no weights are fresh. It is a note if no other cause remains, the rest is healthy, and
    so are all numbers: an asynchronous run lags, and its k3 is what its ages make.
    """
    figures = _old_weights(d)
    if figures is None or "or_else" in figures:
        return figures
    has_fresh = "fresh" in figures or "later" in figures
    is_recorded = has_fresh and all(s.version >= 0 for s in d.rollouts)
    if not is_healthy(d, lags=is_recorded and figures["explains"].is_rest_healthy):
        return figures
    return {**figures, "all_tokens": d.sums.mean_k3 or 0.0, "severity": "note"}


def _old_weights(d: Diagnosis) -> Figures | None:
    fresh_sums, stale_sums = fresh_and_stale(d.versions)
    fresh, stale = VersionMeans.of(fresh_sums), VersionMeans.of(stale_sums)
    starts = len(d.rollouts) >= 3 and d.rollouts[0].rollout_id == 0
    is_enough = fresh.count + stale.count >= FEWEST or starts
    need(is_enough, "weight versions of the samples, or rollouts 0 to 2 of the run")
    if apart := older_are_far(d):
        many = (c for c in stale_sums if c.count >= FEWEST // 4)
        worst = max(many, key=lambda c: c.k3 / c.count, default=None)
        k3: dict[str, object] = {"k3": apart.stale.k3, "error": apart.stale.error, "fresh": apart.fresh.k3}
        both = (K3(means.count, means.k3, means.error) for means in (apart.stale, apart.fresh))
        k3 |= {"explains": explained(*both), "fresh_error": apart.fresh.error}
        return {**k3, "worst": worst, "rollouts": _ids(stale_sums)}
    alone = None
    if fresh.count < FEWEST:
        alone = _all_aged(d, stale_sums) or _held(d, stale_sums)
    if alone and is_scaled(d):
        return {**alone, "or_else": ("temperature",), "untold": (UNTOLD,)}
    return alone or (None if rather_than_rollouts(d) else _lagging(d))


def _all_aged(d: Diagnosis, versions: list[VersionSums]) -> Figures | None:
    aged = [c for c in versions if c.age > 0]
    means = VersionMeans.of(aged)
    if means.count < FEWEST or means.k3 < ALONE_MATTERS:
        return None
    ages = [c.age for c in aged]
    return {
        "k3": means.k3,
        "newest": min(ages),
        "oldest": max(ages),
        "rollouts": _ids(aged),
        "explains": explained_by_tokens(d, means.count, means.count * means.k3),
    }


def _held(d: Diagnosis, older: list[VersionSums]) -> Figures | None:
    """Returns the figures if most tokens come from a version that had sampled an earlier rollout.

    No token is known to come from fresh weights.
    """
    means = VersionMeans.of(older)
    are_few = means.count < max(FEWEST, sum(s.tokens for s in d.rollouts) / 2)
    if are_few or means.k3 < ALONE_MATTERS:
        return None
    versions = sorted({v.version for v in older})
    explains = explained_by_tokens(d, means.count, means.count * means.k3)
    return {"k3": means.k3, "held": versions, "rollouts": _ids(older), "explains": explains}


def _lagging(d: Diagnosis) -> Figures | None:
    """Returns the figures if weights lag from rollout 1 on, because rollout 0 has no lag yet."""
    rollouts = d.rollouts
    if len(rollouts) < 3 or rollouts[0].rollout_id != 0 or min(s.tokens for s in rollouts) < FEWEST:
        return None
    first, later = rollouts[0].k3, median(s.k3 for s in rollouts[1:])
    error = math.hypot(rollouts[0].k3_error, median(s.k3_error for s in rollouts[1:]))
    if later * math.exp(-SURE * error) < CERTAIN * first:  # sampling noise may explain it
        return None
    if later < max(MATTERS, TIMES * first) or side_by_side(d):  # a lag is that of all samples of a version
        return None
    began = began_by_k3(rollouts)
    figures = {
        "k3": first,
        "later": mean_k3(rollouts[1:]),
        "dated": dated(d, began),
        "is_guess": True,
        "explains": explained(K3.of_rollouts(rollouts[1:]), K3.of_rollouts(rollouts[:1])),
        "rollouts": tuple(s.rollout_id for s in rollouts[1:]),
    }
    is_noisy = rollouts[0].absolute >= NOISY  # before any lag
    if rollouts[1].version <= rollouts[0].version or rollouts[0].version < 0:
        is_other = first >= OTHER or (is_noisy and _still_grows(rollouts))
        return None if is_other else figures
    noise, untold = (("quantised",), (PUSHED, ROUNDED)) if is_noisy else ((), (PUSHED,))
    if _comes_back(rollouts):  # partial pushes and growing noise never return
        return figures | {"or_else": ("rollouts_apart",), "untold": (SAMPLED,)}
    if _is_step(rollouts, began):
        return figures | {"or_else": ("damaged_weights", *noise), "untold": untold}
    other = "damaged_weights" if _is_late(began) else "partial_push"
    return figures | {"or_else": ("growing_mismatch", other, *noise), "untold": untold}


def _is_step(rollouts: list[RolloutSummary], began: Began | None) -> bool:
    """Returns whether a mismatch has its full size in the rollout in which it began, and does not grow.

    Weights that never arrive, or arrive in part, are further off after each optimizer step.
    """
    onset = next((at for at, s in enumerate(rollouts) if began and s.rollout_id == began.rollout), 1)
    since = equally_certain(rollouts)[onset:]
    return len(since) >= AFTER and median(since[len(since) // 2 :]) < GROWS * since[0]


def _still_grows(rollouts: list[RolloutSummary]) -> bool:
    """Returns whether the distance grows up to the last rollouts.

    A lag of some rollouts stops growing after as many. Noise stays, and so a sampler that is far off from
    rollout 0 on and that the trainer leaves further behind has another policy.
    """
    since = equally_certain(rollouts)[1:]
    third = max(len(since) // 3, 1)
    parts = (since[:third], since[third:-third] or since, since[-third:])
    first, middle, last = map(fmean, parts)
    return len(since) >= AFTER and last >= max(RISES * first, STILL * middle)


def _is_late(began: Began | None) -> bool:
    """Returns whether a mismatch began after the first rollouts, in which a partial push would show."""
    return began is not None and began.first > 2


def _comes_back(rollouts: list[RolloutSummary]) -> bool:
    """Returns whether the distance of some rollout is gone in a later one, beyond sampling noise."""
    last = rollouts[-1]
    for s in reversed(rollouts[1:]):
        last = min(last, s, key=lambda one: one.k3)
        by_chance = math.exp(-SURE * math.hypot(s.k3_error, last.k3_error))
        if last.k3 <= TIMES * rollouts[0].k3 and s.k3 * by_chance >= RETURNS * last.k3:
            return True
    return False


def _ids(versions: list[VersionSums]) -> tuple[int, ...]:
    return tuple(sorted({c.rollout_id for c in versions}))
