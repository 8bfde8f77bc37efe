"""Defines a task of `slime-ext train`: a model, prompts, a reward, and the host's flags."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Task:
    """One task of `slime-ext train`.

    Args:
        what: sentence for the screen that says which model learns what.
        rollouts: number of rollouts that a run has by default.
        rollout_s: seconds per rollout, on a CPU with `machine.GFLOPS`.
        threads: threads of each process that computes.
        write: (folder of the run, seed) -> folder of the model; also writes train.jsonl and heldout.jsonl.
        flags: the host's flags for this task, without those that every run has.
        eval_every: rollouts between two evaluations on the held-out prompts.
        save_every: rollouts between two checkpoints.
        concurrency: number of requests that the engine serves at the same time.
        context: most tokens of a prompt with its answer.
        room: bytes that a run writes, mostly for its checkpoints.
    """

    what: str
    rollouts: int
    rollout_s: float
    threads: int
    write: Callable[[Path, int], Path]
    flags: tuple[str, ...]
    eval_every: int
    save_every: int
    concurrency: int
    context: int
    room: int


def write_prompts(folder: Path, train: Iterable[dict], heldout: Iterable[dict]) -> None:
    """Writes train.jsonl and heldout.jsonl. Their rows have the keys `input` and `label`."""
    for name, rows in (("train", train), ("heldout", heldout)):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text)
