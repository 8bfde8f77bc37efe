"""Compares the log-probs that each side gives to the same text in several samples of a prompt."""

from __future__ import annotations

import math
from dataclasses import field
from statistics import median
from typing import ClassVar

import torch
from torch import Tensor

from slime_ext.tools.analysis.detectors.shared.contexts import Runs, by_text
from slime_ext.tools.analysis.detectors.shared.detector import FEW, Figures, Margin, need
from slime_ext.tools.analysis.detectors.shared.exchanged import have_another_text
from slime_ext.tools.analysis.detectors.shared.explained import (
    BFLOAT16_K3,
    explained_by_rest,
    explained_by_tokens,
    whole_run,
)
from slime_ext.tools.analysis.detectors.shared.kinds import two_kinds
from slime_ext.tools.analysis.detectors.shared.unrelated import Unrelated
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.measure import Measure
from slime_ext.tools.analysis.measures.rollouts import top_share
from slime_ext.tools.analysis.records import DumpedRollout
from slime_ext.tools.analysis.tables import any_true, zeros

# Findings and groups that also make the log-probs of the same text differ.
NAMED = (
    "spoilt",
    "other_policy",
    "other_log_probs",
    "permuted_log_probs",
    "shared_place",
    "part_of_run",
    "packing_leak",
    "mixed_policies",
    "repeated_routes",
)
DENSE = 0.03  # median |l| over mean |l|
FEWEST, HELD, TIMES = 40, 0.4, 3.0  # tokens; share of mean |l|; times the other side's
# nats, the spread of a side's log-probs of one text. Two correct engines with the same weights in bfloat16
# differ by a mean |l| of 0.04, and one engine by half of that between batches of different sizes.
BFLOAT16 = 0.04
MOST = 0.5  # share of k3 that differs each time
UNSURE = -0.05  # nats, the log-prob of a side that is unsure


class Twice(Measure):
    """Sums over tokens that another sample of their prompt has too, with equal text before and equal weights.

    ``sums`` is [7]: their number, sum |behavior - mean|, sum |proximal - mean| and sum |l|, over tokens at
    which at least one side is unsure; then the same three with squares. The mean is over the n samples that
    have the token, so the squares of the first two are multiplied by n / (n - 1).
    """

    version: ClassVar[int] = 2

    sums: Tensor = field(default_factory=lambda: zeros(7))

    def add(self, part: DumpedRollout) -> None:
        if part.size and part.tokens is not None:
            self.sums += twice(part)


class TwiceOfLength(Measure):
    """The sums of ``Twice``, where only responses of the same length are compared, [7]."""

    sums: Tensor = field(default_factory=lambda: zeros(7))

    def add(self, part: DumpedRollout) -> None:
        if part.size and part.tokens is not None:
            self.sums += twice(part, of_length=True)


def twice(part: DumpedRollout, samples: Tensor | None = None, *, of_length: bool = False) -> Tensor:
    """Returns the numbers of ``Twice`` for one part, [7].

    Args:
        samples: [S] bool, samples that are compared with each other; None: all.
        of_length: only responses of the same length are compared with each other.
    """
    texts = by_text(part)
    if of_length:
        lengths = part.response_lengths[part.segments.ids[texts.at].long()]
        texts = Runs.of(texts.at, texts.run * (int(part.response_lengths.max()) + 1) + lengths)
    if samples is not None:
        there = samples[part.segments.ids[texts.at].long()]
        texts = Runs.of(texts.at[there], texts.run[there])
    size = texts.sizes[texts.run]
    is_again = size > 1
    if not any_true(is_again):
        return zeros(7)
    both, means = texts.log_probs(part)
    apart = (both - means[:, texts.run]).abs()
    size, log_ratio = size.double(), part.log_ratio[texts.at].double()
    squares = apart.square() * size / (size - 1).clamp_min(1)
    rows = torch.stack([torch.ones_like(size), *apart, log_ratio.abs(), *squares, log_ratio.square()], 1)
    return rows[is_again & (both.amin(0) < UNSURE)].sum(0)


def unsteady(d: Diagnosis, side: str) -> Figures | None:
    """Returns ``unrepeated`` if what differs each time makes most of k3, so that it is the cause."""
    figures = unrepeated(d, side)
    return figures if figures and figures["explains"].share >= MOST else None


def depends_on_length(d: Diagnosis) -> bool:
    """Returns whether the trainer scores the same text alike in responses of one length, but not in all.

    Noise moves each response. Positions, chunks and padding may depend on where a response ends.
    """
    (every, _, spread), (count, _, of_length) = (
        d.of(kind).sums[:3].tolist() for kind in (Twice, TwiceOfLength)
    )
    return count >= FEWEST and spread >= every * max(BFLOAT16, TIMES * of_length / count)


