"""Splits samples into near and far ones, relative to how certain their tokens are.

It also tells whether the samples of one prompt are all near or all far.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import field
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from slime_ext.core.metrics.names import HEALTHY
from slime_ext.tools.analysis.detectors.shared.explained import Explained
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.measure import Measure, once_per_part
from slime_ext.tools.analysis.records import DumpedRollout
from slime_ext.tools.analysis.tables import tabulated, zeros

SIZES, DECADES = 48, 6  # bins of |l| over -log behavior of a sample, from 1e-6 to 1
SMALL, CERTAIN = 0.2, 0.05  # nats: largest |l| that a token counts; least mean -log behavior of a sample
GAP, APART = 1, 6.0  # bins on each side of a cut that hold hardly any sample; bins between both means
HOLDS, BETWEEN = 0.8, 0.1  # share of k3 in the far kind; samples between, over those of the smaller kind
SHARE = 0.03  # least share of the samples and of the tokens, because very short responses agree by chance
LEAST = 2e-3  # nats of k3 over the run
AGREES = HEALTHY["k3_kl"][1] or 0.0  # nats of k3, of the near samples
PROMPTS, FEWER, SURE = 3, 0.25, 4.0  # far prompts; mixed prompts, over those by chance; standard errors
MOST = 0.6  # share of far prompts in a rollout; with more, the whole rollout is far off
# Share of the samples, from which on near ones do not agree by chance; share of the smaller kind that has one
# of the other kind beside it in its rollout.
SOME, BESIDE = 0.2, 0.5


class GroupSizes(NamedTuple):
    """How far off the samples of a rollout are, as numbers by bin of ``Sizes.sums``.

    Counts only samples with more than CERTAIN nats of -log behavior per token, and prompts with several.
    """

    rollout_id: int
    samples: tuple[int, ...]  # by bin
    lowest: tuple[int, ...]  # prompts by the bin of their nearest sample
    highest: tuple[int, ...]  # prompts by the bin of their farthest sample


class Sizes(Measure):
    """How far off samples are, relative to how certain their tokens are.

    Args:
        sums: [SIZES, 3] number of samples, number of tokens and sum of k3, by bin of |l| over -log behavior
            of the sample. A token counts for at most SMALL nats of |l|. Only samples with more than CERTAIN
            nats of -log behavior per token count, because the others agree whatever the weights are.
        groups: the same by prompt.
        grouped: [3, SIZES] the same of the rollout that is being read.
    """

    sums: Tensor = field(default_factory=lambda: zeros(SIZES, 3))
    groups: list[GroupSizes] = field(default_factory=list)
    grouped: Tensor = field(default_factory=lambda: zeros(3, SIZES))

    def add(self, part: DumpedRollout) -> None:
        n, *_, k = part.sample_sums
        at = bins_of_samples(part)
        self.sums += tabulated(at, [torch.ones_like(n), n, k], SIZES)
        if part.prompt_ids is not None:
            self.grouped += _by_group(part.prompt_ids, at, (n > 0) & (at < SIZES))

    def close(self, rollout: DumpedRollout) -> None:
        if self.grouped.any():
            rows = (tuple(map(int, row)) for row in self.grouped.tolist())
            self.groups.append(GroupSizes(rollout.rollout_id, *rows))
        self.grouped = zeros(3, SIZES)


@once_per_part
def bins_of_samples(part: DumpedRollout) -> Tensor:
    """Returns the bin of each sample in ``Sizes.sums``, [S]; SIZES if it has hardly any -log behavior."""
    n = part.sample_sums[0]
    small, surprise = part.sums([part.columns[1].clamp(max=SMALL), -part.compared(part.behavior)])
    size = (small / (surprise + CERTAIN * n).clamp_min(1e-30)).clamp_min(1e-30).log10()
    at = ((size + DECADES) * SIZES / DECADES).long().clamp(0, SIZES - 1)
    return torch.where(surprise > CERTAIN * n, at, SIZES)


def _by_group(prompts: Tensor, bins: Tensor, known: Tensor) -> Tensor:
    """Returns the numbers of ``GroupSizes`` over the known samples of one part, [3, SIZES].

    Args:
        prompts, bins: [S] prompt and bin of each sample.
        known: [S] bool, samples to count.
    """
    prompts, bins = prompts[known], bins[known]
    counts = torch.bincount(prompts)
    lowest, highest = (
        torch.zeros_like(counts).scatter_reduce(0, prompts, bins, of, include_self=False)
        for of in ("amin", "amax")
    )
    several = counts > 1
    of_each = (bins[several[prompts]], lowest[several], highest[several])
    return torch.stack([torch.bincount(x, minlength=SIZES) for x in of_each]).double()


class Kinds(NamedTuple):
    """Number of samples, number of tokens and sum of k3, of both kinds; ``cut`` is the bin between them."""

    near: list[float]
    far: list[float]
    cut: int = 0

    def beside(self, rollouts: Iterable[Sequence[int]]) -> int:
        """Returns how many samples of one kind have one of the other kind beside them in their rollout.

        Args:
            rollouts: number of samples by bin, of each rollout.
        """
        return sum(min(sum(row[: self.cut]), sum(row[self.cut :])) for row in rollouts)


def two_kinds(d: Diagnosis) -> Kinds | None:
    """Returns near and far samples, if hardly any lie between; None if all are of one kind."""
    sizes = d.of(Sizes).sums
    samples, tokens, k3 = sizes.sum(0).tolist()
    if not samples or k3 < LEAST * tokens:
        return None
    best: tuple[float, Kinds] | None = None
    # Sums of whole numbers are exact, so that those of every cut are computed at once.
    counts = sizes.numpy()[:, :2]
    lower = numpy.column_stack([counts, numpy.arange(SIZES) * counts[:, 0]]).cumsum(0)
    lows, highs = lower[: SIZES - 2 * GAP], lower[-1] - lower[2 * GAP - 1 : -1]
    for at, (low, high) in enumerate(zip(lows.tolist(), highs.tolist(), strict=True)):
        between, smaller = samples - low[0] - high[0], min(low[0], high[0])
        is_some = smaller >= max(2, SHARE * samples) and min(low[1], high[1]) >= SHARE * tokens
        if not is_some or between > BETWEEN * smaller or high[2] / high[0] - low[2] / low[0] < APART:
            continue
        near, far = sizes[: at + 1].sum(0).tolist(), sizes[at + 2 * GAP :].sum(0).tolist()
        if far[2] >= HOLDS * k3 and (best is None or between < best[0]):
            best = between, Kinds(near, far, at + GAP)
    return best[1] if best else None


def side_by_side(d: Diagnosis) -> Kinds | None:
    """Returns near and far samples, if most lie beside the other kind in their rollout.

    Precision and old weights act on every sample of a rollout. So there are more near ones than agree by
    chance.
    """
    kinds = two_kinds(d)
    if kinds is None or kinds.near[0] < SOME * (kinds.near[0] + kinds.far[0]):
        return None
    beside = kinds.beside(group.samples for group in d.of(Sizes).groups)
    return kinds if beside >= BESIDE * min(kinds.near[0], kinds.far[0]) else None


def rather_than_position(d: Diagnosis, explains: Explained, reach: float) -> bool:
    """Returns whether samples tell far tokens from near ones, and a position does not.

    What acts from a position on acts on every sample that reaches it, and on no token before. If samples
    agree beside far ones, the unhealthy rest before the position lies in the far ones. And if more samples
    agree than end before the position, some agree behind it.

    Args:
        explains: what a finding explains by the tokens after a position.
        reach: the number of samples that go on for some tokens after it, or less.
    """
    kinds = side_by_side(d)
    if kinds is None:
        return False
    agree = kinds.near[0] - (d.sums.sequences - reach)
    return not explains.is_rest_healthy or agree >= SOME * reach


def part_of_samples(d: Diagnosis) -> Kinds | None:
    """Returns near and far samples, if the far ones are fewer or lie beside near ones."""
    kinds = two_kinds(d)
    return side_by_side(d) if kinds and kinds.far[0] > kinds.near[0] else kinds


class Prompts(NamedTuple):
    """Numbers of prompts whose samples are all near, all far, or mixed, and the samples of both kinds.

    ``expected`` is the number of mixed prompts if the kind did not depend on the prompt.
    """

    near: int
    far: int
    mixed: int
    expected: float
    kinds: Kinds


def whole_prompts(d: Diagnosis) -> Prompts | None:
    """Returns the split with the fewest mixed prompts, if prompts decide which samples are far.

    None if they do not, or if the near samples are not healthy. Each rollout is split separately, because a
    rollout that is far off as a whole says nothing about prompts.
    """
    samples = d.of(Sizes)
    if not samples.groups:
        return None
    table = torch.tensor([g[1:] for g in samples.groups], dtype=torch.float64)  # [rollouts, 3, SIZES]
    count, low, high = table.unbind(1)
    size = count.sum(1) / high.sum(1).clamp_min(1)
    best: Prompts | None = None
    highest, lowest = high.sum(0).cumsum(0)[:-1], low.sum(0).flip(0).cumsum(0).flip(0)[1:]
    are_some = (PROMPTS <= lowest) & (lowest <= highest)
    for cut in (are_some.nonzero()[:, 0] + 1).tolist():
        near, far = high[:, :cut].sum(1), low[:, cut:].sum(1)
        beside = far[far <= MOST * high.sum(1)].sum()
        mixed = high.sum(1) - near - far
        share = count[:, cut:].sum(1) / count.sum(1).clamp_min(1)
        expected = float((high.sum(1) * (1 - share**size - (1 - share) ** size)).sum())
        kinds = Kinds(samples.sums[:cut].sum(0).tolist(), samples.sums[cut:].sum(0).tolist())
        prompts = Prompts(int(near.sum()), int(far.sum()), int(mixed.sum()), expected, kinds)
        is_beside = float(beside) >= HOLDS * prompts.far
        if (
            is_beside
            and _are_apart(prompts, samples.sums, cut)
            and (best is None or prompts.mixed < best.mixed)
        ):
            best = prompts
    return best


def _are_apart(prompts: Prompts, sizes: Tensor, cut: int) -> bool:
    """Returns whether both kinds are far apart, and prompts decide the kind."""
    (n, _, _), (m, far, k3) = prompts.kinds.near, prompts.kinds.far
    if not n or prompts.mixed > FEWER * prompts.expected:
        return False
    bins = torch.arange(SIZES).double()
    apart = bins[cut:] @ sizes[cut:, 0] / m - bins[:cut] @ sizes[:cut, 0] / n
    is_far = apart >= APART and k3 >= HOLDS * float(sizes[:, 2].sum()) and k3 >= AGREES * far
    agree = prompts.kinds.near[2] <= AGREES * prompts.kinds.near[1]
    return is_far and agree and prompts.expected - prompts.mixed >= SURE * math.sqrt(prompts.expected)
