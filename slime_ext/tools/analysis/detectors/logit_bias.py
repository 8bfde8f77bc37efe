"""The finding ``logit_bias``."""

from __future__ import annotations

import math
from dataclasses import field
from typing import ClassVar

import torch
from torch import Tensor

from slime_ext.tools.analysis.detectors.shared.clipped import COLUMNS
from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, Margin, need
from slime_ext.tools.analysis.detectors.shared.explained import VALUES, explained_by_values
from slime_ext.tools.analysis.detectors.shared.kinds import two_kinds
from slime_ext.tools.analysis.detectors.shared.repeats import rise
from slime_ext.tools.analysis.detectors.shared.token_ids import IDS, UNSURE, TokenIds, by_id
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.measure import Measure
from slime_ext.tools.analysis.records import DumpedRollout
from slime_ext.tools.analysis.tables import is_below, selection, zeros

SIZES, DECADES = 60, 6  # bins of |l|, from 1e-4 to 1e2 nats


class Unsure(Measure):
    """Tokens at which the sampler was unsure.

    Args:
        ids: sums of ``clipped`` by token id, as in ``TokenIds``.
        sizes: [SIZES] number of tokens by bin of |l|.
    """

    version: ClassVar[int] = 2

    ids: Tensor = field(default_factory=lambda: zeros(IDS, COLUMNS))
    sizes: Tensor = field(default_factory=lambda: zeros(SIZES))

    def add(self, part: DumpedRollout) -> None:
        if part.size and part.tokens is not None:
            is_unsure = part.finite & is_below(part.behavior, UNSURE)
            ids, sums = by_id(part)
            self.ids.index_add_(0, ids, sums[1])
            self.sizes += torch.bincount(
                size_bin(selection(part.columns[1], is_unsure)), minlength=SIZES
            ).double()


def size_bin(absolute: Tensor) -> Tensor:
    """Returns the bin of ``Unsure.sizes`` of each |l| [N], nats.

    >>> size_bin(torch.tensor([0.0, 1e-4, 0.01, 1.0])).tolist()
    [0, 0, 20, 40]
    """
    at = absolute.clamp_min(1e-30).log10() * SIZES / DECADES + 4 * SIZES / DECADES
    return at.round(decimals=6).floor().long().clamp(0, SIZES - 1)


DETECTOR = Detector(
    severity="error",
    side="either",  # a banned token leaves mass out of the record, a finite bias does not
    group="other_policy",
    after=(
        "spoilt",
        "kept_mass",
        "constrained_decoding",
        "shared_place",
        "other_log_probs",
        "minimum_length",
        "prefix_mismatch",
        "part_of_run",
    ),
    what="a few token ids are far off in every context: a logit bias",
    asks="token ids, 300 tokens",
    title="""
        {{ ids | length }} token id{{ 's' if ids | length > 1 }} {{ 'are' if ids | length > 1 else
        'is' }} far off in every context: a logit bias in the sampler.
    """,
    evidence="""
        Where the sampler is unsure, the log-ratio of id {{ ids[:5] | join(", ") }}{{ ", ..." if ids |
        length > 5 }} (modulo 4096) is {{ biases[:5] | join(", ") }}{{ ", ..." if ids | length > 5 }}
        nats in every context, with a spread of {{ "%.1g" | format(spread) }} nats ({{ count | int }}
        tokens). {{ near | share(1) }} of the other tokens of equal certainty are off by less than a
        quarter of that.
    """,
    threshold="""
        at most 10 ids, which hold 15% of the run's squared log-ratio. Where the sampler is unsure,
        their log-ratio is at least 0.1 nats, its mean explains 80% of its square, and 60% of the
        other tokens are off by less than a quarter of it. If some samples are far off and the others
        near, the ids hold 80%
    """,
    ruled_out="""
        Noise, routing or old weights, because they depend on the context and move other tokens as
        far.
    """,
    fix="""
        Look for logit_bias and for banned or forced tokens (bad_words, stop and end tokens) in
        sampling_params, and for the list of end tokens in generation_config.json, which engines always
        apply. A row of the output layer that the push leaves
        out looks the same.
    """,
)
FEWEST, LEAST = 300, 4  # tokens; tokens of an id where the sampler is unsure
MATTERS, CONSTANT = 0.1, 0.8  # nats; share of an id's squared log-ratio that its mean explains
MOST, TOKENS, HELD = 10, 10, 0.15  # ids; their tokens; their share of the squared log-ratio
ALONE = 0.8  # share of the squared log-ratio of ids that alone make samples far off
NEAR, AGREE = 0.25, 0.6  # share of the bias; share of the other tokens that are off by less
SURE, BANNED = 8.0, 3  # standard errors; more ids than this may be frequent tokens under a penalty


def look(d: Diagnosis) -> Figures | None:
    """Finds ids with the same log-ratio in every context, while other tokens agree.

    A bias b on token x makes l = -b + c at x and l = c elsewhere, where c = log sum p e^b. If the sampler is
    unsure, c is mostly near 0, so l is about -b at x in every context. Samples without x agree, so a bias may
    split the samples into near and far ones. Unless x holds nearly all of the squared log-ratio, something
    else makes samples far, and x may merely be frequent in these.
    """
    sums, unsure = d.of(TokenIds).sums, d.of(Unsure)
    need(float(sums[:, 0].sum()) >= FEWEST, "token ids, 300 tokens")
    chosen = _constant_ids(unsure.ids)
    count, _, _, squared, _ = unsure.ids[chosen].sum(0).tolist()
    whole = float(sums[:, 3].sum())
    held = float(sums[chosen, 3].sum())
    if not 0 < len(chosen) <= MOST or count < TOKENS or held < HELD * whole:
        return None
    means = unsure.ids[chosen, 1] / unsure.ids[chosen, 0]
    near = float(unsure.sizes[: int(size_bin(NEAR * means.abs().min()))].sum())
    others = float(unsure.sizes.sum()) - count
    rise_of_repeats, error = rise(d)
    is_history = (
        abs(rise_of_repeats) >= SURE * error > 0 and len(chosen) > BANNED
    )  # a penalty on frequent ids
    is_of_samples = held < ALONE * whole and two_kinds(d) is not None
    if near < AGREE * others or is_history or is_of_samples:
        return None
    explained = float((means.square() * unsure.ids[chosen, 0]).sum())
    spread = math.sqrt(max(squared - explained, 0.0) / count)
    first = unsure.ids[chosen[0]]  # the largest bias, which the other ids are compared with
    return {
        "ids": [f"{i}" for i in chosen.tolist()],
        "biases": [f"{mean:+.2g}" for mean in means.tolist()],
        "spread": spread,
        "count": count,
        "near": near / max(others, 1.0),
        "margin": Margin(float(means.abs()[0]), spread / math.sqrt(float(first[0])), MATTERS),
        "explains": explained_by_values(d, unsure.ids[chosen][:, VALUES]),
    }


def _constant_ids(unsure: Tensor) -> Tensor:
    """Returns the ids with a constant log-ratio where the sampler is unsure, the largest first.

    Ids below a quarter of the largest are left out, because the bias of another id moves them.
    """
    count, signed, _, squared, _ = unsure.unbind(1)
    mean = signed / count.clamp_min(1)
    is_constant = (count >= LEAST) & (count * mean.square() >= CONSTANT * squared)
    size = torch.where(is_constant, mean.abs(), 0)
    ids = (size >= max(MATTERS, NEAR * float(size.max()))).nonzero()[:, 0]
    return ids[size[ids].argsort(descending=True)]
