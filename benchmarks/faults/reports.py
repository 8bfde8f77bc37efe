"""Mechanisms of public reports that no detector was written for, and healthy runs of many kinds.

The set judges ``analyze`` from outside: whoever works on a detector sees the runs of SEEN only. A mechanism
is planted where the report says that it is, in the engine, the trainer or the code between them, in small
runs whose sizes, policies and strengths follow from the seed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.faults.dump import Turn
from benchmarks.faults.mechanisms import Runs, Samples, Toy
from benchmarks.faults.model import BF16, FP8, FP32, How, Shape, Weights, stored
from benchmarks.faults.world import GROUP, World, log_probs_of, resampled

SEEN, UNSEEN = (*range(100, 136), *range(141, 148)), (136, 137, 138)
THINK_END = 2  # token id that ends a thought
Run = Any  # of a world


def draws(seed: int, name: str) -> torch.Generator:
    """Returns the generator of what varies with the seed under a name."""
    return torch.Generator().manual_seed(1000 * seed + sum(map(ord, name)))


def between(world: World, name: str, low: float, high: float) -> float:
    """Returns a strength that follows from the seed."""
    return low + (high - low) * float(torch.rand(1, generator=draws(world.seed, name)))


def base(seed: int, family: str = "dense") -> World:
    """Returns the healthy run of a seed: "dense", a "mixture", of several "turns" or an "adapter"."""
    g = torch.Generator().manual_seed(9000 + seed)

    def one_of(*values: Any) -> Any:
        return values[int(torch.randint(len(values), (1,), generator=g))]

    shape = Shape(
        vocabulary=one_of(64, 96, 128),
        layers=one_of(2, 3),
        width=one_of(32, 48),
        confidence=one_of(4.0, 6.0, 8.0),
    )
    world = World(
        seed=9000 + seed,
        shape=shape,
        rollouts=one_of(5, 6, 8),
        samples=one_of(24, 32),
        length=one_of(44, 56),
        learning=one_of(1e-3, 1.5e-3, 2e-3),
        text=Toy(shape.vocabulary, one_of(10, 16, 20)),
        trainer=How(dtype=one_of(FP32, BF16)),
        arguments=True,
        ranks=one_of(1, 2, 4),
    )
    if family == "mixture":
        return replace(
            world, shape=replace(shape, experts=8, inner=48), routes=True, replays_routes=True, samples=24
        )
    if family == "turns":
        return replace(world, turns=3, length=66)
    if family == "adapter":
        return replace(world, trains=is_adapter, learning=6e-3, reference=True)
    return world


def is_adapter(name: str) -> bool:
    return "q_proj" in name or "v_proj" in name


# What the engine holds after a push.


def uninitialised(run: Run) -> Weights:
    """The receive buffers are never filled, so that each tensor is what lay in that memory before."""
    if not run.number:
        return run.engine
    g = torch.Generator().manual_seed(run.world.seed + run.number)
    memory = torch.cat([w.flatten() for w in run.mine.values()])
    begins = {k: int(torch.randint(len(memory) - w.numel(), (1,), generator=g)) for k, w in run.mine.items()}
    return {k: memory[begins[k] : begins[k] + w.numel()].view_as(w) for k, w in run.mine.items()}


def experts_in_other_layout(run: Run) -> Weights:
    """A reload puts gate and up projections of the experts in each other's place."""
    held = dict(run.engine)
    for name in held if run.number else ():
        if name.endswith("gate_up_proj"):
            held[name] = torch.cat(held[name].chunk(2, 1)[::-1], 1)
    return held


def fused_by_group(run: Run) -> Weights:
    """Rows of q, k and v that lie group by group are read as all of q, then k, then v."""
    held, shape = dict(run.engine), run.world.shape
    for i in range(shape.layers):
        names = [f"model.layers.{i}.self_attn.{one}_proj.weight" for one in "qkv"]
        parts = [held[name].chunk(shape.shared) for name in names]
        fused = torch.cat([part[group] for group in range(shape.shared) for part in parts])
        held |= dict(zip(names, fused.split([len(held[name]) for name in names]), strict=True))
    return held


