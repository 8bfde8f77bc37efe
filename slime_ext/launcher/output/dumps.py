"""Rollout and train dumps in slime's files, so that its tools and slime_ext.analysis read them.

Rollout: {"rollout_id", "samples": [Sample.to_dict(), ...]}. Train, format version 2: {"format_version",
"rollout_id", "rank", "samples", "dp_shards", "raw_reward"}, samples in the order of the rollout dump, fields
over the whole response. Source: slime/observability/{rollout_data_utils,train_data_utils}.py at 624b824.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FORMAT_VERSION = 2
SAMPLE_KEYS = frozenset(
    """
    data_parallel_rank sample_index rollout_position tokens response_lengths total_lengths rewards truncated
    loss_masks rollout_ids rollout_mask_sums rollout_log_probs log_probs advantages returns kl
    local_raw_reward source_names
    """.split()
)


def save_rollout(template: str, rollout_id: int, samples: Sequence[Any]) -> Path:
    """Writes the samples of a rollout.

    Args:
        template: path with {rollout_id}.
        rollout_id: number of the rollout.
        samples: objects with ``to_dict`` or mappings, prompt after prompt.
    """
    rows = [sample if isinstance(sample, Mapping) else sample.to_dict() for sample in samples]
    return _write(Path(template.format(rollout_id=rollout_id)), {"rollout_id": rollout_id, "samples": rows})


def shard_samples(shard: Mapping[str, Sequence[Any]], data_parallel_rank: int) -> list[dict[str, Any]]:
    """One data-parallel rank's lists as one mapping per sample, tensors on the CPU.

    Args:
        shard: slime's rollout_data: a list per field, with sample_indices and partition (positions in the
            rollout dump); per-token fields over the whole response ([R]), not a context-parallel slice.
        data_parallel_rank: whose lists they are.
    """
    fields = {key: values for key, values in shard.items() if key in SAMPLE_KEYS}
    return [
        {
            "data_parallel_rank": data_parallel_rank,
            "sample_index": shard["sample_indices"][i],
            "rollout_position": position,
            **{key: _plain(key, values[i]) for key, values in fields.items()},
        }
        for i, position in enumerate(shard["partition"])
    ]


def save_train(
    template: str,
    rollout_id: int,
    rank: int,
    samples: Sequence[Mapping[str, Any]],
    dp_shards: Sequence[Mapping[str, Any]],
    raw_reward: Sequence[float],
) -> Path:
    """Writes what a rollout was trained on, all data-parallel ranks in one file.

    Args:
        template: path with {rollout_id}, maybe {rank}.
        rollout_id: number of the rollout.
        rank: global rank that writes.
        samples: from `shard_samples`, of all ranks.
        dp_shards: slime's schedule, one per data-parallel rank.
        raw_reward: rewards of the whole rollout, in its order.
    """
    content = {
        "format_version": FORMAT_VERSION,
        "rollout_id": rollout_id,
        "rank": rank,
        "samples": _pooled(sorted(map(dict, samples), key=lambda sample: sample["rollout_position"])),
        "dp_shards": [dict(shard) for shard in dp_shards],
        "raw_reward": list(raw_reward),
    }
    return _write(Path(template.format(rollout_id=rollout_id, rank=rank)), content)


DTYPES = {"tokens": "int64", "loss_masks": "int32"}
SCALARS = frozenset(
    "response_lengths total_lengths rewards truncated rollout_ids local_raw_reward source_names".split()
)


def _plain(key: str, value: Any) -> Any:
    import torch

    if key in SCALARS:
        return value.item() if isinstance(value, torch.Tensor) else value
    dtype = getattr(torch, DTYPES.get(key, "float32"))
    return torch.as_tensor(value).detach().to("cpu", dtype).clone()


def _pooled(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same samples, a field's tensors as parts of one storage: a file entry per field, not per tensor."""
    import torch

    for key in [k for k, v in samples[0].items() if isinstance(v, torch.Tensor)] if samples else []:
        values = [sample[key] for sample in samples]
        parts = torch.cat([v.reshape(-1) for v in values]).split([v.numel() for v in values])
        for sample, value, part in zip(samples, values, parts, strict=True):
            sample[key] = part.view(value.shape)
    return samples


def _write(path: Path, content: Mapping[str, Any]) -> Path:
    """Through a second file: a reader that follows the run never sees half a dump."""
    import torch

    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.partial")
    torch.save(dict(content), temporary)
    temporary.replace(path)
    return path
