"""Faults, each by its mechanism, and healthy runs of many settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.faults.dump import Turn
from benchmarks.faults.harms import (
    append_twice,
    as_lines,
    copy_column,
    copy_samples,
    edited,
    few_rows,
    interleaved,
    mask_all,
    of_other_run,
    rounded_pass,
    without_reward,
)
from benchmarks.faults.model import BF16, FP8, How, Shape
from benchmarks.faults.world import World, write

HEALTHY = "healthy"
SMALL = World()
MIXTURE = Shape(experts=8, inner=48)
LONG = replace(SMALL, rollouts=3, samples=32, length=160)


def engine(**changes) -> World:
    """The small world with another arithmetic of the engine."""
    return replace(SMALL, engine=replace(SMALL.engine, **changes))


def late_by_one(turn: Turn) -> None:
    """A generate function that keeps the log-prob of the prompt's last token."""
    turn.behavior = turn.behavior.roll(1)


def late_by_three(turn: Turn) -> None:
    """The same with three tokens, further than any detector looks."""
    turn.behavior = turn.behavior.roll(3)


def overflown(turn: Turn) -> None:
    """An engine in half precision, in which logits overflow now and then."""
    turn.behavior[:: max(len(turn.behavior) // 2, 1)] = torch.nan


def as_probabilities(turn: Turn) -> None:
    """exp of the log-probs, stored under their name."""
    turn.behavior = turn.behavior.exp()


def forgotten(turn: Turn) -> None:
    """A continued request without return_logprob."""
    if int(turn.prompt.sum()) % 3 == 0:
        turn.behavior = torch.full_like(turn.behavior, torch.nan)


def unmasked(turn: Turn) -> None:
    """A tool's answer in the response mask."""
    turn.mask = torch.ones_like(turn.mask)


def modulo(pair: Tensor) -> int:
    """The token into which the toy tokenizer merges two."""
    return int(7 * pair[0] + pair[1]) % 96


def tokenised_again(turn: Turn, merged: Callable[[Tensor], int] = modulo) -> None:
    """A tokenizer that merges the first two tokens of every turn after the first into one where it can; the
    list of log-probs, which the engine made for two, is cut at its end."""
    begins = [i for i in range(1, len(turn.mask)) if turn.mask[i] and not turn.mask[i - 1]]
    for begin in reversed(begins):
        masked = (~turn.mask[begin:]).nonzero()
        end = begin + int(masked[0]) if len(masked) else len(turn.mask)
        if end - begin < 3 or int(turn.tokens[begin]) % 4 == 3:
            continue
        turn.tokens[begin + 1] = merged(turn.tokens[begin : begin + 2])
        columns = {"tokens": begin, "behavior": end - 1, "mask": begin, "kept": begin, "versions": begin}
        for name, gone in columns.items():
            values = getattr(turn, name)
            setattr(turn, name, torch.cat([values[:gone], values[gone + 1 :]]))


def no_adapter(name: str) -> bool:
    """Weights that LoRA does not train: none of those here."""
    return False


def without_layer_1(name: str) -> bool:
    """A push that sends one pipeline stage and forgets the other."""
    return ".layers.1." not in name


TURNS = replace(SMALL, turns=3, length=72)


def other_seed(folder: Path) -> Path:
    """Writes the dumps of a run of the same settings."""
    return write(replace(SMALL, rollouts=2, seed=10**6), folder)


# name of the finding -> the world in which it is planted
FAULTS: dict[str, World] = {
    "no_response_tokens": replace(SMALL, rollouts=4, harm=edited(mask_all)),
    "left_out": replace(SMALL, rollouts=2, harm=edited(append_twice, "train_data")),
    "other_run": replace(SMALL, rollouts=2, harm=of_other_run(other_seed)),
    "repeated_rollouts": replace(SMALL, rollouts=3, harm=interleaved),
    "duplicate_samples": replace(SMALL, rollouts=2, harm=edited(copy_samples)),
    "outside_vocabulary": replace(SMALL, rollouts=2, harm=few_rows),
    "retokenised": replace(TURNS, spoil=tokenised_again),
    "prefix_mismatch": replace(TURNS, turns=2, forgets=5),
    "nan_log_probs": replace(SMALL, rollouts=2, spoil=overflown),
    "missing_log_probs": replace(SMALL, rollouts=2, spoil=forgotten),
    "positive_log_probs": replace(SMALL, rollouts=2, spoil=as_probabilities),
    "off_by_one": replace(SMALL, rollouts=3, spoil=late_by_one),
    "greedy_sampling": replace(SMALL, rollouts=3, top_k=1),
    "tool_tokens": replace(TURNS, rollouts=3, spoil=unmasked),
    "kept_mass": replace(SMALL, rollouts=4, top_p=0.8, replays="engine"),
    "truncated_sampling": replace(SMALL, rollouts=4, top_p=0.9),
    "before_temperature": replace(
        SMALL, rollouts=6, temperature=0.7, recorded_temperature=1.0, score_temperature=0.7
    ),
    "temperature": replace(SMALL, rollouts=4, temperature=0.7),
    "unlike_entropy": replace(SMALL, rollouts=4, temperature=0.7, recorded_temperature=1.0, entropy=True),
    "frozen_sampler": replace(SMALL, rollouts=10, pushed=no_adapter, learning=2e-3, reference=True),
    "partial_push": replace(SMALL, rollouts=10, pushed=without_layer_1, learning=2e-3, reference=True),
    "growing_mismatch": replace(SMALL, rollouts=12, stops=5, learning=2e-3),
    "resumed_wrong_weights": replace(SMALL, rollouts=10, restart=6, learning=2e-3),
    "stale_weights": replace(SMALL, rollouts=12, late=3, learning=2e-3),
    "stale_cache": replace(SMALL, rollouts=6, switch=True, refill=False, learning=4e-3, harm=as_lines),
    "stale_prefix": replace(SMALL, rollouts=8, keeps_prefix=True, prompt=24, learning=4e-3),
    "batch_shape": replace(SMALL, rollouts=3, harm=rounded_pass),
    "layer": replace(
        SMALL, rollouts=3, shape=Shape(layers=3), engine=How(dtype=BF16, eps={1: 1.0}), layer_dumps=True
    ),
    "kv_precision": replace(LONG, engine=How(dtype=BF16, cache=FP8, cache_from=96)),
    "expert_routing": replace(
        SMALL, rollouts=4, samples=48, shape=MIXTURE, engine=How(dtype=BF16, router=BF16), routes=True
    ),
    "routing_flips": replace(
        SMALL, rollouts=4, samples=48, shape=MIXTURE, engine=How(dtype=BF16, router=BF16)
    ),
    "position_drift": replace(LONG, penalty=0.1),
    "quantised": replace(engine(bits=4), rollouts=4),
    "unexplained": replace(SMALL, rollouts=4, spoil=late_by_three),
    "equal_columns": replace(SMALL, rollouts=4, harm=edited(copy_column, "train_data")),
    "selection_bias": replace(SMALL, rollouts=6, samples=48, most=54),
    "reward_collapse": replace(SMALL, rollouts=12, samples=48, harm=edited(without_reward)),
}


def without_experts(name: str) -> bool:
    """A refit that leaves out what an expert-parallel rank holds."""
    return ".experts." not in name


# thread -> what its users saw, the mechanism that is rebuilt here, its world
THREADS: dict[str, tuple[str, str, World]] = {
    "verl-project/verl#7495": (
        "KL climbs 36 times at a fixed sync interval; taken for staleness for two months",
        "the LoRA adapter is never sent",
        FAULTS["frozen_sampler"],
    ),
    "NVIDIA-NeMo/RL#4243": (
        "a mixture of experts diverges within a few updates; five hypotheses tested and none confirmed; the "
        "expert-parallel degree is implicated, the cause open",
        "a refit without the experts (our assumption)",
        replace(FAULTS["partial_push"], shape=MIXTURE, pushed=without_experts, samples=16),
    ),
    "NVIDIA-NeMo/RL#3743": (
        "gen_kl_error above 0 with shared weights; stale KV after a refit is among the causes",
        "responses go on with the cache of the weights before",
        FAULTS["stale_cache"],
    ),
    "NVIDIA-NeMo/RL#4039": (
        "asked for: a proof that nothing is left, with batch-invariant kernels",
        "both sides in float32; entropy, first policy and layer outputs in the dump",
        replace(
            SMALL,
            samples=32,
            rollouts=6,
            engine=How(),
            entropy=True,
            reference=True,
            layer_dumps=True,
            turns=2,
        ),
    ),
    "radixark/miles#2722": (
        "mean error 0.369; with the expert ids replayed still 0.139",
        "the router's logits in FP8: other experts, and other shares of the same ones",
        replace(FAULTS["expert_routing"], engine=How(dtype=BF16, router=torch.float8_e5m2)),
    ),
    "THUDM/slime#1695": (
        "after a resume the log-probs differ hugely and rewards fall for a few steps",
        "the engine has the base weights in the first rollout after the resume",
        FAULTS["resumed_wrong_weights"],
    ),
    "thinking-machines-lab/tinker-cookbook#822": (
        "rollouts that are too old are discarded: slow, hard problems are hardly ever trained on",
        "responses beyond a limit are thrown away; long ones fail more often",
        FAULTS["selection_bias"],
    ),
    "sgl-project/sglang#25790": (
        "with an FP8 KV cache prefill and decode part from token 96 on",
        "queries from position 96 on read the cache in FP8",
        FAULTS["kv_precision"],
    ),
}
# What a fault brings along, and is said too: the first third of those responses is of older weights.
# What else is true of a fault: an answer that is always the likeliest gives each prompt one reward.
ALSO = {"stale_cache": ("stale_weights",), "greedy_sampling": ("no_advantage",)}


def healthy(number: int) -> World:
    """A run without a fault: sizes, model and settings follow from its number. Mixtures of experts replay the
    sampler's experts, as without that tokens do go to other experts; a lag is one of small steps."""
    g = torch.Generator().manual_seed(1000 + number)

    def one_of(*values):
        return values[int(torch.randint(len(values), (1,), generator=g))]

    shape = Shape(
        vocabulary=one_of(64, 96, 256, 512),
        layers=one_of(1, 2, 3),
        width=one_of(32, 48, 64),
        experts=one_of(0, 0, 0, 8),
        inner=48,
        confidence=one_of(1.0, 1.8, 2.6),
    )
    temperature = one_of(1.0, 1.0, 0.7, 1.2)
    top_p = one_of(1.0, 1.0, 1.0, 0.9)
    length = one_of(12, 24, 48, 96)
    learning = one_of(1e-4, 3e-4, 1e-3)
    is_harmless = learning == 1e-4 and not shape.experts  # a lag, then
    return World(
        seed=1000 + number,
        shape=shape,
        rollouts=one_of(1, 2, 4, 8),
        samples=one_of(4, 8, 16, 32),
        prompt=one_of(2, 10, 30),
        length=length,
        learning=learning,
        engine=How(dtype=one_of(BF16, BF16, torch.float32)),
        trainer=How(dtype=one_of(torch.float32, torch.float32, BF16)),
        late=one_of(0, 1) * is_harmless,
        switch=one_of(False, True) and is_harmless,
        first=one_of(0, 0, 100),
        temperature=temperature,
        score_temperature=temperature,
        top_p=top_p,
        replays="trainer" if top_p < 1 else "",
        turns=one_of(1, 1, 3) if length >= 48 else 1,
        reference=one_of(False, True),
        entropy=one_of(False, True) and top_p == 1,
        routes=shape.experts > 0,
        replays_routes=shape.experts > 0,
        layer_dumps=one_of(False, False, True),
        versions=one_of(True, True, False),
    )
