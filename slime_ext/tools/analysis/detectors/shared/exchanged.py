"""Searches the text to which the log-probs of an unrelated sample belong."""

from __future__ import annotations

import math
from dataclasses import field
from typing import ClassVar

import torch
from torch import Tensor

from slime_ext.ops.divergences import k3
from slime_ext.tools.analysis.detectors.shared.explained import RESTORED, restored
from slime_ext.tools.analysis.detectors.shared.kinds import Kinds
from slime_ext.tools.analysis.detectors.shared.unrelated import TRIED, Unrelated, relation_of
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.measure import Measure
from slime_ext.tools.analysis.records import MOST_K3, DumpedRollout
from slime_ext.tools.analysis.tables import zeros

# Tokens that another sample must fit: first these, then up to these; share of the distance to its own tokens.
COMPARED, CONFIRMED, FITS = 12, 64, 0.3
# Tokens of a stretch, and share of its distance; samples of a part of which one is looked for, and tokens in
# which it is looked for: those of the sample's micro-batch, or of the samples around it.
STRETCH, STRETCH_FITS, STRETCHES, AROUND = 16, 0.15, 16, 1 << 14
MOSTLY = 0.5  # share of the far samples, or of their k3


class Exchanged(Measure):
    """Unrelated samples, and those whose log-probs fit the tokens of another sample of their part.

    At most TRIED samples of a part are compared with the first tokens of all its samples, and STRETCHES of
    those that fit none with every stretch of their micro-batch.

    Args:
        tried: number of samples that were looked for.
        places: [3] how many fit a sample of the same micro-batch, of another, and of an unknown one.
        sums: [RESTORED] of those that fit.
        far: [3] number of tokens of all unrelated samples, sum of k3, and its square over samples.
        apart: sum of k3 over all samples that are far off and not related.
    """

    takes_joined: ClassVar[bool] = True

    tried: int = 0
    places: Tensor = field(default_factory=lambda: zeros(3))
    sums: Tensor = field(default_factory=lambda: zeros(RESTORED))
    far: Tensor = field(default_factory=lambda: zeros(3))
    apart: float = 0.0

    def add(self, part: DumpedRollout) -> None:
        if relation_of(part).unrelated.any():
            for one in part.rollouts:
                self._add(one)

    def _add(self, part: DumpedRollout) -> None:
        relation = relation_of(part)
        unrelated = relation.unrelated
        count, *_, near = part.columns
        sums = part.sums([count, near])
        self.apart += float(sums[1, relation.apart & ~relation.related].sum())
        tokens, distance = sums[:, unrelated]
        self.far += torch.stack([tokens.sum(), distance.sum(), distance.square().sum()])
        which = unrelated.nonzero()[:TRIED, 0]
        lengths = part.response_lengths
        begins = (lengths.cumsum(0) - lengths).tolist()
        owners = _owners(part, which)
        rest = [i for i in which.tolist() if i not in owners][:STRETCHES]
        self.tried += len(owners) + len(rest)
        for i, (owner, after) in {**owners, **_stretches(part, rest)}.items():
            at = slice(begins[i], begins[i] + part.lengths[i])
            self.sums += restored(near[at][part.finite[at]], after)
            is_same = part.batches is not None and part.batches[i] == part.batches[owner]
            self.places[2 if part.batches is None else 0 if is_same else 1] += 1


def have_another_text(d: Diagnosis, kinds: Kinds) -> bool:
    """Returns whether most far samples have the log-probs of another text, which no other weights give.

    Those that are short, or begin as the other text does, do not show it, so most of their k3 counts, too.
    """
    far, _, k3 = kinds.far
    return d.of(Unrelated).unrelated > MOSTLY * far or float(d.of(Exchanged).far[1]) > MOSTLY * k3


def _owners(part: DumpedRollout, which: Tensor) -> dict[int, tuple[int, float]]:
    """Returns sample -> the sample whose tokens its log-probs fit from the start on, and the mean k3 then."""
    lengths = part.response_lengths
    begins = lengths.cumsum(0) - lengths
    long = (lengths >= COMPARED).nonzero()[:, 0]
    which = which[lengths[which] >= COMPARED]
    if not len(which) or not len(long):
        return {}
    at = torch.arange(COMPARED)
    trainer = part.proximal[begins[long][:, None] + at].double()
    sampler = part.behavior[begins[which][:, None] + at].double()
    apart = (sampler[:, None] - trainer[None]).abs().mean(2).nan_to_num(math.inf)
    to_itself, best = apart[which[:, None] == long[None]], apart.min(1)
    owners = {}
    for i, owner in zip(
        which[best.values < FITS * to_itself].tolist(),
        long[best.indices[best.values < FITS * to_itself]].tolist(),
        strict=True,
    ):
        size = min(part.lengths[i], part.lengths[owner], CONFIRMED)
        here, there = (slice(int(begins[s]), int(begins[s]) + size) for s in (i, owner))
        usable = part.finite[here] & part.finite[there]
        q, p = part.behavior[here][usable], part.proximal[there][usable]
        in_place = float(part.log_ratio[here][usable].abs().sum())
        if i != owner and float((p - q).abs().sum()) < FITS * in_place:
            owners[i] = owner, float(k3((p - q).double()).clamp(max=MOST_K3).mean())
    return owners


def _stretches(part: DumpedRollout, which: list[int]) -> dict[int, tuple[int, float]]:
    """Returns sample -> another sample of which a stretch fits its least certain stretch, and the mean k3."""
    lengths = part.response_lengths
    begins = lengths.cumsum(0) - lengths
    owners = {}
    for i in which:
        begin, end = int(begins[i]), int(begins[i]) + part.lengths[i]
        if end - begin < STRETCH or not part.finite[begin:end].all():
            continue
        windows = part.behavior[begin:end].unfold(0, STRETCH, 1)
        at = int(windows.sum(1).argmin())
        sampler = windows[at].double()
        in_place = float((part.proximal[begin + at : begin + at + STRETCH] - sampler).abs().sum())
        around = _around(part, i)
        ids = part.segments.ids[around].unfold(0, STRETCH, 1)
        inside = (ids[:, 0] == ids[:, -1]) & (ids[:, 0] != i)
        apart = (part.proximal[around].double().unfold(0, STRETCH, 1) - sampler).abs().sum(1)
        apart = torch.where(inside, apart.nan_to_num(math.inf), math.inf)
        best = int(apart.argmin())
        if float(apart[best]) < STRETCH_FITS * in_place:
            trainer = part.proximal[around[best : best + STRETCH]].double()
            owners[i] = int(ids[best, 0]), float(k3(trainer - sampler).clamp(max=MOST_K3).mean())
    return owners


def _around(part: DumpedRollout, sample: int) -> Tensor:
    """Returns the tokens of a sample's micro-batch, or of the samples around it, at most AROUND of them."""
    if part.batches is None:
        middle = int((part.segments.ids == sample).nonzero()[0, 0])
        return torch.arange(max(middle - AROUND // 2, 0), min(middle + AROUND // 2, part.size))
    is_same = torch.tensor(part.batches) == part.batches[sample]
    return is_same[part.segments.ids.long()].nonzero()[:AROUND, 0]
