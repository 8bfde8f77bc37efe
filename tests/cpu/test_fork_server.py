"""Interpreters whose work a fork does: what they print, where, their status, how they die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import slime_ext
from slime_ext_cpu import fork_server
from slime_ext_cpu.processes import MARK
from tests import host_server
from tests.ranks import GROUP

ROOT = Path(slime_ext.__file__).parents[1]
SITE = ROOT / "slime_ext_cpu/site"
SERVER = """
import os, sys
from slime_ext_cpu import fork_server
from slime_ext_cpu.processes import MARK
fork_server.start("preloaded_here")
print(os.environ[fork_server.VARIABLE], os.environ[fork_server.TRACKER], flush=True)
sys.stdin.read()
"""
# What the server imports, and changes as `preloaded.py` does.
PRELOADED = """
import os, sys
from multiprocessing import spawn
import decimal
prepare = spawn.prepare
def prepare_with_environment(data):
    os.environ.update(data.pop("environment"))
    prepare(data)
spawn.prepare = prepare_with_environment
"""


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """Where a server listens that has imported `decimal`, and the file of its resource tracker."""
    folder = tmp_path_factory.mktemp("server")
    (folder / "preloaded_here.py").write_text(PRELOADED)
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (folder, ROOT)))}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", SERVER], env=env, **pipes)
    yield process.stdout.readline().split()
    process.stdin.close()
    process.wait()


def start(address, tmp_path, code, *words):
    """An interpreter with a script that has the name of Ray's worker."""
    script = tmp_path / "default_worker.py"
    script.write_text(code)
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(SITE), str(ROOT)]),
        "SLIME_EXT_WITHOUT_CUDA": "1",
        fork_server.VARIABLE: address[0],
        fork_server.TRACKER: address[1],
        "OF_THE_WORKER": "yes",
    }
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": tmp_path}
    return subprocess.Popen([sys.executable, "-u", str(script), *words], env=env, **pipes)


def test_the_fork_has_the_interpreters_arguments_environment_folder_and_output(address, tmp_path):
    code = (
        "import os, sys\n"
        "print('decimal' in sys.modules, sys.argv[1:], os.environ['OF_THE_WORKER'], os.getcwd(), __name__)\n"
        "print('error', file=sys.stderr)\nsys.exit(7)\n"
    )
    process = start(address, tmp_path, code, "--a", "b")
    out, errors = process.communicate(timeout=60)
    assert out == f"True ['--a', 'b'] yes {tmp_path} __main__\n"
    assert (errors, process.returncode) == ("error\n", 7)


def test_a_fork_that_raises_ends_with_its_traceback_and_status_1(address, tmp_path):
    process = start(address, tmp_path, "1 / 0")
    _, errors = process.communicate(timeout=60)
    assert "ZeroDivisionError" in errors and process.returncode == 1


SEMAPHORES = """
import multiprocessing
def name(kind):
    print(multiprocessing.get_context(kind).Lock()._semlock.name, flush=True)
if __name__ == "__main__":
    for kind in ("spawn", "forkserver"):
        name(kind)
        child = multiprocessing.get_context(kind).Process(target=name, args=(kind,))
        child.start()
        child.join()
"""


def test_semaphores_of_a_fork_and_of_its_children_have_the_mark_of_the_run(address, tmp_path, monkeypatch):
    """The guard of the run removes files in /dev/shm with the mark."""
    mark = f"fork-server-{os.getpid()}"
    monkeypatch.setenv(MARK, mark)
    out, errors = start(address, tmp_path, SEMAPHORES).communicate(timeout=60)
    names = out.split()
    assert len(names) == 4 and all(name.startswith(f"/mp_{mark}-") for name in names), errors


SLEEPS = "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(60)"


