"""The file with a line per step: after kills, on full disks, beside links and pipes, and when it is large."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import sys
import threading
import tracemalloc

import pytest

from slime_ext.core.metrics import step_file
from slime_ext.core.metrics.step_file import StepFile, append, rows

NAME = "off_policy.jsonl"


def at(rollout, step=0):
    return {"rollout_id": rollout, "step_id": step}


def line_of(rollout, step=0, more=""):
    return f'{{"rollout_id": {rollout}, "step_id": {step}{more}}}\n'


def steps_in(file):
    return [(row["rollout_id"], row["step_id"]) for row in rows(file, "rollout_id")]


@contextlib.contextmanager
def full_at(size):
    """Inside, no file of this process grows beyond that many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_run_that_resumes_has_each_step_once(tmp_path):
    file = tmp_path / "a" / NAME
    for rollouts in (range(4), range(2, 5)):
        run = StepFile(file)
        for rollout in rollouts:
            for step in (0, 1):
                run.add(at(rollout, step), {"off_policy/tokens": 1.0})
    assert steps_in(file) == [(rollout, step) for rollout in range(5) for step in (0, 1)]


def test_a_step_that_a_host_trains_again_has_one_line(tmp_path):
    file = StepFile(tmp_path / NAME)
    for number in ((0, 0), (0, 1), (0, 1), (1, 0)):
        file.add(at(*number), {"off_policy/tokens": 1.0})
    assert steps_in(file.path) == [(0, 0), (0, 1), (1, 0)]


def test_an_unfinished_line_goes_and_foreign_lines_stay(tmp_path):
    file = tmp_path / NAME
    file.write_text('{"kind": "mine"}\nnote\n[1]\n' + line_of(0) + '{"rollout_id": 1, "st')
    StepFile(file).add(at(1), {})
    lines = file.read_text().splitlines()
    assert lines[:4] == ['{"kind": "mine"}', "note", "[1]", line_of(0).strip()]
    assert len(lines) == 5 and set(json.loads(lines[4])) == {"rollout_id", "step_id", "time"}


def test_foreign_lines_may_hold_any_bytes(tmp_path):
    file = tmp_path / NAME
    file.write_bytes(b'\xff\xfe\n{"rollout_id": 1, "st')
    StepFile(file).add(at(1), {})
    assert file.read_bytes().startswith(b'\xff\xfe\n{"rollout_id": 1, "step_id": 0, "time"')


def cut_in_memory(text, first):
    """What is left of a file for a run that resumes at a rollout: reads all of it, as a loop."""
    kept = ""
    for line in text[: text.rfind("\n") + 1].splitlines(keepends=True):
        if not line.startswith("{") or json.loads(line)["rollout_id"] < first:
            kept += line
    return kept


@pytest.mark.parametrize("seed", range(60))
def test_the_cut_is_that_of_a_loop_over_the_whole_file(tmp_path, monkeypatch, seed):
    draw = random.Random(seed)
    monkeypatch.setattr(step_file, "BLOCK", draw.randint(1, 50))
    text = ""
    for rollout in range(draw.randint(0, 8)):
        text += draw.choice(["", "", "note\n", "\n", "[1]\n" * 3]) + line_of(rollout)
    text += draw.choice(["", "", "a note\n", "half a note", '{"rollout_id": 9, "st'])
    first = draw.randint(0, 9)
    (file := tmp_path / NAME).write_text(text)
    StepFile(file).add(at(first), {})
    kept = cut_in_memory(text, first)
    assert file.read_text().startswith(kept)
    assert file.read_text()[len(kept) :].startswith(f'{{"rollout_id": {first}, "step_id": 0, "time"')
    assert file.read_text().count("\n") == kept.count("\n") + 1


def test_a_long_file_is_read_from_its_end(tmp_path, monkeypatch):
    file, loads, parsed = tmp_path / NAME, json.loads, []
    file.write_text("".join(line_of(rollout, 0, f', "curve": "{"x" * 2000}"') for rollout in range(8000)))
    size = file.stat().st_size
    monkeypatch.setattr(json, "loads", lambda line: parsed.append(line) or loads(line))
    tracemalloc.start()
    try:
        StepFile(file).add(at(7998), {})
        assert tracemalloc.get_traced_memory()[1] < size / 2
    finally:
        tracemalloc.stop()
    monkeypatch.undo()
    assert len(parsed) == 3 and steps_in(file)[-2:] == [(7997, 0), (7998, 0)]


NOTE = "a note of the user's\n"


