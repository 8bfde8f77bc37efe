"""What samples of a rollout share: k3 by every label that a dump holds, log-probs of another text, and how
far chance alone moves a rollout's numbers."""

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
SIZES, DECADES = 48, 6  # bins of how far off a sample is, from 1e-6 to 1 of its surprise
SMALL, CERTAIN = 0.2, 0.05  # nats: most that a token counts; least that a token's surprise counts
HEAD = 16  # first tokens of a response, which samples of every shape have
# Labels whose samples are compared there alone, because later tokens may be further off in all of them.
SHAPES = ("turns", "response length")
HIGHEST = 20.0  # nats, of a log-ratio whose square is still a number
MOST = 64  # values of a label in a rollout; one with more is no label of parts
LATER = 3  # turns, from which on they count as one; likewise places in a micro-batch
FEWEST = 12  # tokens of a sample whose columns are correlated
UNRELATED, RELATED = 0.3, 0.7  # correlation of both sides' log-probs over a sample
APART = 0.4  # nats, mean |l| of a sample of other text, of which each token counts 1 at most
LEAST = -8.0  # nats, of a log-prob, so that single tokens far off do not hide that the others agree
TRIED, COMPARED, FITS = 64, 12, 0.3  # samples, tokens, share of the own distance
# Tokens of a window, and of a sample whose windows are tried; nats by which a token of a window is off and
# unsure; share of its distance that is left at another place.
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
    """How far off the samples of a rollout and of its prompts are: numbers by bin of ``sizes``, of samples
    that are unsure of more than CERTAIN nats a token and of the prompts that have several of them."""

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


# Label -> its value for each sample; None where a dump lacks it. A value "" is none.
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
    """Of all samples of a run.

    Args:
        parts: sums by rollout, label and value.
        replicates: [REPLICATES, 4] tokens, sums of k3, ratio and squared ratio, of samples drawn again with
            replacement (each with a weight that is Poisson of mean 1); ``own`` [REPLICATES, 5] of the rollout
            that is read, and its sum of |l|.
        unrelated: samples whose log-probs do not follow the trainer's at all; ``related`` those that do, of
            ``correlated``; ``swapped`` those of the former that fit another sample of the rollout.
        far: [2] tokens, sum of k3 of the unrelated samples.
        moved: [2] windows of tokens that are far off in them; those of which the trainer's log-probs fit the
            sampler's at another place of the same sample.
        sizes: [SIZES, 3] samples, tokens and sum of k3 by |l|, of which each token counts for SMALL nats at
            most, over -log behavior: how far off a sample is for how sure the sampler was. Of samples of
            which it was unsure of more than CERTAIN nats a token.
        groups: the same by prompt; ``grouped`` [3, SIZES] of the rollout that is read.
    """

    parts: list[Part] = field(default_factory=list)
    replicates: Tensor = field(default_factory=lambda: zeros(REPLICATES, 4))
    own: Tensor = field(default_factory=lambda: zeros(REPLICATES, 5))
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
        generator = torch.Generator().manual_seed(1 + part.rollout_id * 8191 + part.positions[0])
        draws = torch.poisson(torch.ones(REPLICATES, part.count, dtype=torch.float64), generator=generator)
        self.own += draws @ sums[[0, 1, 2, 3, 5]].T
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
        at = torch.where(surprise > CERTAIN * n, at, SIZES)  # others agree whatever the weights
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
        """Ends a rollout; returns the standard errors of the logarithms of its mean k3 and mean |l|."""
        for (label, value), row in sorted(self.open.items()):
            samples, tokens, *rest = row.tolist()
            if samples:
                self.parts.append(Part(rollout.rollout_id, label, value, int(samples), int(tokens), *rest))
        tokens, k3, *_, absolute = self.own.unbind(1)
        errors = _wobble(k3, tokens), _wobble(absolute, tokens)
        self.replicates = self.replicates + self.own[:, :4]
        if self.grouped.any():
            self.groups.append(GroupSizes(rollout.rollout_id, *(tuple(map(int, x)) for x in self.grouped)))
        self.own, self.grouped, self.open = zeros(REPLICATES, 5), zeros(3, SIZES), {}
        return errors

    def by_label(self) -> dict[str, dict[int, list[Part]]]:
        """Label -> rollout -> its parts."""
        found: dict[str, dict[int, list[Part]]] = defaultdict(lambda: defaultdict(list))
        for part in self.parts:
            found[part.label][part.rollout_id].append(part)
        return found


def _rows(n: Tensor, k: Tensor, signed: Tensor, size: Tensor) -> Tensor:
    """[S, 8] the numbers of ``Part``, from sums over some tokens of each sample."""
    rows = torch.stack([torch.ones_like(n), n, k, k * k, k * n, n * n, signed, size], 1)
    return torch.where((n > 0)[:, None], rows, 0)


def _wobble(sums: Tensor, tokens: Tensor) -> float:
    """The standard error of the logarithm of a mean over tokens, from samples drawn again."""
    known = (tokens > 0) & (sums > 0)
    return float((sums[known] / tokens[known]).log().std()) if int(known.sum()) > 2 else 0.0


def _by_group(groups: Tensor, at: Tensor, known: Tensor) -> Tensor:
    """[3, SIZES] as in ``GroupSizes``, of the known samples of one part.

    Args:
        groups, at: [S] prompt and bin of each sample.
    """
    numbers, index, counts = groups[known].unique(return_inverse=True, return_counts=True)
    at, none = at[known], torch.zeros(len(numbers), dtype=torch.int64)
    lowest, highest = (none.scatter_reduce(0, index, at, of, include_self=False) for of in ("amin", "amax"))
    several = counts > 1
    of_each = (at[several[index]], lowest[several], highest[several])
    return torch.stack([torch.bincount(x, minlength=SIZES) for x in of_each]).double()


def _swapped(part: DumpedRollout, which: Tensor) -> int:
    """How many of some samples have the log-probs of another sample of the part."""
    lengths = torch.tensor(part.lengths)
    begins = lengths.cumsum(0) - lengths
    long = (lengths >= COMPARED).nonzero()[:, 0]
    which = which[lengths[which] >= COMPARED]
    if not len(which) or not len(long):
        return 0
    at = torch.arange(COMPARED)
    theirs = part.proximal[begins[long][:, None] + at].double()
    mine = part.behavior[begins[which][:, None] + at].double()
    apart = (mine[:, None] - theirs[None]).abs().mean(2).nan_to_num(math.inf)
    own = apart[which[:, None] == long[None]]
    return int((apart.amin(1) < FITS * own).sum())


def _moved(part: DumpedRollout, which: Tensor) -> Tensor:
    """[2] of some samples; see ``BySample.moved``."""
    lengths = torch.tensor(part.lengths)
    begins = lengths.cumsum(0) - lengths
    found = zeros(2)
    for sample in which.tolist():
        at = slice(int(begins[sample]), int(begins[sample]) + min(part.lengths[sample], LONGEST))
        b, p = (x[at][part.finite[at]].double().clamp(min=LEAST) for x in (part.behavior, part.proximal))
        if len(b) < 2 * WINDOW:
            continue
        theirs, mine = (x.unfold(0, WINDOW, 1) for x in (b, p))
        apart = torch.cdist(mine, theirs, p=1)
        own, best = apart.diagonal(), apart.amin(1)
        is_far = (own > DOUBT * WINDOW) & (mine.sum(1) < -DOUBT * WINDOW)
        fits = is_far & (best < ELSEWHERE * own)
        found += torch.stack([is_far.sum(), fits.sum()])
    return found
