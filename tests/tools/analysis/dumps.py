"""Rollouts written as slime writes them: format version 2, and the per-rank files of v0.3.1 and older."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from benchmarks.faults.saving import save
from slime_ext.tools.analysis.records import DumpedRollout
from tests.slices import slice_response

TOKEN_FIELDS = {"rollout_log_probs": "behavior", "log_probs": "proximal", "advantages": "advantages"}


def of_samples(rollout: DumpedRollout, name: str) -> list[torch.Tensor]:
    return list(getattr(rollout, name).split(rollout.lengths))


def sample_rows(rollout: DumpedRollout) -> list[dict]:
    """The rollout dump's samples; prompts are as long as ``prompt_lengths`` says."""
    versions = of_samples(rollout, "versions") if rollout.versions is not None else None
    rows = []
    for i, length in enumerate(rollout.lengths):
        own = [] if versions is None else [str(v) for v in versions[i].tolist()]
        row = {
            "group_index": i // 8,
            "index": 1000 + i,
            "prompt": rollout.prompts[i],
            "tokens": [0] * rollout.prompt_lengths[i] + of_samples(rollout, "tokens")[i].tolist(),
            "response": rollout.responses[i],
            "response_length": length,
            "reward": float(rollout.rewards[i]),
            "loss_mask": None,
            "weight_versions": list(dict.fromkeys(own)),
            "rollout_log_probs": of_samples(rollout, "behavior")[i].tolist(),
            "status": "completed",
            "metadata": {},
        }
        rows.append(row)
    return rows


def shard(rollout: DumpedRollout, partition: list[int]) -> dict[str, list]:
    """slime's rollout_data of one data-parallel rank, everything whole."""
    lengths = [rollout.lengths[p] for p in partition]
    tokens, masks = of_samples(rollout, "tokens"), of_samples(rollout, "mask")
    rewards = [float(rollout.rewards[p]) for p in partition]
    prompts = [torch.zeros(rollout.prompt_lengths[p], dtype=torch.int64) for p in partition]
    per_token = {
        key: [of_samples(rollout, name)[p].float() for p in partition] for key, name in TOKEN_FIELDS.items()
    }
    return {
        "partition": partition,
        "sample_indices": [1000 + p for p in partition],
        "tokens": [torch.cat([a, tokens[p]]) for a, p in zip(prompts, partition, strict=True)],
        "response_lengths": lengths,
        "total_lengths": [n + rollout.prompt_lengths[p] for n, p in zip(lengths, partition, strict=True)],
        "rewards": rewards,
        "truncated": [0] * len(partition),
        "loss_masks": [masks[p].int() for p in partition],
        "rollout_ids": [rollout.rollout_id] * len(partition),
        "rollout_mask_sums": [masks[p].float().sum() for p in partition],
        **per_token,
        "returns": per_token["advantages"],
        "kl": [torch.zeros(n) for n in lengths],
        "local_raw_reward": rewards,
        "source_names": ["x"] * len(partition),
    }


def write_rollout(folder: Path, rollout: DumpedRollout) -> Path:
    content = {"rollout_id": rollout.rollout_id, "samples": sample_rows(rollout)}
    return _save(folder / "rollout_data" / f"{rollout.rollout_id}.pt", content)


def write_train(folder: Path, rollout: DumpedRollout, ranks: int = 2, steps: int = 1) -> Path:
    """Format version 2, the samples dealt out to data-parallel ranks."""
    samples, places = [], []
    for rank in range(ranks):
        part = list(range(rank, rollout.count, ranks))
        own = shard(rollout, part)
        places.append(
            {
                **{"rank": rank, "data_parallel_rank": rank, "partition": own.pop("partition")},
                "sample_indices": own.pop("sample_indices"),
                "micro_batch_indices": [list(range(s, len(part), steps)) for s in range(steps)],
                "num_microbatches": [1] * steps,
                "global_batch_sizes": [rollout.count // steps] * steps,
            }
        )
        for i, position in enumerate(part):
            place = {"sample_index": 1000 + position, "rollout_position": position}
            samples.append({"data_parallel_rank": rank, **place} | {key: own[key][i] for key in own})
    content = {
        "format_version": 2,
        "rollout_id": rollout.rollout_id,
        "rank": 0,
        "samples": sorted(samples, key=lambda sample: sample["rollout_position"]),
        "dp_shards": places,
        "raw_reward": rollout.rewards.tolist(),
    }
    return _save(folder / "train_data" / f"{rollout.rollout_id}.pt", content)


def _save(path: Path, content: dict) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    save(content, path)
    return path


def write_run(folder: Path, rollouts: list[DumpedRollout]) -> Path:
    for rollout in rollouts:
        write_rollout(folder, rollout)
        write_train(folder, rollout)
    return folder


def write_ranks(
    folder: Path, rollout: DumpedRollout, dp: int = 1, pp: int = 1, cp: int = 1, tp: int = 1
) -> list[Path]:
    """The files of every rank, in Megatron's order: tensor, context, data, pipeline."""
    paths = []
    for stage in range(pp):
        for d in range(dp):
            whole = shard(rollout, list(range(d, rollout.count, dp)))
            whole.pop("partition")
            for c in range(cp):
                local = _local(whole, c, cp) if stage == pp - 1 else _first_stage(whole)
                for _ in range(tp):
                    name = f"{rollout.rollout_id}_{len(paths)}.pt"
                    content = {"rollout_id": rollout.rollout_id, "rank": len(paths), "rollout_data": local}
                    paths.append(_save(folder / "train_data" / name, content))
    return paths


def _local(whole: dict, rank: int, size: int) -> dict:
    cut = dict(whole)
    for key in TOKEN_FIELDS:
        both = zip(whole[key], whole["total_lengths"], whole["response_lengths"], strict=True)
        cut[key] = [slice_response(values, total, response, rank, size) for values, total, response in both]
    return cut


def _first_stage(whole: dict) -> dict:
    return {
        key: values
        for key, values in whole.items()
        if key not in ("log_probs", "advantages", "returns", "kl")
    }


def write_jsonl(path: Path, rollouts: list[DumpedRollout]) -> Path:
    lines = []
    for rollout in rollouts:
        for i in range(rollout.count):
            line = {
                "rollout_id": rollout.rollout_id,
                "rollout_log_probs": of_samples(rollout, "behavior")[i].tolist(),
                "log_probs": of_samples(rollout, "proximal")[i].tolist(),
                "loss_mask": of_samples(rollout, "mask")[i].int().tolist(),
                "advantages": float(of_samples(rollout, "advantages")[i][0]),
                "reward": float(rollout.rewards[i]),
                "response": rollout.responses[i],
            }
            lines.append(json.dumps(line))
    path.write_text("\n".join(lines) + "\n")
    return path
