"""Whole runs of `slime-ext train`, engine and trainer real: what they leave, and what they survive."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from slime_ext.analysis.run_series import read_run
from slime_ext.launcher.arguments import parse_args
from slime_ext.launcher.output.metrics_log import read_metrics
from slime_ext.launcher.supervisor import start_engine
from slime_ext.launcher.validation import validate
from tests.launcher.engine import ROOT, sglang_python

pytestmark = [
    pytest.mark.slow,
    pytest.mark.sglang,
    pytest.mark.xdist_group("engine"),
    pytest.mark.skipif(sglang_python() is None, reason="no SGLang environment: make install"),
]
SMALL = [
    "--rollout-batch-size",
    "4",
    "--n-samples-per-prompt",
    "4",
    "--micro-batch-size",
    "4",
    "--num-rollout",
    "3",
]
DEADLINE = 240.0


def command(directory: Path, *more: str) -> list[str]:
    config = ["--config", "configs/tiny.yaml", "--run-dir", str(directory), "--run-name", "run"]
    engine = ["--sglang-python", str(sglang_python()), "--eval-interval", "100", "--save-interval", "1"]
    return [sys.executable, "-m", "slime_ext.cli", "train", *config, *engine, *SMALL, *more]


def start(directory: Path, *more: str) -> subprocess.Popen:
    return subprocess.Popen(
        command(directory, *more), cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def finish(process: subprocess.Popen) -> str:
    try:
        return process.communicate(timeout=DEADLINE)[0]
    finally:
        process.kill()


def train(directory: Path, *more: str) -> str:
    process = start(directory, *more)
    output = finish(process)
    assert process.returncode == 0, output
    return output


def rows(directory: Path, kind: str) -> list[dict]:
    return [row for row in read_metrics(directory / "run") if row["kind"] == kind]


def wait_for(condition, process: subprocess.Popen):
    """What the condition gives, once that is true."""
    deadline = time.monotonic() + DEADLINE
    while not (found := condition()):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.02)
    return found


def has_steps(directory: Path, count: int) -> bool:
    path = directory / "run" / "metrics.jsonl"
    return path.exists() and path.read_text().count('"kind": "step"') >= count


def processes_of(directory: Path, word: str = "") -> list[int]:
    """Living processes whose command line names the run's directory, and this word."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            words = (entry / "cmdline").read_bytes()
            named = str(directory).encode() in words and word.encode() in words
            if named and state != "Z" and int(entry.name) != os.getpid():
                found.append(int(entry.name))
    return found


def engine_of(process: subprocess.Popen) -> int | None:
    """The first process of a run's engine, ready or not; None while there is none, or it becomes another
    program."""
    for one in psutil.Process(process.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if is_alive(one) and any("sglang_cpu" in word for word in one.cmdline()):
                return one.pid
    return None


def is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, str]:
    """A run of six rollouts whose engine is killed, and once more while it restarts; what it printed."""
    directory = tmp_path_factory.mktemp("finished")
    process = start(directory, "--num-rollout", "6", "--sglang-dtype", "float32")
    wait_for(lambda: has_steps(directory, 5), process)
    first = wait_for(lambda: engine_of(process), process)
    os.kill(first, signal.SIGKILL)
    second = wait_for(lambda: (found := engine_of(process)) != first and found, process)
    os.kill(second, signal.SIGKILL)
    output = finish(process)
    assert process.returncode == 0, output
    return directory, output


def test_a_run_leaves_what_the_readme_says(finished):
    directory, output = finished
    run = directory / "run"
    for name in (
        "args.json",
        "metrics.jsonl",
        "report.png",
        "sglang.log",
        "checkpoints/iter_0000006/rank_0.pt.sha256",
    ):
        assert (run / name).stat().st_size > 0, name
    assert list((run / "tensorboard").iterdir())
    assert len(list((run / "rollout_data").glob("*.pt"))) == len(list((run / "train_data").glob("*.pt"))) == 6
    assert [row["step"] for row in rows(directory, "step")] == list(range(1, 25))
    assert [row["train/staleness"] for row in rows(directory, "step")] == pytest.approx(
        [0, 1, 2, 3] * 6, abs=1e-3
    )
    assert max(row["train/train_rollout_logprob_abs_diff"] for row in rows(directory, "step")) < 1e-5
    assert "rollout 6/6" in output and "tokens/s" in output
    assert re.search(r"done in [\d.]+ min: eval/heldout 0\.\d{3} -> 0\.\d{3}; results in ", output)
    assert output.endswith(f"next: slime-ext analyze {run}\n")
    assert "model built, waiting for the rollout engine" in output
    assert set(read_run(run)) > {"rollout/raw_reward", "eval/heldout", "train/off_policy/k3_kl"}  # report.png
    assert not processes_of(directory)
    dump = torch.load(run / "train_data" / "5.pt", weights_only=True)
    sample = dump["samples"][0]
    assert float((sample["log_probs"] - sample["rollout_log_probs"]).abs().mean()) < 1e-5


