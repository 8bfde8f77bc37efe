#!/usr/bin/env bash
# datasets reads JSON text that looks like a date as a date, if all of a column does. An answer "2024-01-01"
# is then a datetime, which is no longer equal to the text. One other answer in the file keeps all as text.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" datasets==5.2.0
run - 2>errors <<'PYTHON' || { tail -3 errors; exit 1; }
import datetime
import json
from pathlib import Path

import datasets
from recorded import expect

datasets.disable_progress_bars()


def labels(*answers: str) -> list:
    file = Path(f"{len(list(Path().glob('*.jsonl')))}.jsonl")
    file.write_text("".join(f"{json.dumps({'label': answer})}\n" for answer in answers))
    return datasets.load_dataset("json", data_files=str(file), split="train", cache_dir="cache")["label"][:]


dates, mixed, numbers = labels("2024-01-01", "2024-02-29"), labels("2024-01-01", "12"), labels("007", "12")
print("datasets", datasets.__version__)
print("read", dates)
expect("answers that are dates become datetimes", dates[0] == datetime.datetime(2024, 1, 1))
expect("as text they have a time that was not in the file", str(dates[0]) == "2024-01-01 00:00:00")
expect("beside another answer they stay text", mixed == ["2024-01-01", "12"])
expect("numbers stay text", numbers == ["007", "12"])
PYTHON
