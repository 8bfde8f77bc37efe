"""How a rollout is cut: optimizer steps, data-parallel ranks, minibatches, micro-batches, packed tensors.

Host integers only decide the cut, so every rank computes the whole of it and takes its part. Packing and the
zig-zag context-parallel slices are slime's (``slime_ext.host.packing``).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from slime_ext.host.packing import pack_segments, slice_response, zigzag
from slime_ext.launcher.training_data import TrainSample
from slime_ext.ops.segments import AllSum, Segments, identity


@dataclass(frozen=True)
class Layout:
    """Where this rank stands, and on what device its tensors live."""

    dp_rank: int = 0
    dp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    device: torch.device | str = "cpu"
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass. T packed local tokens; lists have one entry per sample, L_i local response tokens.

    Attributes:
        input_ids: [1, T].
        logit_rows: [sum L_i] which of the T logits predict the local response tokens.
        targets: [sum L_i] those tokens.
        loss_masks: N x [R_i] int32, full responses.
        rollout_log_probs, advantages: N x [L_i].
        denominators: [N] response tokens of each sample's rollout.
        versions: [sum L_i] optimizer step of the sampling weights, -1 where unknown.
        weight_versions: N lists of the same by stretch of generation, as the host's texts.
    """

    positions: list[int]
    input_ids: Tensor
    logit_rows: Tensor
    targets: Tensor
    packed_seq_params: PackedSeqParams
    total_lengths: list[int]
    response_lengths: list[int]
    local_lengths: list[int]
    loss_masks: list[Tensor]
    rollout_log_probs: list[Tensor]
    advantages: list[Tensor]
    denominators: Tensor
    versions: Tensor
    weight_versions: list[list[str]]
    cp_rank: int = 0
    cp_size: int = 1

    def local(self, full: Sequence[Tensor]) -> Tensor:
        """N x [R_i] full responses -> [sum L_i], this rank's part."""
        parts = [
            slice_response(x, total, response, self.cp_rank, self.cp_size)
            for x, total, response in zip(full, self.total_lengths, self.response_lengths, strict=True)
        ]
        return torch.cat(parts)

    def segments(self, all_sum: AllSum = identity) -> Segments:
        """The host's packing of these samples."""
        return pack_segments(
            self.loss_masks,
            self.total_lengths,
            self.response_lengths,
            cp_rank=self.cp_rank,
            cp_size=self.cp_size,
            all_sum=all_sum,
        )

    def split(self, flat: Tensor) -> list[Tensor]:
        """[sum L_i] -> N x [L_i]."""
        return list(flat.split(self.local_lengths))


def step_slices(count: int, step_size: int) -> list[range]:
    """Sample positions of each optimizer step, in rollout order.

    >>> step_slices(6, 3)
    [range(0, 3), range(3, 6)]
    """
    return [range(start, start + step_size) for start in range(0, count, step_size)]


def micro_batches(
    args: argparse.Namespace, step: Sequence[int], lengths: Sequence[int], dp_rank: int, dp_size: int
) -> list[list[list[int]]]:
    """Minibatches of micro-batches of positions, for one rank; the same number of each on every rank.

    Args:
        step: positions of the optimizer step.
        lengths: total length of every sample of the rollout, by position.
    """
    parts = args.ppo_n_minibatches
    size = len(step) // parts
    minibatches = [step[i * size : (i + 1) * size] for i in range(parts)]
    return [_cut(args, [m[r::dp_size] for r in range(dp_size)], lengths)[dp_rank] for m in minibatches]


