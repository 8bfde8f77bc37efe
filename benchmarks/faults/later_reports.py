"""Mechanisms of public reports that were searched for when detectors had been changed for all of ``reports``.

Whoever wrote this table had not read a detector. It was committed before anything was judged.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.faults.dump import told
from benchmarks.faults.mechanisms import PAD, Samples
from benchmarks.faults.model import BF16, How, Weights
from benchmarks.faults.reports import (
    ADAPTER,
    MIXTURE,
    OTHER_WEIGHTS,
    TURNS,
    Report,
    between,
    some_of,
    unlabelled,
    world_of,
)
from benchmarks.faults.world import GROUP, World, log_probs_of

Run = Any  # of a world
SMALLEST = 1e-6  # that estimators of advantages add to a standard deviation


# What the engine holds after a push.


def unscaled(world: World) -> Callable[[Run], Weights]:
    """The engine finds no alpha and takes the rank, so that its adapter is weaker than the trainer's."""
    share = between(world, "alpha", 0.25, 0.5)
    return lambda run: {k: run.history[0][k] + share * (w - run.history[0][k]) for k, w in run.engine.items()}


def first_shard_twice(run: Run) -> Weights:
    """Both tensor-parallel ranks load the first half of the rows of q, k, v, gate and up projections."""
    names = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    return {
        k: w[: len(w) // 2].repeat(2, 1) if any(name in k for name in names) else w
        for k, w in run.engine.items()
    }


def without_two_deltas(run: Run) -> Weights:
    """The engine fails to apply the deltas of rollouts 2 and 3; later ones are added to what it has."""
    before, after = run.history[1], run.history[min(max(run.number, 1), 3)]
    return {k: w - (after[k] - before[k]) for k, w in run.engine.items()}


def moved_experts(run: Run) -> Weights:
    """The balancer has swapped two pairs of experts, and the push writes each into its first place."""
    if not run.number:
        return run.engine
    order = torch.tensor([1, 0, 3, 2, *range(4, run.world.shape.experts)])
    return {k: w[order] if ".experts." in k else w for k, w in run.engine.items()}


def scaled_up(run: Run) -> dict[int, tuple[Weights, str]]:
    """An engine that joins at rollout 2 receives transposed views as flat memory."""
    received = {
        k: w.T.reshape(w.shape) if "o_proj" in k or "v_proj" in k else w for k, w in run.engine.items()
    }
    return {3: (received, "")} if run.number > 1 else {}


def scales_doubled(run: Run) -> Weights:
    """Each push converts the FP8 format of the layers again, which doubles their scales."""
    factor = 2.0**run.number
    return {k: factor * w if ".layers." in k and w.dim() > 1 else w for k, w in run.engine.items()}


def first_weights(run: Run) -> Weights:
    """The graph of a decoding step reads the memory in which the first weights lie."""
    return run.history[0]


def without_adapter(run: Run) -> dict[int, tuple[Weights, str]]:
    """Every second request comes from a session, which names no adapter."""
    return {1: (run.history[0], "")} if run.number else {}


# What a sampler does to its logits.


def no_repeated_ngram(world: World) -> Callable[[Tensor, Any], Tensor]:
    """A token is banned if it would end an n-gram that the response has already."""
    size = 2 + world.seed % 2

    def kept(logits: Tensor, rows: Any) -> Tensor:
        if len(rows.tokens) < size:
            return logits
        said = torch.cat(rows.tokens, 1)
        ngrams = said.unfold(1, size, 1)  # [B, N, size]
        comes_again = (ngrams[..., :-1] == said[:, None, 1 - size :]).all(-1)
        banned = torch.zeros_like(logits, dtype=torch.bool)
        for row, column in comes_again.nonzero().tolist():
            banned[row, ngrams[row, column, -1]] = True
        return logits.masked_fill(banned, -torch.inf)

    return kept


def draft_of_few(world: World) -> Callable[[Tensor, Any], Tensor]:
    """Drafts are drawn from the draft's four likeliest tokens, and accepted as if from all of them."""
    spread = between(world, "spread", 0.5, 1.5)

    def emitted(log_probs: Tensor, rows: Any) -> Tensor:
        g = torch.Generator().manual_seed(1000 * world.seed + len(rows.tokens))
        target = log_probs.exp()
        draft = (log_probs + spread * torch.randn(log_probs.shape, generator=g)).softmax(-1)
        few = draft.masked_fill(draft < draft.topk(4).values[:, -1:], 0.0)
        proposed = few / few.sum(-1, keepdim=True)
        accepted = proposed * (target / draft).clamp(max=1.0)
        residual = (target - draft).clamp_min(0.0)
        residual = residual / residual.sum(-1, keepdim=True).clamp_min(1e-12)
        # Rounding may leave a little more than 1.
        return accepted + (1 - accepted.sum(-1, keepdim=True)).clamp_min(0.0) * residual

    return emitted


# What code does to the samples of a rollout on their way to the trainer.


def same_seeds(turns: Samples, run: Run) -> None:
    """Two data-parallel engines draw with the same seed, so that pairs of answers to a prompt are equal."""
    for i in range(0, len(turns), 2):
        turns[i + 1] = replace(deepcopy(turns[i]), engine=turns[i + 1].engine, cached=turns[i + 1].cached)


def late_mask(turns: Samples, run: Run) -> None:
    """The mask of a response is one place behind its log-probs."""
    for turn in turns:
        turn.mask = torch.cat([torch.zeros(1, dtype=torch.bool), turn.mask[:-1]])


def last_token_twice(turns: Samples, run: Run) -> None:
    """The last token before an abort is in the aborted part and in the chunk that says so."""
    g = run.draws
    for turn in some_of(turns, run, "aborted", 0.3, 0.6):
        size = len(turn.tokens)
        at = size // 4 + int(torch.randint(max(size // 2, 1), (1,), generator=g))
        for name in ("tokens", "behavior", "mask", "kept", "versions"):
            column = getattr(turn, name)
            setattr(turn, name, torch.cat([column[: at + 1], column[at:]]))


# What code does to what the trainer computed.


def with_pads(turns: Samples, run: Run) -> None:
    """Queries attend to the pads in front of a prompt."""
    pads = torch.full((int(between(run.world, "pads", 2, 8)),), PAD)
    _scored_after(turns, run, lambda prompt: torch.cat([pads, prompt]))


def without_image(turns: Samples, run: Run) -> None:
    """Tokens of an image are placeholders for the trainer, which does not get the image."""

    def placeholders(prompt: Tensor) -> Tensor:
        size = len(prompt)
        begin, image = size // 4, torch.full((size // 2,), PAD)
        return torch.cat([prompt[:begin], image, prompt[begin + len(image) :]])

    _scored_after(turns, run, placeholders)


def _scored_after(turns: Samples, run: Run, prompt_of: Callable[[Tensor], Tensor]) -> None:
    others = [replace(turn, prompt=prompt_of(turn.prompt)) for turn in turns]
    with torch.no_grad():
        scored = [log_probs for _, _, log_probs, _ in log_probs_of(run.world, others, run.mine)]
    for turn, log_probs in zip(turns, scored, strict=True):
        turn.proximal = log_probs


def smoothed(turns: Samples, run: Run) -> None:
    """Labels are smoothed over the first of two shards of the vocabulary, which each rank takes for all."""
    size = run.world.shape.vocabulary // 2
    weight = between(run.world, "smoothing", 0.02, 0.1) * size / (size - 1)
    with torch.no_grad():
        for turn, table, *_ in log_probs_of(run.world, turns, run.mine):
            turn.proximal = (1 - weight) * turn.proximal + weight * table[:, :size].mean(-1)


# What code does to advantages.


def by_stride(turns: Samples, run: Run) -> None:
    """Samples without an answer are dropped, and each four in a row are normalised as a group; those after
    the last four keep their reward."""
    for turn in some_of(turns, run, "failed", 0.1, 0.25):
        turn.dropped = True
    survivors = [turn for turn in turns if not turn.dropped]
    for turn in survivors:
        turn.advantage = told(turn)
    for begin in range(0, len(survivors) // GROUP * GROUP, GROUP):
        group = survivors[begin : begin + GROUP]
        rewards = torch.tensor([told(turn) for turn in group])
        for turn, reward in zip(group, rewards, strict=True):
            turn.advantage = float((reward - rewards.mean()) / (rewards.std() + SMALLEST))


def by_others(turns: Samples, run: Run) -> None:
    """Mean and standard deviation are those of the other samples, which may all have the same reward."""
    for begin in range(0, len(turns), GROUP):
        group = turns[begin : begin + GROUP]
        for turn in group:
            others = torch.tensor([told(other) for other in group if other is not turn])
            turn.advantage = float((told(turn) - others.mean()) / (others.std() + SMALLEST))


LATER_REPORTS: dict[str, Report] = {
    # weights
    "adapter_unscaled": Report(
        "The engine does not find the adapter's alpha and takes its rank.",
        "Tencent-Hunyuan/UniRL#155",
        ("growing_mismatch", "partial_push", "damaged_weights"),
        lambda world: {"holds": unscaled(world)},
        "25 to 50% of what the adapter adds",
        "ref_log_probs",
        family=ADAPTER,
    ),
    "first_shard_twice": Report(
        "Each tensor-parallel rank loads the first rank's rows of merged projections.",
        "vllm-project/vllm-gguf-plugin#103",
        ("another_policy", "layer", "damaged_weights"),
        world_of(holds=first_shard_twice, layer_dumps=True),
        "two ranks, all layers",
        "layer outputs",
    ),
    "lost_deltas": Report(
        "The engine fails to apply two pushes of deltas, and later deltas are added to what it has.",
        "THUDM/slime#2119",
        ("growing_mismatch", "damaged_weights", "stale_weights"),
        world_of(holds=without_two_deltas, reference=True),
        "two of four to seven pushes",
        "weight versions",
    ),
    "moved_experts": Report(
        "A push addresses experts by their first places, from which the load balancer has moved them.",
        "PrimeIntellect-ai/prime-rl#3583",
        OTHER_WEIGHTS,
        world_of(holds=moved_experts),
        "4 of 8 experts, from rollout 1 on",
        "weight versions",
        family=MIXTURE,
    ),
    "scaled_up_engine": Report(
        "An engine that joins later receives views that are not contiguous as flat memory.",
        "vllm-project/vllm#50641",
        ("part_of_run", "engines_apart", "some_samples"),
        world_of(engines=4, astray=scaled_up),
        "two matrices of each layer, a quarter of the samples from rollout 2 on",
        "the engine of each sample in its metadata",
    ),
    "doubled_scales": Report(
        "Each push converts FP8 weights that were converted before, which doubles their scales.",
        "ROCm/ATOM#2028",
        ("growing_mismatch", "damaged_weights", "another_policy"),
        world_of(holds=scales_doubled, reference=True),
        "all matrices of the layers, twice as large with each push",
        "weight versions",
    ),
    "stale_graph": Report(
        "After a push the graph of decoding steps still reads the first weights, and a prefill the new ones.",
        "vllm-project/vllm#48941",
        ("frozen_sampler", "growing_mismatch", "stale_weights"),
        world_of(decodes=first_weights, reference=True),
        "all tokens but the first",
        "ref_log_probs",
    ),
    "no_adapter_in_sessions": Report(
        "Requests of sessions name no adapter, and the engine answers them with the base weights.",
        "radixark/miles#2075",
        ("some_samples", "part_of_run", "engines_apart"),
        world_of(engines=2, astray=without_adapter, handed=unlabelled),
        "half of the samples",
        family=ADAPTER,
    ),
    # arithmetic
    "raw_router_logits": Report(
        "The engine weights its experts by the router's logits instead of by their shares.",
        "sgl-project/sglang#35160",
        ("layer", "another_policy", "quantised"),
        world_of(engine=How(dtype=BF16, raw_shares=True), layer_dumps=True),
        "all tokens",
        "layer outputs",
        family=MIXTURE,
    ),
    "rotary_layout": Report(
        "The trainer turns neighbouring pairs with a table of angles that is laid out for halves.",
        "NVIDIA/Megatron-LM#3900",
        ("layer", "position_drift", "another_policy"),
        lambda world: {"trainer": replace(world.trainer, neighbours=True), "layer_dumps": True},
        "all positions",
        "layer outputs",
    ),
    "attention_scale": Report(
        "The trainer scales attention by another field of the YaRN settings.",
        "NVIDIA/Megatron-LM#1429",
        ("layer", "another_policy", "quantised"),
        lambda world: {
            "trainer": replace(world.trainer, sharpness=between(world, "sharpness", 1.2, 1.9)),
            "layer_dumps": True,
        },
        "scores 1.2 to 1.9 times as large",
        "layer outputs",
    ),
    "glu_blocks": Report(
        "The trainer reads gate and up projections in blocks of 32 rows; the checkpoint has them as halves.",
        "NVIDIA/Megatron-LM#7576",
        ("layer", "another_policy", "quantised"),
        lambda world: {"trainer": replace(world.trainer, glu_blocks=32)},
        "all layers",
    ),
    # caches
    "lost_scores": Report(
        "The offset of a cache block overflows, and scores of all keys beyond it are 0.",
        "vllm-project/vllm#52109",
        ("kv_precision", "position_drift", "layer"),
        lambda world: {"engine": How(dtype=BF16, lost_scores=int(between(world, "lost", 28, 42)))},
        "keys from position 28 to 41 on",
    ),
    "unwritten_slots": Report(
        "The first chunk of a prompt attends to slots that only the second chunk will fill.",
        "GeeeekExplorer/nano-vllm#213",
        ("prompt_cut", "prefix_mismatch", "layer"),
        world_of(engine=How(dtype=BF16, unwritten=True)),
        "the first half of each prompt",
    ),
    # samplers
    "no_repeated_ngram": Report(
        "A logits processor bans tokens that would repeat an n-gram of the response.",
        "sgl-project/sglang#26685",
        ("penalties", "constrained_decoding", "sparse"),
        lambda world: {"processor": no_repeated_ngram(world)},
        "n-grams of 2 or 3 tokens",
        "tokens",
    ),
    "draft_of_few": Report(
        "Drafts come from top-k of the draft model, and are accepted by its probabilities without top-k.",
        "huggingface/transformers#47932",
        ("unlike_entropy",),
        lambda world: {"emits": draft_of_few(world), "entropy": True},
        "top-4; a draft whose logits are 0.5 to 1.5 off",
        "entropy",
    ),
    "same_seeds": Report(
        "Data-parallel engines sample with the same seed.",
        "NVIDIA/Megatron-LM#5983",
        ("duplicate_samples",),
        world_of(engines=2, handed=same_seeds),
        "pairs of answers to each prompt",
    ),
    # prompts and masks
    "attended_pads": Report(
        "Queries of the trainer attend to the pads in front of a prompt.",
        "AI-Hypercomputer/maxtext#4016",
        ("prompt_cut", "prefix_mismatch"),
        world_of(scored=with_pads),
        "2 to 7 pads",
    ),
    "no_image": Report(
        "The trainer gets placeholders without the image that the engine saw.",
        "microsoft/agent-lightning#560",
        ("prompt_cut", "prefix_mismatch"),
        world_of(scored=without_image),
        "half of each prompt",
    ),
    "late_mask": Report(
        "The mask of a response is one place behind its log-probs.",
        "modelscope/ms-swift#8427",
        ("tool_tokens", "shared_value", "shared_place"),
        world_of(handed=late_mask),
        "the first token of each tool result",
        family=TURNS,
    ),
    "last_token_twice": Report(
        "An aborted request returns its last token twice before it goes on.",
        "sgl-project/sglang#34488",
        ("sparse", "some_samples", "prefix_mismatch"),
        world_of(handed=last_token_twice),
        "one token in 30 to 60% of the samples",
    ),
    # log-probs of the trainer
    "smoothed_labels": Report(
        "Labels are smoothed over one rank's shard of the vocabulary.",
        "NVIDIA/Megatron-LM#7464",
        ("scaled_log_probs", "constant_offset"),
        world_of(scored=smoothed),
        "smoothing 0.02 to 0.1, two ranks",
    ),
    # advantages
    "groups_by_stride": Report(
        "Groups that lost a sample are normalised as if each four in a row were one.",
        "areal-project/AReaL#1419",
        ("advantages",),
        world_of(credited=by_stride),
        "10 to 25% of the samples are lost",
        "rewards, advantages",
        ("selection_bias",),
    ),
    "spread_of_others": Report(
        "Advantages are divided by the standard deviation of the other samples' rewards, even if it is 0.",
        "NVIDIA-NeMo/RL#1518",
        ("advantages",),
        world_of(credited=by_others),
        "groups in which one reward differs",
        "rewards, advantages",
    ),
}
