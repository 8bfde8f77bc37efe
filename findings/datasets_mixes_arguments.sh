#!/usr/bin/env bash
# Dataset.from_list gives tool calls with different arguments each other's keys, with the value None, so a chat template
# writes arguments that the model never gave. As JSON text, or read from a file of JSON lines, they keep their keys.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" datasets==5.2.0
run - <<'PYTHON' 2> errors
import json
from importlib.metadata import version

from datasets import Dataset, load_dataset
from recorded import expect

CALLS = [{"q": "tides"}, {"x": 1, "y": 2}]


def rows(write) -> list[dict]:
    return [{"messages": [{"role": "assistant", "tool_calls": [{"arguments": write(call)}]}]} for call in CALLS]


def arguments(data: Dataset) -> list:
    return [row["messages"][0]["tool_calls"][0]["arguments"] for row in data]


with open("calls.jsonl", "w") as file:
    file.writelines(json.dumps(row) + "\n" for row in rows(dict))
from_list = arguments(Dataset.from_list(rows(dict)))
from_file = arguments(load_dataset("json", data_files="calls.jsonl", cache_dir="cache")["train"])
as_text = [json.loads(text) for text in arguments(Dataset.from_list(rows(json.dumps)))]
print("datasets", version("datasets"), "arguments of two tool calls:")
for name, seen in {"written": CALLS, "from_list": from_list, "JSON lines": from_file, "as text": as_text}.items():
    print(f"  {name:10}", *seen)
expect("from a list, each call has the keys of both", from_list[0] == {"q": "tides", "x": None, "y": None})
expect("from a file, and as text, each has its own", from_file == as_text == CALLS)
PYTHON
