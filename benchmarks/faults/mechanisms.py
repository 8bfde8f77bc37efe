"""Faults by mechanism, those of public reports among them: what was done, where it was seen, which names of a
finding are right.

Each is planted in small runs of several seeds, whose sizes and settings differ. Thresholds were set on SEEN
and on healthy runs below FRESH. UNSEEN and the other healthy runs were judged once, after that.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.faults.dump import Turn
from benchmarks.faults.model import BF16, FP32, How, Shape, Weights, random
from benchmarks.faults.world import GROUP, TOOL, World, credit, resampled, write

SEEN, UNSEEN = (0, 1, 2, 3, 4, 5, 10, 11, 12, 13), (14, 15)
SOUND, FRESH = 146, 116  # healthy runs, and the first that nobody looked at
END, PAD = 0, 1  # token ids of the toy vocabulary
Run = Any  # of a world
Samples = list[Turn]


@dataclass(frozen=True)
class Toy:
    """Text over the toy vocabulary, in which a token ends a response.

    Args:
        pays: what is rewarded: more than half of the tokens even, the "length", or the "prompt" whatever the
            response.
    """

    size: int
    prompt: int
    pays: str = "even"
    end: int = END

    def prompts(self, count: int, generator: torch.Generator) -> Tensor:
        return torch.randint(2, self.size, (count, self.prompt), generator=generator)

    def tool(self, generator: torch.Generator) -> Tensor:
        return torch.randint(2, self.size, (TOOL,), generator=generator)

    def reward(self, turn: Turn) -> float:
        if self.pays == "length":
            return len(turn.tokens) / 100
        counted = turn.prompt if self.pays == "prompt" else turn.tokens
        return float((counted % 2 == 0).float().mean() > 0.5)

    def decode(self, ids: Tensor) -> str:
        return " ".join(map(str, ids.tolist()))


def base(seed: int, family: str = "dense") -> World:
    """A healthy run of a seed: other sizes, another policy and another learning rate for each."""
    g = torch.Generator().manual_seed(77 + seed)

    def one_of(*values: Any) -> Any:
        return values[int(torch.randint(len(values), (1,), generator=g))]

    shape = Shape(
        vocabulary=one_of(64, 96, 128),
        layers=one_of(2, 3),
        width=one_of(32, 48),
        confidence=one_of(5.0, 7.0, 9.0),  # of most tokens it is sure,
    )
    prompt, length = one_of(12, 16, 24), one_of(56, 72)
    if family == "mixture":
        shape = replace(shape, experts=8, inner=48)
    return World(
        seed=seed,
        shape=shape,
        rollouts=one_of(6, 8),
        samples=one_of(32, 40),
        length=72 if family == "turns" else length,
        learning=one_of(1.5e-3, 2e-3),
        turns=3 if family == "turns" else 1,
        text=Toy(shape.vocabulary, prompt),
        arguments=True,
        ranks=4,
    )


def start(world: World) -> Weights:
    """The first policy, which ends about half of its responses within their limit."""
    weights = random(world.shape, torch.Generator().manual_seed(world.seed))
    weights["lm_head.weight"][END] *= 1.3
    return weights


# What a sampler does to its logits.


def counts(logits: Tensor, rows: Any) -> Tensor:
    """[B, V] how often each token came in the response."""
    times = torch.zeros_like(logits)
    for token in rows.tokens:
        times.scatter_add_(1, token, torch.ones_like(token, dtype=logits.dtype))
    return times


def repetition(logits: Tensor, rows: Any) -> Tensor:
    """repetition_penalty 1.15."""
    return torch.where(
        counts(logits, rows) > 0, torch.where(logits > 0, logits / 1.15, logits * 1.15), logits
    )


def presence(logits: Tensor, rows: Any) -> Tensor:
    """presence_penalty 1."""
    return logits - 1.0 * (counts(logits, rows) > 0)


def frequency(logits: Tensor, rows: Any) -> Tensor:
    """frequency_penalty 0.3."""
    return logits - 0.3 * counts(logits, rows)


def biased(logits: Tensor, rows: Any) -> Tensor:
    """logit_bias: three tokens are pushed, three are hardly ever sampled."""
    bias = torch.zeros(logits.shape[1])
    bias[[5, 6, 7]], bias[[9, 10, 11]] = 2.0, -4.0
    return logits + bias


def long_enough(logits: Tensor, rows: Any) -> Tensor:
    """min_new_tokens: no end in the first 30 tokens."""
    if len(rows.tokens) >= 30:
        return logits
    return logits.index_fill(1, torch.tensor(END), -torch.inf)


def under_grammar(logits: Tensor, rows: Any) -> Tensor:
    """A tool call of ten tokens under a grammar: every third is forced, the others are among a tenth."""
    at = len(rows.tokens) - 16
    if not 0 <= at < 10:
        return logits
    g = torch.Generator().manual_seed(at)
    size = logits.shape[1]
    allowed = torch.rand(size, generator=g) < (0.0 if at % 3 == 0 else 0.1)
    allowed[torch.randint(2, size, (1,), generator=g)] = True
    return logits.masked_fill(~allowed, -torch.inf)


# What the engine sees of prompts.


def cut(prompts: Tensor) -> Tensor:
    return prompts[:, prompts.shape[1] // 3 :]


def begun_twice(prompts: Tensor) -> Tensor:
    return torch.cat([prompts[:, :1], prompts], 1)


def padded(prompts: Tensor) -> Tensor:
    return torch.cat([prompts, torch.full((len(prompts), 4), PAD)], 1)


def some_lost(prompts: Tensor) -> Tensor:
    """Prompts with one of some tokens in front: what comes before their second half is lost."""
    lost = prompts.clone()
    lost[prompts[:, 0] % 4 == 0, : prompts.shape[1] // 2] = PAD
    return lost


# What the engine holds after a push.


def rolled_back(run: Run) -> Weights:
    return run.history[0] if run.number >= 2 else run.engine


def without_head(name: str) -> bool:
    return not name.startswith("lm_head")


def first_layer(name: str) -> bool:
    return ".layers.0." in name


def in_wrong_layer(run: Run) -> Weights:
    """From the second push on a layer's attention has the tensors of the layer before it."""
    held = dict(run.engine)
    for name in held if run.number >= 2 else ():
        if ".layers.1.self_attn.v_proj" in name:
            held[name] = run.mine[name.replace(".layers.1.", ".layers.0.")]
    return held


