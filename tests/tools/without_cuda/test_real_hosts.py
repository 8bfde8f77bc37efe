"""The plugin in real hosts, end to end: three launches, with everything that a cluster's run has but CUDA."""

from __future__ import annotations

import contextlib
import os
import resource
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

import slime_ext
from benchmarks import real_hosts, tiny_host
from slime_ext.errors import ConfigError
from slime_ext.tools.without_cuda import driver, tiny
from slime_ext.tools.without_cuda.processes import MARK, marked_processes

ROOT = Path(slime_ext.__file__).parents[1]
SLIME = Path(os.environ.get("HOSTS", "absent"), "slime-624b824")
pytestmark = [pytest.mark.slow, pytest.mark.host]
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
BF16 = 0.02  # of a layout against another, in bfloat16


@pytest.fixture(scope="module", autouse=True)
def environment():
    try:
        driver.wheel_folder()
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """Model, rollouts and the plugin's files."""
    folder = tmp_path_factory.mktemp("hosts")
    real_hosts.prepare(folder)
    return folder


def trained(row):
    assert row["status"] == 0, row["error"]
    return row


def test_slime_trains_the_same_over_context_parallel_ranks_with_metrics_as_alone_without(out):
    if not SLIME.exists():
        pytest.skip("needs the folder HOSTS")
    alone = trained(real_hosts.run("slime/1/off", SLIME, out))
    both = trained(real_hosts.run("slime/cp2/metrics_only", SLIME, out))
    assert len(alone["loss"]) == 4 and both["grad_norm"] == pytest.approx(alone["grad_norm"], rel=BF16)
    assert both["loss"] == pytest.approx(alone["loss"], abs=0.003)
    assert alone["start_up_lines"] == 0 and both["start_up_lines"] == 1
    assert 0 < both["off_policy"]["train/off_policy/k3_kl"] < 0.1


def listening(mark):
    """Addresses, in hexadecimal, at which processes with the mark of a run listen."""
    held = set()
    for pid in marked_processes(mark):
        with contextlib.suppress(OSError):  # gone meanwhile
            held |= {str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()}
    tables = (Path("/proc/net", name).read_text().splitlines()[1:] for name in ("tcp", "tcp6"))
    rows = (line.split() for lines in tables for line in lines)
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in held}


@contextlib.contextmanager
def watched(mark):
    """What listens while a run lasts, and its temporary folder."""
    seen, ended = SimpleNamespace(listening=set(), folders=set()), threading.Event()

    def watch():
        while not ended.wait(1.0):
            seen.listening |= listening(mark)
            for pid in marked_processes(mark):
                with contextlib.suppress(OSError):
                    words = Path(f"/proc/{pid}/environ").read_text().split("\0")
                    seen.folders |= {word[len("TMPDIR=") :] for word in words if word.startswith("TMPDIR=")}

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        ended.set()
        thread.join()


def test_miles_samples_trains_with_a_cap_that_acts_and_pushes_its_weights(out, monkeypatch):
    """Under duress: a proxy where nobody answers, few files, a device of CUDA, a path with a space."""
    monkeypatch.setenv("http_proxy", "http://10.255.255.1:3128")
    monkeypatch.setenv("all_proxy", "socks5://10.255.255.1:1080")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    mark, folder = f"hosts-{os.getpid()}", out / "full ü"
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, limits[1]))
    flags = [*tiny_host.flags(out / "tiny"), *tiny.engine_flags()]
    flags += ["--custom-config-path", f"{out}/capped.yaml"]
    try:
        with watched(mark) as seen:
            run = driver.HostRun(driver.WHEEL, folder, flags, timeout=600, environment={MARK: mark})
            assert run.run() == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert "0100007F" in seen.listening <= LOOPBACK
    assert len(seen.folders) == 1 and not Path(*seen.folders).exists()
    assert not marked_processes(mark) and not list(Path("/dev/shm").glob(f"*{mark}*"))
    row = real_hosts.read_log(folder / "log", 0.0)
    assert len(row["loss"]) == 4 and row["start_up_lines"] == 1
    first_of_second_rollout = real_hosts.read_steps(folder / "log")[2]
    assert first_of_second_rollout["train/train_rollout_logprob_abs_diff"] < 0.01  # the push arrived
    assert first_of_second_rollout["train/off_policy/clipped_fraction"] > 0.25
