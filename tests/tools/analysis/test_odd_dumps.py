"""Dumps with values that no run of slime writes: they are named and left out, and the rest is read."""

from __future__ import annotations

import json
import math

import pytest
import torch

from slime_ext.tools.analysis.pipeline import collect
from slime_ext.tools.analysis.readers import jsonl
from slime_ext.tools.analysis.readers.find import find
from tests.tools.analysis import dumps
from tests.tools.analysis.in_process import read
from tests.tools.analysis.synthetic import World, run
from tests.tools.analysis.test_readers import only

FIRST = run(World(rollouts=1, samples=7, length=23))[0]
GOOD = {"rollout_log_probs": [-1.0, -1.0], "log_probs": [-1.0, -2.0]}


WRONG = (
    {"entropy": 1.0},
    {"rollout_log_probs": [-1.0, -(10**400)]},
    {"log_probs": [[-1.0], [-2.0]]},
    {"advantages": [1, "x"]},
    {"tokens": "ab"},
)


def test_a_line_without_lists_of_numbers_is_left_out(tmp_path):
    for number, wrong in enumerate(WRONG):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "a.jsonl").write_text("\n".join(json.dumps(line) for line in (GOOD | wrong, GOOD)))
        found = only([folder])
        assert found.count == 1 and "1 sample skipped because a list holds something other" in found.notes[0]


def test_a_rollout_dump_of_another_run_is_said_not_to_fit(tmp_path):
    dumps.write_train(tmp_path, FIRST)
    rows = dumps.sample_rows(FIRST)
    rows[1]["response_length"] += 1
    path = tmp_path / "rollout_data" / "0.pt"
    path.parent.mkdir()
    torch.save({"rollout_id": 0, "samples": rows}, path)
    found = only([tmp_path])
    assert found.count == FIRST.count and [bool(text) for text in found.responses].index(False) == 1
    (note,) = found.notes
    assert (
        note.startswith("1 sample with different lengths in the two dumps") and "(first: sample 1, " in note
    )


def test_a_line_of_a_value_without_bounds_is_named(tmp_path):
    for number, wrong in enumerate([{"rollout_id": math.inf}, {"reward": 10**400}, "[" * 100_000]):
        folder = tmp_path / str(number)
        folder.mkdir()
        bad = wrong if isinstance(wrong, str) else json.dumps(GOOD | wrong)
        (folder / "a.jsonl").write_text(f"{bad}\n{json.dumps(GOOD)}\n")
        found, skipped = read([folder])
        assert found.count == 1 and "a.jsonl:1" in str(skipped)


def test_a_sample_whose_log_probs_are_no_list_is_left_out(tmp_path):
    for number, wrong in enumerate([torch.zeros(()), torch.zeros(FIRST.lengths[2], 2), -1.0]):
        folder = tmp_path / str(number)
        folder.mkdir()
        path = dumps.write_train(folder, FIRST)
        content = torch.load(path, weights_only=True)
        content["samples"][2]["rollout_log_probs"] = wrong
        torch.save(content, path)
        assert only([folder]).positions == (0, 1, 3, 4, 5, 6)


