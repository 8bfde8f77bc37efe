"""The train dump of a rollout (slime's format version 2): every sample whole again, written by rank 0."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime_ext.host.packing import zigzag
from slime_ext.launcher.megatron import parallel
from slime_ext.launcher.megatron.batching import micro_batches, step_slices
from slime_ext.launcher.output.dumps import save_train, shard_samples
from slime_ext.launcher.postprocess import columns
from slime_ext.launcher.training_data import TrainSample


def train_dump(
    args: argparse.Namespace, rollout_id: int, batch: Sequence[TrainSample], log_probs: Mapping[int, Tensor]
) -> Callable[[], None]:
    """What writes the dump, to be called whenever there is time; nothing to do but on rank 0. Collective.

    Args:
        log_probs: position -> this rank's part [L_i] of the proximal log-probs.
    """
    full = gather_whole(batch, log_probs)
    if dist.get_rank() != 0:
        return lambda: None
    return lambda: _write(args, rollout_id, batch, full)


def _write(
    args: argparse.Namespace, rollout_id: int, batch: Sequence[TrainSample], log_probs: Mapping[int, Tensor]
) -> None:
    dp_size = args.data_parallel_size
    lengths = [s.total_length for s in batch]
    steps = step_slices(len(batch), args.global_batch_size)
    rows: list[dict[str, Any]] = []
    shards = []
    for rank in range(dp_size):
        shard = [list(chain(*micro_batches(args, step, lengths, rank, dp_size))) for step in steps]
        places = list(chain(*chain(*shard)))
        fields = _fields(args, [batch[p] for p in places], [log_probs[p] for p in places])
        rows += shard_samples({**fields, "partition": places}, rank)
        shards.append(_described(args, rank, shard, places, fields["sample_indices"]))
    save_train(args.save_debug_train_data, rollout_id, 0, rows, shards, [s.raw_reward for s in batch])


def gather_whole(batch: Sequence[TrainSample], local: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """position -> [R_i], put together from the zig-zag parts that the last stage's ranks hold; collective."""
    first = parallel.is_last_stage() and parallel.tp_group().rank() == 0
    cp = parallel.cp_group()
    share = (cp.rank(), {p: x.cpu() for p, x in local.items()} if first else {})
    shares: list[Any] = [share]
    if dist.get_world_size() > 1:
        shares = [None] * dist.get_world_size()
        dist.all_gather_object(shares, share)
    out: dict[int, Tensor] = {}
    for cp_rank, parts in shares:
        for position, values in parts.items():
            sample = batch[position]
            whole = out.setdefault(position, torch.zeros(sample.response_length, dtype=values.dtype))
            (a, b), (c, d) = zigzag(sample.total_length, sample.response_length, cp_rank, cp.size())
            if cp.size() == 1:
                (a, b), (c, d) = (0, sample.response_length), (0, 0)
            whole[a:b], whole[c:d] = values[: b - a], values[b - a :]
    return out


def _fields(
    args: argparse.Namespace, own: Sequence[TrainSample], log_probs: Sequence[Tensor]
) -> dict[str, list[Any]]:
    """slime's per-sample keys of one data-parallel shard."""
    return {
        **columns(own),
        "response_lengths": [s.response_length for s in own],
        "total_lengths": [s.total_length for s in own],
        "loss_masks": [torch.tensor(s.loss_mask, dtype=torch.int32) for s in own],
        "rollout_mask_sums": [torch.tensor(s.mask_sum) for s in own],
        "rollout_log_probs": [torch.tensor(s.rollout_log_probs) for s in own],
        "log_probs": list(log_probs),
        "advantages": [torch.full((s.response_length,), s.advantage) for s in own],
        "returns": [torch.full((s.response_length,), s.advantage) for s in own],
        "kl": [torch.zeros(s.response_length) for s in own],  # no reference policy here
        "source_names": [str(args.prompt_data) for _ in own],
    }


def _described(
    args: argparse.Namespace,
    rank: int,
    shard: list[list[list[int]]],
    places: Sequence[int],
    indices: Sequence[int],
) -> dict[str, Any]:
    """slime's entry of ``dp_shards``: micro-batches as indices into the shard's samples."""
    at = {position: i for i, position in enumerate(places)}
    return {
        "rank": rank,
        "data_parallel_rank": rank,
        "sample_indices": list(indices),
        "partition": list(places),
        "micro_batch_indices": [[at[p] for p in batch] for step in shard for batch in step],
        "num_microbatches": [len(step) for step in shard],
        "global_batch_sizes": [args.global_batch_size for _ in shard],
    }
