"""A third set of mechanisms of public reports, written while detectors were changed with the second in view.

Whoever wrote this table had read no detector, and only totals of what was said of the other sets. It was
committed before anything was judged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.faults.dump import Turn, told
from benchmarks.faults.mechanisms import Samples
from benchmarks.faults.model import BF16, How, Weights, stored
from benchmarks.faults.reports import (
    ADAPTER,
    MIXTURE,
    OTHER_WEIGHTS,
    TURNS,
    Report,
    between,
    draws,
    engine_tables,
    some_of,
    world_of,
)
from benchmarks.faults.world import GROUP, World, credit, log_probs_of, resampled

Run = Any  # of a world
COLUMNS = ("tokens", "behavior", "mask", "kept", "versions")  # of a sample, one entry for each token


# What the engine holds after a push.


def overwritten_buffer(world: World) -> Callable[[Run], Weights]:
    """The second rank loads its rows of k when the next tensor, v, already lies in the buffer."""
    layer = f"model.layers.{world.seed % world.shape.layers}.self_attn."

    def held(run: Run) -> Weights:
        if not run.number:
            return run.engine
        k, v = (run.engine[f"{layer}{name}_proj.weight"] for name in "kv")
        half = len(k) // 2
        return run.engine | {f"{layer}k_proj.weight": torch.cat([k[:half], v[half:]])}

    return held


# What the engine sees of prompts.


def expanded_twice(world: World) -> Callable[[Tensor], Tensor]:
    """The engine expands the first token of an image to a block of tokens, as was done before."""
    extra = int(between(world, "block", 4, 13))

    def expanded(prompts: Tensor) -> Tensor:
        at = prompts.shape[1] // 4
        return torch.cat([prompts[:, :at], prompts[:, at : at + 1].repeat(1, extra), prompts[:, at:]], 1)

    return expanded


# What a sampler does to its logits.


def grammar_of_other_request(world: World) -> Callable[[Tensor, Any], Tensor]:
    """Every third row is restricted, for some steps, by the grammar of a request that has left the batch."""
    begin, size = int(between(world, "begin", 4, 16)), int(between(world, "size", 8, 16))
    share = between(world, "allowed", 0.2, 0.6)

    def restricted(logits: Tensor, rows: Any) -> Tensor:
        step = len(rows.tokens) - begin
        if not 0 <= step < size:
            return logits
        allowed = torch.rand(logits.shape[1], generator=draws(world.seed, f"step {step}")) < share
        allowed[2 + step] = True
        is_other = torch.arange(len(logits)) % 3 == 0
        return logits.masked_fill(is_other[:, None] & ~allowed, -torch.inf)

    return restricted


def verified_at_one(world: World) -> dict[str, Any]:
    """Two tokens of three are drafts, and are accepted as if the temperature were 1."""
    temperature = between(world, "temperature", 0.5, 0.8)

    def emitted(log_probs: Tensor, rows: Any) -> Tensor:
        is_draft = len(rows.tokens) % 3 != 0
        return (temperature * log_probs).softmax(-1) if is_draft else log_probs.exp()

    return {
        "temperature": temperature,
        "score_temperature": temperature,
        "emits": emitted,
        "entropy": True,
    }


# What code does to the samples of a rollout on their way to the trainer.


def of_neighbour(turns: Samples, run: Run) -> None:
    """While another request is in a chunk of its prefill, the log-probs of requests after it in the batch are
    read one row too early."""
    world = run.world
    begin, size = int(between(world, "begin", 2, 16)), int(between(world, "size", 6, 16))
    first = max(int(between(world, "first", 0.3, 0.7) * len(turns)), 1)
    recorded = [turn.behavior.clone() for turn in turns]
    for i in range(first, len(turns)):
        end = min(begin + size, len(recorded[i]), len(recorded[i - 1]))
        if end > begin:
            turns[i].behavior[begin:end] = recorded[i - 1][begin:end]


def one_more_kept(turns: Samples, run: Run) -> None:
    """The engine returns kept sets with one token more than the sets by which it renormalised."""
    for turn, table in zip(turns, engine_tables(run, turns, run.engine), strict=True):
        boundary = table.masked_fill(turn.kept, -torch.inf).argmax(-1)
        turn.kept = turn.kept.scatter(1, boundary[:, None], True)


def stamped_at_end(turns: Samples, run: Run) -> None:
    """The weight version of a sample is read when it is complete."""
    for turn in turns:
        turn.versions = torch.full_like(turn.versions, int(turn.versions.max()))


def cut_results(turns: Samples, run: Run) -> None:
    """Special tokens of a turn vanish from its text, and as many tokens from the begin of the tool result."""
    count = int(between(run.world, "special", 2, 5))
    for turn in some_of(turns, run, "cut", 0.5, 0.9):
        is_tool = torch.cat([torch.zeros(1, dtype=torch.bool), ~turn.mask])
        begins = (is_tool[1:] & ~is_tool[:-1]).nonzero()[:, 0].tolist()
        stays = torch.ones(len(turn.tokens), dtype=torch.bool)
        for begin in begins:
            stays[begin : begin + count] = False
        for name in COLUMNS:
            setattr(turn, name, getattr(turn, name)[stays])


def inverted(turns: Samples, run: Run) -> None:
    """The mask has the tokens of the tools, and none of the policy's."""
    for turn in turns:
        turn.mask = ~turn.mask