def test_weight_versions_are_read_as_far_as_they_are_numbers(tmp_path):
    for number, (versions, read_as) in enumerate(
        [(None, -1), (12, 12), ("12", 12), (["12"], 12), (["x"], -1), (["9" * 30], -1)]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        dumps.write_train(folder, FIRST)
        rows = dumps.sample_rows(FIRST)
        rows[0]["weight_versions"] = versions
        path = folder / "rollout_data" / "0.pt"
        path.parent.mkdir()
        torch.save({"rollout_id": 0, "samples": rows}, path)
        line = {"rollout_log_probs": [-1.0], "log_probs": [-1.0], "weight_versions": versions}
        others = line | {"weight_versions": ["7"]}
        (folder / "a.jsonl").write_text(f"{json.dumps(line)}\n{json.dumps(others)}\n")
        found, line = only([folder / "train_data", path]), only([folder / "a.jsonl"])
        assert set(found.versions[: FIRST.lengths[0]].tolist()) == {read_as} and not found.notes
        assert line.versions.tolist() == [read_as, 7] and not line.notes


def lines(path, *rows, begin=""):
    path.write_text(begin + "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_an_empty_response_is_a_sample(tmp_path):
    empty = GOOD | {"rollout_log_probs": [], "log_probs": [], "tokens": [5, 6]}
    found = only([lines(tmp_path / "a.jsonl", empty, GOOD)])
    assert found.lengths == (0, 2) and not found.notes
    alone = only([lines(tmp_path / "b.jsonl", empty)])
    assert alone.lengths == (0,)


def test_null_is_a_key_that_is_not_there(tmp_path):
    for number, key in enumerate(
        ["response_length", "prompt_length", "tokens", "loss_mask", "mask", "train_log_probs"]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        found = only([lines(folder / "a.jsonl", GOOD | {key: None})])
        assert found.lengths == (2,) and not found.notes


def test_null_hides_no_other_name(tmp_path):
    row = {"rollout_log_probs": None, "behavior": [-1.0], "log_probs": None, "proximal": [-2.0]}
    assert only([lines(tmp_path / "a.jsonl", row)]).proximal.tolist() == [-2.0]


def test_a_byte_order_mark_is_no_text(tmp_path):
    assert only([lines(tmp_path / "a.jsonl", GOOD, begin="\ufeff")]).count == 1


def test_reasons_come_before_how_many_more_there_are(tmp_path):
    path = lines(tmp_path / "a.jsonl", GOOD, *[{"loss": 1}] * 20)
    found = collect(find([path]).jobs, {})
    assert [s.path.rpartition(":")[2] for s in found.skipped] == ["2", "3", "4"]
    assert "18 more lines" in found.skipped[-1].reason


def test_lines_with_wrong_values_are_named_in_their_order_and_the_rest_of_the_rollout_is_read(tmp_path):
    wrong = [GOOD | {"reward": 10**400}, GOOD | {"tokens": 5}]
    path = lines(tmp_path / "a.jsonl", GOOD, wrong[0], GOOD, {"loss": 1}, wrong[1], GOOD | {"engine": "a"})
    found, *skipped = read([path])
    assert (found.count, found.engines) == (3, ("", "", "a"))
    assert [str(one).partition("a.jsonl:")[2][0] for one in skipped] == ["2", "4", "5"]


def test_one_advantage_counts_for_all_tokens_of_its_sample(tmp_path):
    one, each = GOOD | {"advantages": 0.5}, GOOD | {"advantages": [1, 2]}
    for number, (rows, expected) in enumerate(
        [
            ([one, one | {"advantages": -1}], [0.5, 0.5, -1, -1]),
            ([one, each, GOOD], [0.5, 0.5, 1, 2, 0, 0]),
            ([one, GOOD | {"entropy": 1.0}, GOOD], [0.5, 0.5, 0, 0]),
            ([one | {"response_length": 10**30}, one], [0.5, 0.5]),
        ]
    ):
        found = only([lines(tmp_path / f"{number}.jsonl", *rows)])
        assert found.advantages.tolist() == expected


# Values on which parsers of JSON differ: bounds of numbers, half a surrogate pair, depth, what JSON lacks.
NUMBERS = (
    "1e400",
    "-0",
    "4.9e-324",
    "2.4703282292062328e-324",
    "9007199254740993",
    "NaN",
    "-Infinity",
    "01",
    "1.",
)
VALUES = (
    *NUMBERS,
    "9" * 30,
    "9" * 5000,
    r'"\ud83d"',
    r'"\ud83d\ude00"',
    '"\x01"',
    "[" * 300 + "]" * 300,
    "[1,]",
)


@pytest.mark.parametrize("value", VALUES, ids=lambda value: value[:30])
def test_large_files_are_read_as_small_ones(value, tmp_path, monkeypatch):
    path, results = tmp_path / "a.jsonl", []
    path.write_text(f'{{"rollout_log_probs": [-1], "log_probs": [-2], "reward": {value}, "engine": {value}}}')
    for size in (0, 1 << 20):
        monkeypatch.setattr(jsonl, "LARGE", size)
        (one,) = jsonl.read_jsonl(path)
        results.append(str(one))
    assert results[0] == results[1]


def test_files_that_are_left_out_are_named_in_the_order_of_their_numbers(tmp_path):
    for number in (10, 2):
        (tmp_path / f"{number}.pt").write_bytes(b"no dump")
    assert [s.path.rpartition("/")[2] for s in collect(find([tmp_path]).jobs, {}).skipped] == [
        "2.pt",
        "10.pt",
    ]
