"""Reads both policies' log-probs of the tokens that the sampler could have drawn, and compares them.

A head is the sampler's K most likely tokens. Rollout dumps hold its log-probs (``rollout_topk_log_probs``) if
``slime_ext.host.generate`` runs with ``center``, or since slime 2e5cd7c, which also writes them to train
dumps. Under top-p, slime writes the whole support (``rollout_top_p_log_probs`` and
``rollout_top_p_token_offsets``). The trainer's log-probs of the same tokens are ``topk_log_probs`` or
``top_p_log_probs`` of train dumps. No host writes these by itself, but ``slime_ext.host.init`` does with
``center``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slime_ext.ops.centering import ABSENT, FLOOR
from slime_ext.ops.divergences import is_log_prob
from slime_ext.tools.analysis.readers.samples import DumpedSample
from slime_ext.tools.analysis.values import NO_NUMBERS, loaded

HEADS = ("sampler_head", "trainer_head", "sampler_support", "trainer_support")  # of ``DumpedSample``


def compare_heads(row: DumpedSample, sample: DumpedSample) -> None:
    """Sets ``heads``, ``kl`` and ``tail`` of a row.

    The trainer's log-probs are in the row, the sampler's in it or in its sample of the rollout dump. A
    support has neither ``kl`` nor ``tail``, because it leaves nothing out.
    """
    if all(
        x.sampler_head is None and x.trainer_head is None and x.trainer_support is None for x in (row, sample)
    ):
        return
    head = _first(row.sampler_head, sample.sampler_head), row.trainer_head
    support = _first(row.sampler_support, sample.sampler_support), row.trainer_support
    offsets = _first(row.support_offsets, sample.support_offsets)
    for each in (row, sample):  # frees the lists, which are large
        each.sampler_head = each.trainer_head = each.sampler_support = each.trainer_support = None
    length = row.response_length
    if (sides := _tensors(head)) and sides[0].dim() == 2 and len(sides[0]) == length:
        row.kl, row.tail = head_kl(*sides)
        row.heads = _as_absent(*sides)
    elif (sides := _tensors(support)) and (ends := _tensors((offsets,))):
        row.heads, row.is_exact = _rows_of(*sides, ends[0].long(), length), True


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    """Returns all values in float64; an empty list if one is missing, or if their shapes differ."""
    if any(value is None for value in values):
        return []
    try:
        tensors = [torch.as_tensor(loaded(value)).double() for value in values]
    except NO_NUMBERS:
        return []
    return tensors if len({tensor.shape for tensor in tensors}) == 1 else []


def _as_absent(sampler: Tensor, trainer: Tensor) -> tuple[Tensor, Tensor]:
    """Returns both sides in float32, with ABSENT on both where a head is shorter."""
    there = is_log_prob(sampler)
    return tuple(torch.where(there, x, ABSENT).float() for x in (sampler, trainer))  # type: ignore[return-value]


def _rows_of(sampler: Tensor, trainer: Tensor, offsets: Tensor, length: int) -> tuple[Tensor, Tensor] | None:
    """Returns ragged rows as [R, W], padded with NaN; None if the offsets do not fit."""
    counts = offsets.diff()
    fits = sampler.dim() == 1 and offsets.shape == (length + 1,) and bool((counts >= 0).all())
    if not (fits and length and int(offsets[0]) == 0 and int(offsets[-1]) == len(sampler)):
        return None
    there = torch.arange(max(int(counts.max()), 1)) < counts[:, None]
    sides = []
    for values in (sampler, trainer):
        rows = torch.full(there.shape, torch.nan)
        rows[there] = values.float()
        sides.append(rows)
    return sides[0], sides[1]


def head_kl(sampler: Tensor, trainer: Tensor) -> tuple[Tensor, Tensor]:
    """Returns KL(q || p) over a head and its tail, and the tail's mass under q, [R] each.

    The KL is sum over v in H of q_v log(q_v / p_v), plus (1 - Q) log((1 - Q) / (1 - P)), where H is the head,
    q = e^sampler, p = e^trainer, and Q and P are their sums over H. The tail counts as one token. This is
    exact if q / p is the same all over the tail, and too small otherwise.

    Args:
        sampler, trainer: [R, K] log-probs of the same tokens, normalised over the whole vocabulary, nats. If
            a head is shorter, the sampler's values behind it are no log-probs, such as -inf.

    Returns:
        Both in float32; NaN if a token has no head.
    """
    there = is_log_prob(sampler)
    q, p = (torch.where(there, x, -torch.inf).exp() for x in (sampler, trainer))
    q_tail, p_tail = (1 - x.sum(1) for x in (q, p))
    of_tail = q_tail.clamp_min(FLOOR) * (q_tail.clamp_min(FLOOR) / p_tail.clamp_min(FLOOR)).log()
    kl = torch.where(there, q * (sampler - trainer), 0).sum(1) + of_tail
    return tuple(torch.where(there.any(1), x, torch.nan).float() for x in (kl, q_tail))
