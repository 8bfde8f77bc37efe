"""The train dump of a rollout (slime's format version 2): every sample whole again, written by rank 0."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime_ext.host.packing import zigzag
from slime_ext.launcher.megatron import parallel
from slime_ext.launcher.megatron.batching import micro_batches, step_slices
from slime_ext.launcher.output.dumps import save_train, shard_samples
from slime_ext.launcher.rollout.sample import Sample
from slime_ext.launcher.task.rewards import value_of
from slime_ext.launcher.training_data import TrainSample


def train_dump(
    args: argparse.Namespace,
    rollout_id: int,
    batch: Sequence[TrainSample],
    samples: Sequence[Sample],
    log_probs: Mapping[int, Tensor],
) -> Callable[[], None]:
    """What writes the dump, to be called whenever there is time; nothing to do but on rank 0. Collective.

    Args:
        log_probs: position -> this rank's part [L_i] of the proximal log-probs.
    """
    full = gather_whole(batch, log_probs)
    if dist.get_rank() != 0:
        return lambda: None
    return lambda: _write(args, rollout_id, batch, samples, full)


def _write(
    args: argparse.Namespace,
    rollout_id: int,
    batch: Sequence[TrainSample],
    samples: Sequence[Sample],
    log_probs: Mapping[int, Tensor],
) -> None:
    dp_size = args.data_parallel_size
    lengths = [s.total_length for s in batch]
    steps = step_slices(len(batch), args.global_batch_size)
    cuts = [[micro_batches(args, step, lengths, r, dp_size) for step in steps] for r in range(dp_size)]
    rows: list[dict[str, Any]] = []
    described = []
    for rank, cut in enumerate(cuts):
        shard = [[batch for minibatch in step for batch in minibatch] for step in cut]
        mine = [p for step in shard for mb in step for p in mb]
        rows += shard_samples(_fields(args, batch, samples, log_probs, mine), rank)
        described.append(_describe(args, rank, shard, mine, samples))
    rewards = [value_of(s.reward, args.reward_key) or 0.0 for s in samples]
    save_train(args.save_debug_train_data, rollout_id, 0, rows, described, rewards)


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
    args: argparse.Namespace,
    batch: Sequence[TrainSample],
    samples: Sequence[Sample],
    log_probs: Mapping[int, Tensor],
    mine: Sequence[int],
) -> dict[str, list[Any]]:
    """slime's per-sample keys of one data-parallel shard."""
    own = [batch[p] for p in mine]
    return {
        "partition": list(mine),
        "sample_indices": [samples[p].index for p in mine],
        "tokens": [torch.tensor(s.tokens) for s in own],
        "response_lengths": [s.response_length for s in own],
        "total_lengths": [s.total_length for s in own],
        "rewards": [s.advantage for s in own],
        "truncated": [int(samples[p].status == "truncated") for p in mine],
        "loss_masks": [torch.tensor(s.loss_mask, dtype=torch.int32) for s in own],
        "rollout_ids": [s.rollout_id for s in own],
        "rollout_mask_sums": [torch.tensor(s.mask_sum) for s in own],
        "rollout_log_probs": [torch.tensor(s.rollout_log_probs) for s in own],
        "log_probs": [log_probs[p] for p in mine],
        "advantages": [torch.full((s.response_length,), s.advantage) for s in own],
        "returns": [torch.full((s.response_length,), s.advantage) for s in own],
        "kl": [torch.zeros(s.response_length) for s in own],  # no reference policy here
        "source_names": [str(args.prompt_data) for _ in own],
        "local_raw_reward": [value_of(samples[p].reward, args.reward_key) or 0.0 for p in mine],
    }


def _describe(
    args: argparse.Namespace, rank: int, shard: list, mine: Sequence[int], samples: Sequence[Sample]
) -> dict[str, Any]:
    """slime's entry of ``dp_shards``: micro-batches as indices into the shard's samples."""
    at = {position: i for i, position in enumerate(mine)}
    return {
        "rank": rank,
        "data_parallel_rank": rank,
        "sample_indices": [samples[p].index for p in mine],
        "partition": list(mine),
        "micro_batch_indices": [[at[p] for p in mb] for step in shard for mb in step],
        "num_microbatches": [len(step) for step in shard],
        "global_batch_sizes": [args.global_batch_size for _ in shard],
    }