@pytest.mark.parametrize(
    "behind", ["", NOTE, '{"rollout_id": 4, "st'], ids=["plain", "a note", "a half line"]
)
def test_a_kill_at_any_instruction_leaves_the_file_whole_or_cut(tmp_path, behind):
    """Another process reads it at each instruction, which is what a kill there would leave."""
    file, kept, notes = tmp_path / NAME, line_of(0) + line_of(1), behind if behind == NOTE else ""
    before = kept + line_of(2) + line_of(3) + behind
    file.write_text(before)
    seen = set()

    def look(frame, event, argument):
        frame.f_trace_opcodes = True
        if event == "opcode":
            seen.add(file.read_text())
        return look

    tracer = sys.gettrace()
    sys.settrace(look)
    try:
        StepFile(file).add(at(2), {})
    finally:
        sys.settrace(tracer)
    assert before in seen and all(text == before or text.startswith(kept + notes) for text in seen)
    assert steps_in(file) == [(0, 0), (1, 0), (2, 0)] and [path.name for path in tmp_path.iterdir()] == [NAME]


def test_a_line_that_a_full_disk_cut_is_taken_out(tmp_path):
    file = StepFile(tmp_path / NAME)
    file.add(at(0), {})
    before = file.path.read_bytes()
    with full_at(len(before) + 20), pytest.raises(OSError, match="File too large"):
        file.add(at(0, 1), {})
    assert file.path.read_bytes().startswith(before) and len(file.path.read_bytes()) == len(before) + 20
    file.add(at(0, 2), {})
    assert file.path.read_bytes().startswith(before) and steps_in(file.path) == [(0, 0), (0, 2)]
    assert file.path.read_text().count("\n") == 2


@pytest.mark.parametrize("behind", ["", NOTE], ids=["plain", "a note"])
def test_a_resume_on_a_full_disk_loses_no_other_step_and_leaves_nothing_beside_it(tmp_path, behind):
    file, kept = tmp_path / NAME, line_of(0) + line_of(1)
    file.write_text(kept + line_of(2) + behind)
    with full_at(10), pytest.raises(OSError, match="File too large"):
        StepFile(file).add(at(2), {})
    assert file.read_text() == (kept + line_of(2) + behind if behind else kept)
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


@pytest.mark.parametrize("behind", ["", NOTE], ids=["plain", "a note"])
def test_the_cut_keeps_links_mode_and_owner(tmp_path, behind):
    real, link, other = tmp_path / "real", tmp_path / NAME, tmp_path / "other"
    real.write_text(line_of(0) + line_of(1) + behind)
    real.chmod(0o640)
    with contextlib.suppress(PermissionError):  # of root alone
        os.chown(real, 12345, 12345)
    owner = real.stat().st_uid
    link.symlink_to(real)
    other.write_text("not ours")
    (tmp_path / f"{NAME}.tmp").symlink_to(other)
    (tmp_path / "real.tmp").symlink_to(other)
    StepFile(link).add(at(1), {})
    assert link.is_symlink() and not real.is_symlink() and other.read_text() == "not ours"
    assert steps_in(real) == [(0, 0), (1, 0)] and NOTE.strip() not in real.read_text().splitlines()[2:]
    assert real.stat().st_mode & 0o777 == 0o640 and real.stat().st_uid == owner


@pytest.mark.parametrize("reader", [False, True], ids=["nobody reads", "somebody reads"])
def test_a_pipe_is_refused_at_once(tmp_path, reader):
    file, raised = tmp_path / NAME, []
    os.mkfifo(file)
    opened = os.open(file, os.O_RDONLY | os.O_NONBLOCK) if reader else None

    def write():
        with pytest.raises(OSError, match="a pipe or a device") as error:
            StepFile(file).add(at(0), {})
        raised.append(error)

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    thread.join(20)
    os.close(opened if reader else os.open(file, os.O_RDONLY | os.O_NONBLOCK))  # ends a writer that waits
    assert raised


def test_a_number_that_is_not_finite_is_null_and_every_line_is_json(tmp_path):
    values = {"a": float("nan"), "b": float("inf"), "c": 1.0}
    StepFile(tmp_path / NAME).add(at(0), values)
    row = json.loads((tmp_path / NAME).read_text(), parse_constant=pytest.fail)
    assert (row["a"], row["b"], row["c"]) == (None, None, 1.0)
    with pytest.raises(ValueError, match="not JSON compliant"):
        append(tmp_path / NAME, values)


def test_a_line_after_an_unfinished_one_is_whole(tmp_path):
    (file := tmp_path / NAME).write_text(line_of(0) + '{"rollout_id": 1, "st')
    append(file, at(2))
    append(file, at(3))
    assert [row["rollout_id"] for row in rows(file, "rollout_id")] == [0, 2, 3]


def test_what_is_not_the_line_of_a_step_is_passed_over(tmp_path):
    (file := tmp_path / NAME).write_bytes(b'note\n[1]\n{"a": 1}\n{"n": 1}\n\xff\n{"n": "x"}\n\0\0\n{"n": 2')
    assert list(rows(file, "n")) == [{"n": 1}]
