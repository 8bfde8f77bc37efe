"""The driver without a host: what it refuses, what its child sees, and that nothing outlives it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slime_ext.errors import ConfigError
from slime_ext.tools.without_cuda import driver
from slime_ext.tools.without_cuda.processes import MARK, marked_processes


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A folder with a train.py, run by this interpreter instead of the host environment's, without Ray."""
    monkeypatch.setenv("SLIME_EXT_HOST_PYTHON", sys.executable)
    monkeypatch.setattr(driver, "CHILD", "tests.tools.without_cuda.child")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    return tmp_path


def test_flags_environment_and_folder_reach_the_host(checkout):
    (checkout / "train.py").write_text(
        "import os, sys\nprint(sys.argv[1:], os.environ['MINE'], os.getcwd())\n"
        "print(os.environ['SLIME_EXT_WITHOUT_CUDA'], 'RAY_ADDRESS' in os.environ)\nsys.exit(3)\n"
    )
    os.environ["RAY_ADDRESS"] = "another"
    try:
        status = driver.HostRun(checkout, checkout / "out", ["--lr", "1"], environment={"MINE": "here"}).run()
    finally:
        del os.environ["RAY_ADDRESS"]
    assert status == 3
    assert (checkout / "out/log").read_text() == f"['--lr', '1'] here {checkout}/out\n1 False\n"


def test_after_its_time_a_run_ends_with_all_its_processes(checkout):
    (checkout / "train.py").write_text(
        "import os, subprocess, time\nsubprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "time.sleep(600)\n"
    )
    mark = {driver.MARK: "of-this-test"}
    assert driver.HostRun(checkout, checkout / "out", timeout=4, environment=mark).run() == driver.TIMED_OUT
    assert marked_processes("of-this-test") == []


def test_what_cannot_run_is_one_line(checkout, monkeypatch, capsys):
    with pytest.raises(ConfigError, match=r"--host: expected 'miles' or a folder with train_async.py"):
        driver.HostRun(checkout, checkout / "out", asynchronous=True).run()
    monkeypatch.setenv("SLIME_EXT_HOST_PYTHON", "/nowhere/python")
    assert driver.main(["--host", "miles", "--out", str(checkout / "out")]) == 2
    line = "slime-ext: SLIME_EXT_HOST_PYTHON: expected an interpreter, got /nowhere/python: check the path\n"
    assert capsys.readouterr().err == line


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
