"""The tiny task learned to the end on a real host without CUDA: held-out reward and seconds per rollout.

    python -m benchmarks.real_host_learns --out runs/host_learns [--seeds 1 2 3] [--rollouts 60]
    python -m benchmarks.real_host_learns --lag 20 --corrections metrics_only token_tis

A line of OUT/rows.jsonl is written as a run ends, and a run with a line is not started again. With a lag the
run is the host's train_async.py with --update-weights-interval, the reward counts tokens, and what is held
out counts whole answers (benchmarks/evidence/reward.py).
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import re
import statistics
import time
from pathlib import Path

from benchmarks import tiny_host
from slime_ext.without_cuda import tiny
from slime_ext.without_cuda.driver import WHEEL, run_host

CORRECTION = (
    "use_tis: true\ncustom_tis_function_path: slime_ext.tis.{}\n"
    "custom_megatron_init_path: slime_ext.host.init\n"
)
LAGGING = ["--custom-rm-path", "benchmarks.evidence.reward.of_host", "--update-weights-interval"]
ROOT = Path(__file__).parents[1]
HELDOUT_PROMPTS = ROOT / "benchmarks/evidence/heldout.jsonl"
HELDOUT = re.compile(r"eval (\d+): (\{'eval/heldout'.*?\})")
STEP_TIME = re.compile(r"perf (\d+): (\{'perf/.*?\})")


def main(argv: list[str] | None = None) -> None:
    """Runs the seeds that have no line yet."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/host_learns"))
    parser.add_argument("--host", default=WHEEL)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--rollouts", type=int, default=60)
    parser.add_argument("--corrections", nargs="+", default=["token_tis"], help="presets")
    parser.add_argument("--lag", type=int, default=1, help="rollouts between two pushes of weights")
    parser.add_argument("flags", nargs="*", help="further flags of the host, after --")
    given = parser.parse_args(argv)
    rows = given.out / "rows.jsonl"
    given.out.mkdir(parents=True, exist_ok=True)
    done = {json.loads(line)["run"] for line in rows.read_text().splitlines()} if rows.exists() else set()
    for seed, preset in itertools.product(given.seeds, given.corrections):
        name = f"{Path(given.host).name}/{preset}/lag{given.lag}/{seed}/{given.rollouts}"
        if name not in done:
            row = run(name, seed, preset, given)
            with rows.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)


def run(name: str, seed: int, preset: str, given: argparse.Namespace) -> dict:
    """Trains one seed; held-out reward by rollout, seconds."""
    folder, lagging = given.out.absolute() / name, given.lag > 1
    tiny_host.write_model(folder / "tiny", seed)
    task = tiny_host.task_flags(
        folder / "tiny", prompts=32, samples=16, rollouts=given.rollouts, steps=4, micro_batch=128
    )
    flags = [*tiny.cpu_flags(), *tiny_host.model_flags(), *task, *tiny.engine_flags()]
    flags += tiny_host.algorithm_flags(entropy=0.06, decay="linear")
    flags += ["--actor-num-gpus-per-node", "1", "--seed", str(seed), "--rollout-seed", str(seed)]
    (folder / "correction.yaml").write_text(CORRECTION.format(preset))
    flags += ["--custom-config-path", f"{folder}/correction.yaml"]
    heldout_prompts = HELDOUT_PROMPTS if lagging else f"{folder}/tiny/heldout.jsonl"
    flags += ["--eval-prompt-data", "heldout", str(heldout_prompts), "--eval-interval", "20"]
    flags += [*LAGGING, str(given.lag)] if lagging else []
    began = time.time()
    environment = {"PYTHONPATH": str(ROOT)}
    status = run_host(given.host, [*flags, *given.flags], folder, lagging, 4, 3600, environment)
    text = re.sub(r"\x1b\[[0-9;]*m", "", (folder / "log").read_text(errors="replace"))
    heldout = {int(n): ast.literal_eval(found)["eval/heldout"] for n, found in HELDOUT.findall(text)}
    measured = [ast.literal_eval(found) for _, found in STEP_TIME.findall(text)]
    times = [metrics["perf/step_time"] for metrics in measured if "perf/step_time" in metrics]
    seconds = round(time.time() - began, 1)
    median = statistics.median(times) if times else None
    return {"run": name, "status": status, "seconds": seconds, "heldout": heldout, "rollout_s": median}


if __name__ == "__main__":
    main()
