"""A change of the hook's bits is found, and named by the correction that changed."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import hook_bits
from slime_ext import presets
from slime_ext.core.steps import Truncate

CALLS = len(hook_bits.NAMES)
pytestmark = pytest.mark.xdist_group("hook bits")  # one worker makes the record


@pytest.fixture(scope="module")
def record():
    return hook_bits.record(CALLS)


def test_the_same_code_gives_the_same_bits(record):
    assert hook_bits.differences(record, hook_bits.record(CALLS)) == {}
    assert {row["name"] for row in record} == {*hook_bits.NAMES} >= {*presets.PRESETS}
    assert len({row["loss"] for row in record}) > 0.9 * CALLS  # the calls differ from each other


def test_one_bit_of_one_step_is_found_where_it_acts(record, monkeypatch):
    def next_float(self, state, inputs):
        return state.bound(torch.nextafter(state.weights.clamp(max=self.high), torch.tensor(0.0)))

    monkeypatch.setattr(Truncate, "__call__", next_float)
    found = hook_bits.differences(record, hook_bits.record(CALLS))
    assert {"token_tis", "dppo_tv", "normalize tokens"} <= {*found}
    assert not {"icepop", "m2", "vanilla_tis_function", "sapo"} & {*found}
    assert "loss" in found["token_tis"] and found["token_tis"].startswith("1 of 1 calls")


def test_a_gradient_that_differs_alone_is_named(record):
    changed = [dict(row) for row in record]
    for row in changed:
        row["gradient"] += "x" if row["name"] == "topr" else ""
    assert hook_bits.differences(record, changed) == {"topr": "1 of 1 calls (gradient in 1)"}


def test_the_command_says_what_differs_and_exits_with_1(record, tmp_path, capsys):
    other = [row | {"masks": "0"} if row["name"] == "m2" else row for row in record]
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    before.write_text(json.dumps(record))
    after.write_text(json.dumps(other))
    assert hook_bits.main(["--compare", str(before), str(before)]) == 0
    assert hook_bits.main(["--compare", str(before), str(after)]) == 1
    corrections = len({row["name"] for row in record})
    assert capsys.readouterr().out.splitlines() == [
        f"0 of {corrections} corrections differ",
        "m2: 1 of 1 calls (masks in 1)",
        f"1 of {corrections} corrections differ",
    ]
    for wrong in ([str(before), str(after)], ["--compare", str(before)]):
        with pytest.raises(SystemExit, match="2"):
            hook_bits.main(wrong)
