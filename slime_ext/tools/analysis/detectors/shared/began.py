"""Dates the rollout in which a mismatch began, with its error, and says what else changed there.

The model: a mismatch is constant before an onset. After it, it is larger by a constant, or by an amount that
grows with the number of rollouts since, or with its square. Logarithms of the means have a known sampling
error and an unknown scatter from rollout to rollout. The posterior over the onset sums over all other
unknowns, so its interval holds the true onset as often as it says.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor

from slime_ext.tools.analysis.detectors.shared.cached import CachedShares
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.rollouts import RolloutSummary

CONFIDENCE = 0.95  # of the interval
POWERS = (0.0, 1.0, 2.0)  # of the rollouts since the onset, by which k3 grows
SCATTERS = (0.02, 0.1, 0.25, 0.6)  # of log k3 from rollout to rollout
LEVELS = (-1.5, 0.0, 1.5)  # standard errors, by which the level before the onset may be off
SIZES = 24  # sizes of the change, in equal steps of its logarithm
MOST = 160  # rollouts that are dated at once; more are joined first
SURE = 4.0  # of log-likelihood, by which an onset must fit better than none
FEWEST = 100  # tokens of a rollout
HALF, RISES = 0.5, 0.5  # share of the sampler's distance that remains; rise of the share of cached samples


class Began(NamedTuple):
    """The rollout in which a mismatch most likely began, and the interval that holds it in 95% of runs."""

    rollout: int
    first: int
    last: int

    def __str__(self) -> str:
        interval = "" if self.first == self.last else f" ({self.first} to {self.last})"
        return f"began in rollout {self.rollout}{interval}"


def began(ids: Sequence[int], values: Sequence[float], errors: Sequence[float]) -> Began | None:
    """Returns when the mismatch of a run began; None if it has no onset.

    Args:
        ids: of the rollouts, in order.
        values: k3 of each, or the square of another distance, nats.
        errors: standard errors of their logarithms.
    """
    if len(ids) < 3:
        return None
    if len(ids) > MOST:
        return _by_blocks(ids, values, errors)
    fits = _log_likelihoods(torch.tensor(values).double(), torch.tensor(errors).double())
    if float(fits[1:].max() - fits[0]) < SURE:
        return None
    posterior = fits[1:].softmax(0)
    order = posterior.argsort(descending=True)
    enough = int((posterior[order].cumsum(0) < CONFIDENCE).sum()) + 1
    chosen = 1 + order[:enough]
    return Began(ids[int(1 + order[0])], ids[int(chosen.min())], ids[int(chosen.max())])


def _by_blocks(ids: Sequence[int], values: Sequence[float], errors: Sequence[float]) -> Began | None:
    """Returns when a long run's mismatch began: first among blocks of rollouts, then among those around."""
    size = -(-len(ids) // MOST)
    begins = range(0, len(ids), size)
    blocks = [slice(begin, begin + size) for begin in begins]
    means = [fmean(values[block]) for block in blocks]
    rough = began(begins, means, [fmean(errors[block]) / math.sqrt(size) for block in blocks])
    if rough is None:  # it may have begun in the first block or in the last
        first = began(ids[:MOST], values[:MOST], errors[:MOST])
        return first or began(ids[-MOST:], values[-MOST:], errors[-MOST:])
    first, last = max(rough.first - size, 0), min(rough.last + size, len(ids))
    if last - first > MOST // 2:
        return Began(ids[rough.rollout], ids[first], ids[last - 1])
    begin = max(min((first + last - MOST) // 2, len(ids) - MOST), 0)
    around = slice(begin, begin + MOST)
    return began(ids[around], values[around], errors[around])


def _log_likelihoods(values: Tensor, errors: Tensor) -> Tensor:
    """Returns the marginal log-likelihood without an onset, and of an onset at each later rollout, [N]."""
    y, count = values.clamp_min(1e-30).log(), len(values)
    y = y - y.mean()
    scatter = torch.tensor(SCATTERS).double()[:, None]
    variance = errors.square() + scatter.square()  # [scatters, N]
    weights, log_sigma = 1 / variance, 0.5 * variance.log()
    alone = _alone(y, weights, log_sigma)
    sums = torch.stack([weights, weights * y, weights * y.square()])
    early = sums.cumsum(2)[..., :-1, None].transpose(1, 2)  # before each onset, [3, onsets, scatters, 1]
    after = sums[0].sum(1)[:, None] - early[0]
    level = early[1] / early[0] + torch.tensor(LEVELS).double() * early[0].rsqrt()  # [.., levels]
    before = early[2] - 2 * level * early[1] + level.square() * early[0]
    # All onsets at once and squares multiplied out: of a run's few rollouts, calls take longer than numbers.
    since = torch.arange(count) - torch.arange(1, count)[:, None] + 1.0  # [onsets, N]
    growth = since.clamp_min(1).double().log()
    # A change of this size at the last rollout, whatever the power.
    growth = (growth - growth[:, -1:])[:, None] * torch.tensor(POWERS).double()[:, None]
    largest = float(y.max() - y.min()) + 1.0
    changes = torch.linspace(-1.5, largest, SIZES).double()  # log of the change over the level before
    larger = torch.nn.functional.softplus(changes[:, None, None] + growth[:, None])
    apart = (y - larger).flatten(1, 2)  # [onsets, sizes and powers, N]
    late = ((since > 0)[:, None] * weights).mT  # [onsets, N, scatters]
    square, linear = ((x @ late).mT[..., None] for x in (apart.square(), apart))
    level, after = level[:, :, None], after[:, :, None]
    loss = before[:, :, None] + square - 2 * level * linear + level.square() * after
    loss = (0.5 * loss + log_sigma.sum(1)[:, None, None]).flatten(1)
    fits = torch.logsumexp(-loss, 1) - math.log(loss.shape[1])
    return torch.cat([alone[None], fits])


def _alone(y: Tensor, weights: Tensor, log_sigma: Tensor) -> Tensor:
    """Returns the marginal log-likelihood of a constant level."""
    levels = (weights * y).sum(1) / weights.sum(1)
    shift = torch.tensor(LEVELS).double() * weights.sum(1).rsqrt()[:, None]
    loss = 0.5 * ((y - levels[:, None, None] - shift[..., None]).square() * weights[:, None]).sum(-1)
    loss = loss + log_sigma.sum(1)[:, None]
    return torch.logsumexp(-loss.flatten(), 0) - math.log(loss.numel())


def began_by_k3(rollouts: Sequence[RolloutSummary], far: Sequence[int] | None = None) -> Began | None:
    """Returns when k3 of some rollouts rose.

    Args:
        rollouts: in order.
        far: ids of those that are far off, if the mismatch also ends; the first stretch of them is dated.
    """
    enough = [s for s in rollouts if s.tokens >= FEWEST]
    if far is not None:
        last = _end_of_stretch([s.rollout_id for s in enough], far)
        enough = enough[: last + 1]
    return began([s.rollout_id for s in enough], [s.k3 for s in enough], [s.k3_error for s in enough])


def began_by_distance(rollouts: Sequence[RolloutSummary]) -> Began | None:
    """Returns when mean |l| of some rollouts rose."""
    enough = [s for s in rollouts if s.tokens >= FEWEST]
    squares, errors = [s.absolute**2 for s in enough], [2 * s.absolute_error for s in enough]
    return began([s.rollout_id for s in enough], squares, errors)


def _end_of_stretch(ids: Sequence[int], far: Sequence[int]) -> int:
    """Returns the place of the last rollout of the first stretch of far ones."""
    is_far = [rollout_id in far for rollout_id in ids]
    first = is_far.index(True) if any(is_far) else len(ids)
    return next((at - 1 for at in range(first, len(ids)) if not is_far[at]), len(ids) - 1)


def dated(d: Diagnosis, onset: Began | None) -> str:
    """Returns when a mismatch began and what else changed there, as a sentence; empty without a date."""
    if onset is None:
        return ""
    changes = [*_of_versions(d, onset), *_of_other_counters(d, onset)]
    if changes:
        return f" It {onset}: {'; '.join(changes)}."
    recorded = {
        "weight versions": any(s.version >= 0 for s in d.rollouts),
        "ref_log_probs": any(s.pushed is not None for s in d.rollouts),
        "cache counters": bool(d.of(CachedShares).rollouts),
    }
    looked = [name for name, there in recorded.items() if there]
    return f" It {onset}; {' and '.join(looked)} show no change there." if looked else f" It {onset}."


def _of_versions(d: Diagnosis, onset: Began) -> Iterator[str]:
    """Yields what the weight versions do within the interval of an onset, if not what they always do."""
    pushes = [later.version > s.version >= 0 for s, later in pairwise(d.rollouts)]
    for at, (before, s) in enumerate(pairwise(d.rollouts)):
        if not onset.first <= s.rollout_id <= onset.last:
            continue
        if 0 <= s.version < before.version:
            yield f"in rollout {s.rollout_id} the weight versions start again, as after a restart"
        elif pushes[at] and not any(pushes[:at]):
            yield f"rollout {s.rollout_id} is the first after a push"
        elif s.version >= 0 and not pushes[at] and any(pushes[:at]):
            yield f"rollout {s.rollout_id} has no newer weight version than the rollout before"


def _of_other_counters(d: Diagnosis, onset: Began) -> Iterator[str]:
    """Yields what else changes within the interval: distance from the first policy, cache, missing dumps."""
    for before, s in pairwise(d.rollouts):
        if not onset.first <= s.rollout_id <= onset.last:
            continue
        if s.pushed is not None and before.pushed and s.pushed < HALF * before.pushed:
            yield f"in rollout {s.rollout_id} the sampler falls back towards the first policy (ref_log_probs)"
        if s.rollout_id > before.rollout_id + 1:
            yield f"the dumps between the rollouts {before.rollout_id} and {s.rollout_id} are missing"
    for before, cached in pairwise(d.of(CachedShares).rollouts):
        if onset.first <= cached.rollout_id <= onset.last and cached.share - before.share >= RISES:
            yield f"from rollout {cached.rollout_id} on, prompts begin in the engine's prefix cache"
