"""Starting, watching and stopping a server program; the stand-in takes SGLang's place."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

import pytest

from slime_ext.errors import EngineError
from slime_ext.launcher.rollout.server import HOST, START_LINE, EngineProcess
from tests.launcher.engine import started
from tests.launcher.rollout.test_processes import among, listens, wait_for

PROGRAM = (sys.executable, str(Path(__file__).with_name("stand_in.py")))


@pytest.fixture
def engine(tmp_path):
    process = EngineProcess("model", program=PROGRAM, log_path=tmp_path / "logs/sglang.log")
    yield process
    process.stop()


def starts(engine):
    return [line for line in engine.log_path.read_text().splitlines() if line.startswith(START_LINE)]


def test_start_waits_until_it_answers(engine):
    assert not engine.healthy() and not engine.alive()
    started(engine)
    assert engine.healthy() and engine.alive() and engine.pids == [engine.pid]


def test_stop_leaves_no_process_and_no_port(engine):
    pid = started(engine).pid
    engine.stop()
    assert engine.pids == [] and not Path(f"/proc/{pid}").exists()
    assert not listens(engine.port)


def test_nobody_is_given_its_port_before_it_listens_and_while_it_is_away(engine):
    """The system would otherwise hand it out in the seconds that SGLang takes to start."""

    def is_given_away() -> bool:
        with among(engine.port) as asking, contextlib.suppress(OSError):
            asking.bind((HOST, 0))
            return True
        return False

    assert not is_given_away()
    started(engine)
    os.kill(engine.pid, signal.SIGKILL)
    assert wait_for(lambda: not engine.alive()) and not is_given_away()
    assert wait_for(lambda: engine.restarts == 1 and engine.healthy())


@pytest.mark.parametrize("is_ready_between", [True, False])
def test_a_server_that_is_killed_twice_in_a_row_comes_back(tmp_path, is_ready_between):
    """The second time also while it restarts."""
    came_back = []
    program = ("sh", "-c", f"sleep 0.5; exec {' '.join(PROGRAM)} $0 $@")
    with EngineProcess(
        "model", program=program, log_path=tmp_path / "log", on_restart=lambda e: came_back.append(e.restarts)
    ) as engine:
        started(engine)
        known = engine.pid
        os.kill(known, signal.SIGKILL)
        assert wait_for(lambda: engine.restarts == 1 and engine.pid not in (known, None))
        assert (
            wait_for(lambda: engine.healthy() or not is_ready_between)
            and engine.healthy() is is_ready_between
        )
        os.kill(engine.pid, signal.SIGKILL)
        assert wait_for(lambda: engine.restarts == 2 and engine.healthy() and came_back[-1:] == [2])
        assert engine.failure is None and len(starts(engine)) == 3


def test_the_watcher_gives_up(tmp_path):
    with EngineProcess("m", program=PROGRAM, log_path=tmp_path / "log", max_restarts=1) as engine:
        started(engine)
        for _ in range(2):
            assert wait_for(lambda: engine.pid is not None and engine.healthy())
            os.kill(engine.pid, signal.SIGKILL)
            assert wait_for(lambda: not engine.alive())
        assert wait_for(lambda: engine.failure is not None)
        assert "got exit status -9, restarted 1 times" in str(engine.failure)


def test_a_server_that_ends_at_once_shows_its_last_words_and_is_not_tried_again(tmp_path):
    engine = EngineProcess("m", program=PROGRAM, log_path=tmp_path / "log", switches=["--exit-with", "3"])
    with pytest.raises(EngineError, match=r"got exit status 3, .*: RuntimeError: asked to fail") as error:
        started(engine)
    assert "\n" not in str(error.value) and engine.pids == [] and len(starts(engine)) == 1


@pytest.mark.parametrize(("device", "entry"), [("cpu", "sglang_cpu.py"), ("cuda", "-m sglang.launch_server")])
def test_the_command_line_names_what_was_asked_for(device, entry):
    flags = {"dtype": "bfloat16", "context-length": 64, "mem-fraction-static": 0.2, "random-seed": None}
    line = " ".join(
        EngineProcess("m", device=device, flags=flags, switches=["--log-level", "warning"]).command
    )
    assert entry in line and line.endswith("--log-level warning")
    assert all(
        flag in line for flag in ("--dtype bfloat16", "--context-length 64", "--mem-fraction-static 0.2")
    )
    assert "--random-seed" not in line and "None" not in line


HOLDS = "import sys, time; file = open(sys.argv[1], 'w'); open(sys.argv[1] + '.open', 'w'); time.sleep(60)"


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no shared memory file system")
@pytest.mark.parametrize("dies", [False, True])
def test_shared_memory_of_a_server_that_was_never_ready_is_removed(tmp_path, dies):
    held = Path(f"/dev/shm/sglang_test_{os.getpid()}_{dies}")
    opened = Path(f"{held}.open")
    program = [sys.executable, "-c", HOLDS, str(held)]
    engine = EngineProcess(tmp_path, log_path=tmp_path / "log", program=program).launch()
    try:
        wait_for(opened.exists)
        if dies:
            wait_for(lambda: held in engine._shared)
            os.kill(engine.pid, signal.SIGKILL)
            wait_for(lambda: engine.failure is not None)
        engine.stop()
        assert not held.exists()
    finally:
        engine.stop()
        opened.unlink(missing_ok=True)
        held.unlink(missing_ok=True)