def without_positions(run: Run) -> Weights:
    """The rotary table is zero after the engine has slept: every query is 0, and attends to all alike."""
    return {k: 0 * w if run.number and "q_proj" in k else w for k, w in run.engine.items()}


def scales_of_other_stage(run: Run) -> Weights:
    """Layers of the second pipeline stage are quantised with the scales of the first one's."""
    held, layers = dict(run.engine), run.world.shape.layers
    first = (layers + 1) // 2
    for name, w in run.engine.items() if run.number else ():
        for layer in range(first, layers):
            other = name.replace(f".layers.{layer}.", f".layers.{layer - first}.")
            if other != name and w.dim() > 1:
                ratio = run.engine[other].abs().amax(-1) / w.abs().amax(-1)
                held[name] = (w * ratio[..., None]).to(FP8).float()
    return held


def adapter_twice(run: Run) -> Weights:
    """The base weights are exported with the adapter in them, and the engine adds it again."""
    return {k: w + (w - run.history[0][k]) for k, w in run.engine.items()}


def unconnected(run: Run) -> dict[int, tuple[Weights, str]]:
    """An engine whose connection is stale gets no pushes from the third rollout on."""
    return {1: (run.history[2], "")} if run.number > 2 else {}


# What the engine sees of prompts.


def of_other_request(prompts: Tensor) -> Tensor:
    """Prompts that are found in the cache get the state of another one's first half."""
    half = prompts.shape[1] // 2
    others = torch.cat([prompts.roll(GROUP, 0)[:, :half], prompts[:, half:]], 1)
    return torch.where(_hits(prompts)[:, None], others, prompts)


def _hits(prompts: Tensor) -> Tensor:
    return prompts[:, 0] % 2 == 0


def count_hits(turns: Samples, run: Run) -> None:
    for turn in turns:
        turn.cached = len(turn.prompt) // 2 if _hits(turn.prompt[None]) else 0


def other_date(world: World) -> Callable[[Tensor], Tensor]:
    size = world.shape.vocabulary

    def replaced(prompts: Tensor) -> Tensor:
        prompts = prompts.clone()
        prompts[:, 2:4] = 2 + (prompts[:, 2:4] + 7) % (size - 2)
        return prompts

    return replaced


# What a sampler does to its logits.


def thinking_budget(world: World) -> Callable[[Tensor, Any], Tensor]:
    """After a number of tokens without the end of a thought, only that end is left."""
    budget = int(between(world, "budget", 14, 28))

    def forced(logits: Tensor, rows: Any) -> Tensor:
        if len(rows.tokens) != budget:
            return logits
        has_ended = (torch.cat(rows.tokens, 1) == THINK_END).any(1, keepdim=True)
        other = torch.arange(logits.shape[1]) != THINK_END
        return logits.masked_fill(~has_ended & other, -torch.inf)

    return forced


def allowed_ids(world: World) -> Callable[[Tensor, Any], Tensor]:
    """allowed_token_ids: a share of the vocabulary is never sampled."""
    share = between(world, "banned", 0.05, 0.3)
    banned = torch.rand(world.shape.vocabulary, generator=draws(world.seed, "ids")) < share
    banned[: THINK_END + 1] = False
    return lambda logits, rows: logits.masked_fill(banned, -torch.inf)


def min_p(world: World) -> Callable[[Tensor, Any], Tensor]:
    least = between(world, "min_p", 0.03, 0.15)

    def kept(logits: Tensor, rows: Any) -> Tensor:
        shares = logits.softmax(-1)
        return logits.masked_fill(shares < least * shares.amax(-1, keepdim=True), -torch.inf)

    return kept


