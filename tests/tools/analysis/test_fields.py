"""Fields of dumps: one row in ``DumpedRollout``, from which parts and readers follow."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from slime_ext.tools.analysis.fields import ENGINE_RANK, ENGINES
from slime_ext.tools.analysis.readers import jsonl
from slime_ext.tools.analysis.records import ROWS, DumpedRollout
from tests.tools.analysis.rollouts import rollout

ROOT = Path(__file__).parents[3]
RECIPE = ROOT / "docs/contributing.md"
READ = """
import json, sys, torch
from pathlib import Path
from slime_ext.tools.analysis.readers.dumps import read_job
from slime_ext.tools.analysis.readers.find import find
from slime_ext.tools.analysis.readers.jsonl import read_jsonl

lists = {"rollout_log_probs": [-1.0, -2.0], "log_probs": [-1.5, -2.5]}
samples = [lists | more for more in ({"logits": [1.0, 2.0]}, {}, {"logits": [5.0]}, {"logits": [3.0, 4.0]})]
Path("run.jsonl").write_text("\\n".join(map(json.dumps, samples)))
Path("train_data").mkdir()
train = {"format_version": 2, "rollout_id": 0, "samples": samples}
torch.save(train, "train_data/0.pt")
(dumped,) = read_job(find(["."]).jobs[0])
(line,) = read_jsonl(Path("run.jsonl"))
for rollout in (line, dumped):
    parts = [part.logit.tolist() for part in rollout.parts(2)]
    print(json.dumps([rollout.logit.tolist(), parts, rollout.left_out]))
"""


def row_of_the_recipe():
    (row,) = re.findall(r"```python\n +(logit: .*)\n", RECIPE.read_text())
    return row


def test_one_row_reaches_rollouts_parts_and_all_readers(tmp_path):
    package = tmp_path / "slime_ext"
    # Compiled modules save 1 s; those that another worker is writing have a number at their end.
    shutil.copytree(ROOT / "slime_ext", package, ignore=shutil.ignore_patterns("*.pyc.*"))
    records = package / "tools/analysis/records.py"
    before = "    is_exact: bool = False\n"
    assert records.read_text().count(before) == 1
    records.write_text(records.read_text().replace(before, f"    {row_of_the_recipe()}\n{before}"))
    (tmp_path / "run").mkdir()
    words = [sys.executable, "-c", READ]
    done = subprocess.run(
        words, cwd=tmp_path / "run", env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
    )
    expected = "[[1.0, 2.0, NaN, NaN, 3.0, 4.0], [[1.0, 2.0], [NaN, NaN], [3.0, 4.0]], 1]\n"
    assert (done.stdout, done.stderr) == (2 * expected, "")


def test_every_row_says_what_it_holds():
    assert all(row.doc and row.per in ("token", "sample") for row in ROWS)
    assert {row.name for row in ROWS} < set(DumpedRollout.__dataclass_fields__)


@pytest.mark.parametrize("row", [row for row in ROWS if row.names], ids=lambda row: row.name)
def test_every_key_is_documented(row):
    assert all(re.search(rf"\b{name}\b", jsonl.__doc__) for name in row.names if name not in OF_DUMPS)


# Keys that only slime's dumps have, and those that the docstring names as a list.
OF_DUMPS = ("loss_masks", "local_raw_reward", "rewards", "truncated", "metadata", "rollout_top_p_token_ids")
OF_DUMPS += (*ENGINES, ENGINE_RANK)


def test_a_part_cuts_every_field_that_a_rollout_has():
    whole = rollout(seed=1)
    lengths = torch.tensor(whole.lengths)
    values = {
        row.name: torch.arange(whole.size).double() if row.per == "token" else tuple(range(whole.count))
        for row in ROWS
        if row.name not in ("lengths", "mask", "rewards")
    }
    changed = whole.__class__(**{**vars(whole), **values})
    first = list(changed.parts(limit=10))[1]
    begin = first.positions[0]
    for row in ROWS:
        value = values.get(row.name)
        if row.per == "token" and value is not None:
            at = int(lengths[:begin].sum())
            assert getattr(first, row.name).tolist() == value[at : at + first.size].tolist(), row.name
        elif value is not None:
            assert getattr(first, row.name) == value[begin : begin + first.count], row.name
