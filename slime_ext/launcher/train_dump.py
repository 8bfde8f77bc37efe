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
from slime_ext.launcher.postprocess import Steps, columns
from slime_ext.launcher.training_data import TrainSample

ByPosition = Mapping[int, Tensor]


def train_dump(
    args: argparse.Namespace,
    rollout_id: int,
    batch: Sequence[TrainSample],
    log_probs: ByPosition,
    steps: Steps,
) -> Callable[[], None]:
    """What writes the dump, to be called whenever there is time; nothing to do but on rank 0. Collective.

    Args:
        log_probs: position -> this rank's part [L_i] of the proximal log-probs.
        steps: what this rank trained on, --rollout-data-postprocess-path's replacements included.
    """
    found: dict[str, dict[int, Tensor]] = {"loss_masks": {}, "rollout_log_probs": {}, "advantages": {}}
    for part in chain.from_iterable(chain(*step) for step in steps):
        masks = part.split(part.local(part.loss_masks))
        values = (masks, part.rollout_log_probs, part.advantages)
        for field, tensors in zip(found.values(), values, strict=True):
            field.update(zip(part.positions, tensors, strict=True))
    full = gather_whole(batch, {"log_probs": log_probs, **found})
    if dist.get_rank() != 0:
        return lambda: None
    return lambda: _write(args, rollout_id, batch, full)


def _write(
    args: argparse.Namespace, rollout_id: int, batch: Sequence[TrainSample], full: Mapping[str, ByPosition]
) -> None:
    dp_size = args.data_parallel_size
    steps = step_slices(len(batch), args.global_batch_size)
    rows: list[dict[str, Any]] = []
    shards = []
    for rank in range(dp_size):
        shard = [list(chain(*micro_batches(args, step, rank, dp_size))) for step in steps]
        places = list(chain(*chain(*shard)))
        gathered = {field: [values[p] for p in places] for field, values in full.items()}
        gathered["returns"] = gathered["advantages"]
        fields = _fields(args, [batch[p] for p in places]) | gathered
        rows += shard_samples({**fields, "partition": places}, rank)
        shards.append(_described(args, rank, shard, places, fields["sample_indices"]))
    save_train(args.save_debug_train_data, rollout_id, 0, rows, shards, [s.raw_reward for s in batch])


def gather_whole(
    batch: Sequence[TrainSample], local: Mapping[str, ByPosition]
) -> dict[str, dict[int, Tensor]]:
    """Field -> position -> [R_i], put together from the zig-zag parts that the last stage's ranks hold.
    Collective."""
    first = parallel.is_last_stage() and parallel.tp_group().rank() == 0
    cp = parallel.cp_group()
    mine = {field: {p: x.cpu() for p, x in values.items()} for field, values in local.items()}
    share = (cp.rank(), mine if first else {})
    shares: list[Any] = [share]
    if dist.get_world_size() > 1:
        shares = [None] * dist.get_world_size()
        dist.all_gather_object(shares, share)
    out: dict[str, dict[int, Tensor]] = {field: {} for field in local}
    for cp_rank, parts in shares:
        for field, found in parts.items():
            for position, values in found.items():
                _put(out[field], batch[position], values, cp_rank, cp.size())
    return out


def _put(whole: dict[int, Tensor], sample: TrainSample, values: Tensor, cp_rank: int, cp_size: int) -> None:
    """One context-parallel rank's part of a sample where it belongs."""
    total, length = sample.total_length, sample.response_length
    at = zigzag(total, length, cp_rank, cp_size) if cp_size > 1 else ((0, length), (0, 0))
    out = whole.setdefault(sample.position, torch.zeros(length, dtype=values.dtype))
    (a, b), (c, d) = at
    out[a:b], out[c:d] = values[: b - a], values[b - a :]


def _fields(args: argparse.Namespace, own: Sequence[TrainSample]) -> dict[str, list[Any]]:
    """slime's per-sample keys of one data-parallel shard, but for what its ranks hold."""
    return {
        **columns(own),
        "response_lengths": [s.response_length for s in own],
        "total_lengths": [s.total_length for s in own],
        "rollout_mask_sums": [torch.tensor(s.mask_sum) for s in own],
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
