"""Which files are one rollout: names with other numbers in them, second dumps of a rollout, evaluations."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slime_ext.errors import DataError
from slime_ext.tools.analysis.readers.find import find
from tests.tools.analysis import dumps
from tests.tools.analysis.in_process import read
from tests.tools.analysis.test_readers import FIRST, ROLLOUTS, only, same

NAMES = [
    "{id}.pt",
    "{kind}_{id}_0.pt",
    "{kind}_qwen3_8b_{id}.pt",
    "qwen3-8b-{id}.pt",
    "8_{id}.pt",
    "{id}_of_3.pt",
]


def write_as(folder, rollout, name):
    for kind, write in (("rollout", dumps.write_rollout), ("train", dumps.write_train)):
        path = folder / f"{kind}_data" / name.format(kind=kind, id=rollout.rollout_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        write(folder / "raw", rollout).rename(path)


def test_names_with_more_digits_than_the_rollouts_number(tmp_path):
    for number, name in enumerate(NAMES):
        for rollouts in (ROLLOUTS, ROLLOUTS[:1]):
            folder = tmp_path / f"{number}-{len(rollouts)}"
            for rollout in rollouts:
                write_as(folder, rollout, name)
            found = list(read([folder]))
            assert [r.rollout_id for r in found] == [r.rollout_id for r in rollouts], name
            for a, b in zip(found, rollouts, strict=True):
                assert same(a, b) and list(a.responses) == b.responses, name


def test_two_train_dumps_of_one_rollout_are_never_mixed(tmp_path):
    dumps.write_train(tmp_path, FIRST)
    (tmp_path / "train_data" / "0.pt").rename(tmp_path / "a.pt")
    dumps.write_train(tmp_path, replace(FIRST, proximal=FIRST.proximal - 1))
    (tmp_path / "train_data" / "0.pt").rename(tmp_path / "b.pt")
    skipped, found = read([tmp_path / "*.pt"])
    assert same(found, FIRST)
    assert "b.pt: expected one train dump of rollout 0, got a second" in str(skipped)


def test_evaluations_are_left_out_whatever_the_template(tmp_path):
    for number, given in enumerate([".", "*.pt", "rollout_*0.pt"]):
        folder = tmp_path / str(number)
        folder.mkdir()
        for kind in ("rollout", "train"):
            getattr(dumps, f"write_{kind}")(folder, FIRST).rename(folder / f"{kind}_0.pt")
        other = dumps.write_rollout(folder, replace(FIRST, responses=["other"] * FIRST.count))
        other.rename(folder / "rollout_eval_0.pt")
        for kind in ("rollout", "train"):
            (folder / f"{kind}_data").rmdir()
        found = only([folder / given, folder / "rollout_eval_0.pt", folder / "train_0.pt"])
        assert same(found, FIRST) and list(found.responses) == list(FIRST.responses)
        assert find([folder / given]).evaluations == 1


def test_evaluations_alone_are_no_dumps(tmp_path):
    dumps.write_rollout(tmp_path, FIRST).rename(tmp_path / "eval_0.pt")
    with pytest.raises(DataError, match="expected dumps of training, got 1 evaluation dump: name"):
        list(read([tmp_path / "eval_0.pt"]))


def test_a_file_is_read_once_however_it_is_named(tmp_path, monkeypatch):
    dumps.write_run(tmp_path / "run", [FIRST])
    (tmp_path / "link").symlink_to(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    assert only(["run", tmp_path / "run", "run/train_data/../*/0.pt", "link"]).count == FIRST.count


def test_two_runs_are_not_read_as_one(tmp_path):
    for name in ("a", "b"):
        dumps.write_run(tmp_path / name, [FIRST])
    with pytest.raises(DataError, match="expected dumps of one run, got 2 folders: type --against"):
        find([tmp_path / "a", tmp_path / "b"])


def test_files_of_one_rollout_may_be_reached_by_two_ways(tmp_path):
    dumps.write_run(tmp_path / "run", [FIRST])
    (tmp_path / "link").symlink_to(tmp_path / "run")
    found = only([tmp_path / "link" / "rollout_data", tmp_path / "run" / "train_data"])
    assert list(found.responses) == list(FIRST.responses)
