"""The CUDA program on a CPU: every step is walked through; what goes wrong in one stops no other."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from zipfile import ZipFile

import pytest
import torch

from benchmarks import absent_wheels
from benchmarks.on_cuda import __main__ as on_cuda
from benchmarks.on_cuda import center, host, timing
from benchmarks.on_cuda.timing import Row
from tests.ranks import GROUP, server

ROOT = Path(__file__).parents[2]
ROW = Row("hook, T", 8, "")


def run_step(command, log):
    """Runs a step's module as ``python -m`` does, with its log in a file."""
    module, *words = command
    sys.argv = [module, *words]
    with log.open("w") as file, redirect_stdout(file), redirect_stderr(file):
        runpy.run_module(module, run_name="__main__", alter_sys=True)


def forked(command, seconds, log):
    """``on_cuda.step`` in a fork of the server that has imported torch and Megatron, so it starts at once."""
    process = server().Process(target=run_step, args=(command, log))
    process.start()
    process.join(seconds)
    status = process.exitcode  # None: it still runs
    process.kill()
    return "" if status == 0 else f"exit status {status}: {log.read_text()[-2000:]}"


@pytest.mark.slow
@pytest.mark.xdist_group(GROUP)
def test_a_dry_run_has_a_row_for_every_measurement(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(on_cuda, "step", forked)
    words = ["--dry-run", "--out", "here", "--wheels", "none", "--cwd", str(tmp_path)]
    status, out = on_cuda.main(words), tmp_path / "here"
    printed = capsys.readouterr().out
    assert status == 0, printed
    found = json.loads((out / "cuda.json").read_text())
    assert found["wrong"] == [] and set(found["tests"]) == {"skipped"}
    timed = {
        (row["what"].partition(" of ")[0], row["contender"]) for row in found["rows"] if row["milliseconds"]
    }
    assert timed >= {("hook, T", name) for name in ("copy on the device", "ours", "ours, all metrics")}
    assert timed >= {(center.TERM, "ours, f = 1"), (center.LOG_PROBS, "ours")}
    if host.find(None, Path(), Path()):  # the wheel of `make install`
        named = ("uncorrected", "its own TIS", "token_tis")
        assert timed >= {("policy loss", name) for name in named}
        shares = {row["contender"]: row["share"] for row in found["rows"] if "training step" in row["what"]}
        assert shares.pop("uncorrected") is None and set(shares) == set(host.WATCHED)
        assert all(0 < share < 1 for share in shares.values())
    for row in found["rows"]:
        assert f"| {row['what']} | {row['tokens']} | {row['contender']} |" in printed


def test_without_a_device_the_command_says_so(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert on_cuda.main([]) == 2
    assert capsys.readouterr().err.strip() == (
        "benchmarks/cuda.sh: expected a CUDA device, got none: add --dry-run to run on the CPU"
    )
    assert on_cuda.main(["--dry-run", "--slime", "no/such"]) == 2
    assert "--slime: expected a folder, got " in capsys.readouterr().err


def test_the_script_hands_its_words_and_its_folder_on(tmp_path, capsys):
    python = tmp_path / "python"  # says what it is called with: the real one imports torch three times
    python.write_text('#!/bin/bash\n[[ $* != *on_cuda* ]] || printf \'%s\\n\' "$PWD" "$@"; exit 0\n')
    python.chmod(0o755)
    command = ["bash", str(ROOT / "benchmarks/cuda.sh"), "--dry-run", "--wheels", "none", "--slime", "a b"]
    environment = os.environ | {"PYTHON": str(python)}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    folder, *program = ended.stdout.splitlines()[:5]
    assert (ended.returncode, ended.stderr, folder) == (0, "", str(ROOT))
    assert program == ["-W", "ignore", "-m", "benchmarks.on_cuda"]
    assert on_cuda.main(ended.stdout.splitlines()[5:]) == 2
    assert f"--slime: expected a folder, got {tmp_path / 'a b'}: check the path" in capsys.readouterr().err


def test_a_contender_that_raises_or_comes_too_late_is_a_row_that_says_so(capsys):
    def broken():
        raise ValueError("no kernel\nimage")

    bodies = {"works": lambda: None, "broken": broken}
    rows = {row.contender: row for row in timing.measure(ROW, bodies, "cpu", 2, time.monotonic() + 60)}
    assert rows["works"].milliseconds is not None and rows["works"].why == ""
    assert rows["broken"].milliseconds is None and rows["broken"].why == "ValueError: no kernel"
    assert "no kernel" in capsys.readouterr().err
    (late,) = timing.measure(ROW, {"works": lambda: None}, "cpu", 2, time.monotonic() - 1)
    assert late.why == "no time left"
    assert len(on_cuda.unmet([late, *rows.values()])) == 2


def test_a_count_that_fails_leaves_the_time_and_says_so(capsys, monkeypatch):
    def refused(body, device):
        raise RuntimeError("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES")

    monkeypatch.setattr(timing, "launches", refused)
    (row,) = timing.measure(ROW, {"works": lambda: None}, "cpu", 2, time.monotonic() + 60)
    assert row.milliseconds is not None and row.why.startswith("launches: RuntimeError: CUPTI_ERROR")
    assert "CUPTI" in capsys.readouterr().err


def test_a_hook_that_waits_is_wrong_and_another_system_that_waits_is_not():
    ours, mis = (replace(ROW, contender=name, waits=3, milliseconds=1.0) for name in ("ours", "slime mis.py"))
    loss = replace(ours, what="policy loss of slime (x)", contender="token_tis")
    assert on_cuda.unmet([ours, mis, loss]) == [
        "hook, T, ours: waits 3 times for the device",
        "policy loss of slime (x), token_tis: waits 3 times for the device",
    ]
    assert on_cuda.unmet([replace(ours, waits=0)]) == []


def test_a_step_that_dies_or_hangs_is_told_and_leaves_no_process(tmp_path, monkeypatch):
    log = tmp_path / "log"
    (tmp_path / "dies.py").write_text("raise SystemExit('device-side assert')")
    (tmp_path / "hangs.py").write_text(
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(child.pid, flush=True)\ntime.sleep(60)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert on_cuda.step(["dies"], 60, log) == "exit status 1: device-side assert"
    for seconds in (1, 4, 16, 64):  # until it came as far as its child
        said = on_cuda.step(["hangs"], seconds, log)
        assert re.fullmatch(r"cut off after \d+ s", said) and int(said.split()[3]) >= seconds
        if log.read_text():
            break
    child, until = Path("/proc", log.read_text().strip(), "stat"), time.monotonic() + 20
    while time.monotonic() < until and child.exists() and child.read_text().split()[2] != "Z":
        time.sleep(0.1)
    assert not child.exists() or child.read_text().split()[2] == "Z"


def test_the_limits_of_the_steps_are_eight_minutes_together():
    assert sum(on_cuda.SECONDS.values()) <= 8 * 60 - 20  # for what starts and writes


def test_the_wheel_of_the_host_is_unpacked_in_part_and_not_installed(tmp_path, monkeypatch):
    wheels, scratch = tmp_path / "wheels", tmp_path / "scratch"
    wheels.mkdir()
    with ZipFile(wheels / "miles_rl-0.0.2-py3-none-any.whl", "w") as archive:
        for name in ("miles/utils/misc.py", "megatron/core/__init__.py", "sglang/__init__.py"):
            archive.writestr(name, "")
    monkeypatch.setattr(host, "ROOT", tmp_path)
    folder = host.find(None, wheels, scratch)
    assert folder == scratch / "miles_rl-0.0.2" and [path.name for path in folder.iterdir()] == ["miles"]
    assert absent_wheels.absent(wheels) == []
    assert host.find(tmp_path, wheels, scratch) == tmp_path.resolve()
    assert host.find(None, tmp_path / "none", scratch) is None
