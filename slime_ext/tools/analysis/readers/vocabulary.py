"""Finds the size of the vocabulary of a run's model in its folders."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from slime_ext.tools.analysis.readers.find import DUMPS

FLAGS = "args.json"  # slime-ext train writes it
MOST_IDS = 1 << 31
ROWS = ("vocab_size", "padded_vocab_size")  # flags of Megatron, keys of a model's config.json


def vocabulary_of(paths: Sequence[str], tokenizer: str | None) -> int | None:
    """Returns the number of token ids of a run; None if unknown.

    It is one more than the largest id of the tokenizer (--tokenizer, or tokenizer/ beside slime's dumps, also
    if the path is the folder above them).
    Without a tokenizer, it is the number of embedding rows in args.json of the run, or in config.json of its
    model.
    """
    return next((count for count in _known(paths, tokenizer) if count), None)


def _known(paths: Sequence[str], tokenizer: str | None) -> Iterator[int | None]:
    runs = folders_of(paths)
    named = [Path(tokenizer)] if tokenizer else []
    dumps = [absolute(path) / inner for path in paths for inner in DUMPS]
    yield from (_of_tokenizer(folder) for folder in (*named, *(run / "tokenizer" for run in (*dumps, *runs))))
    for flags in (read_json(run / FLAGS) for run in runs):
        model = flags.get("hf_checkpoint")
        yield _rows(flags)
        yield _rows(read_json(Path(model) / "config.json")) if isinstance(model, str) else None
    yield from (_rows(read_json(folder / "config.json")) for folder in named)


def folders_of(paths: Sequence[str]) -> list[Path]:
    """Returns each path of a run and the folder that it is in."""
    return [folder for path in map(absolute, paths) for folder in (path, path.parent)]


def absolute(path: str) -> Path:
    """Returns an absolute path without "." and "..", whose ``parent`` would be wrong."""
    # Path.absolute keeps "..", and Path.expanduser raises for an unknown user.
    return Path(os.path.abspath(os.path.expanduser(path)))  # noqa: PTH100, PTH111


def _rows(mapping: Mapping[str, Any]) -> int | None:
    return next((mapping[key] for key in ROWS if _is_count(mapping.get(key))), None)


def _of_tokenizer(folder: Path) -> int | None:
    """Returns the number of ids in the tokenizer.json of a folder."""
    content = read_json(folder / "tokenizer.json")
    try:
        ids = [
            *content["model"]["vocab"].values(),
            *(token["id"] for token in content.get("added_tokens", ())),
        ]
    except (KeyError, TypeError, AttributeError):
        return None
    return max(filter(_is_count, ids), default=-1) + 1


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < MOST_IDS


def read_json(path: Path) -> Mapping[str, Any]:
    """Returns the mapping in a JSON file; empty if there is none. Does not wait for a pipe."""
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
