"""Prompts from a JSONL file, in slime's order: a new shuffle each epoch, the same one for the same seed."""

from __future__ import annotations

import json
import random
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slime_ext.errors import DataError


@dataclass(frozen=True)
class Prompt:
    """One line of the file.

    `group_index` counts the prompts that the run has taken, -1 before; `ids` are the text's tokens, once it
    has been encoded.
    """

    text: str
    label: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    line: int = 0
    group_index: int = -1
    ids: tuple[int, ...] = ()


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
        self._seed, self._shuffle, self._taken = seed, shuffle, 0

    @classmethod
    def from_args(cls, args: Namespace, tokenizer: Any = None) -> PromptDataset:
        """From --prompt-data, with a tokenizer without the prompts above --rollout-max-prompt-len."""
        prompts = read_prompts(args.prompt_data, args.input_key, args.label_key)
        longest = args.rollout_max_prompt_len
        if tokenizer is not None and longest is not None:
            prompts = [
                p for p in prompts if len(tokenizer.encode(p.text, add_special_tokens=False)) <= longest
            ]
        return cls(prompts, args.rollout_seed, args.rollout_shuffle)

    def __len__(self) -> int:
        return len(self._prompts)

    def next_batch(self, n: int) -> list[Prompt]:
        """The next `n` prompts, over the end of an epoch where needed."""
        taken = []
        for number in range(self._taken, self._taken + n):
            epoch, place = divmod(number, len(self))
            if place == 0 or not taken:
                order = self._order(epoch)
            taken.append(replace(self._prompts[order[place]], group_index=number))
        self._taken += n
        return taken

    def state_dict(self) -> dict[str, int]:
        """Where the run stands, with slime's names."""
        epoch, offset = divmod(self._taken, len(self))
        return {"epoch_id": epoch, "sample_offset": offset, "sample_group_index": self._taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes on where `state` was taken.

        Raises:
            DataError: a position that another file has, which has then changed.
        """
        self._taken = state["sample_group_index"]
        if state["epoch_id"] * len(self) + state["sample_offset"] != self._taken:
            raise DataError(
                f"prompt data: expected the file of the checkpoint, got {len(self)} prompts and "
                f"position {state['sample_offset']}"
            )

    def _order(self, epoch: int) -> list[int]:
        order = list(range(len(self)))
        if self._shuffle:
            random.Random(self._seed + epoch).shuffle(order)
        return order
