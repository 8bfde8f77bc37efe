"""Measures memory and rate of ``slime-ext analyze`` on many large dumps.

    python -m benchmarks.analyze_scale                  # 5 GB in 50 files, in a temporary folder
    python -m benchmarks.analyze_scale --gigabytes 0.4514 --files 120 --against DIR   # and another checkout

Half of the files are train dumps (tensors), and half are the rollout dumps that belong to them (lists).
Responses have 1,000 to 16,000 tokens. We report the peak memory of the process, minus what the same command
needs for a dump of a few tokens (Python, torch and the command itself). We compare it with the memory that
torch.load needs to read the largest file.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

MB = 1e6
LITTLE = 256 * MB  # bytes that malloc keeps, and tensors of a part of a rollout
BYTES_PER_TOKEN = 49.5  # in both files together
SHORTEST, LONGEST, PROMPT = 1_000, 16_000, 200

SIZE = """
import re, sys, time
def size(name):  # of this process; ru_maxrss would begin with that of the parent
    return 1024 * int(re.search(name + r":\\s+(\\d+)", open("/proc/self/status").read())[1])
"""
RUN = f"""{SIZE}
from slime_ext.tools.commands.cli import main
status = main(sys.argv[1:])
print("peak", size("VmHWM"), time.process_time(), file=sys.stderr)
sys.exit(status)
"""
LOAD = f"""{SIZE}
import torch
before = size("VmRSS")
content = torch.load(sys.argv[1], weights_only=True)
print("peak", size("VmRSS") - before, time.process_time(), file=sys.stderr)
"""


def generate(folder: Path, rollouts: int, tokens: int) -> Path:
    """Writes pairs of dumps in slime's format, and returns their folder.

    Args:
        rollouts: number of pairs.
        tokens: response tokens of each pair.
    """
    for kind in ("rollout_data", "train_data"):
        (folder / kind).mkdir(parents=True, exist_ok=True)
    g = torch.Generator().manual_seed(0)
    for rollout_id in range(rollouts):
        lengths = _lengths(tokens, g)
        behavior = -torch.empty(sum(lengths)).exponential_(2.0, generator=g)
        proximal = behavior + 0.02 * torch.randn(sum(lengths), generator=g)
        ids = torch.randint(0, 150_000, (sum(lengths) + PROMPT * len(lengths),), generator=g)
        parts = [n + PROMPT for n in lengths]
        whole = zip(ids.split(parts), behavior.split(lengths), proximal.split(lengths), strict=True)
        sampled, trained = zip(*(_sample(i, *fields) for i, fields in enumerate(whole)), strict=True)
        rollout = {"rollout_id": rollout_id, "samples": list(sampled)}
        train = {"format_version": 2, "rollout_id": rollout_id, "rank": 0, "samples": list(trained)}
        torch.save(rollout, folder / f"rollout_data/{rollout_id}.pt")
        torch.save(train | {"dp_shards": [], "raw_reward": []}, folder / f"train_data/{rollout_id}.pt")
    return folder


def _lengths(tokens: int, g: torch.Generator) -> list[int]:
    lengths: list[int] = []
    while sum(lengths) < tokens:
        drawn = int(torch.randint(SHORTEST, LONGEST, (1,), generator=g))
        lengths.append(min(drawn, tokens - sum(lengths)))
    return lengths


def _sample(i: int, ids: torch.Tensor, behavior: torch.Tensor, proximal: torch.Tensor) -> tuple[dict, dict]:
    n, reward = len(behavior), float(i % 2)
    about = {
        "index": i,
        "group_index": i // 8,
        "prompt": "prompt",
        "response": "word " * (n * 4 // 5),
        "tokens": ids.tolist(),
        "response_length": n,
        "reward": reward,
        "loss_mask": None,
        "weight_versions": ["1"],
        "rollout_log_probs": behavior.tolist(),
    }
    advantages = torch.full((n,), reward - 0.5)
    train = {
        "rollout_position": i,
        "tokens": ids.clone(),
        "response_lengths": n,
        "total_lengths": len(ids),
        "loss_masks": torch.ones(n, dtype=torch.int32),
        "rollout_log_probs": behavior.clone(),
        "log_probs": proximal.clone(),
        "advantages": advantages,
        "returns": advantages.clone(),
        "kl": torch.zeros(n),
        "local_raw_reward": reward,
    }
    return about, train


def measured(program: str, *words: str, tree: Path | None = None) -> tuple[int, float]:
    """Returns a program's peak memory in bytes, as it reports it, and its processor seconds.

    Args:
        tree: the checkout whose slime_ext the program runs; None for the checkout of this file.
    """
    environment = os.environ | ({"PYTHONPATH": str(tree.absolute())} if tree else {})  # and cwd=tree
    command = [sys.executable, "-c", program, *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tree, check=False)
    said = [line for line in done.stderr.splitlines() if line.startswith("peak ")]
    if done.returncode or not said:
        raise SystemExit(f"{words}: {done.stderr[-2000:]}")
    _, peak, seconds = said[-1].split()
    return int(peak), float(seconds)


def main(argv: Sequence[str] | None = None) -> int:
    """Generates dumps, measures and prints.

    Returns 1 if the data take more than LITTLE, and more than twice the memory of the largest file; else 0.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=5.0)
    parser.add_argument("--files", type=int, default=50)
    parser.add_argument("--against", type=Path, help="another checkout to measure on the same files")
    parser.add_argument(
        "--flags", nargs=argparse.REMAINDER, default=[], help="more flags for slime-ext analyze"
    )
    options = parser.parse_args(argv)
    rollouts = options.files // 2
    tokens = int(options.gigabytes * 1e9 / rollouts / BYTES_PER_TOKEN)
    with tempfile.TemporaryDirectory() as folder:
        little = generate(Path(folder) / "little", 1, SHORTEST)
        many = generate(Path(folder) / "many", rollouts, tokens)
        in_memory, name = max((measured(LOAD, str(p))[0], p.parent.name) for p in many.glob("*/0.pt"))
        base, _ = measured(RUN, "analyze", str(little), *options.flags)
        peak, seconds = measured(RUN, "analyze", str(many), *options.flags)
        other = measured(RUN, "analyze", str(many), tree=options.against) if options.against else None
        size = sum(path.stat().st_size for path in many.rglob("*.pt"))
    data = (peak - base) / in_memory
    table = Table(show_header=False, box=None)
    table.add_row("files", f"{2 * rollouts}, {size / 1e9:.2f} GB, {rollouts * tokens:,} response tokens")
    table.add_row("largest file in memory", f"{name}: {in_memory / MB:.0f} MB")
    table.add_row("peak memory", f"{peak / MB:.0f} MB, of which {base / MB:.0f} MB without data")
    table.add_row("data in memory", f"{(peak - base) / MB:.0f} MB, {data:.2f} times the largest file")
    rate = f"{size / MB / seconds:.1f} MB/s, {rollouts * tokens / seconds:,.0f} tokens/s, {seconds:.0f} s"
    table.add_row("rate, one core", rate)
    if other:
        times = f"{other[0] / MB:.0f} MB, {other[1]:.0f} s: {other[1] / seconds:.1f} times"
        table.add_row("the other checkout", times)
    Console(width=120).print(table)
    return 0 if peak - base <= max(2 * in_memory, LITTLE) else 1


if __name__ == "__main__":
    sys.exit(main())
