"""Interpreters whose work a fork does: what they print, where, their status, how they die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import slime_ext
from slime_ext_cpu import driver, fork_server, shortcuts
from slime_ext_cpu.processes import MARK, marked_processes
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


# Installed by every process of a run: empty modules for Ray and for most of what its server imports.
EMPTY = """
import sys
from types import ModuleType
NAMES = (
    "megatron", "megatron.training", "pandas", "transformers", "sglang", "sglang.launch_server",
    "sglang.srt", "sglang.srt.entrypoints", "sglang.srt.entrypoints.http_server",
    "ray", "ray._private", "ray._private.node",
)
def install():
    for name in NAMES:
        module = sys.modules[name] = ModuleType(name)
        module.is_empty = True
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    sys.modules["ray"].init = lambda *words, **options: print("starts Ray", flush=True)
    sys.modules["ray._private.node"].Node = type("Node", (), {})
"""
# Shows whose fork a process of a run is, and what that one had when it was started.
IN_A_FORK = """
import json, multiprocessing, os, sys, tempfile
from pathlib import Path
from slime_ext_cpu.processes import MARK
def shown(name):
    hooks = next(f for f in sys.meta_path if type(f).__name__ == "ImportHooks")
    parent = Path(f"/proc/{os.getppid()}/environ").read_text().split(chr(0))
    facts = {"name": name, "server": os.getppid(), "marks_server": f"{MARK}={os.environ[MARK]}" in parent,
        "preloaded": "slime_ext_cpu.preloaded" in sys.modules and vars(sys.modules["sglang"])["is_empty"],
        "hooks": sorted(module for module, when in hooks._calls if module.endswith((".actor", ".loss"))),
        "mark": os.environ[MARK], "folder": os.environ["RAY_TMPDIR"], "temporary": tempfile.gettempdir(),
        "lock": multiprocessing.get_context("spawn").Lock()._semlock.name,
        "proxies": [os.environ.get(each) for each in ("all_proxy", "http_proxy", "no_proxy")]}
    os.write(1, (json.dumps(facts) + chr(10)).encode())
"""
STARTS = """
import multiprocessing, subprocess, sys
from in_a_fork import shown
if __name__ == "__main__":
    shown("host")
    child = multiprocessing.get_context("spawn").Process(target=shown, args=("child",))
    child.start()
    child.join()
    subprocess.run([sys.executable, sys.argv[1]], check=True)
    sys.exit(5)
"""


@pytest.mark.host
def test_a_run_has_a_server_of_its_own_that_ends_with_it(tmp_path, monkeypatch):
    """Behind a proxy, in a path with a space; the host, its child and Ray's worker are forks of the server.

    It imports only after what the run installs. Nothing of it outlives the run.
    """
    (tmp_path / "empty.py").write_text(EMPTY)
    (tmp_path / "in_a_fork.py").write_text(IN_A_FORK)
    (tmp_path / "train.py").write_text(STARTS)
    worker = tmp_path / "default_worker.py"
    worker.write_text("from in_a_fork import shown\nshown('worker')\n")
    proxies = {"http_proxy": "http://10.255.255.1:3128", "all_proxy": "socks5://10.255.255.1:1080"}
    for name, value in (proxies | {"PYTHONPATH": os.pathsep.join(map(str, (tmp_path, ROOT)))}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(fork_server.VARIABLE, raising=False)
    monkeypatch.setattr(driver, "wheel_folder", lambda: None)
    installed = {driver.INSTALL: f"empty {shortcuts.__name__}"}
    run = driver.HostRun(tmp_path, tmp_path / "a run ü", [str(worker)], environment=installed)
    status, log = run.run(), (tmp_path / "a run ü/log").read_text()
    assert status == 5, log
    rays, *lines = log.splitlines()
    host, child, of_ray = map(json.loads, lines)
    assert rays == "starts Ray" and [one["name"] for one in (host, child, of_ray)] == [
        "host",
        "child",
        "worker",
    ]
    for one in (host, child, of_ray):
        assert one["marks_server"] and one["preloaded"] and one["hooks"] == [shortcuts.ACTOR, shortcuts.LOSS]
        assert one["server"] == host["server"] and one["mark"] == host["mark"], one
        assert one["lock"].startswith(f"/mp_{one['mark']}-") and one["temporary"] == f"{one['folder']}/tmp"
        assert one["proxies"] == [None, proxies["http_proxy"], ",".join(driver.LOOPBACK)]
    assert not marked_processes(host["mark"]) and not Path(host["folder"]).exists()
    assert not list(Path("/dev/shm").glob(f"*{host['mark']}*"))


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
