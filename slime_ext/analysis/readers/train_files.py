"""Rollout dumps and train dumps of format version 2, sample by sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from slime_ext.analysis.readers.rows import Row, as_tensor
from slime_ext.host.versions import versions_of


def about_samples(samples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What only the rollout dump knows of each sample; its lists of tokens are let go."""
    return [
        {
            "index": sample.get("index"),
            "response_length": int(sample.get("response_length") or 0),
            "behavior": _small(sample.get("rollout_log_probs")),
            "group": sample.get("group_index"),
            "reward": number(sample.get("reward")),
            "prompt": text(sample.get("prompt")),
            "response": text(sample.get("response")),
            "weight_versions": versions_of(sample.get("weight_versions")),
            "token_versions": versions_of(sample.get("token_weight_versions")),
        }
        for sample in samples
    ]


def _small(values: Any) -> Tensor | None:
    """Four bytes for each log-prob, where a list takes 32."""
    return None if values is None else as_tensor(values, torch.float32)


def rows_of_train(found: Mapping[str, Any]) -> list[Row]:
    """The samples of a train dump; log-probs are over the whole response."""
    steps = step_of_position(found.get("dp_shards") or ())
    rows = []
    for i, sample in enumerate(found["samples"]):
        position = sample.get("rollout_position")
        position = i if position is None else int(position)
        rows.append(row_of(sample, position, steps.get(position)))
    return rows


def row_of(sample: Mapping[str, Any], position: int, step: int | None = None) -> Row:
    """One sample under slime's plural names."""
    length = int(sample["response_lengths"])
    tokens = sample.get("tokens")
    prompt_length = int(sample.get("total_lengths") or (length if tokens is None else len(tokens))) - length
    reward = sample.get("local_raw_reward")
    return Row(
        position=position,
        response_length=length,
        behavior=sample.get("rollout_log_probs"),
        proximal=sample.get("log_probs"),
        mask=sample.get("loss_masks"),
        tokens=None if tokens is None else tokens[prompt_length : prompt_length + length],
        advantages=sample.get("advantages"),
        entropy=sample.get("entropy"),
        prompt_length=prompt_length,
        reward=number(sample.get("rewards") if reward is None else reward),
        step=step,
    )


def step_of_position(shards: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """Rollout position -> the optimizer step, from 0, that trained it."""
    found = {}
    for shard in shards:
        partition, batches = shard.get("partition"), shard.get("micro_batch_indices")
        counts = shard.get("num_microbatches")
        if partition is None or batches is None or counts is None:
            continue
        # one by one: a count in a file may be of any size
        steps = (step for step, count in enumerate(counts) for _ in range(int(count)))
        for step, batch in zip(steps, batches, strict=False):
            found.update({int(partition[i]): step for i in batch})
    return found


def trainer_version(found: Mapping[str, Any], rollout_id: int) -> int | None:
    """Optimizer steps that came before the rollout, which is how the embedded launcher names its weights;
    every rollout has the same number of steps."""
    shards = found.get("dp_shards") or ({},)
    steps = shards[0].get("num_microbatches")
    return None if steps is None else int(rollout_id) * len(steps)


def number(value: Any) -> float | None:
    """A reward as a number; a mapping of rewards, or none, is None."""
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 else None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def text(value: Any) -> str:
    """A prompt may be a text, or a list of chat messages; half a surrogate pair, which no file can hold, is
    a question mark."""
    return _text(value).encode("utf-8", "replace").decode()


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, (list, tuple)):
        return "\n".join(
            str(part.get("content", "")) if isinstance(part, dict) else str(part) for part in value
        )
    return ""
