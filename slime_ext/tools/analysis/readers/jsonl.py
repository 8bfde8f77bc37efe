"""JSONL: one sample per line, log-probs as plain lists.

Keys of a line (lists have one entry per response token; None is a missing log-prob):

    rollout_log_probs  (or behavior)                    required: of the policy that sampled
    log_probs          (or train_log_probs, proximal)   required: of the trainer, before its step
    loss_mask, tokens (response, or prompt + response), advantages (a list, or one number), entropy,
    token_weight_versions                               lists, optional
    rollout_id (0), prompt_length, reward, group_index, weight_versions, prompt, response   optional

Lines of one rollout are neighbours: where a number comes back, the lines are a rollout of their own, and said
to.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import count, groupby
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
LONGEST = 1 << 26  # characters of a line; a sample of a million tokens takes 40 million
NAMED = 2  # bad lines that are named one by one


def read_jsonl(path: Path) -> Iterator[DumpedRollout | Skipped]:
    """The rollouts of a file in their order; lines that are no samples come as ``Skipped``."""
    bad: list[Skipped] = []
    seen: set[int] = set()
    for rollout_id, found in groupby(_good(path, bad), key=lambda pair: pair[0]):
        rows = [row for _, row in found]
        for position, row in enumerate(rows):
            row.position = position
        made = assemble(rollout_id, str(path), rows)
        yield made if isinstance(made, Skipped) else replace(made, again=rollout_id in seen)
        seen.add(rollout_id)
    yield from bad[:NAMED]
    if len(bad) > NAMED:
        yield Skipped(bad[NAMED].path, f"{len(bad) - NAMED} more lines, from here on, are no samples")


def _good(path: Path, bad: list[Skipped]) -> Iterator[tuple[int, DumpedSample]]:
    for found in _lines(path):
        if isinstance(found, Skipped):
            bad.append(found)
        else:
            yield found


def _lines(path: Path) -> Iterator[tuple[int, DumpedSample] | Skipped]:
    try:
        with path.open(encoding="utf-8-sig", errors="replace") as file:
            for number in count(1):
                line = file.readline(LONGEST)
                if not line:
                    return
                if len(line) == LONGEST:
                    yield Skipped(
                        f"{path}:{number}", f"has {LONGEST:,} characters and more: nothing after it is read"
                    )
                    return
                if line.strip():
                    yield _sample(line, f"{path}:{number}")
    except OSError as error:
        yield Skipped(str(path), f"cannot be read: {error.strerror or error}")


def _sample(line: str, where: str) -> tuple[int, DumpedSample] | Skipped:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        return Skipped(where, f"is no JSON: {error}")
    if not isinstance(found, dict):
        return Skipped(where, f"expected a JSON object, got {type(found).__name__}")
    if all(found.get(key) is None for key in (*ALIASES["behavior"], *ALIASES["proximal"])):
        return Skipped(where, "has neither rollout_log_probs nor log_probs: no sample")
    try:
        return rollout_number(found.get("rollout_id") or 0), _row(found)
    except (TypeError, ValueError, OverflowError) as error:
        return Skipped(where, f"holds a value of another kind: {error}")


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
