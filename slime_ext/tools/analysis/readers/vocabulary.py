"""How many token ids a run's model has, as far as its folders tell."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

LARGEST = 1 << 28  # bytes of a file that is read for it
MOST_IDS = 1 << 31
ROWS = ("vocab_size", "padded_vocab_size")  # flags of Megatron, keys of a model's config.json


def vocabulary_of(paths: Sequence[str], tokenizer: str | None) -> int | None:
    """One more than the largest id of the run's tokenizer (--tokenizer, or tokenizer/ beside slime's dumps),
    else the embedding rows in args.json of the run or in config.json of the model that it names; None if
    unknown."""
    return next(_known(paths, tokenizer), None)


def _known(paths: Sequence[str], tokenizer: str | None) -> Iterator[int]:
    runs = [folder for path in paths for folder in (Path(path), Path(path).parent)]
    given = [Path(tokenizer)] if tokenizer else []
    for folder in (*given, *(run / "tokenizer" for run in runs)):
        yield from _of_tokenizer(_read(folder / "tokenizer.json"))
    for run in runs:
        flags = _read(run / "args.json")
        model = flags.get("hf_checkpoint")
        for found in (flags, _read(Path(model) / "config.json") if isinstance(model, str) else {}):
            yield from (found[key] for key in ROWS if _is_count(found.get(key)))
    for config in (_read(folder / "config.json") for folder in given):
        yield from (config[key] for key in ROWS if _is_count(config.get(key)))


def _of_tokenizer(found: Mapping[str, Any]) -> Iterator[int]:
    """From the tokenizer.json of Hugging Face's tokenizers."""
    model, added = found.get("model"), found.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else []
    if isinstance(added, list):
        ids += [token.get("id") for token in added if isinstance(token, dict)]
    if known := [i for i in ids if _is_count(i)]:
        yield max(known) + 1


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < MOST_IDS


def _read(path: Path) -> Mapping[str, Any]:
    try:
        if not path.is_file() or path.stat().st_size > LARGEST:
            return {}
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