def batch_temperature(world: World) -> Callable[[Tensor, Any], Tensor]:
    """Requests that join the batch of an evaluation are sampled at its temperature."""
    temperature = between(world, "temperature", 0.4, 0.7)

    def colder(logits: Tensor, rows: Any) -> Tensor:
        joins = torch.arange(len(logits)) // GROUP % 3 == 0
        return torch.where(joins[:, None], logits / temperature, logits)

    return colder


# What code does to the samples of a rollout on their way to the trainer.


def some_of(turns: Samples, run: Run, name: str, low: float, high: float) -> list[Turn]:
    """Returns a share of the samples."""
    share = between(run.world, name, low, high)
    is_one = torch.rand(len(turns), generator=run.draws) < share
    return [turn for turn, wanted in zip(turns, is_one, strict=True) if wanted]


def retracted(turns: Samples, run: Run) -> None:
    """The cursor of a retracted request is one ahead: the first log-prob is lost, and 0.0 ends the list."""
    for turn in some_of(turns, run, "retracted", 0.1, 0.25):
        turn.behavior = torch.cat([turn.behavior[1:], torch.zeros(1)])


def of_request_before(turns: Samples, run: Run) -> None:
    """Earlier turns are scored with the last one's prompt_logprobs, whose buffer is not cleared where the
    prompt is cached: whole blocks of 16 hold the numbers of the request before."""
    recorded = [turn.behavior.clone() for turn in turns]
    for i in range(1, len(turns)):
        begins = _turn_begins(turns[i])
        size = min(begins[-1] // 16 * 16 if begins else 0, len(recorded[i - 1]))
        if i % 3 == 0:
            turns[i].behavior[:size] = recorded[i - 1][:size]


def _turn_begins(turn: Turn) -> list[int]:
    return [i for i in range(1, len(turn.mask)) if turn.mask[i] and not turn.mask[i - 1]]


def first_alone(turns: Samples, run: Run) -> None:
    """Speculative decoding returns the log-prob of the prefill's token alone; the others become 0.0."""
    for turn in turns:
        turn.behavior[1:] = 0.0


def of_likeliest(turns: Samples, run: Run) -> None:
    """The value is the first entry of a list that is sorted by probability, not the sampled token's."""
    for turn, table in zip(turns, engine_tables(run, turns, run.engine), strict=True):
        most, likeliest = table.max(-1)
        turn.behavior = torch.where(turn.tokens == likeliest, turn.behavior, most)


def engine_tables(run: Run, turns: Samples, weights: Weights) -> list[Tensor]:
    """Returns log-probs [R, V] of each sample with weights in the engine's arithmetic."""
    how = run.world.engine
    world = replace(run.world, trainer=replace(how, dtype=FP32), replays="", score_temperature=None)
    with torch.no_grad():
        return [table for _, table, *_ in log_probs_of(world, turns, stored(weights, how))]


def appended(turns: Samples, run: Run) -> None:
    """A retried sample still has the list of the aborted attempt, to which the new one is appended."""
    prompts = torch.stack([turn.prompt for turn in turns])
    g, before = run.draws, dict(zip(map(id, turns), resampled(run, prompts), strict=True))
    for turn in some_of(turns, run, "appended", 0.15, 0.3):
        size = len(turn.behavior)
        aborted = before[id(turn)].behavior[: 3 + int(torch.randint(max(size // 2, 1), (1,), generator=g))]
        turn.behavior = torch.cat([aborted, turn.behavior])[:size]


def of_draft(turns: Samples, run: Run) -> None:
    """Accepted draft tokens come back with the log-prob of the draft model."""
    spread, g = between(run.world, "draft", 0.1, 0.2), torch.Generator().manual_seed(run.world.seed)
    draft = {
        k: w + spread * w.std() * torch.randn(w.shape, generator=g) if w.dim() > 1 else w
        for k, w in run.history[0].items()
    }
    for turn, table in zip(turns, engine_tables(run, turns, draft), strict=True):
        proposed = table.gather(1, turn.tokens[:, None])[:, 0]
        chance = (proposed - turn.behavior).exp()
        accepted = torch.rand(chance.shape, generator=run.draws) < chance
        turn.behavior = torch.where(accepted, proposed, turn.behavior)


def large_graph(turns: Samples, run: Run) -> None:
    """Requests beyond a number are in a captured graph that is broken: random tokens, log-probs of NaN."""
    g = run.draws
    for turn in turns[int(len(turns) * between(run.world, "graph", 0.5, 0.85)) :]:
        turn.tokens = torch.randint(2, run.world.shape.vocabulary, turn.tokens.shape, generator=g)
        turn.behavior = torch.full_like(turn.behavior, torch.nan)


def tools_as_turns(turns: Samples, run: Run) -> None:
    """Results of two tools are one user turn for the engine; the trainer's tokens end it in between."""
    for turn in turns:
        begins = [i for i in range(1, len(turn.mask)) if turn.mask[i - 1] and not turn.mask[i]]
        for at in (begin + 3 for begin in reversed(begins) if begin + 3 <= len(turn.mask)):
            extra = {
                "tokens": torch.tensor([3, 4, 5]),
                "behavior": torch.zeros(3),
                "mask": torch.zeros(3, dtype=torch.bool),
                "kept": turn.kept[at - 1 : at].expand(3, -1),
                "versions": turn.versions[at - 1 : at].expand(3),
            }
            for name, values in extra.items():
                column = getattr(turn, name)
                setattr(turn, name, torch.cat([column[:at], values, column[at:]]))


def routes_appended(turns: Samples, run: Run) -> None:
    """A resumed request returns the experts of all tokens, which are appended to those of the first part."""
    for turn in some_of(turns, run, "resumed", 0.3, 0.6):
        first = len(turn.prompt) + len(turn.tokens) // 3
        turn.experts = torch.cat([turn.experts[:first], turn.experts])[: len(turn.experts)]


def without_prompt_routes(turns: Samples, run: Run) -> None:
    """A decode server gets the keys and values of the prompt, not its experts: those rows stay 0."""
    for turn in turns:
        turn.experts = turn.experts.clone()
        turn.experts[: len(turn.prompt) - 1] = 0


def unlabelled(turns: Samples, run: Run) -> None:
    for turn in turns:
        turn.engine = ""


# What code does to what the trainer computed.


def too_low(turns: Samples, run: Run) -> None:
    """Gathered logits are taken for a shard, so that log(ranks) is added to every log-sum-exp."""
    for turn in turns:
        turn.proximal = turn.proximal - float(torch.tensor((2.0, 4.0, 8.0)[run.world.seed % 3]).log())


def in_packed_order(turns: Samples, run: Run) -> None:
    """Samples are sorted by length into micro-batches of 8, and their outputs are not sorted back."""
    for begin in range(0, len(turns), 8):
        batch = turns[begin : begin + 8]
        packed = [turn.proximal for turn in sorted(batch, key=lambda turn: len(turn.tokens))]
        for turn, values in zip(batch, packed, strict=True):
            size = len(turn.tokens)
            turn.proximal = torch.cat([values, torch.zeros(size)])[:size]


def from_the_end(turns: Samples, run: Run) -> None:
    """Log-probs are cut at the end of rows that are padded on the right, as if responses ended there."""
    for begin in range(0, len(turns), 4):
        batch = turns[begin : begin + 4]
        longest = max(len(turn.tokens) for turn in batch)
        for turn in batch:
            size, padding = len(turn.tokens), longest - len(turn.tokens)
            padded = -8 - 4 * torch.rand(padding, generator=run.draws)
            turn.proximal = torch.cat([turn.proximal, padded])[-size:]


def rolled_in_shard(turns: Samples, run: Run) -> None:
    """Labels are rolled within each of four context-parallel shards: a shard's last is its first token."""
    with torch.no_grad():
        for turn, table, *_ in log_probs_of(run.world, turns, run.mine):
            ids = torch.cat([turn.prompt, turn.tokens])
            for shard in torch.arange(len(ids)).tensor_split(4):
                at = int(shard[-1]) + 1 - len(turn.prompt)
                if 0 <= at < len(turn.tokens):
                    turn.proximal[at] = table[at, ids[shard[0]]]


# What code does to advantages.


def whitened_by_rank(turns: Samples, run: Run) -> None:
    """Each of two context-parallel ranks whitens the advantages of its own chunks."""
    ranks = [
        torch.cat([torch.full((len(c),), r) for c, r in zip(chunks, (0, 1, 1, 0), strict=True)])
        for chunks in (torch.arange(len(turn.tokens)).tensor_split(4) for turn in turns)
    ]
    values = torch.cat([torch.full((len(turn.tokens),), turn.advantage) for turn in turns])
    of_rank, masks = torch.cat(ranks), torch.cat([turn.mask for turn in turns])
    whitened = torch.empty_like(values)
    for rank in (0, 1):
        here = of_rank == rank
        counted = values[here & masks]
        whitened[here] = (values[here] - counted.mean()) / (counted.std() + 1e-8)
    for turn, advantages in zip(turns, whitened.split([len(turn.tokens) for turn in turns]), strict=True):
        turn.advantages = advantages


def of_other_shard(turns: Samples, run: Run) -> None:
    """Advantages are sharded over the whole batch, samples within each micro-batch."""
    advantages, devices = [turn.advantage for turn in turns], 4
    for i, turn in enumerate(turns):
        turn.advantage = advantages[i % devices * (len(turns) // devices) + i // devices]


def world_of(**fixed: Any) -> Callable[[World], dict[str, Any]]:
    return lambda world: fixed


OTHER_WEIGHTS = ("damaged_weights", "another_policy", "growing_mismatch")
MIXTURE, TURNS, ADAPTER = "mixture", "turns", "adapter"


@dataclass(frozen=True)
class Report:
    """A mechanism of a public report.

    Args:
        mechanism: what was done, in a sentence; ``strength``: how strong it is.
        source: owner/repository#number.
        right: names of findings: the first choice and up to two others that are acceptable.
        plant: what it makes of the healthy run of its family.
        needs: what a dump must hold for anyone to name it, beside log-probs of both sides.
        also: findings that are true as well.
    """

    mechanism: str
    source: str
    right: tuple[str, ...]
    plant: Callable[[World], dict[str, Any]]
    strength: str = ""
    needs: str = ""
    also: tuple[str, ...] = ()
    family: str = "dense"

    def world(self, seed: int) -> World:
        """Returns the run of a seed in which it is planted."""
        healthy = base(seed, self.family)
        return replace(healthy, **self.plant(healthy))


REPORTS: dict[str, Report] = {
    # weights
    "uninitialised_push": Report(
        "A push reports success and loads uninitialised memory, from the first push on.",
        "lightseekorg/tokenspeed#1373",
        OTHER_WEIGHTS,
        world_of(holds=uninitialised),
        "all tensors",
        "weight versions",
    ),
    "expert_layout": Report(
        "From the first push on gate and up projections of the experts lie in each other's place.",
        "NovaSky-AI/SkyRL#1680",
        OTHER_WEIGHTS,
        world_of(holds=experts_in_other_layout),
        "all experts",
        "weight versions",
        family=MIXTURE,
    ),
    "qkv_rows": Report(
        "The exporter reads fused rows of q, k and v in another order, from the push before rollout 0 on.",
        "Accio-Lab/Dressage#1",
        ("another_policy", "layer", "damaged_weights"),
        world_of(holds=fused_by_group),
        "all layers",
    ),
    "zero_rotary": Report(
        "The rotary table is not restored when the engine wakes, from rollout 1 on.",
        "vllm-project/vllm-ascend#17217",
        OTHER_WEIGHTS,
        world_of(holds=without_positions),
        "all layers",
        "weight versions",
    ),
    "wrong_scales": Report(
        "Layers of the second pipeline stage are pushed in FP8 with the scales of the first stage's.",
        "ISEEKYAN/Megatron-LM#191",
        ("damaged_weights", "another_policy", "quantised"),
        world_of(holds=scales_of_other_stage),
        "half of the layers, about 10% of each row",
        "weight versions",
    ),
    "adapter_twice": Report(
        "The base weights are exported with the adapter merged in, and the engine adds it again.",
        "radixark/miles#1087",
        ("growing_mismatch", "damaged_weights"),
        world_of(holds=adapter_twice),
        "as far as the adapter has moved",
        "ref_log_probs",
        family=ADAPTER,
    ),
    "stale_connection": Report(
        "One engine of four gets no pushes from rollout 3 on, and the router writes the pushed version.",
        "radixark/miles#1444",
        ("part_of_run", "one_engine"),
        world_of(engines=4, ranks=3, astray=unconnected),
        "a quarter of the samples",
        "the engine of each sample in its metadata",
    ),
    "stale_connection_unlabelled": Report(
        "The same, and nobody writes down which engine sampled what.",
        "radixark/miles#1444",
        ("some_samples", "part_of_run", "engines_apart"),
        world_of(engines=4, ranks=3, astray=unconnected, handed=unlabelled),
        "a quarter of the samples",
    ),
    # caches and prompts
    "fp8_cache": Report(
        "Keys and values are in FP8 with a scale of 1, because calibrated scales are dropped at the push.",
        "NVIDIA-NeMo/RL#3225",
        ("quantised", "kv_precision", "layer"),
        world_of(engine=How(dtype=BF16, cache=FP8)),
        "all positions",
    ),
    "state_of_other_request": Report(
        "A prompt that hits the prefix cache gets the state of another request.",
        "vllm-project/tpu-inference#3412",
        ("prompt_cut", "prefix_mismatch", "stale_prefix"),
        world_of(told=of_other_request, handed=count_hits),
        "the first half of every second prompt",
        "cached tokens",
        ("some_prompts",),
    ),
    "lost_handover": Report(
        "Keys and values of the last, partial block of a prompt do not reach the decode server.",
        "vllm-project/vllm#52617",
        ("prefix_mismatch", "prompt_cut"),
        lambda world: {"told": lambda prompts: prompts[:, : -int(between(world, "lost", 3, 7))]},
        "3 to 6 tokens",
    ),
    "other_date": Report(
        "The chat template writes another date into the prompt of the engine.",
        "sgl-project/sglang#3296",
        ("prompt_cut", "prefix_mismatch"),
        lambda world: {"told": other_date(world)},
        "2 of 10 to 20 tokens",
    ),
    "tools_as_turns": Report(
        "Results of parallel tools are one turn for the engine and two in the trainer's tokens.",
        "THUDM/slime#2263",
        ("prefix_mismatch", "prompt_cut"),
        world_of(handed=tools_as_turns),
        "3 tokens in each tool result",
        family=TURNS,
    ),
    # recorded log-probs
    "retracted_cursor": Report(
        "Log-probs of a retracted request begin one place late, and the missing last one becomes 0.0.",
        "sgl-project/sglang#26510",
        ("off_by_one", "other_log_probs"),
        world_of(handed=retracted),
        "10 to 25% of the samples",
        also=("shared_value",),
    ),
    "request_before": Report(
        "Log-probs of earlier turns are read from a buffer that holds those of the request before.",
        "vllm-project/vllm#42245",
        ("other_log_probs", "some_samples", "shared_place"),
        world_of(handed=of_request_before),
        "16 or 32 tokens of every third sample",
        family=TURNS,
    ),
    "first_alone": Report(
        "With speculative decoding only the first log-prob is returned; the others become 0.0.",
        "sgl-project/sglang#14046",
        ("greedy_sampling", "shared_value", "tool_tokens"),
        world_of(handed=first_alone),
        "all tokens but one",
    ),
    "likeliest_value": Report(
        "The value of a token is the first of a list that is sorted by probability.",
        "huggingface/trl#3867",
        ("first_entry", "other_log_probs", "sparse"),
        world_of(handed=of_likeliest, entropy=True),
        "all tokens that are not the likeliest",
        "entropy",
    ),
    "appended_attempt": Report(
        "The log-probs of a retried sample are appended to those of the aborted attempt.",
        "THUDM/slime#1861",
        ("other_log_probs", "permuted_log_probs", "off_by_one"),
        world_of(handed=appended),
        "15 to 30% of the samples",
    ),
    "draft_values": Report(
        "Accepted draft tokens have the log-prob of the draft model.",
        "vllm-project/vllm#4378",
        ("mixed_policies", "another_policy", "sparse"),
        world_of(handed=of_draft),
        "most tokens; a draft of weights that are 10 to 20% off",
    ),
    "large_graph": Report(
        "Requests in a captured graph of a large batch get random tokens and NaN.",
        "pytorch/torchtitan#3668",
        ("nan_log_probs", "missing_log_probs"),
        world_of(handed=large_graph),
        "15 to 50% of the samples",
    ),
    # settings of the sampler
    "thinking_budget": Report(
        "After a number of tokens the end of the thought is forced.",
        "sgl-project/sglang#33146",
        ("constrained_decoding", "shared_place", "shared_value"),
        lambda world: {"processor": thinking_budget(world)},
        "one token of most samples",
    ),
    "allowed_ids": Report(
        "allowed_token_ids of the requests leave out a share of the vocabulary.",
        "vllm-project/vllm#57986",
        ("constrained_decoding", "truncated_sampling", "logit_bias"),
        lambda world: {"processor": allowed_ids(world)},
        "5 to 30% of the vocabulary",
    ),
    "min_p": Report(
        "Log-probs are renormalised after min-p.",
        "huggingface/trl#6789",
        ("truncated_sampling", "constrained_decoding", "kept_mass"),
        lambda world: {"processor": min_p(world)},
        "min-p 0.03 to 0.15",
    ),
    "batch_temperature": Report(
        "Requests that join the batch of an evaluation are sampled at its temperature.",
        "Blaizzy/mlx-vlm#1647",
        ("temperature", "some_samples", "some_prompts"),
        lambda world: {"processor": batch_temperature(world)},
        "a third of the prompts, temperature 0.4 to 0.7",
    ),
    # the trainer
    "log_of_ranks": Report(
        "The trainer adds log(tensor-parallel ranks) to each log-sum-exp.",
        "NVIDIA/Megatron-LM#7452",
        ("constant_offset", "scaled_log_probs", "unlike_entropy"),
        world_of(scored=too_low, entropy=True),
        "log 2 to log 8 nats at every token",
        "entropy",
    ),
    "packed_order": Report(
        "Outputs of samples that were sorted by length are not sorted back.",
        "NovaSky-AI/SkyRL#2096",
        ("other_log_probs", "permuted_log_probs"),
        world_of(scored=in_packed_order),
        "most samples of each micro-batch of 8",
    ),
    "from_the_end": Report(
        "Log-probs are cut from the end of rows that are padded on the right.",
        "verl-project/verl#2368",
        ("permuted_log_probs", "off_by_one", "other_log_probs"),
        world_of(scored=from_the_end),
        "all but the longest of 4 samples",
    ),
    "rolled_in_shard": Report(
        "Labels are rolled within context-parallel shards.",
        "hiyouga/LlamaFactory#10475",
        ("sparse", "permuted_log_probs", "shared_place"),
        world_of(scored=rolled_in_shard),
        "the last token of each quarter",
    ),
    "local_positions": Report(
        "Each of two context-parallel ranks counts rotary positions over its own chunks.",
        "NVIDIA/Megatron-LM#5243",
        ("position_drift", "layer", "kv_precision"),
        lambda world: {"trainer": replace(world.trainer, local_positions=2), "packs": 1},
        "from the second quarter of a sequence on",
    ),
    "no_sinks": Report(
        "The trainer's attention has no sinks.",
        "verl-project/verl#3894",
        ("layer", "another_policy", "quantised"),
        lambda world: {
            "engine": How(dtype=BF16, sink=between(world, "sink", 0.0, 2.0)),
            "layer_dumps": True,
        },
        "sink logits 0 to 2",
        "layer outputs",
    ),
    "routed_scale": Report(
        "The engine drops the factor of what the routed experts add.",
        "sgl-project/sglang-jax#1282",
        ("quantised", "layer", "another_policy"),
        lambda world: {"engine": How(dtype=BF16, routed=between(world, "factor", 0.4, 0.7))},
        "factor 0.4 to 0.7",
        family=MIXTURE,
    ),
    "router_bias": Report(
        "The bias of the router is not among the pushed weights.",
        "NovaSky-AI/SkyRL#1505",
        ("expert_routing", "routing_flips", "partial_push"),
        lambda world: {
            "trainer": replace(world.trainer, router_bias=between(world, "bias", 0.02, 0.1)),
            "replays_routes": False,
        },
        "bias of standard deviation 0.02 to 0.1",
        "both sides' experts",
        family=MIXTURE,
    ),
    "coarse_logits": Report(
        "The trainer subtracts a log-sum-exp in bfloat16 from logits in bfloat16.",
        "AI-Hypercomputer/maxtext#5231",
        ("quantised", "layer"),
        lambda world: {"trainer": replace(world.trainer, logits=BF16)},
        "all tokens",
    ),
    "window_by_one": Report(
        "The engine's sliding window is one position shorter than the trainer's.",
        "pytorch/torchtitan#3687",
        ("position_drift", "kv_precision", "sliding_window"),
        lambda world: {
            "engine": How(dtype=BF16, window=16),
            "trainer": replace(world.trainer, window=17),
        },
        "windows of 16 and 17",
    ),
    "appended_routes": Report(
        "Experts of a resumed request are appended to those of its first part.",
        "verl-project/verl#6029",
        ("expert_routing", "repeated_routes", "route_lengths"),
        world_of(handed=routes_appended),
        "30 to 60% of the samples",
        "experts",
        family=MIXTURE,
    ),
    "prompt_routes": Report(
        "A decode server returns no experts for the prompt: the trainer replays rows of zeros.",
        "llm-d/llm-d-router#1473",
        ("repeated_routes", "expert_routing"),
        world_of(handed=without_prompt_routes),
        "all rows of the prompt",
        "experts",
        family=MIXTURE,
    ),
    # advantages
    "whitened_by_rank": Report(
        "Each context-parallel rank whitens the advantages of its own chunks.",
        "THUDM/slime#2235",
        ("advantages",),
        world_of(credited=whitened_by_rank),
        "two transforms, one for each half of the tokens",
        "advantages by token",
    ),
    "other_shard": Report(
        "Advantages are sharded over the batch and samples over micro-batches, in different order.",
        "tenstorrent/tt-metal#46412",
        ("advantages", "reward_order"),
        world_of(credited=of_other_shard),
        "most samples",
        "rewards, advantages",
    ),
}


def runs_of(seed: int) -> Runs:
    """Returns the healthy runs of a seed, into which reports are planted."""
    return Runs(seed, base=base)


def write_report(report: Report, runs: Runs, folder: Path) -> Path:
    """Writes the dumps of a report."""
    return runs.plant(report.world(runs.seed), report.family, folder)
