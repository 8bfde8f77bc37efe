"""Tokens as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from slime_ext.errors import DataError

Decode = Callable[[Sequence[int]], list[str]]


@cache
def decoder(path: str | None) -> Decode:
    """The function from token ids to their texts, by the tokenizer in a folder; to their numbers for None.

    Raises:
        DataError: there is no tokenizer.
    """
    if path is None:
        return lambda tokens: [f" {token}" for token in tokens]
    if not Path(path).exists():
        raise DataError(f"--tokenizer: expected a folder with a tokenizer, got '{path}'")
    try:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, ImportError) as error:
        first = str(error).splitlines()[0][:120]
        raise DataError(f"--tokenizer: expected a folder with a tokenizer, got '{path}': {first}") from None
    return lambda tokens: [tokenizer.decode([token]) for token in tokens]
