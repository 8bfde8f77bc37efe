"""Interpreters that are handed over to a fork: what they print, where, their status, how they die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import slime_ext
from slime_ext.tools.without_cuda import fork_server
from slime_ext.tools.without_cuda.processes import MARK

ROOT = Path(slime_ext.__file__).parents[1]
SITE = ROOT / "slime_ext/tools/without_cuda/site"
SERVER = """
import sys, json
from slime_ext.tools.without_cuda import fork_server
import decimal  # what the forks find imported
status = fork_server.start(sys.argv[1])
if status is not None:
    sys.exit(status)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """Where a server listens that has imported `decimal`."""
    path = str(tmp_path_factory.mktemp("s") / "socket")
    caller = serving(path)
    yield path
    caller.stdin.close()
    caller.wait()


def serving(path):
    """The process that a server at `path` was forked from."""
    env = os.environ | {"PYTHONPATH": str(ROOT), MARK: path}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", SERVER, path], env=env, **pipes)
    assert process.stdout.readline() == "ready\n"
    return process


def start(address, tmp_path, code, *words, **options):
    """An interpreter with a script that has the name of Ray's worker."""
    script = tmp_path / "default_worker.py"
    script.write_text(code)
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(SITE), str(ROOT)]),
        "SLIME_EXT_WITHOUT_CUDA": "1",
        fork_server.VARIABLE: address,
        "OF_THE_WORKER": "yes",
    }
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": tmp_path}
    return subprocess.Popen([sys.executable, "-u", str(script), *words], env=env, **(pipes | options))


def test_the_fork_has_the_interpreters_arguments_environment_folder_and_output(address, tmp_path):
    code = (
        "import os, sys\n"
        "print('decimal' in sys.modules, sys.argv[1:], os.environ['OF_THE_WORKER'], os.getcwd(), __name__)\n"
        "print('error', file=sys.stderr)\nsys.exit(7)\n"
    )
    process = start(address, tmp_path, code, "--a", "b")
    out, errors = process.communicate(timeout=30)
    assert out == f"True ['--a', 'b'] yes {tmp_path} __main__\n"
    assert (errors, process.returncode) == ("error\n", 7)


def test_a_fork_that_raises_ends_with_its_traceback_and_status_1(address, tmp_path):
    process = start(address, tmp_path, "1 / 0")
    _, errors = process.communicate(timeout=30)
    assert "ZeroDivisionError" in errors and process.returncode == 1


def test_a_killed_interpreter_takes_its_fork_along(address, tmp_path):
    process = start(address, tmp_path, "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(60)")
    fork = int(process.stdout.readline())
    assert fork != process.pid
    process.kill()
    process.wait()
    assert gone(fork)


def test_a_signal_reaches_the_fork_and_its_death_ends_the_interpreter(address, tmp_path):
    process = start(address, tmp_path, "import time\nprint('up', flush=True)\ntime.sleep(60)")
    process.stdout.readline()
    process.terminate()
    assert process.wait(30) == -signal.SIGTERM


def test_an_interpreter_whose_fork_is_killed_is_killed_too(address, tmp_path):
    """Nobody may handle SIGKILL: it once went on by itself, without the files that it had handed over."""
    process = start(address, tmp_path, "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(60)")
    os.kill(int(process.stdout.readline()), signal.SIGKILL)
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (-signal.SIGKILL, "")


def test_multiprocessing_spawn_runs_in_a_fork(address, tmp_path):
    (tmp_path / "task.py").write_text(
        "import sys\ndef put(queue):\n    queue.put('decimal' in sys.modules)\n"
    )
    code = (
        "import multiprocessing, task\n"
        "if __name__ == '__main__':\n"
        "    context = multiprocessing.get_context('spawn')\n"
        "    queue = context.SimpleQueue()\n"
        "    child = context.Process(target=task.put, args=(queue,))\n"
        "    child.start(); print(queue.get()); child.join(); print(child.exitcode)\n"
    )
    out, errors = start(address, tmp_path, code).communicate(timeout=60)
    assert out == "True\n0\n", errors


def test_other_programs_and_a_server_that_has_ended_run_as_they_are(address, tmp_path):
    code = "import sys\nprint('decimal' in sys.modules)\n"
    out, _ = start(f"{address}-none", tmp_path, code).communicate(timeout=30)
    assert out == "False\n"
    for words in (["python", "train.py"], ["python", "-c", "print()"], ["python", "-m", "ray"], ["python"]):
        assert fork_server.program_of(words) is None


def gone(pid):
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False
