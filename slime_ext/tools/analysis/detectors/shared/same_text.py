"""Compares different tokens that samples of a prompt drew after the same text.

Two tokens of one context have the same normaliser. So whatever the trainer's distribution is, a temperature
makes l differ between them in proportion to log behavior, and renormalising to a part of the vocabulary makes
l the same for both.
"""

from __future__ import annotations

import math
from dataclasses import field

import numpy
import torch
from torch import Tensor

from slime_ext.tools.analysis.detectors.shared.clipped import clipped
from slime_ext.tools.analysis.detectors.shared.contexts import by_context
from slime_ext.tools.analysis.detectors.shared.explained import (
    Explained,
    explained_by_values,
    from_part,
)
from slime_ext.tools.analysis.detectors.shared.signs import FAR
from slime_ext.tools.analysis.detectors.shared.twice import BFLOAT16, Twice
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.measure import Measure
from slime_ext.tools.analysis.records import DumpedRollout
from slime_ext.tools.analysis.tables import zeros

FEWEST = 40  # tokens that share their context with a different token
FLAT = 1e-3  # nats^2 per token, variance of log behavior within contexts
SAME = 1e-12  # nats^2, that of one token with rounding
WIDE, MOSTLY = 5, 0.5  # least texts after which l differs, and their share of those with far tokens alone


class SameText(Measure):
    """Sums over tokens whose context another sample of their prompt has, with another token, [5].

    These are their number, sum k3, and over the deviations from their context's means sum l^2, sum
    l log behavior, and sum (log behavior)^2. Products are multiplied by n / (n - 1), for n samples.
    """

    sums: Tensor = field(default_factory=lambda: zeros(5))

    def add(self, part: DumpedRollout) -> None:
        contexts = by_context(part)
        at, run, sizes = contexts.at, contexts.run, contexts.sizes
        if not len(at):
            return
        _, log_ratio, _, _, near = clipped(part)
        log_ratio, near = log_ratio[at], near[at]
        both = torch.stack([log_ratio, part.behavior[at].double()])
        means = torch.zeros(2, len(sizes), dtype=torch.float64).index_add_(1, run, both) / sizes
        apart = both - means[:, run]
        spread = torch.zeros(len(sizes), dtype=torch.float64).index_add_(0, run, apart[1].square())
        is_known = spread[run] > SAME  # several tokens
        n, (l_apart, x_apart) = sizes[run][is_known].double(), apart[:, is_known]
        squares = torch.stack([l_apart.square(), l_apart * x_apart, x_apart.square()]) * n / (n - 1)
        count_k3 = torch.stack([is_known.double().sum(), near[is_known].sum()])
        self.sums += torch.cat([count_k3, squares.sum(1)])


class FarContexts(Measure):
    """Texts after which samples drew different tokens, all of them with |l| of FAR or more.

    Args:
        far: their number.
        wide: the number of those after which l differs by FAR or more.
    """

    far: int = 0
    wide: int = 0

    def add(self, part: DumpedRollout) -> None:
        contexts = by_context(part)
        if not len(contexts.at) or part.tokens is None:
            return
        begins = contexts.begins.numpy()
        log_ratio, tokens = (x[contexts.at].numpy() for x in (part.log_ratio, part.tokens))
        nearest = numpy.minimum.reduceat(numpy.abs(log_ratio), begins)
        spread, differ = (
            numpy.maximum.reduceat(x, begins) - numpy.minimum.reduceat(x, begins) for x in (log_ratio, tokens)
        )
        is_far = (nearest >= FAR) & (differ > 0)
        self.far += int(is_far.sum())
        self.wide += int((is_far & (spread >= FAR)).sum())


def is_not_renormalised(d: Diagnosis) -> bool:
    """Returns whether far tokens after the same text have other log-ratios.

    Renormalising to a part of the vocabulary makes them equal, however large it is. Where it acts on some
    requests only, the tokens of the others are near.
    """
    contexts = d.of(FarContexts)
    return contexts.wide >= WIDE and contexts.wide > MOSTLY * contexts.far


def explained_by_temperature(d: Diagnosis, kinds: Tensor) -> Explained:
    """Returns the share of k3 that goes if l is a line of log behavior in each context.

    Args:
        kinds: [kinds, 3] number of tokens, sum l and sum k3 by certainty, if too few tokens share a context.
            Contexts with other entropies scatter around the line, so the share is then a lower bound.
    """
    count, _, square, product, spread = d.of(SameText).sums.tolist()
    if not _is_enough(d) or not square:
        return explained_by_values(d, kinds)
    share = product * product / (square * spread)
    return from_part(d, share, 2 * math.sqrt(share) * (1 - share) / math.sqrt(count))


def explained_by_masses(d: Diagnosis, kinds: Tensor) -> Explained:
    """Returns the share of k3 that goes if l is one number in each context, as after a renormalisation.

    Args:
        kinds: as ``explained_by_temperature``.
    """
    count, near, square, *_ = d.of(SameText).sums.tolist()
    if not _is_enough(d):
        return explained_by_values(d, kinds)
    left = min(square / 2 / near, 1.0)
    return from_part(d, 1 - left, left / math.sqrt(count))


def _is_enough(d: Diagnosis) -> bool:
    """Returns whether enough different tokens come after the same text.

    If both sides give the same token other log-probs there, the prompts differ that the dump calls one group.
    """
    count, near, *_, spread = d.of(SameText).sums.tolist()
    same_tokens, *_, sampler, trainer, _ = d.of(Twice).sums.tolist()
    is_one_text = min(sampler, trainer) <= BFLOAT16**2 * same_tokens
    return count >= FEWEST and near > 0 and spread >= FLAT * count and is_one_text
