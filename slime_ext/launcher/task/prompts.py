"""Prompts from a JSONL file, in slime's order: a new shuffle each epoch, the same one for the same seed."""

from __future__ import annotations

import json
import random
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slime_ext.errors import DataError


@dataclass(frozen=True)
class Prompt:
    """One line of the file. `group_index` counts the prompts that the run has taken; -1 before."""

    text: str
    label: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    line: int = 0
    group_index: int = -1


def read_prompts(path: str | Path, input_key: str = "input", label_key: str | None = None) -> list[Prompt]:
    """Every prompt of a JSONL file; blank lines are skipped.

    slime prints a malformed line and goes on without it; here it stops the run before it starts.

    Raises:
        DataError: no such file, no prompt in it, a line that is no JSON object, a key missing or of a wrong
            type.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "bytes that are no UTF-8"
        raise DataError(f"{path}: expected a readable JSONL file, got {reason}") from error
    lines = ((number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip())
    prompts = [_prompt(f"{path}:{number}", number, line, input_key, label_key) for number, line in lines]
    if not prompts:
        raise DataError(f"{path}: expected at least one prompt, got an empty file")
    return prompts


def _prompt(where: str, number: int, line: str, input_key: str, label_key: str | None) -> Prompt:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where}: expected a JSON object, got {line.strip()[:40]!r}") from error
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected a JSON object, got a {type(row).__name__}")
    text = _text(where, row, input_key, "--input-key")
    label = _text(where, row, label_key, "--label-key") if label_key is not None else None
    metadata = row.get("metadata") or {}
    if not isinstance(metadata, dict):
        raise DataError(f"{where}: expected a mapping under 'metadata', got {metadata!r}")
    return Prompt(text, label, metadata, number)


def _text(where: str, row: dict[str, Any], key: str, flag: str) -> str:
    if key not in row:
        raise DataError(
            f"{where}: expected the key '{key}' of {flag}, got {', '.join(map(repr, row)) or 'no key'}"
        )
    if not isinstance(row[key], str) or (not row[key] and flag == "--input-key"):
        raise DataError(f"{where}: expected text under '{key}', got {row[key]!r}")
    return row[key]


class PromptDataset:
    """An endless supply of prompts whose order depends on the seed alone: a resumed run sees the same.

    Epoch e is shuffled by a generator seeded with seed + e, from the file's order, like slime's; without
    `shuffle` every epoch is the file's order.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int = 42, shuffle: bool = False):
        if not prompts:
            raise DataError("prompts: expected at least one, got none")
        self._prompts = list(prompts)
        self._seed, self._shuffle = seed, shuffle
        self._epoch, self._offset, self._taken = 0, 0, 0
        self._order = self._ordered(0)

    @classmethod
    def from_args(cls, args: Namespace, tokenizer: Any = None) -> PromptDataset:
        """From --prompt-data, with a tokenizer without the prompts above --rollout-max-prompt-len."""
        prompts = read_prompts(args.prompt_data, args.input_key, args.label_key)
        if tokenizer is not None and args.rollout_max_prompt_len is not None:
            prompts = list(_short(prompts, tokenizer, args.rollout_max_prompt_len))
        return cls(prompts, args.rollout_seed, args.rollout_shuffle)

    def __len__(self) -> int:
        return len(self._prompts)

    def next_batch(self, n: int) -> list[Prompt]:
        """The next `n` prompts, over the end of an epoch where needed."""
        return [self._next() for _ in range(n)]

    def state_dict(self) -> dict[str, int]:
        """Where the run stands, with slime's names."""
        return {"epoch_id": self._epoch, "sample_offset": self._offset, "sample_group_index": self._taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes on where `state` was taken.

        Raises:
            DataError: a position outside of the file, which has then changed.
        """
        if not 0 <= state["sample_offset"] <= len(self):
            raise DataError(
                f"prompt data: expected the file of the checkpoint, got {len(self)} prompts and "
                f"position {state['sample_offset']}"
            )
        self._epoch, self._offset = state["epoch_id"], state["sample_offset"]
        self._taken = state["sample_group_index"]
        self._order = self._ordered(self._epoch)

    def _next(self) -> Prompt:
        if self._offset == len(self):
            self._epoch, self._offset = self._epoch + 1, 0
            self._order = self._ordered(self._epoch)
        prompt = replace(self._prompts[self._order[self._offset]], group_index=self._taken)
        self._offset, self._taken = self._offset + 1, self._taken + 1
        return prompt

    def _ordered(self, epoch: int) -> list[int]:
        order = list(range(len(self._prompts)))
        if self._shuffle:
            random.Random(self._seed + epoch).shuffle(order)
        return order


def _short(prompts: Sequence[Prompt], tokenizer: Any, longest: int) -> Iterator[Prompt]:
    return (p for p in prompts if len(tokenizer.encode(p.text, add_special_tokens=False)) <= longest)
