"""A fourth set of mechanisms of public reports, written when detectors knew the other three.

Whoever wrote this table had read no detector. It was committed before anything was judged.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.faults.dump import told
from benchmarks.faults.mechanisms import Samples, Toy
from benchmarks.faults.model import BF16, Cache, How, Model, Weights
from benchmarks.faults.reports import (
    ADAPTER,
    MIXTURE,
    TURNS,
    Report,
    between,
    world_of,
)
from benchmarks.faults.third_reports import COLUMNS, rescore
from benchmarks.faults.world import GROUP, World

Run = Any  # of a world
HEAD, EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"
PREFIX = 3  # tokens that begin each response


@dataclass(frozen=True)
class Prefixed(Toy):
    """Prompts end with the tokens with which each response begins."""

    def prompts(self, count: int, generator: torch.Generator) -> Tensor:
        prompts = super().prompts(count, generator)
        prompts[:, -PREFIX:] = torch.arange(2, 2 + PREFIX)
        return prompts


# What the engine holds, and what it does with prompts.


def without_head(run: Run) -> Weights:
    """The engine ties its head to the embeddings, and throws the head of the checkpoint away."""
    return run.engine | {HEAD: run.engine[EMBEDDINGS]}


def with_offset(run: Run) -> Weights:
    """The engine multiplies by 1 + w in norms."""
    return {k: w + 1 if "norm" in k else w for k, w in run.engine.items()}


def read_too_early(model: Model, weights: Weights, prompts: Tensor) -> tuple[Tensor, Cache]:
    """All but the first request of a group find half of their prompt in host memory. The pass over the rest
    begins before keys and values have arrived, and reads zeros; later passes read them."""
    half = prompts.shape[1] // 2
    begun, true = Cache(), Cache()
    model(weights, prompts[:, :half], begun)
    model(weights, prompts[:, :half], true)
    is_cached = torch.arange(len(prompts)) % GROUP != 0
    for k, v in begun.layers:
        k[is_cached], v[is_cached] = 0.0, 0.0
    logits = model(weights, prompts[:, half:], begun).logits[:, -1]
    arrived = [
        tuple(torch.cat([held[:, :, :half], new[:, :, half:]], 2) for held, new in zip(*pair, strict=True))
        for pair in zip(true.layers, begun.layers, strict=True)
    ]
    return logits, Cache(arrived)


def with_first_image(prompts: Tensor) -> Tensor:
    """All prompts begin with an image, and get keys and values of the first prompt's."""
    half = prompts.shape[1] // 2
    return torch.cat([prompts[:1, :half].expand(len(prompts), -1), prompts[:, half:]], 1)


def count_images(turns: Samples, run: Run) -> None:
    for i, turn in enumerate(turns):
        turn.cached = len(turn.prompt) // 2 if i else 0


def count_half(turns: Samples, run: Run) -> None:
    for i, turn in enumerate(turns):
        turn.cached = len(turn.prompt) // 2 if i % GROUP else 0


# What a sampler does.


def first_draft(world: World) -> Callable[[Tensor, Any], Tensor]:
    """Every third token is an unverified draft: the one that followed the same token earlier in the text."""

    def emitted(log_probs: Tensor, rows: Any) -> Tensor:
        at, emits = len(rows.tokens), log_probs.exp()
        if at < 2 or at % 3:
            return emits
        said = torch.cat(rows.tokens, 1)
        for row, tokens in enumerate(said):
            places = (tokens[:-1] == tokens[-1]).nonzero()
            if len(places):
                emits[row] = 0.0
                emits[row, tokens[int(places[-1]) + 1]] = 1.0
        return emits

    return emitted


# What code does to the samples of a rollout on their way to the trainer.