def chained(turns: Samples, run: Run) -> None:
    """The agent's recorder takes two answers to a prompt for two turns, because both follow the same tokens.

    It appends the second to the first, and another answer takes the place of the second.
    """
    share = between(run.world, "chained", 0.3, 0.6)
    others = resampled(run, torch.stack([turn.prompt for turn in turns]))
    is_one = torch.rand(len(turns) // 2, generator=run.draws) < share
    for pair in is_one.nonzero()[:, 0].tolist():
        first, second = turns[2 * pair], turns[2 * pair + 1]
        for name in COLUMNS:
            setattr(first, name, torch.cat([getattr(first, name), getattr(second, name)]))
        turns[2 * pair + 1] = others[2 * pair + 1]


# What code does to what the trainer computed.


def rescore(
    turns: Samples, run: Run, others: Sequence[Turn] | None = None, weights: Weights | None = None
) -> None:
    """The trainer scores other samples than it should, or with other weights."""
    with torch.no_grad():
        scored = list(log_probs_of(run.world, list(others or turns), weights or run.mine))
    for turn, (_, _, log_probs, experts) in zip(turns, scored, strict=True):
        turn.proximal, turn.routed = log_probs, experts


def routes_of_layer_before(turns: Samples, run: Run) -> None:
    """Routes are counted over layers with a router, their rows over all layers: from the second layer on
    experts are those of the layer before."""

    def shifted(experts: Tensor) -> Tensor:
        return torch.cat([experts[:, :1], experts[:, :-1]], 1)

    rescore(turns, run, [replace(turn, experts=shifted(turn.experts)) for turn in turns])


def on_quantised_base(turns: Samples, run: Run) -> None:
    """The trainer's adapter is on base weights in 4 bits, the engine's on those of the checkpoint."""
    base = run.history[0]
    coarse = stored(base, How(bits=4, group=16))
    references = [copy(turn) for turn in turns]
    rescore(references, run, weights=coarse)
    rescore(turns, run, weights={k: coarse[k] + (w - base[k]) for k, w in run.mine.items()})
    for turn, reference in zip(turns, references, strict=True):
        turn.reference = reference.proximal


def anchored_again(turns: Samples, run: Run) -> None:
    """From a resume in the middle of the run on, the reference has the weights of the checkpoint."""
    resumed = run.world.rollouts // 2
    if run.number < resumed:
        return
    references = [copy(turn) for turn in turns]
    rescore(references, run, weights=run.history[resumed])
    for turn, reference in zip(turns, references, strict=True):
        turn.reference = reference.proximal


def filled_from_trainer(turns: Samples, run: Run) -> None:
    """Where the engine's list is short, the trainer's own log-probs stay in its place."""
    for turn in some_of(turns, run, "short", 0.4, 0.8):
        missing = max(int(between(run.world, "missing", 0.2, 0.6) * len(turn.tokens)), 1)
        turn.behavior[-missing:] = turn.proximal[-missing:]


# What code does to rewards and advantages.


def each_alone(turns: Samples, run: Run) -> None:
    """Each group has one sample, so that nothing is subtracted from its reward."""
    for turn in turns:
        turn.advantage = told(turn)


def mean_with_pads(turns: Samples, run: Run) -> None:
    """Rewards are whitened over the tokens of the batch, and the mean counts pads as rewards of 0."""
    rewards = torch.tensor([told(turn) for turn in turns])
    lengths = torch.tensor([len(turn.tokens) for turn in turns])
    mean = (rewards * lengths).sum() / (len(turns) * lengths.max())
    variance = ((rewards - mean).square() * lengths).sum() / lengths.sum()
    for turn, advantage in zip(turns, (rewards - mean) / variance.clamp_min(1e-8).sqrt(), strict=True):
        turn.advantage = float(advantage)


def without_judgement(turns: Samples, run: Run) -> None:
    """Some rewards are NaN, and so are mean and standard deviation of their groups."""
    for turn in some_of(turns, run, "failed", 0.05, 0.12):
        turn.reward = torch.nan
    for begin in range(0, len(turns), GROUP):
        credit(turns[begin : begin + GROUP])


THIRD_REPORTS: dict[str, Report] = {
    # the engine
    "block_overwritten": Report(
        "A step that is still under way writes into a cache block that another request has already got.",
        "vllm-project/tpu-inference#3449",
        ("some_samples", "kv_precision", "position_drift"),
        lambda world: {
            "engine": How(
                dtype=BF16, overwritten=world.text.prompt + int(between(world, "overwritten", 18, 26))
            )
        },
        "8 positions of every third sample, for tokens after the 18th to 25th",
    ),
    "lost_rope_delta": Report(
        "Decoding steps forget how much fewer positions than tokens the prompt's image has.",
        "Blaizzy/mlx-vlm#1619",
        ("prompt_cut", "prefix_mismatch", "another_policy"),
        lambda world: {"engine": How(dtype=BF16, jump=int(between(world, "jump", 4, 33)))},
        "responses begin 4 to 32 positions late",
    ),
    "verified_in_windows": Report(
        "All tokens of a window that speculative decoding verifies get the position of its first.",
        "jundot/omlx#2363",
        ("quantised", "another_policy", "position_drift"),
        lambda world: {"engine": How(dtype=BF16, verified=2 + world.seed % 3)},
        "windows of 2 to 4 tokens",
    ),
    "attention_cap": Report(
        "The engine's attention drops the soft cap of its scores.",
        "sgl-project/sglang#33915",
        ("layer", "another_policy", "quantised"),
        lambda world: {
            "trainer": replace(world.trainer, score_cap=between(world, "cap", 1.0, 4.0)),
            "layer_dumps": True,
        },
        "cap 1 to 4, where scores have a standard deviation of about 1.4",
        "layer outputs",
    ),
    "row_of_neighbour": Report(
        "Requests after one in a chunked prefill get log-probs of the row before, with speculative decoding.",
        "vllm-project/vllm#29216",
        ("other_log_probs", "some_samples", "sparse"),
        world_of(handed=of_neighbour),
        "6 to 15 tokens of 30 to 70% of the samples",
    ),
    "grammar_of_other_request": Report(
        "The grammar of a structured request restricts the row of a plain one in the same batch.",
        "Blaizzy/mlx-vlm#1574",
        ("constrained_decoding", "some_samples"),
        lambda world: {"processor": grammar_of_other_request(world)},
        "8 to 15 tokens of a third of the samples, 20 to 60% of the vocabulary allowed",
    ),
    "verified_at_one": Report(
        "Speculative decoding accepts drafts at temperature 1, whatever the temperature of the request.",
        "ohdearquant/lattice#388",
        ("unlike_entropy",),
        verified_at_one,
        "two tokens of three, temperature 0.5 to 0.8",
        "entropy",
    ),
    "boundary_of_top_p": Report(
        "The kernel that renormalises to top-p drops the token at the boundary, which the kept sets hold.",
        "flashinfer-ai/flashinfer#2202",
        ("kept_mass", "truncated_sampling"),
        lambda world: {
            "top_p": between(world, "top_p", 0.6, 0.85),
            "replays": "trainer",
            "handed": one_more_kept,
        },
        "one token of each kept set, top-p 0.6 to 0.85",
        "kept sets",
    ),
    # the trainer
    "whole_shares": Report(
        "The trainer weights experts by their share of all experts, without norm_topk_prob.",
        "pytorch/torchtitan#1448",
        ("layer", "another_policy", "quantised"),
        lambda world: {"trainer": replace(world.trainer, whole_shares=True), "layer_dumps": True},
        "all tokens",
        "layer outputs",
        family=MIXTURE,
    ),
    "embedding_multiplier": Report(
        "The pipeline-parallel trainer leaves out the multiplier of the embeddings.",
        "PaddlePaddle/PaddleFormers#4364",
        ("layer", "another_policy", "quantised"),
        lambda world: {
            "engine": How(dtype=BF16, embedding=between(world, "multiplier", 1.3, 2.5)),
            "layer_dumps": True,
        },
        "multiplier 1.3 to 2.5",
        "layer outputs",
    ),
    "quantised_base": Report(
        "The trainer has the base of its adapter in 4 bits; the engine loads it in 16.",
        "unslothai/unsloth#1930",
        ("quantised", "another_policy"),
        world_of(scored=on_quantised_base),
        "INT4, 16 weights to a scale",
        family=ADAPTER,
    ),
    "shifted_routes": Report(
        "From the second layer on, the trainer replays the experts of the layer before.",
        "verl-project/verl#5037",
        ("expert_routing", "routing_flips"),
        world_of(scored=routes_of_layer_before),
        "all tokens, all layers but the first",
        "both sides' experts",
        family=MIXTURE,
    ),
    "group_scores": Report(
        "The trainer chooses groups of experts by the sum of two scores, the engine by the largest score.",
        "NVIDIA/Megatron-LM#1441",
        ("expert_routing", "routing_flips"),
        lambda world: {"trainer": replace(world.trainer, groups=4), "replays_routes": False},
        "4 groups of 2 experts",
        "both sides' experts",
        family=MIXTURE,
    ),
    "anchored_again": Report(
        "After a resume the reference policy has the weights of the checkpoint, not the first ones.",
        "NVIDIA-NeMo/RL#3722",
        ("equal_reference",),
        world_of(scored=anchored_again, reference=True),
        "from the middle of the run on",
        "ref_log_probs",
    ),
    "mean_with_pads": Report(
        "Advantages are whitened by a mean over tokens and pads.",
        "NovaSky-AI/SkyRL#1305",
        ("advantages",),
        world_of(credited=mean_with_pads),
        "as many pads as shorter samples have",
        "rewards, advantages",
    ),
    "nan_rewards": Report(
        "A reward is NaN where the judge failed, and makes all advantages of its group NaN.",
        "Tencent-Hunyuan/UniRL#335",
        ("advantages",),
        world_of(credited=without_judgement),
        "5 to 12% of the rewards",
        "rewards, advantages",
    ),
    # code between them
    "overwritten_buffer": Report(
        "The second tensor-parallel rank loads a tensor after the next one was written into the same buffer.",
        "sgl-project/sglang#6626",
        OTHER_WEIGHTS,
        lambda world: {"holds": overwritten_buffer(world)},
        "half of the rows of k in one layer, from rollout 1 on",
        "weight versions",
    ),
    "stamped_at_end": Report(
        "A sample whose first part comes from older weights gets the version at the time of its end.",
        "rllm-org/rllm#622",
        ("stale_weights", "some_samples", "shared_place"),
        lambda world: {"switch": True, "gap": 2 + world.seed % 2, "handed": stamped_at_end},
        "the first third of half of the samples, 2 or 3 rollouts old",
    ),
    "image_twice": Report(
        "The engine expands the placeholder of an image that the trainer has expanded already.",
        "huggingface/trl#6299",
        ("prompt_cut", "prefix_mismatch"),
        lambda world: {"told": expanded_twice(world)},
        "4 to 12 more tokens",
    ),
    "cut_results": Report(
        "Tool results lose as many tokens as special tokens vanished from the turn before.",
        "jingyaogong/minimind#850",
        ("prefix_mismatch", "prompt_cut"),
        world_of(handed=cut_results),
        "2 to 4 tokens of each tool result, in 50 to 90% of the samples",
        family=TURNS,
    ),
    "inverted_mask": Report(
        "The mask is inverted: the tokens of tools are trained, those of the policy are not.",
        "mll-lab-nu/RAGEN#71",
        ("tool_tokens", "shared_value"),
        world_of(handed=inverted),
        "all tokens",
        family=TURNS,
    ),
    "chained_siblings": Report(
        "A second answer to the same prompt is appended to the first, as if it were its next turn.",
        "NVIDIA-NeMo/ProRL-Agent-Server#37",
        ("prefix_mismatch", "some_samples", "part_of_run"),
        world_of(handed=chained),
        "30 to 60% of the pairs",
    ),
    "filled_from_trainer": Report(
        "Where the engine's list of log-probs is short, those of the trainer stay in its place.",
        "NVIDIA/Megatron-LM#7015",
        ("equal_columns",),
        world_of(scored=filled_from_trainer),
        "the last 20 to 60% of 40 to 80% of the samples",
    ),
    "groups_of_one": Report(
        "Each group has one trajectory, so that its advantage is its reward.",
        "rllm-org/rllm#924",
        ("advantages",),
        world_of(credited=each_alone),
        "all samples",
        "rewards, advantages",
    ),
}
