"""Healthy runs of many kinds, and short windows of runs whose engine is 20 rollouts behind."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.faults.mechanisms import Samples, start
from benchmarks.faults.model import BF16, FP32, How, Weights
from benchmarks.faults.reports import ADAPTER, MIXTURE, TURNS, base, between, unlabelled
from benchmarks.faults.world import World, credit, log_probs_of, resampled, write

SEEDS, UNSEEN_SEEDS = (200, 201, 202, 203, 204), tuple(range(263, 268))
LAG, WINDOWS = 20, 10  # rollouts behind; windows of each such run
LAGGING, UNSEEN_LAGGING = tuple(range(300, 321)), (321, 322, 323)  # seeds of such runs
NATIVE = How(dtype=BF16, native=True)
Run = Any  # of a world


def of_last_versions(run: Run) -> dict[int, tuple[Weights, str]]:
    """Three samples of four come from one, two and three versions ago, as a replay buffer hands them out."""
    return {k: (run.history[run.number - k], str(run.version - k)) for k in range(1, min(run.number, 3) + 1)}


def of_other_kernels(turns: Samples, run: Run) -> None:
    """Every second engine multiplies in bfloat16, as with another batch size."""
    world = replace(run.world, engine=NATIVE, engines=0, handed=None)
    others = resampled(replace(run, world=world), torch.stack([turn.prompt for turn in turns]))
    for i in range(1, len(turns), 2):
        turns[i] = replace(others[i], engine=turns[i].engine, cached=turns[i].cached)


def by_chunk(turns: Samples, run: Run) -> None:
    """The trainer's numbers depend on the size of the chunk in which a sample is scored."""
    others = log_probs_of(replace(run.world, trainer=NATIVE), turns, run.mine)
    with torch.no_grad():
        for i, (turn, _, log_probs, _) in enumerate(others):
            turn.proximal = log_probs if i // 8 % 2 else turn.proximal


def rounded(turns: Samples, run: Run) -> None:
    """Records are bfloat16 (THUDM/slime#892), or have four decimals."""
    for turn in turns:
        is_coarse = run.world.seed % 2
        turn.behavior = turn.behavior.to(BF16).float() if is_coarse else turn.behavior.round(decimals=4)


def with_evaluations(world: World) -> dict[str, Any]:
    return {"evaluates": True, "engines": 4, "reference": True, "entropy": True}


def by_length(turns: Samples, run: Run) -> None:
    """The reward function takes a penalty for length off, and writes the sum down."""
    for turn in turns:
        turn.reward -= 0.3 * len(turn.tokens) / run.world.length
    for begin in range(0, len(turns), 4):
        credit(turns[begin : begin + 4])


def calm(world: World) -> dict[str, Any]:
    """Steps that are small enough for a lag of a few rollouts."""
    return {"learning": between(world, "learning", 1e-4, 3e-4)}


KINDS: dict[str, tuple[str, Callable[[World], dict[str, Any]]]] = {
    "mixed_ages": (
        "dense",
        lambda world: calm(world) | {"engines": 4, "astray": of_last_versions, "handed": unlabelled},
    ),
    "both_bfloat16": ("dense", lambda world: {"trainer": NATIVE}),
    "mixture": (MIXTURE, lambda world: {}),
    "mixture_of_turns": (MIXTURE, lambda world: {"turns": 3, "length": 66}),
    "tools": (TURNS, lambda world: {}),
    "adapter": (ADAPTER, lambda world: {"learning": 2e-3}),
    "tiny_batches": ("dense", lambda world: {"samples": 4 + world.seed % 2 * 4}),
    "long_answers": ("dense", lambda world: {"samples": 8, "rollouts": 2, "length": 400}),
    "partial_rollouts": ("dense", lambda world: calm(world) | {"switch": True}),
    "steady_engine": (
        "dense",
        lambda world: {"engine": How(), "trainer": How(dtype=BF16), "scored": by_chunk},
    ),
    "several_engines": ("dense", lambda world: {"engines": 4, "handed": of_other_kernels}),
    "lag": ("dense", lambda world: calm(world) | {"late": 1 + world.seed % 2}),
    "short_run": ("dense", lambda world: {"rollouts": 1 + world.seed % 4}),
    "temperature": (
        "dense",
        lambda world: dict.fromkeys(("temperature", "score_temperature"), between(world, "t", 0.6, 1.3)),
    ),
    "rounded_records": ("dense", lambda world: {"handed": rounded, "trainer": How(dtype=FP32)}),
    "shaped_rewards": ("dense", lambda world: with_evaluations(world) | {"credited": by_length}),
}


def kind(name: str, seed: int) -> World:
    """Returns the world of a healthy run."""
    family, changes = KINDS[name]
    world = base(seed, family)
    return replace(world, **changes(world))


def write_kind(name: str, seed: int, folder: Path) -> Path:
    """Writes the dumps of a healthy run."""
    world = kind(name, seed)
    return write(world, folder, [start(world)])


def write_lagging(seed: int, folder: Path) -> Path:
    """Writes 34 rollouts of a run whose engine is LAG rollouts behind."""
    world = replace(base(seed), late=LAG, rollouts=LAG + 14, samples=24, versions=bool(seed % 2))
    return write(world, folder, [start(world)])


def window(whole: Path, number: int, folder: Path) -> Path:
    """Copies 4 to 10 rollouts, all of which come from weights that are up to LAG rollouts old."""
    size = 4 + number * 3 % 7
    begin = 3 + (number * 11) % (LAG + 14 - size - 3)
    for name in ("rollout_data", "train_data"):
        (folder / name).mkdir(parents=True)
        for at in range(begin, begin + size):
            shutil.copy(whole / name / f"{at}.pt", folder / name)
    shutil.copy(whole / "args.json", folder)
    return folder