def _cut(
    args: argparse.Namespace, shares: list[Sequence[int]], lengths: Sequence[int]
) -> list[list[list[int]]]:
    """Every rank's micro-batches, made equally many by halving the fullest ones."""
    if not args.use_dynamic_batch_size:
        n = args.micro_batch_size
        return [[list(s[i : i + n]) for i in range(0, len(s), n)] for s in shares]
    cuts = [_fill(s, lengths, args.max_tokens_per_gpu * args.context_parallel_size) for s in shares]
    most = max(len(c) for c in cuts)
    for cut in cuts:
        while len(cut) < most:
            fullest = max(range(len(cut)), key=lambda i: len(cut[i]))
            whole = cut[fullest]
            cut[fullest : fullest + 1] = [whole[: len(whole) // 2], whole[len(whole) // 2 :]]
    return cuts


def _fill(share: Sequence[int], lengths: Sequence[int], limit: int) -> list[list[int]]:
    """Consecutive samples, as many as ``limit`` tokens hold; a longer sample goes alone."""
    out: list[list[int]] = []
    room = -1
    for position in share:
        if lengths[position] > room:
            out.append([])
            room = limit
        out[-1].append(position)
        room -= lengths[position]
    return out


@dataclass(frozen=True)
class _Share:
    """One sample's part on a context-parallel rank: its tokens, and where its response tokens' logits are.

    Attributes:
        tokens: the two zig-zag chunks, padded with token 0; the whole sequence on one rank.
        rows: offset in ``tokens`` of each local response token's logit, one position before it.
        targets, log_probs, versions: of the local response tokens.
    """

    tokens: list[int]
    rows: list[int]
    targets: list[int]
    log_probs: list[float]
    versions: list[int]


def _share(sample: TrainSample, layout: Layout) -> _Share:
    tokens, rows = _tokens_and_rows(sample, layout)
    total, response = sample.total_length, sample.response_length
    per_token = (sample.response_tokens, sample.rollout_log_probs, sample.versions or [-1] * response)
    local = (slice_response(x, total, response, layout.cp_rank, layout.cp_size) for x in per_token)
    return _Share(tokens, rows, *local)


def _tokens_and_rows(sample: TrainSample, layout: Layout) -> tuple[list[int], list[int]]:
    first_logit = sample.total_length - sample.response_length - 1
    if layout.cp_size == 1:
        return sample.tokens, list(range(first_logit, sample.total_length - 1))
    chunk = -(-sample.total_length // (2 * layout.cp_size))
    padded = sample.tokens + [0] * (2 * layout.cp_size * chunk - sample.total_length)
    slots = (layout.cp_rank, 2 * layout.cp_size - 1 - layout.cp_rank)
    runs = zigzag(sample.total_length, sample.response_length, layout.cp_rank, layout.cp_size)
    rows: list[int] = []
    for place, (slot, (start, stop)) in enumerate(zip(slots, runs, strict=True)):
        moved = first_logit + (place - slot) * chunk
        rows += range(start + moved, stop + moved)
    return [t for slot in slots for t in padded[slot * chunk : (slot + 1) * chunk]], rows


def pack_micro_batch(samples: Sequence[TrainSample], layout: Layout) -> MicroBatch:
    """Concatenates the samples' local tokens and everything that goes with them."""
    shares = [_share(s, layout) for s in samples]
    begins = list(accumulate((len(share.tokens) for share in shares), initial=0))
    return MicroBatch(
        packed_seq_params=_packed_seq_params([b * layout.cp_size for b in begins], layout.device),
        cp_rank=layout.cp_rank,
        cp_size=layout.cp_size,
        **_concatenated(shares, begins, layout),
        **_by_sample(samples, shares, layout),
    )


def _concatenated(shares: Sequence[_Share], begins: Sequence[int], layout: Layout) -> dict[str, Tensor]:
    """Ids of the local tokens, and of the local response tokens what is one tensor."""

    def long(parts: Iterable[list[int]]) -> Tensor:
        return torch.tensor(list(chain.from_iterable(parts)), dtype=torch.long, device=layout.device)

    rows = ([begin + row for row in share.rows] for begin, share in zip(begins, shares, strict=False))
    return {
        "input_ids": long(share.tokens for share in shares)[None],
        "logit_rows": long(rows),
        "targets": long(share.targets for share in shares),
        "versions": long(share.versions for share in shares),
    }


def _by_sample(samples: Sequence[TrainSample], shares: Sequence[_Share], layout: Layout) -> dict[str, Any]:
    """What has one entry per sample."""
    place = {"device": layout.device}
    local = [len(share.rows) for share in shares]
    advantages = [s.advantage for s in samples]
    return {
        "positions": [s.position for s in samples],
        "total_lengths": [s.total_length for s in samples],
        "response_lengths": [s.response_length for s in samples],
        "local_lengths": local,
        "loss_masks": [torch.tensor(s.loss_mask, dtype=torch.int32, **place) for s in samples],
        "rollout_log_probs": [torch.tensor(x.log_probs, dtype=layout.dtype, **place) for x in shares],
        "advantages": list(map(partial(_filled, layout), local, advantages)),
        "denominators": torch.tensor([s.mask_sum for s in samples], dtype=layout.dtype, **place),
        "weight_versions": [s.weight_versions for s in samples],
    }


def _filled(layout: Layout, length: int, value: float) -> Tensor:
    return torch.tensor([value] * length, dtype=layout.dtype, device=layout.device)


def _packed_seq_params(cumulative: list[int], device: torch.device | str) -> PackedSeqParams:
    cu = torch.tensor(cumulative, dtype=torch.int32, device=device)
    longest = max(b - a for a, b in pairwise(cumulative))
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=longest, max_seqlen_kv=longest
    )
