"""Rollout and train dumps in slime's files, so that its tools and slime_ext.analysis read them.

Rollout: {"rollout_id", "samples": [Sample.to_dict(), ...]}. Train, format version 2: {"format_version",
"rollout_id", "rank", "samples", "dp_shards", "raw_reward"}, samples in the order of the rollout dump, fields
over the whole response. Source: slime/observability/{rollout_data_utils,train_data_utils}.py at 624b824.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime_ext.host.packing import join_response
from slime_ext.launcher.megatron import parallel

FORMAT_VERSION = 2
PER_TOKEN = ("rollout_log_probs", "log_probs", "advantages", "returns")
PLAIN = "response_lengths total_lengths rewards truncated rollout_ids local_raw_reward source_names".split()
TYPES: dict[str, torch.dtype | None] = {  # of a sample's fields; None: a number or text as it is
    **dict.fromkeys((*PER_TOKEN, "kl", "rollout_mask_sums"), torch.float32),
    **{"tokens": torch.int64, "loss_masks": torch.int32},
    **dict.fromkeys(PLAIN),
}
SCHEDULE = ("sample_indices", "partition", "micro_batch_indices", "num_microbatches", "global_batch_sizes")
Shard = Mapping[str, Sequence[Any]]  # slime's rollout_data of one data-parallel rank: a list per field


def save_rollout(template: str, rollout_id: int, samples: Sequence[Any]) -> Path:
    """Writes the samples of a rollout.

    Args:
        template: path with {rollout_id}.
        rollout_id: number of the rollout.
        samples: objects with ``to_dict`` or mappings, prompt after prompt.
    """
    rows = [sample if isinstance(sample, Mapping) else sample.to_dict() for sample in samples]
    return _write(Path(template.format(rollout_id=rollout_id)), {"rollout_id": rollout_id, "samples": rows})


def train_dump(template: str, rollout_id: int, data: Mapping[str, Any], source: str) -> Callable[[], Any]:
    """Gathers the dump on rank 0 and returns the function that writes it (elsewhere: nothing). Collective.

    Args:
        template: path with {rollout_id}.
        rollout_id: number of the rollout.
        data: of ``postprocess.rollout_data``: what this rank trained on.
        source: where the prompts came from.
    """
    shard = _whole(data)
    shard["kl"] = [torch.zeros(length) for length in shard["response_lengths"]]  # no reference policy here
    shard["source_names"] = [source] * len(shard["partition"])
    speaks = parallel.is_last_stage() and parallel.tp_group().rank() == parallel.cp_group().rank() == 0
    mine = (parallel.dp_group().rank(), shard) if speaks else None
    shards = dict(filter(None, _gathered(mine, dist.group.WORLD)))
    if dist.get_rank() != 0:
        return lambda: None
    return partial(save_train, template, rollout_id, [shards[rank] for rank in sorted(shards)])


def save_train(template: str, rollout_id: int, shards: Sequence[Shard]) -> Path:
    """Writes what a rollout was trained on, all data-parallel ranks in one file.

    Args:
        template: path with {rollout_id}.
        rollout_id: number of the rollout.
        shards: of each data-parallel rank, per-token fields over the whole response ([R]).
    """
    samples = [row for rank, shard in enumerate(shards) for row in _rows(rank, shard)]
    places = [
        {"rank": rank, "data_parallel_rank": rank} | {key: shard[key] for key in SCHEDULE}
        for rank, shard in enumerate(shards)
    ]
    content = {
        "format_version": FORMAT_VERSION,
        "rollout_id": rollout_id,
        "rank": 0,
        "samples": _pooled(sorted(samples, key=lambda sample: sample["rollout_position"])),
        "dp_shards": places,
        "raw_reward": list(shards[0]["raw_reward"]),
    }
    return _write(Path(template.format(rollout_id=rollout_id)), content)


def _rows(rank: int, shard: Shard) -> Iterator[dict[str, Any]]:
    """One mapping per sample of a data-parallel rank, tensors on the CPU."""
    fields = {key: values for key, values in shard.items() if key in TYPES}
    for i, position in enumerate(shard["partition"]):
        place = {"sample_index": shard["sample_indices"][i], "rollout_position": position}
        values = {key: _typed(TYPES[key], values[i]) for key, values in fields.items()}
        yield {"data_parallel_rank": rank, **place, **values}


def _typed(dtype: torch.dtype | None, value: Any) -> Any:
    if dtype is None:
        return value.item() if isinstance(value, Tensor) else value
    return torch.as_tensor(value).detach().to("cpu", dtype).clone()


def _pooled(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same samples, a field's tensors as parts of one storage: a file entry per field, not per tensor."""
    for key in [k for k, v in samples[0].items() if isinstance(v, Tensor)] if samples else []:
        values = [sample[key] for sample in samples]
        parts = torch.cat([v.reshape(-1) for v in values]).split([v.numel() for v in values])
        for sample, value, part in zip(samples, values, parts, strict=True):
            sample[key] = part.view(value.shape)
    return samples


def _gathered(mine: Any, group: dist.ProcessGroup) -> list[Any]:
    """The objects of all ranks of a group, in their order."""
    if group.size() == 1:
        return [mine]
    out: list[Any] = [None] * group.size()
    dist.all_gather_object(out, mine, group=group)
    return out


def _whole(data: Mapping[str, Any]) -> dict[str, Any]:
    """The same on the CPU, each context-parallel rank's part [L_i] put together with the others' to [R_i]."""
    group = parallel.cp_group()
    data = {k: [v.cpu() if isinstance(v, Tensor) else v for v in values] for k, values in data.items()}
    if group.size() == 1:
        return data
    shares = _gathered({key: data[key] for key in PER_TOKEN if key in data}, group)
    lengths = list(zip(data["total_lengths"], data["response_lengths"], strict=True))
    for key in shares[0]:
        data[key] = [
            join_response([share[key][i] for share in shares], *lengths[i]) for i in range(len(lengths))
        ]
    return data


def _write(path: Path, content: Mapping[str, Any]) -> Path:
    """Through a second file: a reader that follows the run never sees half a dump."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.partial")
    torch.save(dict(content), temporary)
    temporary.replace(path)
    return path
