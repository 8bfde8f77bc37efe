"""Compares loss and gradient norm of real slime and miles with and without the plugin.

    python -m benchmarks.real_hosts --hosts ../shared/hosts --out runs/real_hosts [--only 'miles/*']
    python -m benchmarks.real_hosts --out runs/real_hosts --table

Every run trains two rollouts on the CPU. Most runs read the rollouts from the same files, without an engine
(--debug-train-only). Each run adds a line to OUT/rows.jsonl when it ends. A run with a line is not started
again.
"""

from __future__ import annotations

import argparse
import ast
import fnmatch
import functools
import itertools
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks import tiny_host
from benchmarks.lines import complete, read
from slime_ext_cpu import tiny
from slime_ext_cpu.driver import WHEEL, HostRun
from slime_ext_cpu.host_log import plain_lines
from slime_ext_cpu.tasks import letters

ROLLOUTS = 2
STEP = re.compile(r"step (\d+): (\{'train/.*?\})")
CLOCK = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)")
PLUGINS = {
    "off": None,
    "metrics_only": "get_mismatch_metrics: true\ncustom_tis_function_path: slime_ext.tis.correct\n",
    "capped": "use_tis: true\ncustom_tis_function_path: slime_ext.tis.correct\n",
}
CAPPED_STEPS = "slime_ext:\n  steps:\n    - reweight: {level: token}\n    - truncate: {high: 1.0}\n"


@dataclass(frozen=True)
class Layout:
    """The layout of a run: the host's flags, the ranks, and train_async.py or train.py."""

    flags: tuple[str, ...] = ()
    ranks: int = 1
    asynchronous: bool = False
    steps: int = 2
    engine: bool = False  # SGLang samples; otherwise the rollouts come from files
    resumed: bool = False  # the first rollout trains and saves, another run loads and continues


LAYOUTS = {
    "1": Layout(),
    "tp2": Layout(("--tensor-model-parallel-size", "2"), ranks=2),
    "pp2": Layout(("--pipeline-model-parallel-size", "2"), ranks=2),
    "cp2": Layout(("--context-parallel-size", "2"), ranks=2),
    "dp2": Layout(ranks=2),
    "async": Layout(asynchronous=True),
    "one step": Layout(steps=1),
    "four steps": Layout(steps=4),
    "rollout log-probs": Layout(("--use-rollout-logprobs",)),
    "recompute": Layout(("--recompute-loss-function",)),
    "resumed": Layout(resumed=True),
    "engine": Layout(engine=True),
    "engine async": Layout(engine=True, asynchronous=True),
    "colocated": Layout(("--colocate", "--no-offload-train", "--no-offload-rollout"), engine=True),
}


def main(argv: list[str] | None = None) -> None:
    """Executes the runs that have no line yet, or prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=Path, default=os.environ.get("HOSTS"), help="folder of checkouts")
    parser.add_argument("--out", type=Path, default=Path("runs/real_hosts"))
    parser.add_argument("--only", default="*", help="pattern of host/layout/plugin")
    parser.add_argument("--table", action="store_true", help="print the table of the finished runs")
    options = parser.parse_args(argv)
    file = options.out / "rows.jsonl"
    if not options.table:
        hosts = {WHEEL: WHEEL} | {p.name: p for p in sorted(options.hosts.iterdir() if options.hosts else ())}
        options.out.mkdir(parents=True, exist_ok=True)
        prepare(options.out)
        every = ("/".join(parts) for parts in itertools.product(hosts, LAYOUTS, PLUGINS))
        asked = fnmatch.filter(every, options.only)
        complete(
            file, "run", {n: functools.partial(run, n, hosts[n.split("/")[0]], options.out) for n in asked}
        )
    print(table(list(read(file, "run").values())))


def prepare(out: Path) -> None:
    """Writes the model, the rollouts and the plugin's files, unless they exist."""
    if not (out / "rollouts").exists():
        letters.write(out / "tiny", seed=0)
        tiny_host.write_rollouts(out / "tiny", out / "rollouts", ROLLOUTS)
    for name, text in PLUGINS.items():
        if text is not None:
            init = "custom_megatron_init_path: slime_ext.host.init\n"
            steps = CAPPED_STEPS if name == "capped" else "slime_ext:\n  preset: metrics_only\n"
            (out / f"{name}.yaml").write_text(text + init + steps)


