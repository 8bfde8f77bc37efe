"""Reads the first rows of a launch's data. Makes rows with its keys if this machine lacks the file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from slime_ext.errors import ConfigError, did_you_mean
from slime_ext.tools.folders import is_file
from slime_ext.tools.launch.launch import Launch, WrittenFlag

Row = dict[str, Any]
ROWS = 64
LONGEST, FEW = 2000, 8  # characters; longer rows are skipped, but if all are longer, the shortest few stay
HELD_OUT = "--eval-prompt-data"
READ = (".jsonl", ".parquet")
SLICED = re.compile(r"(.*)@\[(-?\d*):(-?\d*)\]")


def all_rows(launch: Launch) -> tuple[list[Row], list[Row]]:
    """Returns the rows for training and the rows for evaluations.

    Training rows are made up if --prompt-data is absent. Evaluations have no rows if --eval-prompt-data is
    absent.

    Raises:
        ConfigError: a row lacks a key that a flag names, or the file cannot be read.
    """
    train, held_out = launch.flag("--prompt-data"), launch.flag(HELD_OUT)
    rows = rows_of(launch, train) if train else made_rows(launch)
    return rows, rows_of(launch, held_out) if held_out else []


def rows_of(launch: Launch, flag: WrittenFlag) -> list[Row]:
    """Returns up to ``ROWS`` short rows of a data file. If all are long, returns the shortest few.

    Returns made-up rows if the file is not on this machine.
    """
    where, (file, part) = f"{flag.where}: {flag.name}", file_of(flag.values[-1])
    if not is_file(file):
        if "@[" in file.name:
            raise ConfigError(
                f"{where}: expected FILE@[first:last], got {file}, which the host reads as a name: write the "
                "range in that form"
            )
        return made_rows(launch, held_out=flag.name == HELD_OUT)
    if file.suffix not in READ and not launch.flag("--data-source-path"):
        raise ConfigError(
            f"{where}: expected a file {' or '.join(READ)}, got {file}, which the host cannot read: convert "
            "it to JSON lines"
        )
    try:
        rows = {number: json.loads(line) for number, line in _numbered(file, part)}
    except (ValueError, OSError) as error:
        raise ConfigError(
            f"{where}: expected rows of JSON, got {error} in {file}: correct that row"
        ) from None
    if not rows:
        raise ConfigError(f"{where}: expected rows, got none in {flag.values[-1]}: give a file that has some")
    for number, row in rows.items():
        place = f"row {number} of {file}"
        if not isinstance(row, dict):
            raise ConfigError(f"{where}: expected an object in each row, got {_short(row)} in {place}")
        _check(launch, row, place, held_out=flag.name == HELD_OUT)
    sizes = sorted((len(json.dumps(row, default=str)), number) for number, row in rows.items())
    numbers = sorted(number for size, number in sizes if size < LONGEST) or [n for _, n in sizes[:FEW]]
    return [rows[number] for number in numbers[:ROWS]]


def _check(launch: Launch, row: Row, place: str, *, held_out: bool) -> None:
    """Raises ConfigError if a row has no prompt or no label."""
    for role in ("input", "label"):
        name, key = _key(launch, role, held_out=held_out)
        where = f"{named.where if (named := launch.flag(name)) else Path(launch.script).name}: {name}"
        if key and key not in row:
            raise ConfigError(
                f"{where}: expected a key of {place}, got '{key}'{did_you_mean(key, row)} "
                f"(keys: {', '.join(row)})"
            )
        if role == "input" and not isinstance(row[key], str | list):
            raise ConfigError(
                f"{where}: expected text or messages under '{key}', got {_short(row[key])} in {place}"
            )


def _short(value: Any) -> str:
    """Returns the beginning of a value as JSON."""
    return json.dumps(value, default=str)[:60]


def made_rows(launch: Launch, *, held_out: bool = False) -> list[Row]:
    """Makes rows that ask for the sum of two numbers, with the launch's keys."""
    prompt, label, metadata = (
        _key(launch, role, held_out=held_out)[1] for role in ("input", "label", "metadata")
    )
    is_chat, rows = launch.value("--loss-type") == "sft_loss", []
    for i in range(ROWS):
        text, answer = f"What is {i} + {i % 7}?", str(i + i % 7)
        messages = [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
        row: Row = {prompt: messages if is_chat else text, label: answer, metadata: {}}
        rows.append({key: value for key, value in row.items() if key})
    return rows


def _key(launch: Launch, role: str, *, held_out: bool = False) -> tuple[str, str]:
    """Returns (flag, key) for the input, label or metadata of rows. The key is empty if rows have none."""
    eval_flag = f"--eval-{role}-key"
    name = eval_flag if held_out and launch.value(eval_flag) else f"--{role}-key"
    return name, launch.value(name, "input" if role == "input" else "")


def file_of(word: str) -> tuple[Path, slice]:
    """Splits a flag's word into the file that it names and the range of rows.

    >>> file_of("d.jsonl@[10:-5]")
    (PosixPath('d.jsonl'), slice(10, -5, None))
    """
    if not (match := SLICED.fullmatch(word)):
        return Path(word), slice(None)
    return Path(match[1]), slice(*(int(bound) if bound else None for bound in match.groups()[1:]))


def _numbered(file: Path, part: slice) -> Iterator[tuple[int, str]]:
    """Yields (number from 1, JSON) of the first rows in a range of a file.

    Blank lines count in the numbers but are not rows.
    """

    def rows() -> Iterator[tuple[int, str]]:
        return ((number, line) for number, line in enumerate(_lines(file), 1) if line.strip())

    if min(part.start or 0, part.stop or 0) < 0:
        start, stop, _ = part.indices(sum(1 for _ in rows()))
    else:
        start, stop = part.start or 0, part.stop
    last = start + ROWS * 4
    return islice(rows(), start, last if stop is None else max(min(stop, last), start))


def _lines(file: Path) -> Iterator[str]:
    """Yields the rows of a file as JSON."""
    if file.suffix != ".parquet":
        with file.open() as lines:
            yield from lines
        return
    from pyarrow import parquet

    for batch in parquet.ParquetFile(file).iter_batches(ROWS * 4):
        yield from (json.dumps(row, default=str) for row in batch.to_pylist())


def write_rows(rows: list[Row], file: Path) -> None:
    """Writes rows as JSONL."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row, default=str) + "\n" for row in rows))


def longest_prompt(launch: Launch, rows: list[Row], tokenizer: Any) -> int:
    """Returns the number of tokens of the longest prompt.

    Raises:
        ConfigError: the chat template refuses a prompt.
    """
    flag = launch.flag("--apply-chat-template")
    keys = {_key(launch, "input", held_out=held_out)[1] for held_out in (False, True)}
    longest = 0
    for prompt in (row[key] for row in rows for key in keys if isinstance(row.get(key), str | list)):
        try:
            longest = max(longest, _length(prompt, tokenizer, is_chat=bool(flag)))
        except Exception as error:  # the template is code of the model and may raise anything
            where = flag or launch.flag("--prompt-data")
            raise ConfigError(
                f"{f'{where.where}: {where.name}' if where else launch.script}: expected prompts that the "
                f"chat template takes, got {_short(prompt)}: {type(error).__name__}: {error}"
            ) from None
    return longest


def _length(prompt: Any, tokenizer: Any, *, is_chat: bool) -> int:
    if isinstance(prompt, str) and not is_chat:
        return len(tokenizer(prompt)["input_ids"])
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if tokenizer.chat_template is None:
        return len(tokenizer(json.dumps(messages))["input_ids"])
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return len(tokenizer(text)["input_ids"])
