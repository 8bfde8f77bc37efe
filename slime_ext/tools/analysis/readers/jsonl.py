"""JSONL: one sample per line, log-probs as plain lists.

Keys of a line (lists have one entry per response token; None is a missing log-prob):

    rollout_log_probs  (or behavior)                    required: of the policy that sampled
    log_probs          (or train_log_probs, proximal)   required: of the trainer, before its step
    loss_mask, tokens (response, or prompt + response), advantages (a list, or one number), entropy,
    token_weight_versions                               lists, optional
    rollout_id (0), prompt_length, reward, group_index, weight_versions, prompt, response   optional

Lines of one rollout are neighbours. Where a rollout's number comes back later in the file, those lines are
read as a rollout of their own and reported.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from slime_ext.host.contract import versions_of
from slime_ext.tools.analysis.document import Skipped
from slime_ext.tools.analysis.readers.samples import DumpedSample, assemble, number, rollout_number, text
from slime_ext.tools.analysis.records import DumpedRollout

ALIASES = {
    "behavior": ("rollout_log_probs", "behavior"),
    "proximal": ("log_probs", "train_log_probs", "proximal"),
    "mask": ("loss_mask", "mask"),
}
NAMED = 2  # bad lines that are named one by one


def read_jsonl(path: Path) -> Iterator[DumpedRollout | Skipped]:
    """The rollouts of a file in their order, then lines that are no samples as ``Skipped``."""
    bad: list[Skipped] = []
    seen: set[int] = set()
    for rollout_id, found in groupby(_good(path, bad), key=lambda pair: pair[0]):
        rows = [replace(row, position=position) for position, (_, row) in enumerate(found)]
        made = assemble(rollout_id, str(path), rows)
        yield made if isinstance(made, Skipped) else replace(made, again=rollout_id in seen)
        seen.add(rollout_id)
    yield from bad[:NAMED]
    if len(bad) > NAMED:
        yield Skipped(bad[NAMED].path, f"{len(bad) - NAMED} more lines, from here on, are no samples")


def _good(path: Path, bad: list[Skipped]) -> Iterator[tuple[int, DumpedSample]]:
    try:
        with path.open(encoding="utf-8-sig", errors="replace") as file:
            for at, line in enumerate(file, 1):
                if line.strip():
                    try:
                        yield _sample(line)
                    except (TypeError, ValueError, OverflowError, RecursionError) as error:
                        bad.append(Skipped(f"{path}:{at}", str(error)))
    except OSError as error:
        bad.append(Skipped(str(path), f"cannot be read: {error.strerror or error}"))


def _sample(line: str) -> tuple[int, DumpedSample]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"expected a JSON object, got {type(found).__name__}")
    if all(found.get(key) is None for key in (*ALIASES["behavior"], *ALIASES["proximal"])):
        raise ValueError("has neither rollout_log_probs nor log_probs: no sample")
    try:
        return rollout_number(found.get("rollout_id") or 0), _row(found)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"holds a value of another kind: {error}") from None


def _row(found: Mapping[str, Any]) -> DumpedSample:
    lists = {ours: _first(found, *keys) for ours, keys in ALIASES.items()}
    known = next(values for values in lists.values() if values is not None)
    length = int(_first(found, "response_length", default=len(known)))
    tokens = found.get("tokens") or []
    advantages = found.get("advantages")
    return DumpedSample(
        position=0,
        response_length=length,
        **lists,
        tokens=tokens[len(tokens) - length :] or None,
        advantages=[advantages] * length if isinstance(advantages, (int, float)) else advantages,
        entropy=found.get("entropy"),
        prompt_length=int(_first(found, "prompt_length", default=max(len(tokens) - length, 0))),
        reward=number(found.get("reward")),
        group=found.get("group_index"),
        prompt=text(found.get("prompt")),
        response=text(found.get("response")),
        weight_versions=versions_of(found.get("weight_versions")),
        token_versions=versions_of(found.get("token_weight_versions")),
    )


def _first(found: Mapping[str, Any], *keys: str, default: Any = None) -> Any:
    """The value of the first of the keys that is there and not null."""
    return next((found[key] for key in keys if found.get(key) is not None), default)
