"""Faults on a real host without CUDA: what the host does, and what slime_ext adds.

    PYTHONPATH=. python -m tests.downstream.real_faults --out runs/faults [--host miles|DIR] [NAME ...]

A line of JSON per run goes to OUT/faults.jsonl as it ends; a fault
that is there already is not run again. The status is 1 where something did not go as FAULTS says. The table
of what was found is in tests/downstream/RESULTS.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import tiny_host
from slime_ext_cpu import driver, tiny
from slime_ext_cpu.tasks import letters
from tests.downstream.planted import PER_ROLLOUT

ROOT = Path(__file__).parents[2]
PROMPTS, ROLLOUTS, TIMEOUT_S = 4, 3, 900
OURS = {
    "use_tis": True,
    "custom_tis_function_path": "slime_ext.tis.correct",
    "custom_megatron_init_path": "slime_ext.host.init",
    "custom_rollout_log_function_path": "slime_ext.host.log_rollout",
    "slime_ext": {"preset": "token_tis"},
}
PLANTED_INIT = {"custom_megatron_init_path": "tests.downstream.planted.init"}
PUSHED = OURS | PLANTED_INIT
HOSTS_OWN = {"use_tis": True, "tis_clip": 2.0}  # its vanilla_tis_function
PLANT = ("--custom-generate-function-path", "tests.downstream.planted.generate")
TOLERANT = (
    "--use-fault-tolerance",
    "--rollout-health-check-interval",
    "3",
    "--rollout-health-check-timeout",
    "10",
)
TWO_ENGINES = ("--rollout-num-gpus", "2")
# Into the run's own folder, with enough of everything for the detectors, and the first policy's log-probs.
DUMPED = (
    *("--num-rollout", "10", "--dump-details", "dumps", "--use-kl-loss", "--kl-loss-coef", "0"),
    *("--rollout-batch-size", "16", "--n-samples-per-prompt", "8"),
)
CERTIFIED = "slime_ext: certificate, weights {}: {}"
NEVER = {"action": "stop", "steps": 1}


@dataclass(frozen=True)
class Fault:
    """One run, and how it must end.

    Args:
        planted: the variable PLANTED.
        config: the file of --custom-config-path.
        flags: more of the host's flags.
        ends: a pattern of the last line on the screen; empty: the run comes to its end.
        rollouts: how many of them were trained on.
        says: a pattern of a line that the log must have.
        held: what must hold of every line of off_policy.jsonl, metric -> (least, most).
        again: whether it is started a second time, with --load, and must then come to its end.
        asynchronous: train_async.py.
    """

    planted: str = "nothing"
    config: Mapping[str, Any] = field(default_factory=lambda: OURS)
    flags: tuple[str, ...] = ()
    ends: str = ""
    says: str = ""
    rollouts: int = ROLLOUTS
    held: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    again: bool = False
    asynchronous: bool = False


def with_ours(**keys: Any) -> dict[str, Any]:
    """The configuration with further keys under ``slime_ext:``."""
    return OURS | {"slime_ext": OURS["slime_ext"] | keys}


FAULTS = {
    "nan": Fault("nan", flags=PLANT, held={"nonfinite_fraction": (0.05, 0.3)}),
    "nan, without slime_ext": Fault("nan", HOSTS_OWN, PLANT, ends=".", rollouts=0),
    "nan, on_nonfinite raise": Fault(
        "nan", with_ours(on_nonfinite="raise"), PLANT, "slime_ext: rollout_log_probs, sequence .*got nan", 0
    ),
    "positive": Fault("positive", flags=PLANT, held={"nonfinite_fraction": (0.2, 0.3)}),
    "positive, without slime_ext": Fault("positive", HOSTS_OWN, PLANT),
    "missing": Fault("missing", flags=PLANT, ends="slime_ext: .*got none in 16 of 16", rollouts=0),
    "missing, without slime_ext": Fault("missing", HOSTS_OWN, PLANT, ends=".", rollouts=0),
    "some missing": Fault("some_missing", flags=PLANT, ends="slime_ext: .*got none in 4 of 16", rollouts=0),
    "some missing, without slime_ext": Fault("some_missing", HOSTS_OWN, PLANT, ends=".", rollouts=0),
    "dead engine": Fault("kill_engine", flags=PLANT, ends=".", rollouts=0),
    "engine killed twice": Fault("kill_engine_twice", flags=(*PLANT, *TWO_ENGINES, *TOLERANT)),
    "trainer killed": Fault(
        "kill_trainer",
        flags=("--custom-megatron-before-train-step-hook-path", "tests.downstream.planted.before_step"),
        ends=".",
        rollouts=2,
        again=True,
    ),
    "guard": Fault(
        config=with_ours(guards={"ratio_max": {"max": 0.0, **NEVER}}),
        ends="slime_ext: .*ratio_max",
        rollouts=1,
    ),
    "wrong key": Fault(
        config=with_ours(presett="geo_rs"),
        ends="slime_ext: .*a known key, got 'presett'",
        rollouts=0,
    ),
    "misspelt flag": Fault(
        flags=("--custom-tis-funtion-path", "slime_ext.tis.correct"),
        ends="slime_ext: --custom-tis-funtion-path: expected --custom-tis-function-path"
        "|.* unrecognized arguments: --custom-tis-funtion-path",  # the miles wheel's parser
        rollouts=0,
    ),
    "sound pushes": Fault("nothing", PUSHED, DUMPED, says=CERTIFIED.format(9, "sound"), rollouts=10),
    "pushes of older weights": Fault(
        "older_push", PUSHED, DUMPED, says=CERTIFIED.format(2, "NOT sound: no tensor"), rollouts=10
    ),
    "pushes without a layer": Fault(
        "skipped_layer",
        PUSHED,
        DUMPED,
        says=CERTIFIED.format(2, "NOT sound: layer 1 did not change"),
        rollouts=10,
    ),
    "pushes without a layer, guarded": Fault(
        "skipped_layer",
        with_ours(guards={"certified": {"min": 1, **NEVER}}) | PLANTED_INIT,
        ends="slime_ext: off_policy/certified",
        rollouts=2,
    ),
    "nan, a version old, guarded": Fault(
        "nan",
        with_ours(guards={"staleness_max": {"max": 0.0, "action": "stop", "steps": ROLLOUTS - 1}}),
        PLANT,
        ends="slime_ext: off_policy/staleness_max",
        held={"staleness_max": (0, 1), "nonfinite_fraction": (0.05, 0.3)},
        asynchronous=True,
    ),
}


def main(argv: list[str]) -> int:
    """Runs the faults that are named, else all, that OUT has no line of."""
    parser = argparse.ArgumentParser(prog="python -m tests.downstream.real_faults")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(FAULTS))
    parser.add_argument(
        "--out",
        type=lambda out: Path(out).absolute(),
        required=True,
        help="folder of the runs and of faults.jsonl",
    )
    parser.add_argument(
        "--host", default=driver.WHEEL, help="'miles' for the wheel, or the folder of a checkout"
    )
    given = parser.parse_args(argv)
    if unknown := [name for name in given.names if name not in FAULTS]:
        parser.error(f"expected one of {', '.join(FAULTS)}, got {unknown[0]}")
    given.out.mkdir(parents=True, exist_ok=True)
    table = given.out / "faults.jsonl"
    rows = [json.loads(line) for line in table.read_text().splitlines()] if table.exists() else []
    done = {row["fault"] for row in rows}
    for name in given.names or FAULTS:
        if name in done:
            continue
        row = run(name, FAULTS[name], given.host, given.out)
        rows.append(row)
        with table.open("a") as file:
            file.write(json.dumps(row, default=str) + "\n")
        print(json.dumps(row, default=str), flush=True)
    return int(any(row["wrong"] for row in rows))


def run(name: str, fault: Fault, host: str, out: Path) -> dict[str, Any]:
    """One row: how a run with a fault went, and what of it is not as the fault says."""
    folder = out / re.sub("[^a-z]+", "_", name)
    found = started(fault, host, out / "tiny", folder, fault.flags)
    wrong = complaints(fault, found, folder)
    if fault.again:
        again = Fault(rollouts=fault.rollouts)
        (folder / "log").rename(folder / "log.killed")
        more = ("--load", str(folder / "checkpoints"))
        found["again"] = started(again, host, out / "tiny", folder, more)
        wrong += complaints(Fault(), found["again"], folder)
    return {"fault": name, "host": str(host), "folder": folder, "wrong": wrong, **found}


def started(fault: Fault, host: str, task: Path, folder: Path, more: tuple[str, ...]) -> dict[str, Any]:
    """Runs the host with a fault; its status, its last line, the rollouts that it trained on, seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    letters.write(task, seed=0)
    config = folder / "config.yaml"
    config.write_text(json.dumps(fault.config))  # which YAML can read
    flags = tiny_host.flags(task, PROMPTS, PER_ROLLOUT // PROMPTS, ROLLOUTS, steps=1)
    flags += [*tiny.engine_flags(), "--custom-config-path", str(config)]
    flags += ["--save", str(folder / "checkpoints"), "--save-interval", "1", *more]
    flags += ["--use-tensorboard", "--tb-project-name", "faults", "--tb-experiment-name", "run"]
    environment = {
        "PLANTED": fault.planted,
        "PYTHONPATH": str(ROOT),
        "TENSORBOARD_DIR": str(folder / "tensorboard"),
    }
    began = time.monotonic()
    run = driver.HostRun(host, folder, flags, fault.asynchronous, timeout=TIMEOUT_S, environment=environment)
    status = run.run()
    seconds = round(time.monotonic() - began)
    return {"status": status, "trained": len(steps_of(folder)), "seconds": seconds, "last": last_line(folder)}


def complaints(fault: Fault, found: Mapping[str, Any], folder: Path) -> list[str]:
    """What did not go as the fault says."""
    wrong = []
    if bool(fault.ends) != bool(found["status"]):
        wrong.append(f"status {found['status']}")
    if fault.ends and not re.match(fault.ends, found["last"]):
        wrong.append(f"last line {found['last']!r}")
    if "slime_ext" in fault.config and found["trained"] != fault.rollouts:
        wrong.append(f"trained on {found['trained']} rollouts")
    if not re.search(fault.says, (folder / "log").read_text(errors="replace")):
        wrong.append(f"no line {fault.says!r}")
    if "engine" in fault.planted and "planted: kills" not in (folder / "log").read_text(errors="replace"):
        wrong.append("no engine was killed")
    for metric, (least, most) in fault.held.items():
        values = [step[f"off_policy/{metric}"] for step in steps_of(folder)]
        if not values or not all(least <= value <= most for value in values):
            wrong.append(f"{metric} {values}")
    return wrong


def steps_of(folder: Path) -> list[dict[str, Any]]:
    """The lines of off_policy.jsonl."""
    file = folder / "checkpoints/off_policy.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def last_line(folder: Path) -> str:
    """What the user sees last."""
    lines = [line for line in (folder / "log").read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else ""


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main(sys.argv[1:]))
