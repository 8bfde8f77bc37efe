"""How a rollout is cut: optimizer steps, data-parallel ranks, minibatches, micro-batches, packed tensors.

The cut depends on integers alone, so every rank computes all of it and takes its part. Packing and the
zig-zag context-parallel slices are slime's (``slime_ext.host.packing``).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
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
    args: argparse.Namespace, step: Sequence[int], dp_rank: int, dp_size: int
) -> list[list[list[int]]]:
    """Minibatches of micro-batches of positions of an optimizer step, for one rank."""
    parts, n = args.ppo_n_minibatches, args.micro_batch_size
    size = len(step) // parts
    minibatches = [step[i * size : (i + 1) * size] for i in range(parts)]
    shares = [m[dp_rank::dp_size] for m in minibatches]
    return [[list(s[i : i + n]) for i in range(0, len(s), n)] for s in shares]


def pack_micro_batch(samples: Sequence[TrainSample], layout: Layout) -> MicroBatch:
    """Concatenates the samples' local tokens and everything that goes with them."""
    place = {"device": layout.device}
    ids, rows, ends, local_lengths = [], [], [0], []
    for sample in samples:
        tokens, own = _tokens_and_rows(sample, layout)
        rows += [len(ids) + row for row in own]
        ids += tokens
        ends.append(len(ids) * layout.cp_size)
        local_lengths.append(len(own))

    def local(of: Callable[[TrainSample], list[Any]]) -> list[list[Any]]:
        """Of each sample's full response this rank's part."""
        size = layout.cp_rank, layout.cp_size
        return [slice_response(of(s), s.total_length, s.response_length, *size) for s in samples]

    def long(values: Iterable[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.long, **place)

    def real(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=layout.dtype, **place)

    cu, longest = torch.tensor(ends, dtype=torch.int32, **place), max(b - a for a, b in pairwise(ends))
    return MicroBatch(
        positions=[s.position for s in samples],
        input_ids=long(ids)[None],
        logit_rows=long(rows),
        targets=long(chain(*local(lambda s: s.response_tokens))),
        packed_seq_params=PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=longest, max_seqlen_kv=longest
        ),
        total_lengths=[s.total_length for s in samples],
        response_lengths=[s.response_length for s in samples],
        local_lengths=local_lengths,
        loss_masks=[torch.tensor(s.loss_mask, dtype=torch.int32, **place) for s in samples],
        rollout_log_probs=list(map(real, local(lambda s: s.rollout_log_probs))),
        advantages=[real([s.advantage] * n) for s, n in zip(samples, local_lengths, strict=True)],
        denominators=real([s.mask_sum for s in samples]),
        versions=long(chain(*local(lambda s: s.versions or [-1] * s.response_length))),
        weight_versions=[s.weight_versions for s in samples],
        cp_rank=layout.cp_rank,
        cp_size=layout.cp_size,
    )


def _tokens_and_rows(sample: TrainSample, layout: Layout) -> tuple[list[int], list[int]]:
    """A sample's tokens on a context-parallel rank, and where the logits of its local response tokens are.

    The tokens are the two zig-zag chunks, padded with token 0, or the whole sequence on one rank; a token's
    logit is one position before it.
    """
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
