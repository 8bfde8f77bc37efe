"""KL(behavior || proximal) at each token from the sampler's head: its K most likely tokens.

The sampler's is in rollout dumps (``rollout_topk_log_probs``: ``slime_ext.host.generate`` beside ``center``;
slime since 2e5cd7c, in train dumps too). The trainer's log-probs of the same tokens are ``topk_log_probs`` of
train dumps, which no host writes by itself, but ``slime_ext.host.init`` does beside ``center``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slime_ext.ops.centering import FLOOR
from slime_ext.ops.divergences import is_log_prob
from slime_ext.tools.analysis.readers.samples import NO_NUMBERS, DumpedSample
from slime_ext.tools.analysis.readers.spilled import loaded


def compare_heads(row: DumpedSample, sample: DumpedSample) -> None:
    """Sets ``kl`` and ``tail`` of a row, where it holds the trainer's log-probs and it or its sample of the
    rollout dump holds the sampler's."""
    sampler = row.sampler_head if row.sampler_head is not None else sample.sampler_head
    trainer, row.sampler_head, row.trainer_head, sample.sampler_head = row.trainer_head, None, None, None
    if sampler is None or trainer is None:
        return
    try:
        heads = [torch.as_tensor(loaded(values)).double() for values in (sampler, trainer)]
    except NO_NUMBERS:
        return
    if heads[0].dim() == 2 and heads[0].shape == heads[1].shape and len(heads[0]) == row.response_length:
        row.kl, row.tail = head_kl(*heads)


def head_kl(sampler: Tensor, trainer: Tensor) -> tuple[Tensor, Tensor]:
    """[R] sum over v in H of q_v log(q_v / p_v), plus (1 - Q) log((1 - Q) / (1 - P)); and [R] 1 - Q.

    With the head H, q = e^sampler, p = e^trainer, Q and P their sums over H. Exact over the head. The tail
    counts as one token, which is exact where q / p is the same all over it, and too little elsewhere.

    Args:
        sampler, trainer: [R, K] log-probs of the same tokens, normalised over the whole vocabulary, nats;
            the sampler's is no log-prob, such as -inf, where a head is shorter.

    Returns:
        float32, NaN where a token has no head.
    """
    there = is_log_prob(sampler)
    q, p = (torch.where(there, x, -torch.inf).exp() for x in (sampler, trainer))
    q_tail, p_tail = (1 - x.sum(1) for x in (q, p))
    of_tail = q_tail.clamp_min(FLOOR) * (q_tail.clamp_min(FLOOR) / p_tail.clamp_min(FLOOR)).log()
    kl = torch.where(there, q * (sampler - trainer), 0).sum(1) + of_tail
    return tuple(torch.where(there.any(1), x, torch.nan).float() for x in (kl, q_tail))
