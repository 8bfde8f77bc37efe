"""A task on which one early slip costs all: running sums, `length` symbols in and as many out.

The answer's symbol t is the sum modulo 8 of the first t symbols asked, written with configs/tiny's letters:
its model and tokenizer serve. With an error rate e per symbol an answer is right with (1 - e)^length.
"""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

from benchmarks.tiny_task import END_OF_PROMPT, Task

LETTERS = Task().letters
TRAIN, HELDOUT = 2048, 128


def answer(symbols: str) -> str:
    """The running sums.

    >>> answer("bbdh")
    'bcfe'
    """
    sums = itertools.accumulate(LETTERS.index(symbol) for symbol in symbols)
    return "".join(LETTERS[total % len(LETTERS)] for total in sums)


def write(length: int, directory: Path) -> dict[str, object]:
    """Writes train.jsonl and heldout.jsonl, the same bytes each time; the flags that name them."""
    draw = random.Random(length)
    asked = ["".join(draw.choices(LETTERS, k=length)) for _ in range(TRAIN + HELDOUT)]
    files = {"train": asked[:TRAIN], "heldout": asked[TRAIN:]}
    directory.mkdir(parents=True, exist_ok=True)
    for name, part in files.items():
        (directory / f"{name}.jsonl").write_text("".join(_line(symbols) for symbols in part))
    train, heldout = (str(directory / f"{name}.jsonl") for name in files)
    return {"prompt_data": train, "eval_prompt_data": ["heldout", heldout]}


def _line(symbols: str) -> str:
    row = {"input": symbols + END_OF_PROMPT, "label": answer(symbols), "metadata": {"rm_type": "exact"}}
    return json.dumps(row) + "\n"