def run(name: str, host: str | Path, out: Path) -> dict:
    """Trains once, and returns the row of the run."""
    _, layout_name, plugin = name.split("/")
    layout, folder = LAYOUTS[layout_name], out.absolute() / name.replace(" ", "-")
    flags, began = flags_of(layout, plugin, out.absolute()), time.time()
    if layout.resumed:
        saved = str(folder / "checkpoints")
        once = ["--num-rollout", "1", "--save", saved, "--save-interval", "1"]
        start(host, layout, [*flags, *once], folder / "1")
        flags += ["--load", saved, "--override-opt-param-scheduler"]  # the first run was shorter
    status = start(host, layout, flags, folder)
    row = {"run": name, "status": status, "seconds": round(time.time() - began, 1)}
    return row | read_log(folder / "log", began)


def flags_of(layout: Layout, plugin: str, out: Path) -> list[str]:
    """Returns the host's flags."""
    flags = [*tiny_host.flags(out / "tiny", rollouts=ROLLOUTS, steps=layout.steps), *layout.flags]
    flags += ["--actor-num-gpus-per-node", f"{layout.ranks}"]
    if layout.engine:
        flags += tiny.engine_flags()
    else:
        flags += ["--load-debug-rollout-data", f"{out}/rollouts/{{rollout_id}}.pt", "--debug-train-only"]
    if PLUGINS[plugin] is not None:
        flags += ["--custom-config-path", f"{out}/{plugin}.yaml"]
    return flags


def start(host: str | Path, layout: Layout, flags: list[str], folder: Path) -> int:
    """Runs the host, and returns its exit status."""
    gpus = layout.ranks + layout.engine
    return HostRun(host, folder, flags, layout.asynchronous, gpus, timeout=600).run()


def read_log(log: Path, began: float) -> dict:
    """Reads a run's log: steps, our lines, seconds until the first step, and an error."""
    lines, steps = plain_lines(log), read_steps(log)
    clock = next((CLOCK.search(line) for line in lines if STEP.search(line)), None)
    ours = [line[line.index("slime_ext: ") :] for line in lines if "slime_ext: " in line]
    measured = steps.get(1, steps.get(0, {}))
    return {
        "first_step_s": clock and round(time.mktime(time.strptime(clock[1], "%Y-%m-%d %H:%M:%S")) - began),
        "loss": [step["train/loss"] for _, step in sorted(steps.items())],
        "grad_norm": [step["train/grad_norm"] for _, step in sorted(steps.items())],
        "off_policy": {name: value for name, value in measured.items() if "off_policy" in name},
        "start_up": ours[:1],
        "start_up_lines": sum("passes cur_log_probs" in line for line in ours),
        "error": [line for line in lines if re.match(r"^\S*(Error|Exception)\b", line)][-1:],
    }


def read_steps(log: Path) -> dict[int, dict]:
    """Returns the metrics that the host printed, by optimizer step."""
    steps = {}
    for number, metrics in STEP.findall("\n".join(plain_lines(log))):
        steps.setdefault(int(number), ast.literal_eval(re.sub(r"\bnan\b|\binf\b", "None", metrics)))
    return steps


def table(rows: list[dict]) -> str:
    """Returns a row of Markdown for each host and layout.

    It has the host alone, metrics_only, and a low cap.
    """
    lines = [
        "| host | layout | loss | gradient norm | metrics_only | our lines | capped: loss | clipped | s |",
        "|---|---|---|---|---|---|---|---|---:|",
    ]
    rows_at: dict[str, dict[str, dict]] = {}
    for row in rows:
        place, _, plugin = row["run"].rpartition("/")
        rows_at.setdefault(place, {})[plugin] = row
    for place, by_plugin in rows_at.items():
        cells = (*place.split("/"), *_cells(by_plugin))
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def _cells(by_plugin: dict[str, dict]) -> Iterator[str]:
    """Yields the cells of one layout, with a dash for a run that is missing."""
    alone, measured, capped = (by_plugin.get(plugin, {}) for plugin in PLUGINS)
    shown = alone or measured
    yield _numbers(shown.get("loss"))
    yield _numbers(shown.get("grad_norm"))
    same = all(alone.get(key) == measured.get(key) for key in ("loss", "grad_norm"))
    yield "-" if not (alone and measured) else "the same bits" if same else "OTHER"
    yield "/".join(str(row.get("start_up_lines", "-")) for row in (alone, measured, capped))
    yield _numbers(capped.get("loss"))
    yield _numbers(
        [capped["off_policy"]["train/off_policy/clipped_fraction"]] if capped.get("off_policy") else None
    )
    yield f"{max(row['seconds'] for row in by_plugin.values()):.0f}"


def _numbers(values: list[float] | None) -> str:
    return " ".join(f"{value:.4g}" for value in values) if values else "-"


if __name__ == "__main__":
    main()
