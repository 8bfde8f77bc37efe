"""The first rows of a launch's data, or rows with its keys where the file is not on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from slime_ext.errors import ConfigError, did_you_mean
from slime_ext.tools.folders import is_file
from slime_ext.tools.scripts.launch import Launch, WrittenFlag

Row = dict[str, Any]
ROWS = 64
LONGEST = 2000  # characters; longer rows are passed over


def all_rows(launch: Launch) -> tuple[list[Row], list[Row]]:
    """Rows for training, made ones where --prompt-data is absent, and for evaluations, none where
    --eval-prompt-data is absent.

    Raises:
        ConfigError: a row lacks a key that a flag names, or the file cannot be read.
    """
    train, held_out = launch.flag("--prompt-data"), launch.flag("--eval-prompt-data")
    rows = rows_of(launch, train) if train else made_rows(launch)
    return rows, rows_of(launch, held_out) if held_out else []


def rows_of(launch: Launch, flag: WrittenFlag) -> list[Row]:
    """Up to ``ROWS`` rows of a data file, or made ones where there is no such file."""
    file = Path(flag.values[-1].partition("@[")[0])
    if not is_file(file):
        return made_rows(launch)
    where = f"{flag.where}: {flag.name}"
    try:
        read = (json.loads(line) for line in _lines(file) if line.strip())
        rows = [row for row in islice(read, ROWS * 4) if len(json.dumps(row, default=str)) < LONGEST][:ROWS]
    except (ValueError, OSError) as error:
        raise ConfigError(f"{where}: expected rows of JSON, got {error} in {file}") from None
    if not rows:
        raise ConfigError(f"{where}: expected rows below {LONGEST} characters, got none in {file}")
    for name in ("--input-key", "--label-key"):
        key = _keys(launch).get(name)
        if key is not None and key not in rows[0]:
            place = named.where if (named := launch.flag(name)) else Path(launch.script).name
            near = did_you_mean(key, rows[0])
            raise ConfigError(
                f"{place}: {name}: expected a key of {file}, got '{key}'{near} (keys: {', '.join(rows[0])})"
            )
    return rows


def made_rows(launch: Launch) -> list[Row]:
    """Sums of two numbers under the launch's keys."""
    keys = _keys(launch)
    rows = []
    for i in range(ROWS):
        text, answer = f"What is {i} + {i % 7}?", str(i + i % 7)
        messages = [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
        is_chat = launch.value("--loss-type") == "sft_loss"
        row: Row = {keys["--input-key"]: messages if is_chat else text}
        row |= {key: answer for name, key in keys.items() if name == "--label-key"}
        row |= {key: {} for name, key in keys.items() if name == "--metadata-key"}
        rows.append(row)
    return rows


def _keys(launch: Launch) -> dict[str, str]:
    keys = {name: launch.value(name) for name in ("--input-key", "--label-key", "--metadata-key")}
    return {"--input-key": "input"} | {name: key for name, key in keys.items() if key}


def _lines(file: Path) -> Iterator[str]:
    """Rows as JSON; of a Parquet file as many as are looked at."""
    if file.suffix != ".parquet":
        with file.open() as lines:
            yield from lines
        return
    from pyarrow import parquet

    batch = next(parquet.ParquetFile(file).iter_batches(ROWS * 4))
    yield from (json.dumps(row, default=str) for row in batch.to_pylist())


def write_rows(rows: list[Row], file: Path) -> None:
    """The rows as JSONL."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row, default=str) + "\n" for row in rows))


def longest_prompt(launch: Launch, rows: list[Row], tokenizer: Any) -> int:
    """Tokens of the longest prompt."""
    key, is_chat = _keys(launch)["--input-key"], bool(launch.flag("--apply-chat-template"))
    return max(_length(row[key], tokenizer, is_chat=is_chat) for row in rows)


def _length(prompt: Any, tokenizer: Any, *, is_chat: bool) -> int:
    if isinstance(prompt, str) and not is_chat:
        return len(tokenizer(prompt)["input_ids"])
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if tokenizer.chat_template is None:
        return len(tokenizer(json.dumps(messages))["input_ids"])
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return len(tokenizer(text)["input_ids"])