def test_an_engine_that_is_killed_twice_in_a_row_is_restarted_and_nothing_is_lost(finished):
    directory, output = finished
    assert "rollout engine restarted (2)" in output
    for rollout in range(6):
        samples = torch.load(directory / f"run/rollout_data/{rollout}.pt", weights_only=False)["samples"]
        assert [s["index"] for s in samples] == list(range(16 * rollout, 16 * rollout + 16))
        assert all(set(s["weight_versions"]) == {str(4 * rollout)} for s in samples)


def test_a_killed_trainer_continues_at_its_checkpoint(finished, tmp_path, monkeypatch):
    """At the same samples, and with the engine's lag; its half precision is seen."""
    monkeypatch.chdir(ROOT)
    flags = ("--num-rollout", "4", "--update-weights-interval", "3", "--sglang-dtype", "bfloat16")
    args = validate(parse_args(command(tmp_path / "engine", *flags)[4:]))
    with start_engine(args) as engine:
        flags = (*flags, "--sglang-server-url", engine.url)
        process = start(tmp_path, *flags)
        wait_for(lambda: (tmp_path / "run/checkpoints/iter_0000002").exists(), process)
        [rank] = processes_of(tmp_path, "worker")
        os.kill(rank, signal.SIGKILL)
        output = finish(process)
        assert process.returncode == 2 and "killed by signal 9" in output
        assert "continue with the same command and --load" in output
        assert not processes_of(tmp_path, "worker")
        train(tmp_path, *flags, "--load", str(tmp_path / "run/checkpoints"))
    steps = rows(tmp_path, "step")
    assert [row["step"] for row in steps] == list(range(1, 17))
    assert [row["train/staleness"] for row in steps] == pytest.approx([*range(12), *range(4)], abs=1e-3)
    assert min(row["train/train_rollout_logprob_abs_diff"] for row in steps) > 1e-5
    for rollout in range(3):
        there, here = (
            torch.load(base / f"run/rollout_data/{rollout}.pt", weights_only=False)["samples"]
            for base in (finished[0], tmp_path)
        )
        assert [s["prompt"] for s in there] == [s["prompt"] for s in here]


def ended(process: subprocess.Popen, number: int, directory: Path) -> tuple[int, str]:
    """Sends the signal; status and output of a run of which no process may be left."""
    family = psutil.Process(process.pid).children(recursive=True)
    assert family
    process.send_signal(number)
    output = finish(process)
    left = list(filter(is_alive, psutil.wait_procs(family, timeout=15)[1]))
    for one in left:
        one.kill()
    assert not left and not processes_of(directory)
    return process.returncode, output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_interrupted_while_the_engine_starts_leaves_no_process(tmp_path, number):
    process = start(tmp_path)
    wait_for(lambda: engine_of(process), process)
    status, output = ended(process, number, tmp_path)
    assert status == 130 and output.endswith("slime-ext: interrupted: start again\n")


def listening(process: subprocess.Popen) -> set[str]:
    """Addresses on which processes of a run listen."""
    found = set()
    for one in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            found |= {c.laddr.ip for c in one.net_connections("inet") if c.status == psutil.CONN_LISTEN}
    return found


def test_a_parallel_run_agrees_with_the_sampler_listens_on_loopback_only_and_leaves_no_process(tmp_path):
    """Also when its parent is killed."""
    layout = ("--tensor-model-parallel-size", "2", "--context-parallel-size", "2")
    process = start(tmp_path, *layout, "--sglang-dtype", "float32", "--num-rollout", "50")
    wait_for(lambda: has_steps(tmp_path, 8), process)
    assert listening(process) == {"127.0.0.1"}
    assert ended(process, signal.SIGKILL, tmp_path)[0] == -signal.SIGKILL
    assert max(row["train/train_rollout_logprob_abs_diff"] for row in rows(tmp_path, "step")) < 1e-5


def test_a_mixture_of_experts_agrees_with_the_sampler(tmp_path):
    model = ("--hf-checkpoint", "configs/tiny/model_moe", "--pipeline-model-parallel-size", "2")
    train(tmp_path, *model, "--sglang-dtype", "float32")
    found = [row["train/train_rollout_logprob_abs_diff"] for row in rows(tmp_path, "step")]
    assert len(found) == 12 and 0 < max(found) < 1e-5


def test_an_asynchronous_run_samples_with_the_weights_before_the_last_push_from_an_fp8_cache(tmp_path):
    flags = ("--train-async", "--sglang-dtype", "float32", "--sglang-kv-cache-dtype", "fp8_e4m3")
    train(tmp_path, *flags)
    steps = rows(tmp_path, "step")
    ages = [*range(8), *range(4, 8)]
    assert [row["train/staleness"] for row in steps] == pytest.approx(ages, abs=1e-3)
    assert steps[0]["train/train_rollout_logprob_abs_diff"] > 1e-6
