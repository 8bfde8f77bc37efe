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
from slime_ext.launcher.output.dumps import save_train, shard_samples
from slime_ext.launcher.postprocess import Steps, rollout_data
from slime_ext.launcher.training_data import TrainSample

PER_TOKEN = ("rollout_log_probs", "log_probs", "advantages", "returns")
SCHEDULE = ("sample_indices", "partition", "micro_batch_indices", "num_microbatches", "global_batch_sizes")


def train_dump(
    args: argparse.Namespace,
    rollout_id: int,
    batch: Sequence[TrainSample],
    log_probs: dict[int, Tensor],
    steps: Steps,
) -> Callable[[], None]:
    """Gathers the dump on rank 0 and returns the function that writes it (elsewhere: nothing). Collective.

    Args:
        log_probs: position -> this rank's part [L_i] of the proximal log-probs.
        steps: what this rank trained on, --rollout-data-postprocess-path's replacements included.
    """
    data = rollout_data(args, steps, log_probs, batch)
    shard = (parallel.dp_group().rank(), _whole(data))
    speaks = parallel.is_last_stage() and parallel.tp_group().rank() == parallel.cp_group().rank() == 0
    shards = _gathered(shard if speaks else None, dist.group.WORLD)
    if dist.get_rank() != 0:
        return lambda: None
    return lambda: _write(args, rollout_id, [shard for shard in shards if shard is not None])


def _gathered(mine: Any, group: dist.ProcessGroup) -> list[Any]:
    """The objects of all ranks of a group, in their order."""
    if group.size() == 1:
        return [mine]
    out: list[Any] = [None] * group.size()
    dist.all_gather_object(out, mine, group=group)
    return out


def _whole(data: dict[str, Any]) -> dict[str, Any]:
    """The same on the CPU, each context-parallel rank's part [L_i] put together with the others' to [R_i]."""
    group = parallel.cp_group()
    data = {k: [v.cpu() if isinstance(v, Tensor) else v for v in values] for k, values in data.items()}
    if group.size() == 1:
        return data
    mine = {key: data[key] for key in PER_TOKEN if key in data}
    shares = _gathered(mine, group)
    lengths = list(zip(data["total_lengths"], data["response_lengths"], strict=True))
    whole = {
        key: [_joined([share[key][i] for share in shares], *lengths[i]) for i in range(len(lengths))]
        for key in mine
    }
    return {**data, **whole}


def _joined(parts: Sequence[Tensor], total: int, length: int) -> Tensor:
    out = torch.zeros(length, dtype=parts[0].dtype)
    for rank, values in enumerate(parts):
        (a, b), (c, d) = zigzag(total, length, rank, len(parts))
        out[a:b], out[c:d] = values[: b - a], values[b - a :]
    return out


def _write(
    args: argparse.Namespace, rollout_id: int, shards: Sequence[tuple[int, Mapping[str, Any]]]
) -> None:
    rows, described = [], []
    for rank, data in shards:
        constant = {
            "kl": [torch.zeros(length) for length in data["response_lengths"]],  # no reference policy here
            "source_names": [str(args.prompt_data)] * len(data["partition"]),
        }
        rows += shard_samples({**data, **constant}, rank)
        described.append({"rank": rank, "data_parallel_rank": rank, **{key: data[key] for key in SCHEDULE}})
    save_train(args.save_debug_train_data, rollout_id, 0, rows, described, shards[0][1]["raw_reward"])
