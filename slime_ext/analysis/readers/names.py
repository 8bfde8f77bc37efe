"""What the names of dumps say: the number of the rollout, and which of them are of evaluations."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

NUMBER = re.compile(r"\d+")
RANKED = re.compile(r"\d+[_-](?:rank[_-]?)?\d+$")
# slime puts "eval_5" where the template of --save-debug-rollout-data has the rollout's number.
EVALUATION = re.compile(r"(^|[^a-z])eval_\d")


def numbers(files: Iterable[Path]) -> dict[Path, int | None]:
    """The number of each file's rollout; None where its name has none.

    Among names that are else the same it is the first number that differs, so that ``qwen3-8b-0`` and
    ``qwen3-8b-1`` are two rollouts; a name of its own kind has it last. The rank in ``5_0`` is never meant.
    """
    alike: dict[tuple[Path, str], list[Path]] = {}
    for path in files:
        alike.setdefault((path.parent, NUMBER.sub("#", path.stem)), []).append(path)
    return {path: number for paths in alike.values() for path, number in _of_alike(paths)}


def is_evaluation(path: Path) -> bool:
    """Whether a name is that of an evaluation's samples, on which nothing was trained."""
    return bool(EVALUATION.search(path.name))


def _of_alike(paths: Sequence[Path]) -> Iterable[tuple[Path, int | None]]:
    rows = [NUMBER.findall(path.stem) for path in paths]
    if not rows[0]:
        return [(path, None) for path in paths]
    last = len(rows[0]) - (2 if RANKED.search(paths[0].stem) else 1)
    at = next((i for i in range(last) if len({row[i] for row in rows}) > 1), last)
    return [(path, int(row[at])) for path, row in zip(paths, rows, strict=True)]
