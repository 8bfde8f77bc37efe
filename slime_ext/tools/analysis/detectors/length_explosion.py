"""The finding ``length_explosion``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import field
from statistics import fmean
from typing import NamedTuple

import numpy
import torch

from slime_ext.core.metrics.names import HEALTHY
from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.measure import Measure
from slime_ext.tools.analysis.records import DumpedRollout


class Cut(NamedTuple):
    """How long the responses of a rollout are, and how many samples were cut at the limit.

    Attributes:
        length_error: standard error of the mean length, over prompts where they are known.
        truncated: share of the samples that were cut; ``truncated_error`` is its standard error over prompts.
        independent: number of prompts, or of samples where prompts are not known.
    """

    rollout_id: int
    length_error: float
    truncated: float
    truncated_error: float
    independent: int


class Responses(NamedTuple):
    """What ``RolloutSummary`` and ``Cut`` say of one rollout."""

    tokens: int
    length: float
    reward: float | None
    rollout_id: int
    length_error: float
    truncated: float
    truncated_error: float
    independent: int


class Cuts(Measure):
    """The samples of each rollout that were cut at the limit."""

    rollouts: list[Cut] = field(default_factory=list)

    def close(self, rollout: DumpedRollout) -> None:
        is_cut = [status == "truncated" for status in rollout.statuses or [""] * rollout.count]
        of_length, of_cut, independent = _errors_of_means(rollout, [rollout.lengths, is_cut])
        share = sum(is_cut) / max(rollout.count, 1)
        self.rollouts.append(Cut(rollout.rollout_id, of_length, share, of_cut, independent))


def _errors_of_means(rollout: DumpedRollout, values: Sequence[Sequence[float]]) -> tuple[float, float, int]:
    """Returns the standard errors of two means over samples, and the number of independent values.

    The samples are those with a response. Answers to one prompt count as one value.

    Args:
        values: [2, S].
    """
    means = torch.from_numpy(numpy.array(values, dtype=numpy.float64))[:, rollout.responding]
    if rollout.prompt_ids is not None:
        prompts = rollout.prompt_ids[rollout.responding]
        counts = torch.bincount(prompts)
        sums = torch.zeros(2, len(counts), dtype=torch.float64).index_add_(1, prompts, means)
        means = (sums / counts)[:, counts > 0]
    count = means.shape[1]
    errors = (means.std(1) / math.sqrt(count)).tolist() if count > 1 else [0.0, 0.0]
    return *errors, count


DETECTOR = Detector(
    severity="warning",
    explains=False,
    what="responses become several times as long",
    asks="6 rollouts",
    title="Responses explode: they become {{ (late / early) | factor }} as long.",
    evidence="""
        Mean length {{ "%.0f" | format(early) }} tokens before rollout {{ first }}, {{ "%.0f" |
        format(late) }} from there on{% if cut %}. {{ cut | share(1) }} of the samples are cut at the
        limit there, and {{ before | share(1) }} before {%- endif %}.{% if rewarded %} The mean reward
        went from {{ "%.3g" | format(rewarded[0]) }} to {{ "%.3g" | format(rewarded[1]) }}.{% endif %}
    """,
    threshold="""
        from some rollout on, every rollout is longer than any before: on average 2.5 times as long
        with half of the samples cut, or 4 times as long as at least two rollouts, and 1.5 times after
        subtracting 2 standard errors. Near the limit, 1.5 times is enough if 90% of the samples are
        cut, more in every rollout than in any before, and if their share jumps by 4 standard errors
        (over prompts if they are known) from one rollout to the next. It is a note while k3 is unhealthy
    """,
    ruled_out="A harder batch of prompts, because every rollout from there on is longer than any before.",
    fix="""
        {%- if rewarded and rewarded[1] > rewarded[0] %} If the reward pays for length, nothing is
        wrong: raise the limit before samples are cut. {%- else %} Read a few of the longest
        responses, because text that repeats itself is a sign of a policy that falls apart. Check how
        the loss is averaged (per token or per sample), a penalty for length, and which reward cut
        samples get. {%- endif %}
    """,
)
ROLLOUTS, TIMES, AFTER = 6, 2.5, 2  # rollouts; times as long; rollouts from the onset on
SURE, CERTAIN = 2.0, 1.5  # standard errors to subtract; times as long, after that
AGREES = HEALTHY["k3_kl"][1] or 0.0  # nats of k3; above it, another policy may explain the lengths
ALONE, LEAST = 4.0, 2  # times as long if few samples are cut; rollouts before the onset
CUT = 0.5  # share of the samples that are cut at the limit, from the onset on
# Near the limit: share of the samples that are cut; times as long; standard errors by which that share jumps.
FULL, LONGER, JUMPS = 0.9, 1.5, 4.0


Parts = tuple[list[Responses], list[Responses]]  # the rollouts before an onset, and from it on


def look(d: Diagnosis) -> Figures | None:
    """Finds the rollout from which on responses are several times as long as before."""
    cuts = {cut.rollout_id: cut for cut in d.of(Cuts).rollouts}
    rollouts = [Responses(s.tokens, s.length, s.reward, *cuts[s.rollout_id]) for s in d.rollouts if s.length]
    need(len(rollouts) >= ROLLOUTS, f"{ROLLOUTS} rollouts")
    splits = ((rollouts[:at], rollouts[at:]) for at in range(1, len(rollouts) - AFTER + 1))
    parts = max(filter(_explodes, splits), key=_growth, default=None)
    if parts is None:
        return None
    early, late = (fmean(s.length for s in part) for part in parts)
    cut = fmean(s.truncated for s in parts[1])
    rewards = [[s.reward for s in part if s.reward is not None] for part in parts]
    return {
        "severity": "note" if (d.sums.mean_k3 or 0.0) > AGREES else "warning",
        "first": parts[1][0].rollout_id,
        "early": early,
        "late": late,
        "before": fmean(s.truncated for s in parts[0]),
        "cut": cut,
        "rewarded": [fmean(part) for part in rewards] if all(rewards) else None,
    }


def _explodes(parts: Parts) -> bool:
    """Returns whether responses are much longer from a rollout on, beyond the effect of other prompts."""
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
    """Returns whether the share of cut samples jumps at a rollout to nearly all."""
    before, since = parts
    is_full = fmean(s.truncated for s in since) >= FULL
    if not is_full or min(s.truncated for s in since) <= max(s.truncated for s in before):
        return False
    samples_of_one = _samples_of_one([*before, *since])
    ends = (_share_cut(rollout, samples_of_one) for rollout in (before[-1], since[0]))
    (low, low_variance), (high, high_variance) = ends
    return high - low >= JUMPS * math.sqrt(low_variance + high_variance)


def _samples_of_one(rollouts: list[Responses]) -> float:
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


def _share_cut(rollout: Responses, samples_of_one: float) -> tuple[float, float]:
    """Returns the share of samples that are cut, and its binomial variance.

    One sample of each kind is added, so that shares of 0 and 1 have a variance, too.

    Args:
        samples_of_one: how many samples count as one.
    """
    samples = rollout.tokens / rollout.length / samples_of_one
    share = (rollout.truncated * samples + 1) / (samples + 2)
    return share, share * (1 - share) / (samples + 2)


def _growth(parts: Parts) -> float:
    early, late = (fmean(s.length for s in part) for part in parts)
    return late / early


def _error(rollouts: list[Responses]) -> float:
    """Returns the standard error of the logarithm of the mean length."""
    total = math.sqrt(sum(s.length_error**2 for s in rollouts))
    return total / sum(s.length for s in rollouts)
