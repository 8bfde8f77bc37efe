"""What only a machine with CUDA can show: tests_gpu, the embedded trainer on NCCL, and the hook's time.

    bash benchmarks/cuda.sh [--out DIR] [--slime DIR] [--verl DIR] [--skyrl DIR] [--dry-run]

The hook is timed as slime calls it, lists in and lists out, beside slime's mis.py, verl and SkyRL and beside
a copy on the device of what a call reads (three tensors and the loss, 16 bytes per token) in one interleaved
run. Launches are kernels and copies that one call queues, from PyTorch's profiler. ``--dry-run`` does the
same on a CPU with small batches, and counts none.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.speed.run import contenders
from benchmarks.speed.workloads import Batch

ROOT = Path(__file__).parents[1]
SEQUENCES = 64
TOKENS = {"32k": 1 << 15, "1M": 1 << 20, "8M": 1 << 23}
TOKENS_DRY = {"8k": 1 << 13}
REPEAT, REPEAT_DRY, WARM_UP = 20, 3, 3
COPY = "copy on the device"
MIS = "slime mis.py"
TRAINER_STEPS = 10
LIMIT_S = 240  # of tests_gpu
HOOK = ["--use-tis", "--custom-tis-function-path", "slime_ext.tis.token_tis"]
Body = Callable[[Batch], object]


@dataclass(frozen=True)
class Timed:
    """One contender on one batch: median milliseconds of a call, and what it queues on the device."""

    config: str
    tokens: str
    contender: str
    milliseconds: float
    launches: int | None
    times_copy: float
    times_mis: float | None


def batch_on(device: str, tokens: int) -> Batch:
    """A batch of 64 equal sequences on the device, in every layout that a contender wants."""
    batch = Batch.of([tokens // SEQUENCES] * SEQUENCES)
    made = {name: getattr(batch, name) for name in ("where", "proximal", "behavior", "mask")}
    for name, value in {**vars(batch), **made}.items():
        if isinstance(value, torch.Tensor):
            setattr(batch, name, value.detach().to(device).requires_grad_(name == "host_loss"))
    return batch


def copy(batch: Batch) -> None:
    """Reads what a hook call reads, and writes as much."""
    for tensor in (batch.flat_proximal, batch.flat_behavior, batch.flat_mask, batch.host_loss.detach()):
        tensor.clone()


def milliseconds(bodies: dict[str, Body], batch: Batch, repeat: int, device: str) -> dict[str, float]:
    """contender -> median time of a call until the device has done its work; contenders take turns."""
    for body in bodies.values():
        for _ in range(WARM_UP):
            body(batch)
    taken: dict[str, list[float]] = {name: [] for name in bodies}
    for _ in range(repeat):
        for name, body in bodies.items():
            taken[name].append(_once(body, batch, device))
    return {name: statistics.median(times) for name, times in taken.items()}


def _once(body: Body, batch: Batch, device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    body(batch)
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1e3


def launches(body: Body, batch: Batch, device: str) -> int | None:
    """Kernels and copies that one call queues; None on a CPU, which queues none."""
    if device != "cuda":
        return None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        body(batch)
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())


def time_the_hook(device: str, sizes: dict[str, int], repeat: int, slime: str | None) -> list[Timed]:
    """Every contender on every size, for token weights (T) and for sequence weights with rejection (S)."""
    rows = []
    for config in "TS":
        found = contenders(config, ("eager", "compiled"), slime)
        bodies = {COPY: copy} | {name: body for name, body in found.items() if not name.startswith("floor")}
        for name, tokens in sizes.items():
            batch = batch_on(device, tokens)
            times = milliseconds(bodies, batch, repeat, device)
            rows += [
                Timed(
                    config,
                    name,
                    contender,
                    taken,
                    launches(bodies[contender], batch, device),
                    taken / times[COPY],
                    times[MIS] / taken if MIS in times else None,
                )
                for contender, taken in times.items()
            ]
    return rows


def run_tests() -> dict[str, object]:
    """The last line of tests_gpu, and its exit status (5: nothing ran)."""
    command = [sys.executable, "-m", "pytest", "tests_gpu", "-q", "-p", "no:cacheprovider"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return {"exit": None, "said": f"no end after {LIMIT_S} s", "output": ""}
    lines = done.stdout.strip().splitlines() or ["nothing"]
    return {"exit": done.returncode, "said": lines[-1], "output": done.stdout[-8000:] + done.stderr[-2000:]}


def train(steps: int, samples: int) -> dict[str, object]:
    """Optimizer steps of the embedded trainer on a random rollout, with the hook and all metrics."""
    from benchmarks.proximal_forward import one_rank, rollout, trainer
    from slime_ext.launcher.megatron import parallel

    with tempfile.TemporaryDirectory() as folder:
        parallel.initialize(one_rank(), f"file://{folder}/store")
        trained = trainer(samples, steps, HOOK)
        cut = trained.cut(rollout(samples))
        proximal = trained.proximal(cut)
        seconds, hook, losses = [], [], []
        for index, step in enumerate(cut):
            begin = time.perf_counter()
            metrics, log = trained.train_step(step, proximal, index)
            seconds.append(time.perf_counter() - begin)
            hook.append(log.hook_seconds)
            losses.append(float(metrics["train/loss"]))
        backend = dist.get_backend()
        parallel.destroy()
    return {
        "steps": len(cut),
        "backend": backend,
        "finite": all(map(math.isfinite, losses)),
        "losses": losses,
        "milliseconds_per_step": statistics.median(seconds) * 1e3,
        "hook_milliseconds": statistics.median(hook) * 1e3,
    }


def machine(device: str) -> dict[str, str]:
    """What the figures were measured on."""
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or "CPU"
    return {"device": name, "torch": torch.__version__, "python": platform.python_version()}


def markdown(found: dict, rows: list[Timed]) -> str:
    """The report: machine, tests, trainer, and one row per configuration, size and contender."""
    place, tests, trained = found["machine"], found["tests"], found["trainer"]
    lines = [
        f"# The hook on {place['device']} (PyTorch {place['torch']})",
        "",
        f"tests_gpu: {tests['said']} (exit status {tests['exit']})",
        "",
        f"Embedded trainer, {trained['backend']}: {trained['steps']} steps, "
        f"{trained['milliseconds_per_step']:.1f} ms each, {trained['hook_milliseconds']:.2f} ms of it the "
        f"hook, losses {'finite' if trained['finite'] else 'NOT FINITE'}",
        "",
        f"| weights | tokens in {SEQUENCES} sequences | | ms | launches | times the copy | times mis.py |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    for row in rows:
        faster = "-" if row.times_mis is None else f"{row.times_mis:.1f}"
        queued = "-" if row.launches is None else row.launches
        lines.append(
            f"| {row.config} | {row.tokens} | {row.contender} | {row.milliseconds:.3f} | {queued} | "
            f"{row.times_copy:.1f} | {faster} |"
        )
    return "\n".join(lines) + "\n"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="benchmarks/cuda.sh", description=__doc__.splitlines()[0])
    made.add_argument("--out", type=Path, default=Path("runs/cuda"), help="folder of cuda.md and cuda.json")
    for system in ("slime", "verl", "skyrl"):
        made.add_argument(f"--{system}", metavar="DIR", help=f"a checkout of {system} to compare with")
    made.add_argument("--dry-run", action="store_true", help="walk through it on a CPU with small batches")
    return made


def main() -> int:
    """1 where a test or the trainer failed."""
    asked = parser().parse_args()
    if not asked.dry_run and not torch.cuda.is_available():
        print(
            "benchmarks/cuda.sh: expected a CUDA device, got none: --dry-run walks through it here",
            file=sys.stderr,
        )
        return 2
    device = "cpu" if asked.dry_run else "cuda"
    sys.path[:0] = [folder for folder in (asked.verl, asked.skyrl) if folder]
    sizes, repeat = (TOKENS_DRY, REPEAT_DRY) if asked.dry_run else (TOKENS, REPEAT)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    begin = time.monotonic()
    found = {"machine": machine(device), "tests": run_tests()}
    print(f"tests_gpu: {found['tests']['said']} ({time.monotonic() - begin:.0f} s)", flush=True)
    found["trainer"] = train(TRAINER_STEPS, 40 if asked.dry_run else 640)
    print(f"trainer: {found['trainer']} ({time.monotonic() - begin:.0f} s)", flush=True)
    rows = time_the_hook(device, sizes, repeat, asked.slime)
    found |= {"hook": [asdict(row) for row in rows], "seconds": time.monotonic() - begin}
    asked.out.mkdir(parents=True, exist_ok=True)
    text = markdown(found, rows)
    (asked.out / "cuda.md").write_text(text)
    (asked.out / "cuda.json").write_text(json.dumps(found, indent=1) + "\n")
    print(text, f"\nwritten to {asked.out}/cuda.md and cuda.json after {found['seconds']:.0f} s", sep="")
    return 0 if found["tests"]["exit"] in (0, 5) and found["trainer"]["finite"] else 1


if __name__ == "__main__":
    sys.exit(main())
