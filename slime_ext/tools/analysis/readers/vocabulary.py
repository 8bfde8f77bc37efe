"""How many token ids a run's model has, as far as its folders tell."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

MOST_IDS = 1 << 31
ROWS = ("vocab_size", "padded_vocab_size")  # flags of Megatron, keys of a model's config.json


def vocabulary_of(paths: Sequence[str], tokenizer: str | None) -> int | None:
    """One more than the largest id of the run's tokenizer (--tokenizer, or tokenizer/ beside slime's dumps),
    else the embedding rows in args.json of the run or in config.json of the model that it names; None if
    unknown."""
    return next((count for count in _known(paths, tokenizer) if count), None)


def _known(paths: Sequence[str], tokenizer: str | None) -> Iterator[int | None]:
    runs = [folder for path in paths for folder in (Path(path), Path(path).parent)]
    given = [Path(tokenizer)] if tokenizer else []
    yield from (_of_tokenizer(folder) for folder in (*given, *(run / "tokenizer" for run in runs)))
    for flags in (read_json(run / "args.json") for run in runs):
        model = flags.get("hf_checkpoint")
        yield _rows(flags)
        yield _rows(read_json(Path(model) / "config.json")) if isinstance(model, str) else None
    yield from (_rows(read_json(folder / "config.json")) for folder in given)


def _rows(found: Mapping[str, Any]) -> int | None:
    return next((found[key] for key in ROWS if _is_count(found.get(key))), None)


def _of_tokenizer(folder: Path) -> int | None:
    """From the tokenizer.json of Hugging Face's tokenizers."""
    found = read_json(folder / "tokenizer.json")
    try:
        ids = [*found["model"]["vocab"].values(), *(token["id"] for token in found.get("added_tokens", ()))]
    except (KeyError, TypeError, AttributeError):
        return None
    return max(filter(_is_count, ids), default=-1) + 1


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < MOST_IDS


def read_json(path: Path) -> Mapping[str, Any]:
    """The mapping that a JSON file holds; empty where there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