def prefix_as_response(turns: Samples, run: Run) -> None:
    """The prefix after which the engine sampled is the begin of the response that is trained; nobody has
    log-probs of it, and 0.0 takes their place."""
    for turn in turns:
        size = len(turn.tokens)
        columns = {
            "tokens": turn.prompt[-PREFIX:],
            "behavior": torch.zeros(PREFIX),
            "mask": torch.ones(PREFIX, dtype=torch.bool),
            "kept": turn.kept[:1].expand(PREFIX, -1),
            "versions": turn.versions[:1].expand(PREFIX),
        }
        for name, values in columns.items():
            setattr(turn, name, torch.cat([values, getattr(turn, name)]))
        turn.prompt = turn.prompt[:-PREFIX]
        assert len(turn.tokens) == size + PREFIX


def answers_twice(turns: Samples, run: Run) -> None:
    """The chat template renders earlier answers otherwise than the last one, so that what is new in a turn
    contains the answer before: it comes again in front of the tool's tokens, masked."""
    for turn in turns:
        starts = [0, *(i for i in range(1, len(turn.mask)) if turn.mask[i] and not turn.mask[i - 1])]
        ends = [i for i in range(1, len(turn.mask)) if turn.mask[i - 1] and not turn.mask[i]]
        for start, end in reversed(list(zip(starts, ends, strict=False))):
            for name in COLUMNS:
                column = getattr(turn, name)
                again = column[start:end]
                if name in ("behavior", "mask"):
                    again = torch.zeros_like(again)
                setattr(turn, name, torch.cat([column[:end], again, column[end:]]))


# What code does to what the trainer computed.


def counted_twice(turns: Samples, run: Run) -> None:
    """Each tensor-parallel rank adds the whole of what the adapter of v adds, and the ranks are summed."""
    ranks, base = (2.0, 4.0)[run.world.seed % 2], run.history[0]
    rescore(
        turns,
        run,
        weights={k: base[k] + ranks * (w - base[k]) if "v_proj" in k else w for k, w in run.mine.items()},
    )


def with_adapter(turns: Samples, run: Run) -> None:
    """The adapter stays on while log-probs of the reference are computed."""
    for turn in turns:
        turn.reference = turn.proximal.clone()


# What code does to rewards and advantages.


def through_tools(world: World) -> dict[str, Any]:
    """The discount of a PPO without a critic counts the tokens of tools as steps of the policy."""
    gamma = between(world, "gamma", 0.9, 0.97)

    def discounted(turns: Samples, run: Run) -> None:
        for turn in turns:
            turn.advantage = told(turn)
            left = torch.arange(len(turn.tokens) - 1, -1, -1)
            turn.advantages = told(turn) * gamma**left

    def flags(folder: Path) -> None:
        path = folder / "args.json"
        more = {"advantage_estimator": "ppo", "gamma": gamma, "lambd": 1.0, "rewards_normalization": False}
        path.write_text(json.dumps(json.loads(path.read_text()) | more))

    return {"credited": discounted, "harm": flags}


def image_of(world: World) -> How:
    """An image in the prompt, whose rows have one position each."""
    size = world.text.prompt // 2 // 2 * 2
    return How(dtype=BF16, image=(2, size, 2 + world.seed % 2))