def test_a_killed_interpreter_takes_its_fork_along(address, tmp_path):
    process = start(address, tmp_path, SLEEPS)
    fork = int(process.stdout.readline())
    assert fork != process.pid
    process.kill()
    process.wait()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{fork}/cmdline").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not Path(f"/proc/{fork}").exists()


def test_a_signal_reaches_the_fork_and_its_death_ends_the_interpreter(address, tmp_path):
    process = start(address, tmp_path, SLEEPS)
    process.stdout.readline()
    process.terminate()
    assert process.wait(60) == -signal.SIGTERM


def test_an_interpreter_whose_fork_is_killed_is_killed_too(address, tmp_path):
    process = start(address, tmp_path, SLEEPS)
    os.kill(int(process.stdout.readline()), signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (-signal.SIGKILL, "")


def test_other_programs_and_a_server_that_has_ended_run_as_they_are(address, tmp_path):
    code = "import sys\nprint('decimal' in sys.modules)\n"
    out, _ = start([f"{address[0]}-none", address[1]], tmp_path, code).communicate(timeout=60)
    assert out == "False\n"
    for words in (["python", "train.py"], ["python", "-c", "print()"], ["python", "-m", "ray"], ["python"]):
        assert fork_server.program_of(words) == []
    monitor = ["/ray/_private/log_monitor.py", "--session-dir=/tmp"]
    assert fork_server.program_of(["python", "-u", *monitor]) == monitor


ASKS = """
import os
from multiprocessing import forkserver
from slime_ext_cpu import fork_server
fork_server.start("absent")
asked = forkserver._forkserver._forkserver_address
print(asked, os.environ[fork_server.VARIABLE], os.environ[fork_server.TRACKER])
"""


def test_a_run_asks_the_server_that_its_environment_names(address):
    env = os.environ | {"PYTHONPATH": str(ROOT), fork_server.VARIABLE: address[0]}
    done = subprocess.run([sys.executable, "-c", ASKS], env=env, capture_output=True, text=True)
    asked, named, tracker = done.stdout.split()
    assert asked == named == address[0] and tracker != address[1], done.stderr


MODULE = "def install():\n    print('installed')\n"
SHOWS = """
import multiprocessing, os, sys, tempfile
from pathlib import Path
from slime_ext_cpu import fork_server
from slime_ext_cpu.processes import MARK
def show():
    first = Path("/proc/self/environ").read_text().partition(chr(0))[0]
    print("torch" in sys.modules, first == f"{MARK}={os.environ[MARK]}", tempfile.gettempdir(), flush=True)
    os.write(2, b"error")
if __name__ == "__main__":
    fork_server.ask(os.environ[fork_server.VARIABLE])
    fork_server.send_environment()
    child = multiprocessing.get_context("forkserver").Process(target=show)
    child.start()
    child.join()
"""


@pytest.mark.slow
@pytest.mark.host
@pytest.mark.xdist_group(GROUP)
def test_a_fork_of_a_shared_server_belongs_to_the_run_that_asks(tmp_path):
    """It shows the run's mark, has its temporary folder, installs what it names and writes to its log."""
    (tmp_path / "to_install.py").write_text(MODULE)
    log, mark = tmp_path / "log", f"shared-{os.getpid()}"
    with log.open("a") as file:
        starter = subprocess.Popen(["sleep", "60"], stdout=file, stderr=file)
    script = tmp_path / "forks.py"
    script.write_text(SHOWS)
    env = os.environ | host_server.shared()
    env |= {"PYTHONPATH": os.pathsep.join(map(str, (tmp_path, ROOT))), "TMPDIR": str(tmp_path), MARK: mark}
    env |= {fork_server.TRACKER: f"/proc/{starter.pid}/fd/9", "SLIME_EXT_INSTALL": "to_install"}
    try:
        subprocess.run([sys.executable, str(script)], env=env, check=True, timeout=60)
    finally:
        starter.kill()
        starter.wait()
    assert log.read_text() == f"installed\nTrue True {tmp_path}\nerror"
