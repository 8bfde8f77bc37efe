"""A folder that grows: each rollout is read once, when it is whole; findings are told when they arise."""

from __future__ import annotations

import json
import shutil
import threading
import time
from dataclasses import replace

import pytest

from slime_ext.errors import DataError
from slime_ext.tools.analysis.document import json_of
from slime_ext.tools.analysis.follow import Follower
from slime_ext.tools.analysis.readers import dumps as reader
from slime_ext.tools.analysis.request import Request
from slime_ext.tools.commands import cli
from tests.tools.analysis import dumps
from tests.tools.analysis.synthetic import World, recorded_late, run

ROLLOUTS = run(World(rollouts=5, samples=24, length=24))
MADE = [*ROLLOUTS[:3], *recorded_late(ROLLOUTS[3:], 1)]


@pytest.fixture
def made(tmp_path):
    """Dumps that lie aside: copied into the followed folder one by one."""
    dumps.write_run(tmp_path / "made", MADE)
    return tmp_path / "made"


def drop(made, folder, number, *kinds):
    for kind in kinds or ("rollout_data", "train_data"):
        (folder / kind).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(made / kind / f"{number}.pt", folder / kind / f"{number}.pt")


def looked(follower, times=2):
    """Numbers of the rollouts that were read, and names of alerts, over some looks."""
    news = [one for _ in range(times) for one in follower.look()]
    return [m.rollout_id for n in news for m in n.moments], [a.name for n in news for a in n.alerts]


def test_each_rollout_is_read_once_when_it_is_whole(tmp_path, made, monkeypatch):
    read = []
    load = reader.load_plain
    monkeypatch.setattr(reader, "load_plain", lambda path: load(read.append(path) or path))
    follower = Follower(Request((str(tmp_path / "run"),)))
    assert looked(follower) == ([], [])
    with pytest.raises(DataError, match="got none that could be read"):
        follower.document()
    drop(made, tmp_path / "run", 0, "rollout_data")
    assert looked(follower) == ([], []) and not read  # it is still being trained on
    drop(made, tmp_path / "run", 0, "train_data")
    assert looked(follower, 1)[0] == []  # it may still be written
    assert looked(follower, 1)[0] == [0]
    drop(made, tmp_path / "run", 1)
    drop(made, tmp_path / "run", 2)
    assert looked(follower)[0] == [1, 2] and looked(follower) == ([], [])
    assert len(read) == len(set(read)) == 6
    assert len(follower.document().timeline) == 3


