"""The driver without a host: what reaches the host, faults of a machine or a user and their line, and that
nothing outlives a run."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from slime_ext.errors import ConfigError
from slime_ext.tools.without_cuda import driver
from slime_ext.tools.without_cuda.processes import MARK, marked_processes

ROOT = Path(__file__).parents[3]
CHILD = "tests.tools.without_cuda.child"
# What main() runs where nobody says otherwise, as a process.
DRIVER = (
    f"import sys; from slime_ext.tools.without_cuda import driver; driver.CHILD = {CHILD!r}; "
    "sys.exit(driver.main(sys.argv[1:]))"
)


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A checkout whose train.py does nothing, run by this interpreter without Ray."""
    monkeypatch.setenv("SLIME_EXT_HOST_PYTHON", sys.executable)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(driver, "CHILD", CHILD)
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


def no_interpreter(host, monkeypatch):
    monkeypatch.setenv("SLIME_EXT_HOST_PYTHON", "/tmp")


def no_host(host, monkeypatch):
    (host / "train.py").unlink()


def full(place):
    def fill(host, monkeypatch):
        of, where = os.statvfs, str(host / place)

        def statvfs(path):
            found = of(path)
            free = 100 if str(path) == where else found.f_bavail
            return SimpleNamespace(f_bavail=free, f_frsize=found.f_frsize)

        monkeypatch.setattr(os, "statvfs", statvfs)

    return fill


def few_files(host, monkeypatch):
    def setrlimit(which, limits):
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda which: (64, 64))
    monkeypatch.setattr(resource, "setrlimit", setrlimit)


def no_ports(host, monkeypatch):
    bind, given = socket.socket.bind, []

    def bind_some(self, address):
        if address[1] == 0:
            given.append(address)
            if len(given) > 6:
                raise OSError(errno.EADDRINUSE, "Address already in use")
        return bind(self, address)

    monkeypatch.setattr(socket.socket, "bind", bind_some)


def no_loopback(host, monkeypatch):
    def connect(self, address):
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr(socket.socket, "connect", connect)


def another_run(host, monkeypatch):
    (host / "out").mkdir()
    log = (host / "out/log").open("a")
    fcntl.flock(log, fcntl.LOCK_EX)
    monkeypatch.setattr(host.__class__, "_held", log, raising=False)


def older_slime(host, monkeypatch):
    (host / "slime/utils").mkdir(parents=True)
    (host / "slime/utils/arguments.py").write_text('("rms_norm_eps", "norm_epsilon", equal),\n')
    configuration = host / "megatron/core/transformer/transformer_config.py"
    configuration.parent.mkdir(parents=True)
    configuration.write_text("class T:\n    layernorm_epsilon: float = 1e-5\n")


def unknown_rounding(host, monkeypatch):
    monkeypatch.setenv("SLIME_EXT_ROUND", "int3")


def killed(host, monkeypatch):
    train(host, "import os\nos.kill(os.getpid(), 9)\n")


def disk_fills(host, monkeypatch):
    train(host, "import os\nraise RuntimeError('later') from OSError(28, os.strerror(28), '/x/dump')\n")


def disk_filled(host, monkeypatch):
    """The log was cut off in the middle of a line, so that it does not say."""
    train(host, "print('in the middle of a li', end='')\nraise SystemExit(1)\n")
    check = driver.machine.check
    monkeypatch.setattr(driver.machine, "check", lambda *args: (check(*args), full("out")(host, monkeypatch)))


FAULTS = {
    removed_folder: "working directory: expected one that exists, got a removed one: cd to another",
    out_is_below_a_file: r"{host}/file/out: expected a folder to write to, got Not a directory: .*",
    no_host: r"--host: expected 'miles' or a folder with train.py, got {host}: check the path",
    no_interpreter: "SLIME_EXT_HOST_PYTHON: expected an interpreter, got /tmp: check the path",
    full("out"): r"{host}/out: expected 64 MiB free for the files of the run, got 0: make room there, or .*",
    full("/tmp"): r"/tmp: expected \d+ MiB free for Ray and temporary files, got 0: make room there",
    full("/dev/shm"): r"/dev/shm: expected 8 MiB free for shared memory, got 0: make room there, or .*",
    few_files: "open files: expected 1024 or more per process, got 64: raise `ulimit -Hn`",
    no_ports: r"ports: expected 200 free ones on 127.0.0.1, got 5: end what holds them, or widen .*",
    no_loopback: r"127.0.0.1: expected a connection to a port of this machine, got .*Network is unreach.*",
    another_run: r"{host}/out: expected a folder of no other run, got one that a run writes to: name .*",
    older_slime: r"--host {host}: expected a host that knows Megatron-LM's layernorm_epsilon, got one that "
    "asks for norm_epsilon: give the Megatron-LM of its release with --megatron DIR, or take --host miles",
    unknown_rounding: r"SLIME_EXT_ROUND: unknown format 'int3'; did you mean 'int8'\? .*",
    killed: "the host was killed by SIGKILL, by hand or by a machine without memory",
    disk_filled: r"no room left in {host}/out",
    disk_fills: r"no room left in {host}/out, /tmp or /dev/shm: OSError: .*No space left on device: .*",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__qualname__.partition(".")[0])
