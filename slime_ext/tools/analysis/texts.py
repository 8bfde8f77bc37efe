"""Turns tokens and counts into text that is safe to print."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from slime_ext.errors import DataError

Decode = Callable[[Sequence[int]], list[str]]
# Control characters except line ends and tabs, marks of text direction, and Unicode's line separators.
HIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def legible(text: str) -> str:
    """Escapes every character that could hide or reorder other characters.

    >>> legible("run\\u202e1\\n")
    'run\\\\u202e1\\n'
    """
    return HIDDEN.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


def encodable(text: str) -> str:
    """Replaces half surrogate pairs, which no file can hold, by question marks.

    They are in names of files with bytes that are not UTF-8, and in JSON.

    >>> encodable("half \\ud83d")
    'half ?'
    """
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def counted(count: int, word: str) -> str:
    """Returns a count with its noun, in the plural if needed.

    >>> counted(1, "sample"), counted(1200, "token")
    ('1 sample', '1,200 tokens')
    """
    return f"{count:,} {word}{'s' * (count != 1)}"


@cache
def decoder(path: str | None) -> Decode:
    """Returns the function from token ids to texts, from the tokenizer in a folder.

    Without a folder the texts are the ids. An id that the tokenizer does not have is shown as a number.

    Raises:
        DataError: the folder holds no tokenizer.
    """
    if path is None:
        return lambda tokens: [f" {token}" for token in tokens]
    if not Path(path).exists():
        raise DataError(f"--tokenizer: expected a folder with a tokenizer, got '{path}'")
    try:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        ids = frozenset(tokenizer.get_vocab().values())
    except Exception as error:  # a file of a newer version raises a bare Exception
        first = (str(error).splitlines() or [type(error).__name__])[0][:120]
        is_old = not isinstance(error, (OSError, ValueError))
        advice = ": pip install -U transformers tokenizers" if is_old else ""
        raise DataError(
            f"--tokenizer: expected a folder with a tokenizer, got '{path}': {first}{advice}"
        ) from None
    return lambda tokens: [tokenizer.decode([t]) if t in ids else f" {t}" for t in tokens]
