"""What `slime-ext train` can learn: a model, prompts, a reward, and the flags of the host that fit them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Task:
    """One task of `slime-ext train`.

    Args:
        what: what learns what, for the screen.
        rollouts: how many a run has by default.
        rollout_s: seconds per rollout on two idle cores.
        threads: of each process that computes.
        write: (folder of the run, seed) -> folder of the model; writes train.jsonl and heldout.jsonl too.
        flags: of the host, without those that every run has.
        eval_every: rollouts between two evaluations on what is held out.
        save_every: rollouts between two checkpoints.
        concurrency: requests that the engine works on at a time.
        context: longest prompt with its answer, tokens.
        room: bytes that a run writes, its checkpoints above all.
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
    """Writes train.jsonl and heldout.jsonl, whose rows have the keys input and label."""
    for name, rows in (("train", train), ("heldout", heldout)):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text)