def jumping(run: Run) -> Weights:
    lag = (0, 0, 2, 0, 3, 1, 3, 0)[run.number % 8]
    return run.history[max(run.number - lag, 0)]


def other_checkpoint(run: Run) -> Weights:
    return _noisy(run.history[0], run.world.seed) if run.number in (3, 4) else run.engine


def teacher(run: Run) -> Weights:
    return _noisy(run.history[0], run.world.seed)


def _noisy(weights: Weights, seed: int) -> Weights:
    g = torch.Generator().manual_seed(10_000 + seed)
    return {
        k: w + 0.12 * w.std() * torch.randn(w.shape, generator=g) if w.dim() > 1 else w
        for k, w in weights.items()
    }


def one_at_base(run: Run) -> dict[int, tuple[Weights, str]]:
    return {5: (run.history[0], "")} if run.number in (4, 5) else {}


def one_recovered(run: Run) -> dict[int, tuple[Weights, str]]:
    return {2: (run.history[0], "default")} if run.number in (3, 4) else {}


# What code does to the samples of a rollout on their way to the trainer.


def ended_again(turns: Samples, run: Run) -> None:
    """The engine leaves the end token out; the generate function puts it back, with log-prob 0.0."""
    for turn in turns:
        if int(turn.tokens[-1]) == END:
            turn.behavior[-1] = 0.0


