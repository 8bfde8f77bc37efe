"""The driver without a host: what reaches the host, faults of a machine or a user and their line, and that
nothing outlives a run."""

from __future__ import annotations

import fcntl
import functools
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from slime_ext.errors import ConfigError
from slime_ext_cpu import driver, host_log, machine
from slime_ext_cpu.processes import MARK, marked_processes

ROOT = Path(__file__).parents[2]
CHILD = "tests.cpu.child"
# A run of a folder's train.py, as a process.
RUN = (
    f"import sys; from slime_ext_cpu import driver; driver.CHILD = {CHILD!r}; "
    "driver.wheel_folder = lambda: None; sys.exit(driver.HostRun(sys.argv[1], sys.argv[2]).run())"
)


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A checkout whose train.py does nothing, run by this interpreter without Ray."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(driver, "wheel_folder", lambda: None)
    monkeypatch.setattr(driver, "CHILD", CHILD)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 40))  # on any disk
    train(tmp_path, "")
    return tmp_path


def train(folder, text):
    (folder / "train.py").write_text(text)


def removed_folder(host, monkeypatch):
    (host / "gone").mkdir()
    monkeypatch.chdir(host / "gone")
    (host / "gone").rmdir()


def out_is_below_a_file(host, monkeypatch):
    (host / "file").touch()
    return host / "file/out"


def no_host(host, monkeypatch):
    (host / "train.py").unlink()


def full(place):
    def fill(host, monkeypatch):
        of, where = shutil.disk_usage, str(host / place)
        monkeypatch.setattr(
            shutil, "disk_usage", lambda path: SimpleNamespace(free=100) if str(path) == where else of(path)
        )

    return fill


def another_run(host, monkeypatch):
    (host / "out").mkdir()
    log = (host / "out/log").open("a")
    fcntl.flock(log, fcntl.LOCK_EX)
    monkeypatch.setattr(host.__class__, "_held", log, raising=False)


def unknown_rounding(host, monkeypatch):
    monkeypatch.setenv("SLIME_EXT_ROUND", "int3")


def scored_twice_on_a_checkout(host, monkeypatch):
    monkeypatch.setenv("SLIME_EXT_SCORE", "both")


def unknown_type(host, monkeypatch):
    monkeypatch.setenv("SLIME_EXT_BFLOAT16", "float33")


def unknown_score(host, monkeypatch):
    monkeypatch.setenv("SLIME_EXT_SCORE", "botj")


FAULTS = {
    removed_folder: "working directory: expected a folder that exists, got a removed folder: cd elsewhere",
    out_is_below_a_file: r"{host}/file/out: expected a folder to write to, got Not a directory: .*",
    no_host: r"--host: expected 'miles' or a folder with train.py, got {host}: check the path",
    full("out"): r"{host}/out: expected 64 MiB free for the files of the run, got 0: make room there, or .*",
    full("/tmp"): r"/tmp: expected \d+ MiB free for Ray and temporary files, got 0: make room there",
    full("/dev/shm"): r"/dev/shm: expected 8 MiB free for shared memory, got 0: make room there, or .*",
    another_run: r"{host}/out: expected a folder that no other run uses, got a folder that a run writes .*",
    scored_twice_on_a_checkout: "SLIME_EXT_SCORE: expected served with a checkout, got both: .*",
    unknown_score: r"SLIME_EXT_SCORE: expected a known score, got 'botj'; did you mean 'both'\? .*",
    unknown_type: r"SLIME_EXT_BFLOAT16: expected a known type, got 'float33'; did you mean 'float32'\? .*",
    unknown_rounding: r"SLIME_EXT_ROUND: expected a known format, got 'int3'; did you mean 'int8'\? .*",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__qualname__.partition(".")[0])
def test_a_fault_is_one_line_before_the_start(fault, host, monkeypatch):
    out = fault(host, monkeypatch) or host / "out"
    with pytest.raises(ConfigError) as error:
        driver.HostRun(host, out).run()
    assert re.fullmatch(FAULTS[fault].format(host=re.escape(str(host))), str(error.value))


def test_answers_under_way_are_not_reached_by_a_push_for_a_score(tmp_path, monkeypatch):
    monkeypatch.setenv("SLIME_EXT_SCORE", "both")
    monkeypatch.setattr(driver, "wheel_folder", lambda: tmp_path)
    with pytest.raises(ConfigError, match="expected served with --lag above 1, got both"):
        driver.HostRun(driver.WHEEL, tmp_path / "out", asynchronous=True).check()
    driver.HostRun(driver.WHEEL, tmp_path / "out").check()