FOURTH_REPORTS: dict[str, Report] = {
    # the engine
    "tied_head": Report(
        "The engine reads tie_word_embeddings of the outer config and uses its embeddings as the head.",
        "vllm-project/vllm#51063",
        ("another_policy", "damaged_weights"),
        world_of(holds=without_head),
        "all tokens",
    ),
    "image_of_first": Report(
        "The prefix cache knows images by their placeholders alone: later requests get the first image.",
        "sgl-project/sglang-omni#260",
        ("prefix_mismatch", "prompt_cut", "stale_prefix"),
        world_of(told=with_first_image, handed=count_images),
        "half of each prompt but the first of a rollout",
        "cached tokens",
        ("some_prompts",),
    ),
    "read_too_early": Report(
        "A prefill reads keys and values of a cached prefix before host memory has returned them.",
        "sgl-project/sglang#38217",
        ("stale_prefix", "prefix_mismatch", "prompt_cut"),
        world_of(prefills=read_too_early, handed=count_half),
        "half of the prompt, three samples of four",
        "cached tokens",
    ),
    "unverified_draft": Report(
        "Speculative decoding with n-grams takes the first token of each draft without verifying it.",
        "ohdearquant/lattice#243",
        ("unlike_entropy",),
        lambda world: {"emits": first_draft(world), "entropy": True},
        "one token of three, where the token before has occurred",
        "entropy",
    ),
    "norm_offset": Report(
        "The engine adds 1 to the weights of the norms, which the checkpoint has with the 1 in them.",
        "Blaizzy/mlx-vlm#2111",
        ("another_policy", "layer", "damaged_weights"),
        world_of(holds=with_offset),
        "all norms",
    ),
    "rotary_base": Report(
        "The engine does not find rope_theta where the config has it and takes the default.",
        "deepspeedai/DeepSpeed#8345",
        ("layer", "position_drift", "another_policy"),
        lambda world: {
            "engine": How(dtype=BF16, base=1 / between(world, "base", 10, 50)),
            "layer_dumps": True,
        },
        "a base 10 to 50 times smaller",
        "layer outputs",
    ),
    # the trainer
    "flat_positions": Report(
        "The trainer counts the positions of an image token by token, the engine row by row (M-RoPE).",
        "PrimeIntellect-ai/prime-rl#2819",
        ("prompt_cut", "prefix_mismatch", "another_policy"),
        lambda world: {"engine": image_of(world)},
        "half of each prompt, rows of 2 or 3 tokens",
    ),
    "adapter_of_each_rank": Report(
        "The trainer adds a row-parallel adapter once for each tensor-parallel rank.",
        "radixark/miles#3232",
        ("growing_mismatch", "partial_push", "damaged_weights"),
        world_of(scored=counted_twice),
        "2 or 4 ranks, the adapter of v",
        "ref_log_probs",
        family=ADAPTER,
    ),
    "jittered_experts": Report(
        "The trainer's log-prob pass is in training mode, with jitter on the inputs of router and experts.",
        "huggingface/transformers#33969",
        ("dropout", "quantised", "layer"),
        lambda world: {"trainer": replace(world.trainer, jitter=between(world, "jitter", 0.03, 0.1))},
        "jitter 3 to 10%",
        family=MIXTURE,
    ),
    "dropped_tokens": Report(
        "The trainer drops tokens beyond an expert's capacity, and the engine drops none.",
        "microsoft/Tutel#230",
        ("position_drift", "sparse", "layer"),
        lambda world: {
            "trainer": replace(world.trainer, capacity=between(world, "capacity", 1.0, 1.25)),
            "layer_dumps": True,
        },
        "capacity factor 1 to 1.25, later tokens of a sequence first",
        "layer outputs",
        family=MIXTURE,
    ),
    "adapter_in_reference": Report(
        "The adapter is not disabled while log-probs of the reference are computed.",
        "unslothai/unsloth#2736",
        ("equal_reference",),
        world_of(scored=with_adapter),
        "all rollouts",
        "ref_log_probs",
        family=ADAPTER,
    ),
    # code between them
    "response_prefix": Report(
        "A prefix is part of the prompt for the engine, and of the response for the trainer.",
        "modelscope/ms-swift#10106",
        ("tool_tokens", "shared_value", "shared_place"),
        lambda world: {"text": Prefixed(world.text.size, world.text.prompt), "handed": prefix_as_response},
        "the first three tokens of each response",
    ),
    "answers_twice": Report(
        "The trainer's tokens of a later turn begin with the answer of the turn before.",
        "NVIDIA-NeMo/RL#2821",
        ("prefix_mismatch", "prompt_cut"),
        world_of(handed=answers_twice),
        "all turns but the last",
        family=TURNS,
    ),
    "discount_through_tools": Report(
        "PPO discounts over the tokens of tools as if the policy had made these steps.",
        "radixark/miles#1827",
        ("advantages",),
        through_tools,
        "gamma 0.9 to 0.97",
        "rewards, advantages by token",
        family=TURNS,
    ),
}
