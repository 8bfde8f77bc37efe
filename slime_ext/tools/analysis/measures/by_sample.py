"""Sums samples by every label of a dump, counts samples of other text, and draws samples again.

Samples that are drawn again show how far chance alone moves the numbers of a rollout.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from slime_ext.tools.analysis.records import DumpedRollout
from slime_ext.tools.analysis.tables import Additive, tabulated, zeros

REPLICATES = 64
SIZES, DECADES = 48, 6  # bins of |l| over -log behavior of a sample, from 1e-6 to 1
SMALL, CERTAIN = 0.2, 0.05  # nats: largest |l| that a token counts; least mean -log behavior of a sample
HEAD = 16  # first tokens of a response, which samples of every shape have
# Labels whose samples are compared over these tokens only, because later tokens may be further off in all.
SHAPES = ("turns", "response length")
HIGHEST = 20.0  # nats; the square of a larger ratio might overflow
MOST = 64  # values of a label in a rollout; a label with more is ignored
LATER = 3  # turns or places in a micro-batch; higher numbers count as this one
FEWEST = 12  # least tokens of a sample for a correlation
UNRELATED, RELATED = 0.3, 0.7  # correlation of both sides' log-probs over a sample
APART = 0.4  # nats, mean |l| of a sample with another text's log-probs; a token counts at most 1 nat
LEAST = -8.0  # nats; smaller log-probs count as this, so that single far tokens hide no agreement
TRIED, COMPARED, FITS = 64, 12, 0.3  # samples; tokens; share of the distance to the sample itself
# Tokens of a window; tokens of a sample in which windows are searched; mean nats per token by which a far
# window is off and unsure; share of its distance that may remain at another position.
WINDOW, LONGEST, DOUBT, ELSEWHERE = 6, 512, 0.3, 0.2


class Part(NamedTuple):
    """Sums over the samples of a rollout that have one value of a label."""

    rollout_id: int
    label: str
    value: str
    samples: int
    tokens: int
    k3: float  # sum of ``near`` over tokens
    square: float  # sum over samples of (k3's sum)^2
    cross: float  # sum over samples of k3's sum times tokens
    lengths: float  # sum over samples of tokens^2
    log_ratio: float = 0.0  # sum
    absolute: float = 0.0  # sum |l|


class GroupSizes(NamedTuple):
    """How far off the samples of a rollout are, as numbers by bin of ``BySample.sizes``.

    Counts only samples with more than CERTAIN nats of -log behavior per token, and prompts with several.
    """

    rollout_id: int
    samples: tuple[int, ...]  # by bin
    lowest: tuple[int, ...]  # prompts by the bin of their nearest sample
    highest: tuple[int, ...]  # prompts by the bin of their farthest sample


def _octave(values: Sequence[int]) -> list[str]:
    begins = [1 << int(math.log2(max(n, 1))) for n in values]
    return [f"{n} to {2 * n - 1} tokens" for n in begins]


def _versions(part: DumpedRollout) -> list[str] | None:
    if part.versions is None:
        return None
    return [f"{v:g}" if v == v else "without a number" for v in part.oldest_versions().tolist()]


def _turns(part: DumpedRollout) -> list[str] | None:
    ends = torch.tensor(part.lengths).cumsum(0) - 1
    ids = torch.where(part.mask, part.turns, 0)
    most = torch.zeros(part.count, dtype=ids.dtype).scatter_reduce(0, part.segments.ids.long(), ids, "amax")
    return None if not len(ends) else [str(min(int(n) + 1, LATER)) for n in most.tolist()]


# Label -> its value for each sample, or None if a dump lacks it. The value "" means unknown.
LABELS: dict[str, Callable[[DumpedRollout], Sequence[str] | None]] = {
    "engine": lambda part: part.engines,
    "data-parallel rank": lambda part: None if part.ranks is None else [str(r) for r in part.ranks],
    "weight version": _versions,
    "status": lambda part: part.statuses or None,
    "place in the micro-batch": lambda part: (
        None if part.places is None else [str(min(p, LATER)) for p in part.places]
    ),
    "prefix": lambda part: None if part.cached is None else ["cached" if n else "fresh" for n in part.cached],
    "turns": _turns,
    "prompt length": lambda part: _octave(part.prompt_lengths),
    "response length": lambda part: _octave(part.lengths),
}


@dataclass
class BySample(Additive):
    """Sums over the samples of a run.

    Args:
        parts: sums by rollout, label and value.
        replicates: [REPLICATES, 4] number of tokens, and sums of k3, ratio and squared ratio, of samples that
            are drawn again with replacement (each has a Poisson weight of mean 1).
        of_rollout: [REPLICATES, 5] the same of the rollout that is being read, and its sum of |l|.
        correlated: number of samples with a correlation of both sides' log-probs.
        unrelated, related: how many of them have a low or a high correlation.
        swapped: number of unrelated samples that fit another sample of the rollout.
        far: [2] number of tokens and sum of k3 of the unrelated samples.
        moved: [2] number of far windows in unrelated samples, and of those that fit elsewhere in their
            sample.
        sizes: [SIZES, 3] number of samples, number of tokens and sum of k3, by bin of |l| over -log behavior
            of the sample. A token counts for at most SMALL nats of |l|. Only samples with more than CERTAIN
            nats of -log behavior per token count.
        groups: the same by prompt.
        grouped: [3, SIZES] the same of the rollout that is being read.
        open: sums by label and value of the rollout that is being read.
    """

    parts: list[Part] = field(default_factory=list)
    replicates: Tensor = field(default_factory=lambda: zeros(REPLICATES, 4))
    of_rollout: Tensor = field(default_factory=lambda: zeros(REPLICATES, 5))
    unrelated: int = 0
    related: int = 0
    correlated: int = 0
    swapped: int = 0
    far: Tensor = field(default_factory=lambda: zeros(2))
    moved: Tensor = field(default_factory=lambda: zeros(2))
    sizes: Tensor = field(default_factory=lambda: zeros(SIZES, 3))
    groups: list[GroupSizes] = field(default_factory=list)
    grouped: Tensor = field(default_factory=lambda: zeros(3, SIZES))
    open: dict[tuple[str, str], Tensor] = field(default_factory=dict)

    def add(self, part: DumpedRollout) -> None:
        """Adds the samples of a part of a rollout."""
        count, absolute, _, log_ratio, _, near = part.columns
        ratio = part.log_ratio.double().clamp(max=HIGHEST).exp() * count
        sums = part.segments.local_sums([count, near, ratio, ratio.square(), log_ratio, absolute])
        seed = (1 + part.rollout_id * 8191 + part.positions[0]) % (1 << 63)
        generator = torch.Generator().manual_seed(seed)
        draws = torch.poisson(torch.ones(REPLICATES, part.count, dtype=torch.float64), generator=generator)
        self.of_rollout += draws @ sums[[0, 1, 2, 3, 5]].T
        n, k, *_ = sums
        head = (part.segments.within < HEAD).double()
        rows = _rows(*sums[[0, 1, 4, 5]])
        heads = _rows(*part.segments.local_sums([x * head for x in (count, near, log_ratio, absolute)]))
        for label, values_of in LABELS.items():
            values = values_of(part)
            if values is not None:
                self._add_label(label, values, heads if label in SHAPES else rows)
        self._add_unrelated(part, sums)
        small, surprise = part.segments.local_sums(
            [absolute.clamp(max=SMALL), -part.compared(part.behavior).double()]
        )
        size = (small / (surprise + CERTAIN * n).clamp_min(1e-30)).clamp_min(1e-30).log10()
        at = ((size + DECADES) * SIZES / DECADES).long().clamp(0, SIZES - 1)
        at = torch.where(surprise > CERTAIN * n, at, SIZES)  # the others agree whatever the weights are
        self.sizes += tabulated(at, [torch.ones_like(n), n, k], SIZES)
        if part.groups is not None:
            self.grouped += _by_group(torch.tensor(part.groups), at, (n > 0) & (surprise > CERTAIN * n))

    def _add_label(self, label: str, values: Sequence[str], rows: Tensor) -> None:
        names = {value: i for i, value in enumerate(dict.fromkeys(values))}
        if len(names) > MOST:
            return
        index = torch.tensor([names[value] for value in values])
        table = zeros(len(names), rows.shape[1]).index_add_(0, index, rows)
        for value, row in zip(names, table, strict=True):
            if value:
                key = label, value
                self.open[key] = self.open[key] + row if key in self.open else row

    def _add_unrelated(self, part: DumpedRollout, sums: Tensor) -> None:
        count = sums[0]
        b, p = (part.compared(x).double().clamp(min=LEAST) for x in (part.behavior, part.proximal))
        sb, sp, bb, pp, bp = part.segments.local_sums([b, p, b * b, p * p, b * p])
        n = count.clamp_min(1)
        of_b, of_p, of_both = bb - sb * sb / n, pp - sp * sp / n, bp - sb * sp / n
        correlation = of_both / (of_b * of_p).clamp_min(1e-30).sqrt()
        known = (count >= FEWEST) & (of_b > 1e-6) & (of_p > 1e-6)
        (size,) = part.segments.local_sums([part.log_ratio.abs().clamp(max=1.0)])
        bad = known & (correlation < UNRELATED) & (size / n > APART)
        self.correlated += int(known.sum())
        self.related += int((known & (correlation > RELATED)).sum())
        if bad.any():
            self.unrelated += int(bad.sum())
            self.far += torch.stack([count[bad].sum(), sums[1][bad].sum()])
            self.swapped += _swapped(part, bad.nonzero()[:TRIED, 0])
            self.moved += _moved(part, bad.nonzero()[:TRIED, 0])

    def close(self, rollout: DumpedRollout) -> tuple[float, float]:
        """Ends a rollout. Returns the standard errors of the logarithms of its mean k3 and mean |l|."""
        for (label, value), row in sorted(self.open.items()):
            samples, tokens, *rest = row.tolist()
            if samples:
                self.parts.append(Part(rollout.rollout_id, label, value, int(samples), int(tokens), *rest))
        tokens, k3, *_, absolute = self.of_rollout.unbind(1)
        errors = _wobble(k3, tokens), _wobble(absolute, tokens)
        self.replicates = self.replicates + self.of_rollout[:, :4]
        if self.grouped.any():
            self.groups.append(GroupSizes(rollout.rollout_id, *(tuple(map(int, x)) for x in self.grouped)))
        self.of_rollout, self.grouped, self.open = zeros(REPLICATES, 5), zeros(3, SIZES), {}
        return errors

    def by_label(self) -> dict[str, dict[int, list[Part]]]:
        """Returns label -> rollout -> its parts."""
        parts_of: dict[str, dict[int, list[Part]]] = defaultdict(lambda: defaultdict(list))
        for part in self.parts:
            parts_of[part.label][part.rollout_id].append(part)
        return parts_of


def _rows(n: Tensor, k: Tensor, signed: Tensor, size: Tensor) -> Tensor:
    """Returns the numbers of ``Part`` from sums over some tokens of each sample, [S, 8]."""
    rows = torch.stack([torch.ones_like(n), n, k, k * k, k * n, n * n, signed, size], 1)
    return torch.where((n > 0)[:, None], rows, 0)


def _wobble(sums: Tensor, tokens: Tensor) -> float:
    """Returns the standard error of the logarithm of a mean over tokens, from samples drawn again."""
    known = (tokens > 0) & (sums > 0)
    return float((sums[known] / tokens[known]).log().std()) if int(known.sum()) > 2 else 0.0


def _by_group(groups: Tensor, bins: Tensor, known: Tensor) -> Tensor:
    """Returns the numbers of ``GroupSizes`` over the known samples of one part, [3, SIZES].

    Args:
        groups, bins: [S] prompt and bin of each sample.
        known: [S] bool, samples to count.
    """
    numbers, index, counts = groups[known].unique(return_inverse=True, return_counts=True)
    bins, none = bins[known], torch.zeros(len(numbers), dtype=torch.int64)
    lowest, highest = (none.scatter_reduce(0, index, bins, of, include_self=False) for of in ("amin", "amax"))
    several = counts > 1
    of_each = (bins[several[index]], lowest[several], highest[several])
    return torch.stack([torch.bincount(x, minlength=SIZES) for x in of_each]).double()


def _swapped(part: DumpedRollout, which: Tensor) -> int:
    """Returns how many of some samples have the log-probs of another sample of the part."""
    lengths = torch.tensor(part.lengths)
    begins = lengths.cumsum(0) - lengths
    long = (lengths >= COMPARED).nonzero()[:, 0]
    which = which[lengths[which] >= COMPARED]
    if not len(which) or not len(long):
        return 0
    at = torch.arange(COMPARED)
    trainer = part.proximal[begins[long][:, None] + at].double()
    sampler = part.behavior[begins[which][:, None] + at].double()
    apart = (sampler[:, None] - trainer[None]).abs().mean(2).nan_to_num(math.inf)
    to_itself = apart[which[:, None] == long[None]]
    return int((apart.amin(1) < FITS * to_itself).sum())


def _moved(part: DumpedRollout, which: Tensor) -> Tensor:
    """Returns the numbers of ``BySample.moved`` for some samples, [2]."""
    lengths = torch.tensor(part.lengths)
    begins = lengths.cumsum(0) - lengths
    counts = zeros(2)
    for sample in which.tolist():
        at = slice(int(begins[sample]), int(begins[sample]) + min(part.lengths[sample], LONGEST))
        b, p = (x[at][part.finite[at]].double().clamp(min=LEAST) for x in (part.behavior, part.proximal))
        if len(b) < 2 * WINDOW:
            continue
        sampler_windows, trainer_windows = (x.unfold(0, WINDOW, 1) for x in (b, p))
        apart = torch.cdist(trainer_windows, sampler_windows, p=1)
        in_place, best = apart.diagonal(), apart.amin(1)
        is_far = (in_place > DOUBT * WINDOW) & (trainer_windows.sum(1) < -DOUBT * WINDOW)
        fits = is_far & (best < ELSEWHERE * in_place)
        counts += torch.stack([is_far.sum(), fits.sum()])
    return counts