KILLED = "import os\nos.kill(os.getpid(), 9)\n"
NO_ROOM = "import os\nraise RuntimeError('later') from OSError(28, os.strerror(28), '/x/dump')\n"
CUT_OFF = "print('in the middle of a li', end='')\nraise SystemExit(1)\n"  # the log does not say it
ENDINGS = {
    KILLED: (-9, "the host was killed by SIGKILL, by a user or because memory ran out"),
    NO_ROOM: (1, "no room left in {out}, /tmp or /dev/shm: OSError: .*No space left on device: .*"),
    CUT_OFF: (1, "no room left in {out}"),
}


@pytest.mark.parametrize("text", ENDINGS)
def test_what_ended_a_run_is_one_line(text, host, monkeypatch):
    train(host, text)
    status, line = ENDINGS[text]
    assert driver.HostRun(host, host / "out").run() == status
    if text == CUT_OFF:
        full("out")(host, monkeypatch)
    said = host_log.ending(status, host / "out/log")
    assert re.fullmatch(line.format(out=re.escape(str(host / "out"))), said)


def test_flags_environment_folder_and_raised_limits_reach_the_host(host, monkeypatch):
    train(
        host,
        "import os, resource, sys\nprint(sys.argv[1:], os.environ['MINE'], os.getcwd())\n"
        "print(os.environ['SLIME_EXT_WITHOUT_CUDA'], 'RAY_ADDRESS' in os.environ)\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 1024)\nsys.exit(3)\n",
    )
    monkeypatch.setenv("RAY_ADDRESS", "another")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    try:
        run = driver.HostRun(host, host / "out ö b", ["--lr", "1"], environment={"MINE": "here"})
        assert run.run() == 3
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    said = (host / "out ö b/log").read_text()
    assert said == f"['--lr', '1'] here {host}/out ö b\n1 False\nTrue\n"


def test_after_its_time_a_run_ends_with_all_its_processes(host, monkeypatch):
    """Its time ends when it has started the processes."""
    begun, wait = host / "begun", subprocess.Popen.wait

    def cut(process, timeout=None):
        while timeout == 4 and not begun.exists():
            time.sleep(0.01)
        return wait(process, timeout and 0.01)

    train(
        host,
        "import pathlib, subprocess as s, time\ns.Popen(['sleep', '600'], start_new_session=True)\n"
        f"pathlib.Path({str(begun)!r}).touch()\ntime.sleep(600)",
    )
    mark = f"driver-{os.getpid()}"
    run = driver.HostRun(host, host / "out", timeout=4, environment={MARK: mark})
    monkeypatch.setattr(subprocess.Popen, "wait", cut)
    assert run.run() == 124  # of coreutils' timeout
    assert not marked_processes(mark)


def test_nobody_else_reads_the_folder_of_a_run_in_tmp(host):
    train(host, "import os\nprint(oct(os.stat(os.environ['RAY_TMPDIR']).st_mode & 0o777))\n")
    mask = os.umask(0)
    try:
        assert driver.HostRun(host, host / "out").run() == 0
    finally:
        os.umask(mask)
    assert (host / "out/log").read_text() == "0o700\n"


FETCH = """
import http.server, threading, urllib.request
server = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
threading.Thread(target=server.serve_forever, daemon=True).start()
try:
    urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/", timeout=5)
except urllib.request.HTTPError as error:
    print(error.code)
"""


