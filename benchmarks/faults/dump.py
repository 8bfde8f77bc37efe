"""slime's files: rollout dump, train dump of format version 2, layer outputs (its own and SGLang's)."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.faults.saving import save

FORMAT_VERSION = 2


@dataclass
class Turn:
    """One sample: what the engine wrote down, and what the trainer made of it."""

    prompt: Tensor
    tokens: Tensor
    behavior: Tensor
    mask: Tensor
    kept: Tensor
    versions: Tensor
    experts: Tensor | None = None
    proximal: Tensor | None = None
    reference: Tensor | None = None
    entropy: Tensor | None = None
    routed: Tensor | None = None
    cached: int = 0  # tokens of the prompt that the engine had in its prefix cache
    reward: float = 0.0
    advantage: float = 0.0
    dropped: bool = False
    status: str = "completed"
    rank: int = 0  # data-parallel, of the trainer
    engine: str = ""  # that sampled it, where the generate function writes that down
    version: str = ""  # that the engine reports instead of ``versions``: a string at will
    told_reward: float | None = None  # that reaches the trainer, if not ``reward``
    advantages: Tensor | None = None  # by token, if not ``advantage`` at all of them


def copied(turn: Turn) -> Turn:
    """Returns a sample whose tensors can be changed in place."""
    own = {name: value.clone() for name, value in vars(turn).items() if isinstance(value, Tensor)}
    return replace(turn, **own)


def write_rollout(folder: Path, world, rollout_id: int, turns: list[Turn]) -> None:
    """The two files of a rollout."""
    kept = [(i, turn) for i, turn in enumerate(turns) if not turn.dropped]
    rows = [_sample(world, rollout_id, i, turn) for i, turn in enumerate(turns)]
    _save(folder / f"rollout_data/{rollout_id}.pt", {"rollout_id": rollout_id, "samples": rows})
    if world.evaluates:
        name = folder / f"rollout_data/eval_{rollout_id}.pt"
        _save(name, {"rollout_id": rollout_id, "samples": rows[:4]})
    train = {
        "format_version": FORMAT_VERSION,
        "rollout_id": rollout_id,
        "rank": 0,
        "samples": [_trained(rollout_id, len(turns), i, turn) for i, turn in kept],
        "dp_shards": [_shard(rank, rollout_id, turns) for rank in sorted({turn.rank for turn in turns})],
        "raw_reward": [told(turn) for turn in turns],
    }
    _save(folder / f"train_data/{rollout_id}.pt", train)


def _shard(rank: int, rollout_id: int, turns: list[Turn]) -> dict:
    mine = [i for i, turn in enumerate(turns) if turn.rank == rank and not turn.dropped]
    return {
        "rank": rank,
        "data_parallel_rank": rank,
        "sample_indices": [rollout_id * len(turns) + i for i in mine],
        "partition": mine,
        "micro_batch_indices": [list(range(len(mine)))],
        "num_microbatches": [1],
        "global_batch_sizes": [sum(not turn.dropped for turn in turns)],
    }


def told(turn: Turn) -> float:
    """The reward that reaches the trainer."""
    return turn.reward if turn.told_reward is None else turn.told_reward


def write_arguments(folder: Path, world) -> None:
    """The flags of the run, as far as they bear on its dumps."""
    flags = {
        "advantage_estimator": "grpo",
        "n_samples_per_prompt": 4,
        "grpo_std_normalization": True,
        "rewards_normalization": True,
        "rollout_temperature": world.score_temperature or 1.0,
        "rollout_top_p": world.top_p if world.replays == "trainer" else 1.0,
        "rollout_top_k": -1,
        "rollout_max_response_len": world.length,
        "rollout_batch_size": world.samples // 4,
        "num_experts": world.shape.experts or None,
        "vocab_size": world.shape.vocabulary,
    }
    (folder / "args.json").write_text(json.dumps(flags))


def _save(path: Path, content: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save(content, path)


def _sample(world, rollout_id: int, i: int, turn: Turn) -> dict:
    """As ``Sample.to_dict`` of slime writes it."""
    versions = [turn.version or str(v) for v in turn.versions.tolist()]
    nothing = dict.fromkeys(("label", "generate_function_path", "train_metadata", "session_id"))
    row = nothing | {
        "group_index": (rollout_id * world.samples + i) // 4,
        "index": rollout_id * world.samples + i,
        "rollout_id": rollout_id,
        "prompt": _text(world, turn.prompt),
        "tokens": torch.cat([turn.prompt, turn.tokens]).tolist(),
        "response": _text(world, turn.tokens),
        "response_length": len(turn.tokens),
        "reward": turn.reward,
        "loss_mask": turn.mask.int().tolist(),
        "weight_versions": list(dict.fromkeys(versions)) if world.versions else [],
        "rollout_log_probs": turn.behavior.tolist(),
        "status": "aborted" if turn.dropped else turn.status,
        "metadata": {"engine": turn.engine} if turn.engine else {},
        "remove_sample": False,
        "non_generation_time": 0.0,
        "prefix_cache_info": {"cached_tokens": turn.cached, "total_prompt_tokens": len(turn.prompt)},
    }
    if world.switch:
        row["token_weight_versions"] = versions
    if world.replays:
        sizes = (turn.kept.sum(1) * turn.mask).tolist()
        row["rollout_top_p_token_ids"] = torch.cat(
            [k.nonzero()[:, 0] for k, m in zip(turn.kept, turn.mask, strict=True) if m]
        ).int()
        row["rollout_top_p_token_offsets"] = torch.tensor([0, *sizes]).cumsum(0).int()
    if turn.experts is not None:
        row["rollout_routed_experts"] = turn.experts.int()
    return row


def _text(world, ids: Tensor) -> str:
    return world.text.decode(ids) if world.text else " ".join(map(str, ids.tolist()))


def _trained(rollout_id: int, samples: int, i: int, turn: Turn) -> dict:
    size = len(turn.tokens)
    uniform = torch.full((size,), turn.advantage)
    advantages = uniform if turn.advantages is None else turn.advantages
    row = {
        "data_parallel_rank": turn.rank,
        "sample_index": rollout_id * samples + i,
        "rollout_position": i,
        "tokens": torch.cat([turn.prompt, turn.tokens]),
        "response_lengths": size,
        "total_lengths": size + len(turn.prompt),
        "rewards": turn.advantage,  # slime's, normalised by group
        "truncated": int(turn.status == "truncated"),
        "loss_masks": turn.mask.int(),
        "rollout_ids": rollout_id,
        "rollout_mask_sums": turn.mask.sum().float(),
        "rollout_log_probs": turn.behavior,
        "log_probs": turn.proximal,
        "kl": torch.zeros(size),
        "advantages": advantages,
        "returns": advantages,
        "local_raw_reward": told(turn),
    }
    more = {"ref_log_probs": turn.reference, "entropy": turn.entropy, "routed_experts": turn.routed}
    return row | {key: values for key, values in more.items() if values is not None}


def write_layers(folder: Path, ids: list[Tensor], trainer: list[Tensor], sampler: list[Tensor]) -> None:
    """The trainer's layer outputs as slime's layerwise_alignment.py dumps them, the sampler's residual
    stream as SGLang's --debug-tensor-dump-output-folder does."""
    lengths = torch.tensor([len(one) for one in ids])
    outputs = {
        "store_prefix": "actor",
        "input_ids": torch.cat(ids)[None],
        "cu_seqlens": torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int(),
        "layers": {i: x[:, None] for i, x in enumerate(trainer)},
        "modules": {},
    }
    _save(folder / "layers/trainer/rank00000/actor_Pass00000.pt", outputs)
    theirs = {
        "model.forward_batch_info.input_ids": torch.cat(ids),
        "model.forward_batch_info.seq_lens": lengths,
    }
    names = [f"model.layers.{i}.input_layernorm" for i in range(1, len(sampler))] + ["model.norm"]
    theirs |= {name: [torch.zeros_like(x), x] for name, x in zip(names, sampler, strict=True)}
    _save(folder / "layers/sampler/TP0_PP0_Rank0_pid1/Pass00001.pt", theirs)