def test_a_file_that_is_cut_off_is_tried_again_when_it_has_changed(tmp_path, made):
    folder, follower = tmp_path / "run", Follower(Request((str(tmp_path / "run"),)))
    drop(made, folder, 0)
    assert looked(follower)[0] == [0]
    drop(made, folder, 1)
    whole = (folder / "train_data/1.pt").read_bytes()
    (folder / "train_data/1.pt").write_bytes(whole[: len(whole) // 2])
    assert looked(follower, 3) == ([], []) and "cut off" in follower.document().skipped[0].reason
    (folder / "train_data/1.pt").write_bytes(whole)
    assert looked(follower)[0] == [1] and not follower.document().skipped


def test_what_comes_late_is_said(tmp_path, made):
    folder, follower = tmp_path / "run", Follower(Request((str(tmp_path / "run"),)))
    drop(made, folder, 0)
    assert looked(follower)[0] == [0] and not follower.document().skipped
    shutil.copyfile(made / "train_data/0.pt", folder / "train_data/0_1.pt")  # of a slow rank
    assert looked(follower) == ([], [])
    (late,) = follower.document().skipped
    assert "0_1.pt" in late.path and late.reason.startswith("has changed since it was read: type analyze")
    file = dumps.write_jsonl(tmp_path / "run.jsonl", MADE[:2])
    follower, text = Follower(Request((str(file),))), file.read_text()
    assert looked(follower)[0] == [0, 1]
    file.write_text(text + dumps.write_jsonl(tmp_path / "more.jsonl", MADE[2:3]).read_text())
    with pytest.raises(DataError, match="got a file that grows: write a file per rollout, or type analyze"):
        looked(follower)


def test_it_finds_what_a_whole_reading_finds(tmp_path, made, capsys):
    folder, follower = tmp_path / "run", Follower(Request((str(tmp_path / "run"),)))
    alerts = []
    for number in range(5):
        drop(made, folder, number)
        alerts += looked(follower)[1]
    assert cli.main(["analyze", str(made), "--json", "-"]) == 0
    whole, mine = json.loads(capsys.readouterr().out), json.loads(json_of(follower.document()))
    for key in ("total", "findings", "timeline", "effects", "recommendation"):
        assert mine[key] == whole[key], key
    assert set(alerts) >= {finding["name"] for finding in whole["findings"]} != set()
    assert len(alerts) == len(set(alerts))


def test_a_note_that_becomes_a_warning_is_told_again(tmp_path, capsys):
    lagging = run(World(rollouts=8, samples=32, length=64, interval=4, learning=0.02))
    moved = [  # chi^2 is healthy until the second half of the run
        replace(r, proximal=r.behavior + (4.0 if i > 3 else 0.5) * (r.proximal - r.behavior))
        for i, r in enumerate(lagging)
    ]
    dumps.write_run(tmp_path / "made", moved)
    folder, follower = tmp_path / "run", Follower(Request((str(tmp_path / "run"),)))
    told = []
    for number in range(8):
        drop(tmp_path / "made", folder, number)
        told += [(f.name, f.severity) for _ in range(2) for news in follower.look() for f in news.alerts]
        if told and number == 3:
            assert cli.main(["analyze", str(folder), "--fail-on", "any"]) == 0
            assert "No fault found" in capsys.readouterr().out
            assert cli.main(["analyze", str(folder), "--fail-on", "stale_weights"]) == 1
    assert told == [("stale_weights", "note"), ("stale_weights", "warning")]


def test_the_command_ends_with_the_run_or_with_an_alert(tmp_path, made, capsys):
    def written(folder, count):
        def write():
            for number in range(count):
                drop(made, folder, number)
                time.sleep(0.1)

        thread = threading.Thread(target=write)
        thread.start()
        return thread

    calm, bad = tmp_path / "calm", tmp_path / "bad"
    calm.mkdir()
    (calm / "args.json").write_text('{"num_rollout": 3}')
    thread = written(calm, 3)
    assert cli.main(["analyze", "--follow", str(calm), "--every", "0.02"]) == 0
    thread.join()
    said = capsys.readouterr().out
    assert [line.split(":")[0] for line in said.splitlines() if line.startswith("rollout ")] == [
        "rollout 0",
        "rollout 1",
        "rollout 2",
    ]
    thread = written(bad, 5)
    words = ["--follow", str(bad), "--every", "0.02", "--idle", "60", "--alert-exit", "--json", "-"]
    begun = time.monotonic()
    assert cli.main(["analyze", *words]) == 1
    assert time.monotonic() - begun < 60  # the alert has ended it, not that nothing came
    thread.join()
    told = capsys.readouterr()
    alert, _, document = told.out.partition("\n")
    assert json.loads(alert)["rollout"] >= 3 and f"ALERT {json.loads(alert)['alert']}" in told.err
    assert json.loads(document)["findings"]


def test_ctrl_c_ends_it_with_what_was_read(tmp_path, made, capsys, monkeypatch):
    drop(made, tmp_path / "run", 0)
    slept = iter([None, None, KeyboardInterrupt])

    def sleep(seconds):
        if (error := next(slept)) is not None:
            raise error

    monkeypatch.setattr(time, "sleep", sleep)
    assert cli.main(["analyze", "--follow", str(tmp_path / "run")]) == 0
    assert "rollout 0: " in capsys.readouterr().out


def test_idle_time_ends_it(tmp_path, made):
    drop(made, tmp_path / "run", 0)
    assert cli.main(["analyze", "--follow", str(tmp_path / "run"), "--every", "0", "--idle", "0.5"]) == 0


def test_mistakes_are_one_line(tmp_path, capsys):
    (tmp_path / "x").mkdir()
    for name in "ab":
        dumps.write_run(tmp_path / name, MADE[:1])
    for words, said in (
        (["--alert-exit"], "--alert-exit: expected --follow"),
        (["--idle", "3"], "--every, --idle: expected --follow beside them"),
        (["--every", "3"], "--every, --idle: expected --follow beside them"),
        (["--follow", "--every", "-1"], "--every, --idle: expected seconds"),
        (["--follow", "--rollouts", "abc"], "--rollouts: expected numbers and ranges such as"),
        (["--presets", "geo_sr"], "--presets: expected a known preset, got 'geo_sr'; did you mean 'geo_rs'?"),
    ):
        assert cli.main(["analyze", str(tmp_path / "x"), *words]) == 2
        assert said in capsys.readouterr().err
    assert cli.main(["analyze", "--follow", str(tmp_path / "a"), str(tmp_path / "b")]) == 2
    assert "expected dumps of one run, got 2 folders" in capsys.readouterr().err