@pytest.mark.parametrize("own", [{}, {"no_proxy": "example.org"}, {"NO_PROXY": "*"}])
def test_loopback_goes_around_proxies(own, host, monkeypatch):
    """The proxy is a port where nobody listens."""
    for name in ("http_proxy", "HTTP_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        proxy = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        for name, value in {"http_proxy": proxy, "all_proxy": "socks5://127.0.0.1:9", **own}.items():
            monkeypatch.setenv(name, value)
        more = f"import os\nassert 'all_proxy' not in os.environ and os.environ['http_proxy'] == '{proxy}'\n"
        train(host, FETCH + more)
        assert driver.HostRun(host, host / "out").run() == 0
    assert (host / "out/log").read_text().splitlines()[-1] == "501"


def test_a_device_of_cuda_is_hidden_from_the_run_and_that_is_said(host, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(machine, "DEVICES", "nul[l]")
    train(host, "import os\nassert min(map(int, os.environ['CUDA_VISIBLE_DEVICES'].split(','))) >= 1000\n")
    assert driver.HostRun(host, host / "out").run() == 0
    assert list(machine.notes()) == ["without CUDA: this run uses the CPU and does not see null"]


def test_stdin_may_be_closed(host):
    train(host, "print(0)\n")
    command = [sys.executable, "-c", RUN, str(host), str(host / "out")]
    done = subprocess.run(["bash", "-c", 'exec "$@" <&-', "bash", *command], capture_output=True, text=True)
    assert done.returncode == 0 and (host / "out/log").read_text() == "0\n", done.stderr


LEAVES = """
import multiprocessing, os, pathlib, subprocess, tempfile, time
from multiprocessing import resource_tracker
tempfile.mkdtemp(prefix="pymp-")
mark = os.environ["%s"]
lock = multiprocessing.get_context("spawn").Lock()
os.kill(resource_tracker._resource_tracker._pid, 9)  # as Ray does
pathlib.Path(f"/dev/shm/sglang_loads_x_{mark}.shm").touch()
subprocess.Popen(["sleep", "600"], start_new_session=True)
print(mark, os.environ["RAY_TMPDIR"], tempfile.gettempdir(), lock._semlock.name, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_nothing_behind(number, host):
    train(host, LEAVES % MARK)
    command = [sys.executable, "-c", RUN, str(host), str(host / "out")]
    default = functools.partial(signal.signal, number, signal.SIG_DFL)  # nohup has it ignored
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=default)
    log, deadline = host / "out/log", time.monotonic() + 30
    while not (log.exists() and log.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    mark, folder, temporary, lock = log.read_text().split()
    semaphore = Path(f"/dev/shm/sem.{lock[1:]}")
    assert semaphore.exists()
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    ended = -number if number == signal.SIGINT else 128 + number  # the first is Python's own
    assert process.returncode == ended and (number == signal.SIGINT or said == "")
    assert Path(temporary).parent == Path(folder) and not Path(folder).exists()
    assert not marked_processes(mark) and not list(Path("/dev/shm").glob(f"*{mark}*"))
    assert not semaphore.exists()


def test_an_environment_without_the_wheel_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    with pytest.raises(ConfigError, match=rf"expected the wheel of miles in {tmp_path}, got none: run `make"):
        driver.wheel_folder()
    (tmp_path / "miles/miles").mkdir(parents=True)
    assert driver.wheel_folder() == tmp_path / "miles"


def test_no_other_process_gets_stand_ins():
    code = (
        "import sys; print([f for f in sys.meta_path if type(f).__name__ == 'ImportHooks'],"
        " *(p for p in sys.path if p.endswith('/torchvision')))"
    )
    path = os.pathsep.join([str(driver.SITE), str(driver.PACKAGES[0].parent)])
    env = {"PYTHONPATH": path, "PATH": os.environ["PATH"]}
    said = [
        subprocess.run([sys.executable, "-c", code], env=env | more, capture_output=True, text=True).stdout
        for more in ({}, {"SLIME_EXT_WITHOUT_CUDA": "1"})
    ]
    assert said[0] == "[]\n" and "ImportHooks" in said[1] and said[1].endswith("/torchvision\n")


@pytest.mark.host
def test_a_process_with_a_long_title_keeps_its_mark():
    """Ray's agents once overwrote theirs, and two of them outlived the run."""
    code = "import setproctitle\nsetproctitle.setproctitle('x' * 4000)\nprint(flush=True)\ninput()\n"
    env = {MARK: "of-a-title", **driver.ENVIRONMENT}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", code], env=env, **pipes)
    process.stdout.readline()
    assert list(marked_processes("of-a-title")) == [process.pid]
    process.communicate(b"\n")


@pytest.mark.parametrize("name", ["plain", "with a blank", "with\ttab"])
def test_rays_workers_start_by_a_path_without_blanks(name, tmp_path):
    python = tmp_path / name / "bin/python3"
    python.parent.mkdir(parents=True)
    python.touch()
    (folder := tmp_path / "run").mkdir()
    found = driver._without_blanks(python, folder)
    assert found.samefile(python) and not any(map(str.isspace, str(found)))
