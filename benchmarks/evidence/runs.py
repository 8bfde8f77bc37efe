"""One run: the launcher with the flags of an arm, then its line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from benchmarks.evidence import chain, settings
from benchmarks.evidence.rows import Row
from benchmarks.evidence.settings import ROOT, Panel, Settings
from slime_ext.errors import ConfigError
from slime_ext.launcher.output.metrics_log import read_metrics
from slime_ext.launcher.validation.places import default_python

DIVERGED = ("the weights have diverged", "expected a finite gradient norm")
SOURCE, FOLLOWER = "B", "G"  # whose first rollouts are analysed, and who trains with what comes out
DUMPS = ("rollout_data", "train_data")


def missing(
    of: Settings, panel: str, arms: list[str], seeds: list[int], done: list[Row]
) -> Iterator[tuple[str, int]]:
    """(arm, seed) of the runs without a line, seed by seed: the table is balanced whenever it is read."""
    have = {row.key for row in done}
    for seed in seeds:
        for arm in arms:
            if (panel, arm, seed, of.digest(panel, arm)) not in have:
                yield arm, seed


def refuse_thawed(of: Settings, panel: str, seeds: list[int], done: list[Row]) -> None:
    """Raises where test seeds would run with settings that are not fixed, or are others than their lines'.

    Raises:
        ConfigError: no date under `frozen`, or a line whose settings are not the file's.
    """
    test = set(of.panels[panel].seeds)
    if test & set(seeds) and of.panels[panel].frozen is None:
        raise ConfigError(
            f"settings.yaml: panels: {panel}: frozen: expected a date before test seeds run, got none: tune "
            "with other seeds, then fix the settings in a commit"
        )
    for row in done:
        if row.panel == panel and row.seed in test and row.settings != of.digest(panel, row.arm):
            raise ConfigError(
                f"settings.yaml: panels: {panel}: expected the settings {row.settings} of {row.arm} seed "
                f"{row.seed}'s line, got {of.digest(panel, row.arm)}: they were frozen"
            )


def run(of: Settings, panel: str, arm: str, seed: int, out: Path, done: list[Row]) -> Row:
    """Trains; the run's line.

    Raises:
        ConfigError: the run stopped for another reason than that it diverged; nothing is said about its arm.
    """
    recommended = _recommended(of, panel, arm, seed, done)
    folder = (out / panel / f"{arm}-{seed}").absolute()
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
    folder.mkdir(parents=True)
    analysed = arm == SOURCE
    flags = settings.located(of.flags(panel, arm, seed, recommended)) | {"no_dump_details": not analysed}
    flags |= _start(of.panels[panel], flags, out.absolute() / panel / f"start-{seed}")
    (folder / "flags.yaml").write_text(yaml.safe_dump(flags))
    began = time.monotonic()
    stopped = train(folder)
    if analysed:
        recommended = analyse(folder, of.analysed_rollouts)
    curve = [(row["step"], row["eval/heldout"]) for row in read_metrics(folder) if row["kind"] == "eval"]
    _forget(folder)
    return Row(
        panel=panel,
        arm=arm,
        seed=seed,
        settings=of.digest(panel, arm),
        commit=commit(),
        versions=versions(),
        heldout=[(step, round(value, 4)) for step, value in curve],
        end=0.0 if stopped else round(curve[-1][1], 4),
        stopped=stopped,
        recommended=recommended,
        seconds=round(time.monotonic() - began),
    )


def _start(panel: Panel, flags: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The flags of the panel's own task, and of the model that its runs of a seed start from, made once."""
    found = {} if panel.chain is None else chain.write(panel.chain, folder.parent / "task")
    if panel.warm is None:
        return found
    model = folder / "model"
    if not model.exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "flags.yaml").write_text(yaml.safe_dump(flags | found))
        words = ["--config", folder / "flags.yaml", "--out", model]
        words += ["--until", panel.warm.until, "--lr", panel.warm.lr]
        ended = _command("benchmarks.evidence.warm", *words)
        if ended.returncode:
            raise ConfigError(f"{model}: expected a trained model, got: {ended.stderr.strip()[-300:]}")
    return found | {"hf_checkpoint": str(model)}


def _recommended(of: Settings, panel: str, arm: str, seed: int, done: list[Row]) -> str | None:
    """What arm G trains with, from B's line of the same seed."""
    if arm != FOLLOWER:
        return None
    source = panel, SOURCE, seed, of.digest(panel, SOURCE)
    found = [row.recommended for row in done if row.key == source]
    if not found or found[0] is None:
        raise ConfigError(
            f"{panel}: {FOLLOWER} seed {seed}: expected {SOURCE}'s line before it, got none: run {SOURCE}"
        )
    return found[0]


def train(folder: Path) -> str | None:
    """Runs the launcher with the folder's flags; what it said if it diverged, else None.

    Raises:
        ConfigError: it stopped for another reason.
    """
    words = [
        "train",
        "--config",
        folder / "flags.yaml",
        "--run-dir",
        folder.parent,
        "--run-name",
        folder.name,
    ]
    ended = _command("slime_ext.cli", *words)
    if ended.returncode == 0:
        return None
    said = ended.stderr.strip().splitlines()[-1:] or ["nothing"]
    if any(word in ended.stderr for word in DIVERGED):
        return said[0]
    raise ConfigError(f"{folder}: expected the run to end, got: {said[0]}: see its logs, then start again")


def analyse(folder: Path, rollouts: int) -> str:
    """The correction that analyze recommends after the run's first rollouts."""
    file = folder / "analysis.json"
    ended = _command("slime_ext.cli", "analyze", folder, "--rollouts", f"0-{rollouts - 1}", "--json", file)
    if not file.exists():
        raise ConfigError(f"{folder}: expected analyze to read the dumps, got: {ended.stderr.strip()[-300:]}")
    return json.loads(file.read_text())["recommendation"]["name"]


def _command(module: str, *words: object) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", module, *map(str, words)]
    return subprocess.run(command, cwd=ROOT, env=env, text=True, capture_output=True, check=False)


def _forget(folder: Path) -> None:
    """Drops what is large; metrics, logs and the analysis stay."""
    for name in (*DUMPS, "checkpoints", "weights", "weights_evaluated"):
        shutil.rmtree(folder / name, ignore_errors=True)


def commit() -> str:
    """Of the code, with a plus where a file other than the lines has changed."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=ROOT, text=True, capture_output=True, check=False
        ).stdout.strip()

    changed = [
        line for line in git("status", "--porcelain", "-uno").splitlines() if not line.endswith(".jsonl")
    ]
    return git("rev-parse", "--short=10", "HEAD") + "+" * bool(changed)


@cache
def versions() -> dict[str, str]:
    """Of what computes."""
    found = {name: version(name) for name in ("torch", "megatron-core", "transformers")}
    asked = "from importlib.metadata import version; print(version('sglang'))"
    python = subprocess.run(
        [default_python(), "-c", asked], cwd=ROOT, text=True, capture_output=True, check=True
    )
    return found | {"python": sys.version.split()[0], "sglang": python.stdout.strip()}


def commit_line(row: Row, path: Path) -> None:
    """A commit that holds the new line alone."""
    file = str(path.relative_to(ROOT))
    message = f"Evidence: {row.panel}, arm {row.arm}, seed {row.seed}"
    for words in (("add", file), ("commit", "-q", "-m", message, "--", file)):
        subprocess.run(["git", *words], cwd=ROOT, check=True)