def unrepeated(d: Diagnosis, side: str) -> Figures | None:
    """Returns how much a side's log-probs of the same text differ, if that is a part of the distance."""
    sums = d.of(Twice).sums
    count, sampler, trainer, absolute, *squares, _ = sums.tolist()
    need(count >= FEWEST, f"{FEWEST} tokens with the same text before them in another sample of their prompt")
    spread, other = (sampler, trainer) if side == "sampler" else (trainer, sampler)
    samples, kinds = d.of(Unrelated), two_kinds(d)
    # In two kinds of samples, most tokens of the far ones are off, however few they are in the run.
    are_few = kinds is None and (top_share(d.rollouts) >= FEW or (side == "sampler" and _are_few(d)))
    if are_few or samples.unrelated > samples.related:  # the log-probs of another text
        return None
    # The far samples' own k3 is then beyond that of two engines, however few of the texts are theirs.
    of_kinds = kinds if side == "sampler" else None
    if of_kinds is not None and have_another_text(d, of_kinds):
        return None
    # One engine of several is hidden in the mean over all samples; dropout is in each of them.
    least = None if side == "trainer" else BFLOAT16_K3 if of_kinds is None else 0.0
    if not differs(sums, side, least):
        return None
    if of_kinds is None:
        k3, left = whole_run(d)[1], 1 - min(squares[side == "trainer"] / float(sums[-1]), 1.0)
        explains = explained_by_rest(d, k3, left * k3)
    else:
        explains = explained_by_tokens(d, *of_kinds.far[1:])
    # Of two kinds of samples, the squares decide, and the gap between the kinds is the margin.
    margin = {} if of_kinds else {"margin": _margin(sums, side)}
    return margin | {
        "variance": squares[side == "trainer"] / count,
        "count": count,
        "spread": spread / count,
        "other": other / count,
        "absolute": absolute / count,
        "explains": explains,
    }


def repeats(d: Diagnosis, side: str) -> bool:
    """Returns whether a side scores the same text alike in several samples, although they are far off.

    What acts through the other samples of a batch or of a pack does not, because they are others each time.
    """
    count, sampler, trainer, absolute = d.of(Twice).sums[:4].tolist()
    spread = sampler if side == "sampler" else trainer
    return count >= FEWEST and spread < min(BFLOAT16 * count, HELD * absolute)


def differs(sums: Tensor, side: str, least: float | None) -> bool:
    """Returns whether a side's log-probs of the same text differ more than two correct engines', and alone.

    Args:
        sums: [7], as ``Twice.sums``.
        least: nats^2, if a part of the samples may be far off: their mean square at least. The mean over all
            samples hides these. k3 of two engines is half the mean square of their difference, which is the
            variance of one of them. None: only the means count.
    """
    count, *absolutes, distance = sums[:4].tolist()
    *squares, square = sums[4:].tolist()
    one, other = (0, 1) if side == "sampler" else (1, 0)
    if absolutes[one] >= max(BFLOAT16 * count, HELD * distance, TIMES * absolutes[other]):
        return True
    if least is None or not squares[one]:
        return False
    return squares[one] >= max(least * count, HELD * square, TIMES**2 * squares[other])


def _margin(sums: Tensor, side: str) -> Margin:
    """Returns the margin of the mean size of a side's differences, or of their mean square if that decides.

    Args:
        sums: [7], as ``Twice.sums``.
    """
    count, *absolutes, distance, sampler, trainer, square = sums.tolist()
    one, other = (0, 1) if side == "sampler" else (1, 0)
    squares = sampler, trainer
    limit = max(BFLOAT16 * count, HELD * distance, TIMES * absolutes[other])
    if absolutes[one] >= limit:
        return Margin(*(x / count for x in (absolutes[one], math.sqrt(squares[one]), limit)))
    limit = max(BFLOAT16_K3 * count, HELD * square, TIMES**2 * squares[other])
    # A few large differences make most of the square: it is known as well as that of so many equal ones.
    alike = absolutes[one] ** 2 / squares[one]
    return Margin(*(x / count for x in (squares[one], squares[one] / math.sqrt(alike), limit)))


def _are_few(d: Diagnosis) -> bool:
    """Returns whether most tokens agree, so that only some log-probs were overwritten."""
    middle = median(s.median for s in d.rollouts)
    return middle < DENSE * (d.sums.mean_absolute or 0.0)