def test_a_fault_is_one_line(fault, host, monkeypatch, capsys):
    out = fault(host, monkeypatch) or host / "out"
    status = driver.main(["--host", str(host), "--out", str(out), "--megatron", str(host)])
    said = capsys.readouterr().err
    assert re.fullmatch(f"slime-ext: {FAULTS[fault].format(host=re.escape(str(host)))}\n", said)
    assert status == {killed: 137, disk_fills: 1, disk_filled: 1}.get(fault, 2)


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


def test_after_its_time_a_run_ends_with_all_its_processes(host):
    train(
        host,
        "import subprocess as s, time\ns.Popen(['sleep', '600'], start_new_session=True)\ntime.sleep(600)",
    )
    run = driver.HostRun(host, host / "out", timeout=4, environment={MARK: "of-this-test"})
    assert run.run() == driver.TIMED_OUT
    assert marked_processes("of-this-test") == []


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


def test_a_device_of_cuda_is_hidden_from_the_run_and_that_is_said(host, monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr("slime_ext.tools.without_cuda.machine.DEVICES", "nul[l]")
    train(host, "import os\nassert min(map(int, os.environ['CUDA_VISIBLE_DEVICES'].split(','))) >= 1000\n")
    assert driver.main(["--host", str(host), "--out", str(host / "out")]) == 0
    assert "slime-ext: without CUDA: null hidden from this run" in capsys.readouterr().out


def test_stdin_may_be_closed(host):
    train(host, "print(0)\n")
    command = [sys.executable, "-c", DRIVER, "--host", str(host), "--out", str(host / "out")]
    done = subprocess.run(["bash", "-c", 'exec "$@" <&-', "bash", *command], capture_output=True, text=True)
    assert done.returncode == 0 and (host / "out/log").read_text() == "0\n", done.stderr


LEAVES = """
import os, pathlib, subprocess, tempfile, time
tempfile.mkdtemp(prefix="pymp-")
mark = os.environ["%s"]
pathlib.Path(f"/dev/shm/sglang_loads_x_{mark}.shm").touch()
subprocess.Popen(["sleep", "600"], start_new_session=True)
print(mark, os.environ["RAY_TMPDIR"], tempfile.gettempdir(), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_nothing_behind(number, host):
    train(host, LEAVES % MARK)
    command = [sys.executable, "-c", DRIVER, "--host", str(host), "--out", str(host / "out")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    log, deadline = host / "out/log", time.monotonic() + 30
    while not (log.exists() and log.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    mark, folder, temporary = log.read_text().split()
    process.send_signal(number)
    _, said = process.communicate(timeout=30)
    assert (process.returncode, said) == (128 + number, "")
    assert Path(temporary).parent == Path(folder) and not Path(folder).exists()
    assert not marked_processes(mark) and not list(Path("/dev/shm").glob(f"*{mark}*"))


@pytest.mark.parametrize("has_it", ["this one", "of the folder", "none"])
def test_the_environment_is_one_that_has_the_wheel(has_it, tmp_path, monkeypatch):
    own, folder = tmp_path / "own", tmp_path / "folder/.venv"
    for place in (own, folder):
        (place / "bin").mkdir(parents=True)
        (place / "bin/python").touch()
    for place in {"this one": (own, folder), "of the folder": (folder,), "none": ()}[has_it]:
        (place / "miles/miles").mkdir(parents=True)
    monkeypatch.delenv("SLIME_EXT_HOST_PYTHON", raising=False)
    monkeypatch.setattr(sys, "prefix", str(own))
    monkeypatch.setattr(sys, "executable", str(own / "bin/python"))
    monkeypatch.setattr(driver, "PACKAGE", tmp_path / "elsewhere/slime_ext")
    monkeypatch.chdir(tmp_path / "folder")
    if has_it == "none":
        with pytest.raises(ConfigError, match=r"expected the wheel of miles in .*, got none"):
            driver.host_python()
    else:
        found = {"this one": own, "of the folder": folder}[has_it]
        assert driver.host_python() == found / "bin/python"
        assert driver.wheel_folder() == found / "miles"


def test_no_other_process_gets_stand_ins():
    code = (
        "import sys; print([f for f in sys.meta_path if type(f).__name__ == 'ImportHooks'],"
        " *(p for p in sys.path if p.endswith('/torchvision')))"
    )
    path = os.pathsep.join([str(driver.SITE), str(Path(driver.PACKAGE).parent)])
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
    assert marked_processes("of-a-title") == [process.pid]
    process.communicate(b"\n")


@pytest.mark.parametrize("name", ["plain", "with a blank", "with\ttab"])
def test_rays_workers_start_by_a_path_without_blanks(name, tmp_path):
    python = tmp_path / name / "bin/python3"
    python.parent.mkdir(parents=True)
    python.touch()
    (folder := tmp_path / "run").mkdir()
    found = driver._without_blanks(python, folder)
    assert found.samefile(python) and not any(map(str.isspace, str(found)))
