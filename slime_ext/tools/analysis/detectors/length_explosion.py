"""The finding ``length_explosion``."""

from __future__ import annotations

import math
from statistics import fmean

from slime_ext.core.metrics.names import HEALTHY
from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need
from slime_ext.tools.analysis.measures.detector_statistics import RolloutSummary
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="warning",
    explains=False,
    what="responses become several times as long",
    asks="6 rollouts",
    title="Responses explode: they become {{ (late / early) | factor }} as long.",
    evidence="""
        Mean length {{ "%.0f" | format(early) }} tokens before rollout {{ first }}, {{ "%.0f" |
        format(late) }} from there on{% if cut %}; {{ cut | share(1) }} of the samples are cut at the
        limit there, {{ before | share(1) }} before {%- endif %}.{% if rewarded %} The mean reward
        went from {{ "%.3g" | format(rewarded[0]) }} to {{ "%.3g" | format(rewarded[1]) }}.{% endif %}
    """,
    threshold="""
        from some rollout on 2.5 times the length before with half of the samples cut, or 4 times that of
        two rollouts, 1.5 times by 2 standard errors, and every rollout longer than any before. Near the
        limit, 1.5 times is enough if 90% of the samples are cut, in every rollout more than in any
        before, and their share jumps by 4 standard errors, over prompts if they are known, from one
        rollout to the next. A note while k3 is unhealthy
    """,
    ruled_out="A harder batch of prompts: every rollout from there on is longer than any before.",
    fix="""
        {%- if rewarded and rewarded[1] > rewarded[0] %} If the reward pays for it, nothing; raise the
        limit before samples are cut. {%- else %} Read a few of the longest: text that repeats itself is
        a policy that comes apart. Look at how the loss is averaged (per token or per sample), at a
        penalty for length, and at what cut samples are given as a reward. {%- endif %}
    """,
)
ROLLOUTS, TIMES, AFTER = 6, 2.5, 2  # rollouts; times; rollouts from there on
SURE, CERTAIN = 2.0, 1.5  # standard errors, that far below; times
AGREES = HEALTHY["k3_kl"][1] or 0.0  # nats of k3; above it the lengths are those of another policy
ALONE, LEAST = 4.0, 2  # times, whatever is cut; rollouts before
CUT = 0.5  # share of the samples that is cut at the limit from there on
# Near the limit: share of the samples that is cut, times as long, standard errors of the share's jump
FULL, LONGER, JUMPS = 0.9, 1.5, 4.0


Parts = tuple[list[RolloutSummary], list[RolloutSummary]]  # of a run, before a rollout and from it on


def look(d: Diagnosis) -> Figures | None:
    """Finds the rollout from which on responses are a multiple as long as before."""
    rollouts = [s for s in d.statistics.rollouts if s.length]
    need(len(rollouts) >= ROLLOUTS, f"{ROLLOUTS} rollouts")
    splits = ((rollouts[:at], rollouts[at:]) for at in range(1, len(rollouts) - AFTER + 1))
    parts = max(filter(_explodes, splits), key=_growth, default=None)
    if parts is None:
        return None
    early, late = (fmean(s.length for s in part) for part in parts)
    cut = fmean(s.truncated for s in parts[1])
    rewards = [[s.reward for s in part if s.reward is not None] for part in parts]
    return {
        "severity": "note" if (d.sums.mean("k3") or 0.0) > AGREES else "warning",
        "first": parts[1][0].rollout_id,
        "early": early,
        "late": late,
        "before": fmean(s.truncated for s in parts[0]),
        "cut": cut,
        "rewarded": [fmean(own) for own in rewards] if all(rewards) else None,
    }


def _explodes(parts: Parts) -> bool:
    """Whether responses are a multiple as long from a rollout on, beyond what other prompts may do."""
    before, since = parts
    growth, cut = _growth(parts), fmean(s.truncated for s in since)
    if min(s.length for s in since) <= max(s.length for s in before):
        return False
    if growth >= LONGER and _reaches_limit(parts):
        return True
    if growth < TIMES:
        return False
    if cut < CUT and (growth < ALONE or len(before) < LEAST):
        return False
    return growth * math.exp(-SURE * math.hypot(*map(_error, parts))) >= CERTAIN


def _reaches_limit(parts: Parts) -> bool:
    """Whether nearly all samples are cut from a rollout on, and their share jumps there."""
    before, since = parts
    is_full = fmean(s.truncated for s in since) >= FULL
    if not is_full or min(s.truncated for s in since) <= max(s.truncated for s in before):
        return False
    samples_of_one = _samples_of_one([*before, *since])
    ends = (_share_cut(rollout, samples_of_one) for rollout in (before[-1], since[0]))
    (low, low_variance), (high, high_variance) = ends
    return high - low >= JUMPS * math.sqrt(low_variance + high_variance)


def _samples_of_one(rollouts: list[RolloutSummary]) -> float:
    """Returns how many samples tell as much as one independent sample.

    Answers to one prompt are alike. So the variance of the share that is cut, over prompts, is divided by
    the binomial variance. A share of 0 or 1 has neither, so one number counts for the whole run. It is
    lowered by its own standard error, because a few prompts differ by chance.
    """
    known = [s for s in rollouts if 0 < s.truncated < 1 and s.independent > 1]
    if not known:
        return 1.0
    binomial = sum(s.truncated * (1 - s.truncated) * s.length / s.tokens for s in known)
    error = math.sqrt(2 / sum(s.independent - 1 for s in known))
    return max(1.0, sum(s.truncated_error**2 for s in known) / binomial * (1 - error))


def _share_cut(rollout: RolloutSummary, samples_of_one: float) -> tuple[float, float]:
    """The share of samples that are cut and its binomial variance, with one more of each kind, so that a
    share of 0 or 1 has a variance, too.

    Args:
        samples_of_one: how many samples count as one.
    """
    samples = rollout.tokens / rollout.length / samples_of_one
    share = (rollout.truncated * samples + 1) / (samples + 2)
    return share, share * (1 - share) / (samples + 2)


def _growth(parts: Parts) -> float:
    early, late = (fmean(s.length for s in part) for part in parts)
    return late / early


def _error(rollouts: list[RolloutSummary]) -> float:
    """The standard error of the logarithm of the mean length."""
    total = math.sqrt(sum(s.length_error**2 for s in rollouts))
    return total / sum(s.length for s in rollouts)
