"""How a rollout is cut: optimizer steps, data-parallel ranks, minibatches, micro-batches, packed tensors.

Host integers only decide the cut, so every rank computes the whole of it and takes its part. Packing and the
zig-zag context-parallel slices are slime's (``slime_ext.host.packing``).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from slime_ext.host.packing import slice_response, zigzag
from slime_ext.launcher.training_data import TrainSample


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
    cp_rank: int = 0
    cp_size: int = 1

    def local(self, full: Sequence[Tensor]) -> Tensor:
        """N x [R_i] full responses -> [sum L_i], this rank's part."""
        parts = [
            slice_response(x, total, response, self.cp_rank, self.cp_size)
            for x, total, response in zip(full, self.total_lengths, self.response_lengths, strict=True)
        ]
        return torch.cat(parts)

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


def pack_micro_batch(samples: Sequence[TrainSample], layout: Layout) -> MicroBatch:
    """Concatenates the samples' local tokens and everything that goes with them."""
    chunks = [_chunk(s.total_length, layout.cp_size) for s in samples]
    begins = list(accumulate((c * (2 if layout.cp_size > 1 else 1) for c in chunks), initial=0))
    lengths = [(s.total_length, s.response_length) for s in samples]
    pieces = [zigzag(total, response, layout.cp_rank, layout.cp_size) for total, response in lengths]
    if layout.cp_size == 1:
        pieces = [((0, response), (0, 0)) for _, response in lengths]
    rows = [
        begin + _row(s, at, chunk, layout)
        for s, begin, chunk, runs in zip(samples, begins, chunks, pieces, strict=False)
        for run in runs
        for at in range(*run)
    ]
    local = [sum(stop - start for start, stop in runs) for runs in pieces]

    def long(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=layout.device)

    def floats(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=layout.dtype, device=layout.device)

    def cut(values: list, s: TrainSample) -> list:
        return slice_response(values, s.total_length, s.response_length, layout.cp_rank, layout.cp_size)

    responses = [cut(s.tokens[s.total_length - s.response_length :], s) for s in samples]
    versions = [cut(s.versions or [-1] * s.response_length, s) for s in samples]
    return MicroBatch(
        positions=[s.position for s in samples],
        input_ids=long([t for s, c in zip(samples, chunks, strict=True) for t in _tokens(s, c, layout)])[
            None
        ],
        logit_rows=long(rows),
        targets=long([t for r in responses for t in r]),
        packed_seq_params=_packed_seq_params([b * layout.cp_size for b in begins], layout.device),
        total_lengths=[total for total, _ in lengths],
        response_lengths=[response for _, response in lengths],
        local_lengths=local,
        loss_masks=[torch.tensor(s.loss_mask, dtype=torch.int32, device=layout.device) for s in samples],
        rollout_log_probs=[floats(cut(s.rollout_log_probs, s)) for s in samples],
        advantages=[floats([s.advantage] * n) for s, n in zip(samples, local, strict=True)],
        denominators=floats([s.mask_sum for s in samples]),
        versions=long([v for vs in versions for v in vs]),
        cp_rank=layout.cp_rank,
        cp_size=layout.cp_size,
    )


def _chunk(total: int, cp_size: int) -> int:
    """Tokens of one zig-zag chunk: ceil(total / 2 cp); the whole sequence on one rank."""
    return total if cp_size == 1 else -(-total // (2 * cp_size))


def _tokens(sample: TrainSample, chunk: int, layout: Layout) -> list[int]:
    """The sample's tokens on this rank, padded with token 0 to two chunks."""
    if layout.cp_size == 1:
        return sample.tokens
    padded = sample.tokens + [0] * (2 * layout.cp_size * chunk - sample.total_length)
    first, second = layout.cp_rank, 2 * layout.cp_size - 1 - layout.cp_rank
    return padded[first * chunk : (first + 1) * chunk] + padded[second * chunk : (second + 1) * chunk]


def _row(sample: TrainSample, at: int, chunk: int, layout: Layout) -> int:
    """Local offset of the logit that predicts response token ``at``: one position before it."""
    position = sample.total_length - sample.response_length + at - 1
    if layout.cp_size == 1 or position // chunk == layout.cp_rank:
        return position - layout.cp_rank * chunk
    return chunk + position - (2 * layout.cp_size - 1 - layout.cp_rank) * chunk


def _packed_seq_params(cumulative: list[int], device: torch.device | str) -> PackedSeqParams:
    cu = torch.tensor(cumulative, dtype=torch.int32, device=device)
    longest = max(b - a for a, b in pairwise(cumulative))
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=longest, max_seqlen_kv=longest
    )
