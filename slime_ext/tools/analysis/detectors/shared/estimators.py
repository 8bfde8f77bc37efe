"""Finds from which rewards the advantages of a rollout follow.

Samples and prompts are arrays, because a rollout has few, and a call of torch takes three times as long.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import field
from itertools import product
from typing import ClassVar

import numpy
import torch
from numpy import ndarray
from torch import Tensor

from slime_ext.ops.segments import as_bytes, selected
from slime_ext.tools.analysis.measures.measure import Measure, once_per_part
from slime_ext.tools.analysis.records import DumpedRollout
from slime_ext.tools.analysis.tables import any_true, is_finite

FITS = 0.98  # correlation within groups from which an explanation counts as exact
LEVEL = 0.05  # largest mean advantage of a prompt, as a share of mean |A|
ROUNDING = 1e-3  # advantage that rounding may leave where it should be 0
BLOWN = 2.0  # times the largest |A| of other prompts; smaller ones may come from samples that were dropped
# Of the advantages that a rank normalised: their mean, and their variance minus 1; tokens of a rank. Chance
# brings both of two ranks with 1000 tokens there in one of 10^9 rollouts.
MEAN, VARIANCE, ENOUGH = 1e-4, 1e-3, 30
# Times the largest advantage of any estimator: the range of the rewards if it only subtracts a mean of them,
# and the root of their number if it divides by a deviation that they all are in.
BEYOND = 10.0
CP_SIZES = (2, 4, 8)
PROMPTS = 3  # with all their samples, from which on one baseline for all is told from one for each
SEVERAL = 1e-5  # advantage by which a token of a sample that has one number differs from the mean by rounding
# Correlation within groups: below -TURNED the sign is flipped, above AGREES it is right.
TURNED, AGREES = 0.5, 0.3


class Estimators(Measure):
    """The ids of rollouts by the rewards from which their advantages follow; see ``kind_of``."""

    version: ClassVar[int] = 2

    own: list[int] = field(default_factory=list)
    flipped: list[int] = field(default_factory=list)
    late: list[int] = field(default_factory=list)
    early: list[int] = field(default_factory=list)
    others: list[int] = field(default_factory=list)
    batch: list[int] = field(default_factory=list)
    zero: list[int] = field(default_factory=list)
    flat: list[int] = field(default_factory=list)
    unlike: list[int] = field(default_factory=list)
    partial: list[int] = field(default_factory=list)
    constant: list[int] = field(default_factory=list)
    nan: list[int] = field(default_factory=list)
    chunks: list[int] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    blown: list[int] = field(default_factory=list)
    raw: list[int] = field(default_factory=list)
    level: list[int] = field(default_factory=list)

    def close(self, rollout: DumpedRollout) -> None:
        kind = kind_of(rollout)
        if kind:
            getattr(self, kind).append(rollout.rollout_id)


@once_per_part
@numpy.errstate(all="ignore")  # a square of rewards may overflow
def kind_of(rollout: DumpedRollout) -> str:
    """Returns from which rewards the advantages of a rollout follow; "" if unknown.

    own: the sample's reward minus the mean over its prompt
    flipped: the negative of that
    late, early: the rewards of the previous or the next sample
    others: the reward minus the mean over samples of several prompts
    batch: the reward minus the mean over all samples
    raw: the reward, from which nothing is subtracted
    level: the reward minus another number, which is the same for all prompts
    unlike: none of these
    constant: own, except that prompts whose samples all have one reward have advantages that are not 0
    blown: some are larger than rewards of this range and number allow, as after a division by nearly 0
    zero: all advantages are 0, although rewards differ within a group
    flat: all advantages are 0, and rewards are the same within each group
    partial: most samples have one number at some response tokens and 0 at others
    nan: some response tokens have no finite advantage
    chunks, ranks: context-parallel or data-parallel ranks normalised the advantages of their tokens
    """
    if rollout.advantages is None:
        return ""
    if any_true(rollout.mask & ~is_finite(rollout.advantages)):
        return "nan"
    advantage, constant = of_samples(rollout)
    if by := _normalised_by(rollout, advantage):
        return by
    if rollout.rewards is None or rollout.groups is None:
        return ""
    there, groups = with_reward(rollout), rollout.prompt_ids.numpy()
    rewards = numpy.where(there, rollout.rewards.numpy(), 0)
    size = int(numpy.bincount(groups).max())
    if int(there.sum()) < 4 or size < 2:
        return ""
    is_flat = float(abs(_centred(rewards, groups, there)).max()) < 1e-6
    if not (advantage[there] != 0).any():
        return "flat" if is_flat else "zero"
    if not constant:
        return "partial" if _is_partial(rollout) else ""
    return "" if is_flat else _of_prompts(rollout, advantage, rewards, there, size)


def with_reward(rollout: DumpedRollout) -> ndarray:
    """Returns the samples with a response token and a reward, [S] bool."""
    return rollout.responding.numpy() & numpy.isfinite(rollout.rewards.numpy())


def _is_over_masked(advantage: ndarray, rewards: ndarray, groups: ndarray, there: ndarray) -> bool:
    """Returns whether the mean of a prompt is also over samples that are masked out."""
    known = numpy.isfinite(rewards)
    if (known == there).all():
        return False
    own = _by_prompt(numpy.where(known, rewards, 0), groups, known)
    return max(_correlation(advantage, one, there) for one in own) > FITS


def _of_prompts(
    rollout: DumpedRollout, advantage: ndarray, rewards: ndarray, there: ndarray, size: int
) -> str:
    """Returns the kind of advantages that are one number per sample; prompts with one reward come first."""
    groups = rollout.prompt_ids.numpy()
    if _is_over_masked(advantage, rollout.rewards.numpy(), groups, there):
        return "own"
    same = with_one_reward(rewards, groups, there)
    others = abs(advantage[there & ~same])
    is_odd = same.any() and len(others) and abs(advantage[same]).max() > max(ROUNDING, BLOWN * others.max())
    if is_odd and _explained(advantage, rewards, groups, there & ~same, size) == "own":
        return "constant"
    known = rewards[there]
    most = max(float(known.max() - known.min()), math.sqrt(rollout.size))
    if float(abs(advantage[there]).max()) > BEYOND * most:
        return "blown"
    return _explained(advantage, rewards, groups, there, size)


def _explained(advantage: ndarray, rewards: ndarray, groups: ndarray, there: ndarray, size: int) -> str:
    within = _centred(advantage, groups, there)
    inside = _fit(within, rewards, groups, there)
    if inside > FITS:
        level = abs((advantage - within)[there]).mean()
        is_own = float(level) < LEVEL * float(abs(advantage[there]).mean())
        if is_own:
            return "own"
        return _of_level(advantage, rewards, groups, there) or _of_chunk(advantage, rewards, there, size)
    if inside < -FITS:
        return "flipped"
    for kind, by in (("late", 1), ("early", -1)):
        fits = (_fit(x, numpy.roll(rewards, by), groups, there) for x in (within, advantage))
        shifted = (numpy.roll(own, by) for own in _by_prompt(rewards, groups, there))
        if max(*fits, *(_correlation(advantage, own, there) for own in shifted)) > FITS:
            return kind
    if chunk := _of_chunk(advantage, rewards, there, size):
        return chunk
    if inside < -TURNED:
        return "flipped"
    return "" if inside > AGREES else "unlike"


def _normalised_by(rollout: DumpedRollout, advantage: ndarray) -> str:
    """Returns "chunks" or "ranks" if each context-parallel or data-parallel rank normalised its tokens.

    Args:
        advantage: [S] mean of each sample.
    """
    mask = rollout.mask
    if _has_several(rollout, advantage):
        values = rollout.credit.double()[mask]
        by_rank = (_are_normal(values, ranks[mask]) for ranks in _chunk_ranks(rollout))
        return "chunks" if any(by_rank) else ""
    if rollout.ranks is None or rollout.groups is None:
        return ""
    # An advantage minus the mean of its prompt has mean 0 on a rank that holds whole prompts.
    there = rollout.responding.numpy()
    means = advantage - _centred(advantage, rollout.prompt_ids.numpy(), there)
    if not (abs(means[there]) >= ROUNDING).any():
        return ""
    ranks = torch.tensor(rollout.ranks)[rollout.segments.ids.long()]
    return "ranks" if _are_normal(rollout.credit.double()[mask], ranks[mask]) else ""


def _has_several(rollout: DumpedRollout, advantage: ndarray) -> bool:
    """Returns whether the advantages of a sample differ by more than rounding.

    Args:
        advantage: [S] mean of each sample.
    """
    begin = 0
    for part in rollout.parts():
        means = part.segments.expand(torch.from_numpy(advantage[begin : begin + part.count]))
        apart = selected((part.credit.double() - means).abs(), part.mask)
        if part.size and float(apart.max()) > SEVERAL:
            return True
        begin += part.count
    return False


def _are_normal(values: Tensor, ranks: Tensor) -> bool:
    """Returns whether the values of each of several ranks have mean 0 and variance 1."""
    n = torch.bincount(ranks).double()
    n, ranks = n[n > 0], ranks.unique(return_inverse=True)[1]
    if len(n) < 2 or float(n.min()) < ENOUGH:
        return False
    mean = torch.bincount(ranks, values) / n
    square = torch.bincount(ranks, values.square()) / n
    apart = (square - mean.square() - 1).abs() - 1 / n  # whether or not the divisor is n - 1
    return float(mean.abs().max()) < MEAN and float(apart.max()) < VARIANCE


def _chunk_ranks(rollout: DumpedRollout) -> Iterator[Tensor]:
    """Yields the context-parallel rank of each token, [T], for each size and each text that may be cut."""
    within = rollout.segments.within.long()
    lengths, prompts = rollout.response_lengths, torch.tensor(rollout.prompt_lengths)
    sample = rollout.segments.ids.long()
    for cp, with_prompt, is_even in product(CP_SIZES, (True, False), (False, True)):
        before = prompts[sample] if with_prompt else torch.zeros_like(sample)
        size, count = before + lengths[sample], 2 * cp
        # Chunks are equal after padding, or the first ones are one token longer.
        each, longer = (size // count, size % count) if is_even else ((size + count - 1) // count, 0 * size)
        row = before + within
        early = row // (each + 1)
        late = longer + (row - longer * (each + 1)) // each.clamp_min(1)
        chunk = torch.where(row < longer * (each + 1), early, late).clamp(max=count - 1)
        yield torch.minimum(chunk, count - 1 - chunk)


def of_samples(rollout: DumpedRollout) -> tuple[ndarray, bool]:
    """Returns the mean advantage of each sample [S], and whether all its tokens have that number."""
    sums = []
    for part in rollout.parts():
        values = part.credit.double()
        sums.append(part.sums([values, values.square(), as_bytes(part.mask)]))
    total, square, count = torch.cat(sums, 1).numpy()
    n = count.clip(1)
    mean = total / n
    spread = (square / n - mean * mean).clip(0)
    return mean, bool((spread <= 1e-6 + 1e-4 * (mean * mean)).all())


def _is_partial(rollout: DumpedRollout) -> bool:
    """Returns whether most samples have one advantage at some response tokens, and 0 at others."""
    values = rollout.credit.double()
    there = (values != 0).double()
    total, square, count, every = rollout.segments.local_sums(
        [values, values.square(), there, rollout.mask.double()]
    )
    n = count.clamp_min(1)
    is_one = (square / n - (total / n).square()).abs() <= 1e-6 + 1e-4 * (total / n).square()
    return 2 * int((is_one & (count > 0) & (count < every)).sum()) > int((count > 0).sum())


def with_one_reward(rewards: ndarray, groups: ndarray, there: ndarray) -> ndarray:
    """Returns the samples with a reward whose prompt has one reward for all of its samples, [S] bool."""
    apart = abs(_centred(rewards, groups, there))
    largest = numpy.zeros(int(groups.max()) + 1)
    numpy.maximum.at(largest, groups, apart)
    return there & (largest[groups] < 1e-6)


def _centred(values: ndarray, groups: ndarray, there: ndarray) -> ndarray:
    n = numpy.bincount(groups, there)
    means = numpy.bincount(groups, numpy.where(there, values, 0)) / n.clip(1)
    return numpy.where(there, values - means[groups], 0)


def _correlation(a: ndarray, b: ndarray, there: ndarray) -> float:
    """Returns the correlation of a and b over the samples ``there``, without subtracting their means."""
    x, y = a[there], b[there]
    size = math.sqrt(x @ x) * math.sqrt(y @ y)
    return float(x @ y) / size if size else 0.0


def _by_prompt(rewards: ndarray, groups: ndarray, there: ndarray) -> tuple[ndarray, ndarray]:
    """Returns the rewards minus the mean of their group, and the same over its standard deviation."""
    plain = _centred(rewards, groups, there)
    n = numpy.bincount(groups, there).clip(1)
    deviation = numpy.sqrt(numpy.bincount(groups, plain * plain) / n)[groups]
    return plain, plain / deviation.clip(1e-9)


def _fit(advantage: ndarray, rewards: ndarray, groups: ndarray, there: ndarray) -> float:
    """Returns the larger correlation, by size, with either of what ``_by_prompt`` returns."""
    return max((_correlation(advantage, x, there) for x in _by_prompt(rewards, groups, there)), key=abs)


def _of_level(advantage: ndarray, rewards: ndarray, groups: ndarray, there: ndarray) -> str:
    """Returns "raw", "batch" or "level" if one number is subtracted from the rewards of all prompts, else "".

    The mean advantage of a prompt follows its mean reward then. Only prompts with all their samples count,
    because the mean that was subtracted also has the samples that were left out.
    """
    sizes = numpy.bincount(groups, there)
    whole = there & (sizes == sizes.max())[groups]
    if len(set(groups[whole].tolist())) < PROMPTS:
        return ""
    one = numpy.zeros_like(groups)
    a, r = (_centred(values, one, whole) for values in (advantage, rewards))
    of_prompts = [values - _centred(values, groups, whole) for values in (a, r)]
    if min(_correlation(a, r, whole), _correlation(*of_prompts, whole)) < FITS:
        return ""
    if float(abs(of_prompts[0][whole]).mean()) < LEVEL * float(abs(advantage[whole]).mean()):
        return ""
    mean, known = float(rewards[whole].mean()), rewards[whole]
    subtracted = mean - float(advantage[whole].mean()) * float(r @ r) / float(a @ r)
    near = LEVEL * float(known.max() - known.min())
    if abs(subtracted) < near:
        return "raw"
    return "batch" if abs(subtracted - mean) < near else "level"


def _of_chunk(advantage: ndarray, rewards: ndarray, there: ndarray, size: int) -> str:
    """Returns "batch" or "others" if the baseline is over all samples or over other groups, else "".

    Tries groups of ``size`` neighbours at each offset, and groups with samples of every prompt.
    """
    count = len(rewards)
    if _fit(advantage, rewards, numpy.zeros(count, dtype=numpy.int64), there) > FITS:
        return "batch"
    chunks = [(numpy.arange(count) + shift) // size for shift in range(size)]
    chunks.append(numpy.arange(count) % max(count // size, 1))
    return "others" if max(_fit(advantage, rewards, chunk, there) for chunk in chunks) > FITS else ""