def corrupt_tail(turns: Samples, run: Run) -> None:
    """Log-probs of stale drafts at the last three tokens before the limit."""
    g = run.draws
    for turn in turns:
        if turn.status == "truncated":
            turn.behavior[-3:] = -12 - 16 * torch.rand(3, generator=g)[: len(turn.behavior)]


def sentinels(turns: Samples, run: Run) -> None:
    _at_random(turns, run, 2e-3, -9999.0)


def lone_zeros(turns: Samples, run: Run) -> None:
    _at_random(turns, run, 6e-3, 0.0)


def _at_random(turns: Samples, run: Run, share: float, value: float) -> None:
    g = run.draws
    for turn in turns:
        turn.behavior[torch.rand(len(turn.behavior), generator=g) < share] = value


def accepted_drafts(turns: Samples, run: Run) -> None:
    """Tokens that a draft proposed come back with 0.0: the likelier a token, the more often."""
    g = run.draws
    for turn in turns:
        accepted = torch.rand(len(turn.behavior), generator=g) < 0.9 * (turn.behavior / 2).exp()
        turn.behavior[accepted] = 0.0


def short_lists(turns: Samples, run: Run) -> None:
    """A list of log-probs that is five short is filled with 0.0 up to the tokens' length."""
    g = run.draws
    for turn in turns:
        if float(torch.rand(1, generator=g)) < 0.3:
            turn.behavior[-5:] = 0.0


def retried(turns: Samples, run: Run) -> None:
    """A request that failed was sent again; the log-probs are those of the attempt before."""
    g = run.draws
    prompts = torch.stack([turn.prompt for turn in turns])
    for turn, before in zip(turns, resampled(run, prompts), strict=True):
        size = len(turn.behavior)
        if float(torch.rand(1, generator=g)) < 0.4 and len(before.behavior) >= size:
            turn.behavior = before.behavior[:size]


def swapped(turns: Samples, run: Run) -> None:
    """Answers that arrive together are paired with each other's log-probs, if the lengths allow."""
    for one, other in zip(turns[::4], turns[2::4], strict=True):
        if len(one.behavior) == len(other.behavior):
            one.behavior, other.behavior = other.behavior, one.behavior


def stripped(turns: Samples, run: Run) -> None:
    """A stop string of five tokens is cut off everywhere, save in the experts."""
    for turn in turns[::3]:
        if len(turn.tokens) > 10:
            for name in ("tokens", "behavior", "mask", "kept", "versions"):
                setattr(turn, name, getattr(turn, name)[:-5])


def stale_rows(turns: Samples, run: Run) -> None:
    """A chunk of the prompt carries the experts of the token before it."""
    for turn in turns:
        size = len(turn.prompt)
        turn.experts[size // 4 : size - 1] = turn.experts[size // 4 - 1]


def divided(turns: Samples, run: Run) -> None:
    """Log-probs, not logits, are divided by the temperature."""
    for turn in turns:
        turn.behavior = turn.behavior / run.world.temperature


# What code does to what the trainer computed.


def zigzag(turns: Samples, run: Run) -> None:
    """Chunks of two context-parallel ranks, joined in the order of another layout."""
    for turn in turns:
        whole = torch.cat([torch.zeros(len(turn.prompt)), turn.proximal])
        first, second, third, fourth = torch.tensor_split(whole, 4)
        joined = torch.cat([first, third, fourth, second])
        turn.proximal = joined[len(turn.prompt) :]


def late_in_pack(turns: Samples, run: Run) -> None:
    """A pack has one log-prob less than it has tokens for each sample, which adds up along the pack."""
    for begin in range(0, len(turns), 4):
        for shift, turn in enumerate(turns[begin : begin + 4]):
            turn.proximal = turn.proximal.roll(-shift)


def of_reference(turns: Samples, run: Run) -> None:
    for turn in turns:
        turn.proximal = turn.reference.clone()


# What code does to rewards and advantages.


def flipped(turns: Samples, run: Run) -> None:
    for turn in turns:
        turn.advantage = -turn.advantage


def interleaved(turns: Samples, run: Run) -> None:
    """Samples lie prompt by prompt, groups are formed as if they lay round by round."""
    for begin in range(len(turns) // GROUP):
        credit(turns[begin :: len(turns) // GROUP])


def over_all(turns: Samples, run: Run) -> None:
    """Groups are uneven, so the rewards become one row and are normalised over all prompts."""
    credit(turns)


def one_late(turns: Samples, run: Run) -> None:
    """A sample was dropped from one list and not from the other: rewards come one sample late."""
    rewards = [turn.reward for turn in turns]
    for turn, reward in zip(turns, rewards[-1:] + rewards[:-1], strict=True):
        turn.told_reward = reward
    for begin in range(0, len(turns), GROUP):
        credit(turns[begin : begin + GROUP])


def at_last_turn(turns: Samples, run: Run) -> None:
    """The advantage of the last turn, with that turn's mask, is copied to all turns."""
    for turn in turns:
        begins = [i for i in range(1, len(turn.mask)) if turn.mask[i] and not turn.mask[i - 1]]
        turn.advantages = torch.full((len(turn.tokens),), turn.advantage)
        turn.advantages[: begins[-1] if begins else 0] = 0.0


# What is done to the files.


def window(folder: Path) -> None:
    """Only later rollouts are given."""
    for path in folder.glob("*_data/*.pt"):
        if int(path.stem) < 4:
            path.unlink()


def _adapter(name: str) -> bool:
    return "q_proj" in name or "v_proj" in name


def _of_tokens(name: str) -> bool:
    return name.startswith(("lm_head", "model.embed_tokens"))


def _all(name: str) -> bool:
    return True


@dataclass(frozen=True)
class Case:
    """A fault.

    Args:
        mechanism: what was done, in a sentence.
        source: where it was seen: owner/repository#number, or the issue of this project.
        right: names of findings of which each is a right answer.
        world: what it makes of the healthy run of its family.
        needs: what a dump must hold for anyone to name it, beside log-probs of both sides.
        also: findings that follow from it and are said too.
        learns: it is trained with the fault; else the weights are those of the healthy run.
    """

    mechanism: str
    source: str
    right: tuple[str, ...]
    world: dict[str, Any] = field(default_factory=dict)
    needs: str = ""
    also: tuple[str, ...] = ()
    family: str = "dense"
    learns: bool = False

    def of(self, seed: int) -> World:
        """Its world."""
        healthy = base(seed, self.family)
        changes = {
            k: v(healthy) if k in ("text", "trainer") and callable(v) else v for k, v in self.world.items()
        }
        return replace(healthy, **changes)


def sampler(**how: Any) -> dict[str, How]:
    return {"engine": How(dtype=BF16, **how)}


def trainer(**how: Any) -> dict[str, How]:
    return {"trainer": How(**how)}


OURS = "57"
PARTS = ("part_of_run", "one_engine")
CASES: dict[str, Case] = {
    # named by the issue
    "min_new_tokens": Case(
        "The end token is banned for the first 30 tokens, and log-probs are renormalised without it.",
        OURS,
        ("minimum_length",),
        {"processor": long_enough},
        "tokens",
    ),
    "prompt_cut": Case(
        "The engine truncates the prompt on the left, the trainer scores the whole one.",
        OURS,
        ("prefix_mismatch", "prompt_cut"),
        {"told": cut},
    ),
    "int4": Case(
        "INT4 weights in the engine, 16 to a scale.", OURS, ("quantised",), sampler(bits=4, group=16)
    ),
    "int3": Case(
        "INT3 weights in the engine, 16 to a scale.", OURS, ("quantised",), sampler(bits=3, group=16)
    ),
    "sliding_window": Case(
        "The engine's attention sees the last 32 positions only.",
        OURS,
        ("sliding_window", "position_drift", "kv_precision"),
        sampler(window=32) | {"length": 96},
    ),
    "end_zero": Case(
        "The end token is put back by the generate function with log-prob 0.0.",
        "NovaSky-AI/SkyRL#758",
        ("end_token", "shared_value", "tool_tokens"),
        {"handed": ended_again},
        "tokens",
    ),
    "tail": Case(
        "The last three log-probs before the length limit are those of stale drafts.",
        "vllm-project/vllm#38711",
        ("tail", "shared_place"),
        {"handed": corrupt_tail},
        "status",
    ),
    "sentinel": Case(
        "Minus infinity is written as -9999.0.", OURS, ("nan_log_probs", "sentinel"), {"handed": sentinels}
    ),
    "lone_zeros": Case(
        "Single log-probs of 0.0.",
        OURS,
        ("shared_value", "tool_tokens", "filled_zeros"),
        {"handed": lone_zeros},
    ),
    "stale_window": Case(
        "Later rollouts of a dense run whose engine is three rollouts behind.",
        OURS,
        ("stale_weights", "dense"),
        {"late": 3, "harm": window},
    ),
    "retried": Case(
        "Retried samples keep the log-probs of the attempt before.",
        OURS,
        ("retried_log_probs", "other_log_probs", "some_samples"),
        {"handed": retried},
    ),
    "repetition_penalty": Case(
        "A repetition penalty in the sampler alone.",
        OURS,
        ("penalties",),
        {"processor": repetition},
        "tokens",
    ),
    "presence_penalty": Case(
        "A presence penalty in the sampler alone.", OURS, ("penalties",), {"processor": presence}, "tokens"
    ),
    "frequency_penalty": Case(
        "A frequency penalty in the sampler alone.",
        OURS,
        ("penalties", "position_drift"),
        {"processor": frequency},
        "tokens",
    ),
    "logit_bias": Case(
        "A bias on six tokens in the sampler alone.", OURS, ("logit_bias",), {"processor": biased}, "tokens"
    ),
    "swapped": Case(
        "Log-probs are swapped between samples of the same length.",
        OURS,
        ("swapped_log_probs", "other_log_probs", "some_samples"),
        {"handed": swapped},
    ),
    "dropout": Case("The trainer scores with dropout.", OURS, ("dropout", "dense"), trainer(dropout=0.05)),
    "packing_leak": Case(
        "Samples of a pack attend to each other in the trainer.",
        OURS,
        ("packing_leak",),
        {"packs": 4},
        "the place in the pack: dp_shards",
    ),
    "teacher": Case(
        "A frozen teacher samples on purpose.",
        OURS,
        ("another_policy",),
        {"holds": teacher, "versions": False},
    ),
    "stale_routes": Case(
        "A chunk of the prompt carries the experts of the token before it, and the trainer replays them.",
        "sgl-project/sglang#36404",
        ("repeated_routes",),
        {"routes": True, "replays_routes": True, "handed": stale_rows},
        "experts",
        family="mixture",
    ),
    "long_routes": Case(
        "Samples were cut, their experts were not.",
        "radixark/miles#861",
        ("route_lengths",),
        {"routes": True, "handed": stripped},
        "experts",
        ("expert_routing",),
        family="mixture",
    ),
    "grammar": Case(
        "Ten tokens of each response are sampled under a grammar.",
        OURS,
        ("constrained_decoding",),
        {"processor": under_grammar},
    ),
    "stale_head": Case(
        "A tied head is a copy in the engine, which no push reaches.",
        "vllm-project/vllm#51665",
        ("stale_head", "partial_push"),
        {"pushed": without_head, "reference": True, "learning": 6e-3, "trains": _of_tokens},
        "ref_log_probs",
        learns=True,
    ),
    "flipped_sign": Case(
        "Advantages have the wrong sign.", OURS, ("advantage_sign", "advantages"), {"credited": flipped}
    ),
    "interleaved_groups": Case(
        "The baseline is over samples of other prompts: groups are formed in another order.",
        "PrimeIntellect-ai/prime-rl#600",
        ("advantage_baseline", "advantages"),
        {"credited": interleaved},
        "group, rewards, advantages",
    ),
    "one_late": Case(
        "Rewards reach the trainer one sample late.",
        OURS,
        ("reward_order", "advantages"),
        {"credited": one_late},
        "rewards in both dumps",
    ),
    "no_advantage": Case(
        "The reward function looks at the prompt alone: all advantages are 0.",
        OURS,
        ("no_advantage",),
        {"text": lambda own: replace(own.text, pays="prompt")},
        "advantages",
        learns=True,
    ),
    "of_reference": Case(
        "The trainer's log-probs are computed with the reference weights.",
        OURS,
        ("equal_reference",),
        {"reference": True, "scored": of_reference},
        "ref_log_probs",
        ("growing_mismatch", "frozen_sampler", "partial_push"),
    ),
    "one_engine": Case(
        "One engine of eight has the base weights for two rollouts.",
        OURS,
        PARTS,
        {"engines": 8, "astray": one_at_base},
        "the engine of each sample in its metadata",
    ),
    "recovered_engine": Case(
        "One engine of eight was restarted and serves the base weights for two rollouts, as version default.",
        "radixark/miles#1724",
        (*PARTS, "stale_weights"),
        {"engines": 8, "astray": one_recovered},
        "weight versions",
    ),
    "stale_rank": Case(
        "One data-parallel rank of the trainer takes no more steps.",
        OURS,
        ("part_of_run", "stale_rank", "one_rank"),
        {"stale_rank": (2, 2)},
        "data_parallel_rank",
    ),
    "two_rollouts": Case(
        "Two rollouts were sampled from another checkpoint.",
        OURS,
        ("part_of_run", "rollouts_apart", "resumed_wrong_weights"),
        {"holds": other_checkpoint},
    ),
    "length_explosion": Case(
        "The reward pays for length, which explodes.",
        OURS,
        ("length_explosion",),
        {
            "text": lambda own: replace(own.text, pays="length"),
            "learning": 1e-2,
            "rollouts": 10,
            "samples": 16,
            "length": 140,
        },
        learns=True,
    ),
    # from public threads
    "divided_log_probs": Case(
        "The sampler's log-probs are divided by the temperature, instead of its logits.",
        "PrimeIntellect-ai/prime-rl#697",
        ("scaled_log_probs", "before_temperature", "temperature"),
        {
            "temperature": 0.7,
            "recorded_temperature": 1.0,
            "score_temperature": 0.7,
            "handed": divided,
        },
    ),
    "pack_shift": Case(
        "The trainer's log-probs of a pack are shifted by one more place with each sample.",
        "PrimeIntellect-ai/prime-rl#606",
        ("off_by_one", "pack_shift"),
        {"scored": late_in_pack},
    ),
    "over_all_prompts": Case(
        "Groups are uneven, and rewards are normalised over the whole rollout.",
        "THUDM/slime#1414",
        ("advantage_baseline", "advantages"),
        {"credited": over_all},
        "group, rewards, advantages",
    ),
    "woken_at_base": Case(
        "An engine that wakes from sleep reloads the base weights, from the third rollout on.",
        "huggingface/trl#5312",
        ("frozen_sampler", "growing_mismatch", "base_weights"),
        {"holds": rolled_back, "reference": True},
        "ref_log_probs",
    ),
    "wrong_layer": Case(
        "A stale plan of the conversion puts a layer's tensors into another layer at each push.",
        "NovaSky-AI/SkyRL#1345",
        ("partial_push", "growing_mismatch", "damaged_weights"),
        {"holds": in_wrong_layer, "reference": True},
    ),
    "padded_prompt": Case(
        "The engine has four pad tokens between prompt and response.",
        "NovaSky-AI/SkyRL#747",
        ("prefix_mismatch",),
        {"told": padded},
    ),
    "begun_twice": Case(
        "The engine's prompt begins with two begin tokens.",
        "huggingface/trl#3853",
        ("prefix_mismatch",),
        {"told": begun_twice},
    ),
    "soft_cap": Case(
        "The engine caps the logits (final_logit_softcapping), the trainer does not.",
        "huggingface/trl#5692",
        ("soft_cap", "temperature"),
        sampler(soft_cap=15.0),
    ),
    "stretched": Case(
        "The trainer scales the rotary positions as for a longer context.",
        "NVIDIA-NeMo/Megatron-Bridge#2791",
        ("rotary", "layer", "position_drift"),
        trainer(stretch=8.0),
    ),
    "lost_prompts": Case(
        "One prompt in four loses the state of its first half in the engine, whatever the sample.",
        "NVIDIA-NeMo/RL#2100",
        ("some_prompts", "prefix_mismatch", "part_of_run"),
        {"told": some_lost},
        "group",
    ),
    "raced_buffer": Case(
        "At one token in 25 the log-prob is read from the buffer after the next step has overwritten it.",
        "sgl-project/sglang#19761",
        ("sparse", "some_tokens", "off_by_one"),
        {"races": 0.04},
    ),
    "short_lists": Case(
        "A list of log-probs that is too short is filled with 0.0 at its end.",
        "PrimeIntellect-ai/verifiers#2078",
        ("shared_value", "shared_place", "tool_tokens"),
        {"handed": short_lists},
    ),
    "drafts": Case(
        "Accepted draft tokens come back with log-prob 0.0.",
        "vllm-project/vllm#17876",
        ("shared_value", "tool_tokens", "filled_zeros"),
        {"handed": accepted_drafts},
    ),
    "zigzag": Case(
        "Context-parallel chunks of the trainer's log-probs are joined in the wrong order.",
        "THUDM/slime#73",
        ("permuted_log_probs", "unexplained"),
        {"scored": zigzag},
    ),
    "few_layers": Case(
        "A push reaches one layer only.",
        "OpenRLHF/OpenRLHF#660",
        ("partial_push",),
        {"pushed": first_layer, "reference": True},
        "ref_log_probs",
    ),
    "recomputed_routes": Case(
        "A request that was retracted for a push returns its log-probs with the experts of the new weights.",
        "radixark/miles#3277",
        ("expert_routing", "stale_weights", "recomputed_routes"),
        {"switch": True, "gap": 3, "routes": True, "replays_routes": True},
        "experts, weight versions",
        family="mixture",
    ),
    "hybrid_cache": Case(
        "Prompts are found in a cache that no push empties.",
        "radixark/miles#2783",
        ("stale_prefix",),
        {"keeps_prefix": True, "text": lambda own: replace(own.text, prompt=24)},
        "cached tokens",
    ),
    "jumping_lag": Case(
        "The trainer runs ahead of the engine by none to three rollouts, and nobody records by how many.",
        "PrimeIntellect-ai/prime-rl#491",
        ("stale_weights", "part_of_run", "rollouts_apart"),
        {"holds": jumping},
    ),
    "phantom_rows": Case(
        "The fused kernel of the trainer counts rows beyond the vocabulary into its log-softmax.",
        "verl-project/verl#2656",
        ("unnormalised", "truncated_sampling"),
        {"trainer": lambda own: How(phantoms=math.exp(1.8 * own.shape.confidence))},
    ),
    "thinking_stripped": Case(
        "The chat template drops tokens of the first turn from the prompts of later turns.",
        "verl-project/verl#6854",
        ("prefix_mismatch",),
        {"forgets": 5},
        family="turns",
    ),
    "last_turn_only": Case(
        "Earlier turns get the advantage with the mask of the last turn: 0.",
        "NovaSky-AI/SkyRL#1492",
        ("advantages", "partial_advantages"),
        {"credited": at_last_turn},
        "advantages by token",
        family="turns",
    ),
}


def sound(number: int) -> World:
    """A healthy run: 8 to 4,000 tokens, dense or a mixture whose experts are replayed, one or three turns,
    a lag of one rollout of small steps, an adapter that is trained, evaluations in between."""
    g = torch.Generator().manual_seed(5000 + number)

    def one_of(*values: Any) -> Any:
        return values[int(torch.randint(len(values), (1,), generator=g))]

    longest = number % 30 == 7
    length = 4000 if longest else (8, 24, 48, 96, 200)[number % 5]
    shape = Shape(
        vocabulary=one_of(64, 96, 256),
        layers=1 if longest else one_of(1, 2, 3),
        width=one_of(32, 48),
        experts=8 if number % 6 == 3 else 0,
        inner=48,
        confidence=one_of(2.6, 5.0, 8.0),
    )
    temperature = one_of(1.0, 1.0, 0.7, 1.2)
    is_lagging, is_adapter = number % 7 == 4, number % 5 == 2
    return World(
        seed=5000 + number,
        shape=shape,
        rollouts=1 if longest else 30 if number % 20 == 10 else one_of(2, 4, 8),
        samples=4 if longest or number % 20 == 10 else one_of(8, 16, 32, 64),
        learning=1e-4 if is_lagging else one_of(3e-4, 1e-3),
        length=length,
        engine=How(dtype=one_of(BF16, BF16, FP32)),
        late=int(is_lagging),
        temperature=temperature,
        score_temperature=temperature,
        turns=3 if number % 5 in (2, 3) and number % 2 else 1,
        text=Toy(shape.vocabulary, one_of(4, 12, 30)),
        trains=_adapter if is_adapter else _all,
        reference=one_of(False, True),
        entropy=one_of(False, True),
        routes=shape.experts > 0,
        replays_routes=shape.experts > 0,
        versions=one_of(True, True, False),
        engines=one_of(0, 0, 8),
        ranks=one_of(1, 4),
        evaluates=number % 4 == 1,
        arguments=one_of(True, False),
    )


@dataclass
class Runs:
    """What is planted into the healthy runs of a seed, whose weights and samples are made once.

    Args:
        base: makes the healthy run of a seed and a family.
    """

    seed: int
    most_rollouts: int = 10**6
    base: Callable[[int, str], World] = base
    histories: dict[str, list[Weights]] = field(default_factory=dict)
    memo: dict[str, dict] = field(default_factory=dict)

    def write(self, name: str, folder: Path) -> Path:
        """Writes the dumps of a fault."""
        case = CASES[name]
        world = case.of(self.seed)
        world = replace(world, rollouts=min(world.rollouts, self.most_rollouts))
        if case.learns:
            return write(world, folder, [start(world)])
        return self.plant(world, case.family, folder)

    def plant(self, world: World, family: str, folder: Path) -> Path:
        """Writes the dumps of a world that has the weights of its family's healthy run."""
        if family not in self.histories:
            self._train(family)
        history, memo = self.histories[family], self.memo[family]
        return write(replace(world, rollouts=min(world.rollouts, len(history))), folder, history, memo)

    def _train(self, family: str) -> None:
        world = self.base(self.seed, family)
        world = replace(world, rollouts=min(world.rollouts, self.most_rollouts))
        self.histories[family] = [start(world)]
        self.memo[family] = {}
        with tempfile.TemporaryDirectory(prefix="slime_ext_faults_") as folder:
            write(world, Path(folder), self.histories[family], self.memo[family])
