"""Runs ``slime-ext train`` with an arm's settings, and makes the line of the run."""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.evidence.rows import Row
from benchmarks.evidence.settings import ROOT, Settings, base
from slime_ext.errors import ConfigError
from slime_ext_cpu.driver import COMPUTING
from slime_ext_cpu.progress import HELDOUT, HELDOUT_TRAINED, METRICS, SHOWN
from slime_ext_cpu.stand_ins import bfloat16
from slime_ext_cpu.stand_ins.hosts import ROUND, SCORE
from slime_ext_cpu.tasks import sums, write_prompts
from slime_ext_cpu.train import DUMP

DIVERGED = "NaN", "nan", "finite"
SOURCE, FOLLOWER = "B", "G"  # B's first rollouts are analysed, G trains with what is recommended
UNCORRECTED = "metrics_only"
# flags of slime-ext train; all other flags are the host's
TRAIN = "task", "correction", "lag", "rollouts", "seed", "threads"
PROMPT = "prompt"  # with {a} and {b}
ASKED = "heldout_prompts"  # how many prompts; by default all of the task's
ROUNDING = "rounding"  # of the sampler's weights
SCORED = "score"  # both: score with the pushed weights and with the trainer's
WIDENED = "bfloat16"  # float32: the type in which bfloat16 tensors are multiplied
STEPS = "num_steps_per_rollout"
LARGE = "dump", "checkpoint"
LOGGED = {  # name in a line's ``rollouts`` -> the run's metric
    "k3": SHOWN["k3"],
    "ess": SHOWN["ess"],
    "ess_ratio": "train/off_policy/ess_ratio",  # from the raw ratios, so it is the same quantity in every arm
    "ratio_p99": "train/off_policy/ratio_p99",
    "ratio_max": "train/off_policy/ratio_max",
    "weight_mean": "train/off_policy/weight_mean",
    "clipped": "train/off_policy/clipped_fraction",
    "ppo_clipped": "train/pg_clipfrac",
    "reward": SHOWN["reward"],
    "advantage_mean": "rollout/advantages",
    "grad_norm": "train/grad_norm",
    "heldout": HELDOUT,
    "heldout_trained": HELDOUT_TRAINED,
}
# Without an entropy bonus the host logs no entropy. The sampler's mean -log-prob of its own tokens estimates
# its entropy without bias, in nats per token. The trainer's mean at the same tokens is a cross-entropy.
PERPLEXITY = {"entropy": "perplexity_behavior", "cross_entropy": "perplexity_numerator"}
COMPUTE = "torch", "transformers", "sglang", "ray", "miles-rl"
VERSIONS = """
import json, platform, sys
from importlib.metadata import version
print(json.dumps({"python": platform.python_version(), **{name: version(name) for name in sys.argv[1:]}}))
"""


def missing(
    of: Settings, panel: str, arms: list[str], seeds: list[int], done: list[Row]
) -> Iterator[tuple[str, int]]:
    """Yields (arm, seed) of each run without a line.

    It goes seed by seed, so that the table is always balanced.
    """
    for seed in seeds:
        for arm in arms:
            if line_of(of, panel, arm, seed, done) is None:
                yield arm, seed


def line_of(of: Settings, panel: str, arm: str, seed: int, done: Sequence[Row]) -> Row | None:
    """Returns the line of a run.

    On a host, it can be the line of another arm or panel with the same command.

    Arm G has the line of C if analyze recommends token_tis. Arm A has no mismatch, so it is the same run in
    every panel with the same flags.
    """
    key = panel, arm, seed, of.digest(panel, arm)
    line = next((row for row in done if row.key == key), None)
    if line is not None or of.panels[panel].host is None:
        return line
    recommended = _advised(of, panel, seed, done) if arm == FOLLOWER else None
    if arm == FOLLOWER and recommended is None:
        return None
    words = seed, of.digest(panel, arm, recommended)
    return next((row for row in done if (row.seed, row.settings) == words and row.arm != FOLLOWER), None)


def refuse(of: Settings, panel: str, seeds: Iterable[int], done: Iterable[Row]) -> None:
    """Raises ConfigError if a run would not count.

    Raises:
        ConfigError: the panel has no host, or the settings of test seeds are not fixed, or they differ from
            those of the panel's lines. Or the environment changes how a run computes.
    """
    for name in (name for name in COMPUTING if name in os.environ):  # no line says so
        raise ConfigError(
            f"{name}: expected unset, got a value: unset it, because settings.yaml alone says how to compute"
        )
    place, test = f"settings.yaml: panels: {panel}", set(of.panels[panel].seeds)
    if of.panels[panel].host is None:
        raise ConfigError(
            f"{place}: expected a panel with a host, got one of the training "
            "loop that is gone: its lines stay, and each names the commit at which it can run again"
        )
    if test & set(seeds) and of.panels[panel].frozen is None:
        raise ConfigError(
            f"{place}: frozen: expected a date before test seeds run, got none: tune with other seeds, then "
            "fix the settings in a commit"
        )
    tried = of.panels[panel].frozen is None  # the settings of a pilot may differ
    for row in () if tried else done:
        if row.panel == panel and row.seed in test and row.settings != of.digest(panel, row.arm):
            raise ConfigError(
                f"{place}: expected the settings {row.settings} of {row.arm} seed {row.seed}'s line, got "
                f"{of.digest(panel, row.arm)}: they were frozen"
            )


def run(
    of: Settings, panel: str, arm: str, seed: int, out: Path, done: list[Row], *, keep: bool = False
) -> Row:
    """Trains, and returns the run's line.

    Args:
        keep: whether to keep its dumps and its last checkpoint of 2 GB.

    Raises:
        ConfigError: the run stopped, but it did not diverge, so it says nothing about its arm.
    """
    recommended = _recommended(of, panel, arm, seed, done)
    folder = (out / panel / f"{arm}-{seed}-{of.digest(panel, arm)}").absolute()
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
    folder.parent.mkdir(parents=True, exist_ok=True)
    prompts = folder.parent / "prompts"
    write_prompts_of(of, panel, prompts)
    words, environment = command(of, panel, arm, seed, recommended, prompts)
    began = time.monotonic()
    stopped = train([*words[:1], "--out", str(folder), *words[1:]], environment, folder)
    seconds = round(time.monotonic() - began)
    effects = None
    if base(arm) == SOURCE:
        recommended, effects = analyse(folder, of.panels[panel].analysed)
    metrics = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    steps = of.panels[panel].flags.get(STEPS, 1)
    curve = heldout(metrics, steps)
    for name in () if keep else LARGE:
        shutil.rmtree(folder / name, ignore_errors=True)
    return Row(
        panel=panel,
        arm=arm,
        seed=seed,
        settings=of.digest(panel, arm),
        commit=commit(),
        versions=versions(),
        heldout=curve,
        heldout_trained=heldout(metrics, steps, HELDOUT_TRAINED) or None,
        end=0.0 if stopped else curve[-1][1],
        k3=_median(metrics, SHOWN["k3"]),
        ess=_median(metrics, SHOWN["ess"]),
        stopped=stopped,
        recommended=recommended,
        effects=effects,
        rollouts=logged(metrics),
        seconds=seconds,
    )


def write_prompts_of(of: Settings, panel: str, folder: Path) -> None:
    """Writes the task's sums as prompts in the panel's form, by default the task's."""
    folder.mkdir(parents=True, exist_ok=True)
    flags = of.panels[panel].flags
    train, heldout = sums.prompts(flags.get(PROMPT, sums.PROMPT))
    write_prompts(folder, train, heldout[: flags.get(ASKED)])


def command(
    of: Settings, panel: str, arm: str, seed: int, recommended: str | None = None, prompts: Path = Path()
) -> tuple[list[str], dict[str, str]]:
    """Returns the words after `slime-ext`, and the variables, of an arm's run.

    Args:
        prompts: the folder that `write_prompts_of` made.
    """
    flags = of.flags(panel, arm, seed, recommended)
    preset = flags.pop("custom_tis_function_path", UNCORRECTED).rpartition(".")[2]
    for name in ("use_tis", "rollout_seed", PROMPT, ASKED):  # slime-ext train sets the first two itself
        flags.pop(name, None)
    flags = {"correction": preset} | flags
    variables = {ROUND: ROUNDING, SCORE: SCORED, bfloat16.VARIABLE: WIDENED}
    environment = {variable: flags.pop(name) for variable, name in variables.items() if name in flags}
    ours = {name: flags.pop(name) for name in TRAIN if name in flags}
    flags["prompt_data"] = prompts / "train.jsonl"
    flags["eval_prompt_data"] = ["heldout", prompts / "heldout.jsonl"]
    words = ["train", "--host", of.panels[panel].host]
    return [*words, *_words(ours), "--", *_words(flags)], environment


def _words(flags: Mapping[str, Any]) -> Iterator[str]:
    """Yields `--name value` for each flag, and `--name` alone for a switch."""
    for name, value in flags.items():
        yield f"--{name.replace('_', '-')}"
        if value is not True:
            yield from map(str, value if isinstance(value, list) else [value])


def heldout(metrics: Iterable[Mapping[str, Any]], steps: int, name: str = HELDOUT) -> list[tuple[int, float]]:
    """Returns (optimizer steps so far, held-out share) of each evaluation. Rollout -1 is before training."""
    return [(steps * (row["rollout"] + 1), round(row[name], 4)) for row in metrics if name in row]


def logged(metrics: Iterable[Mapping[str, Any]]) -> list[dict[str, float]]:
    """Returns the metrics ``LOGGED`` and the entropies of each rollout, to four significant digits."""
    rollouts = []
    for row in metrics:
        values = {name: row[metric] for name, metric in LOGGED.items() if row.get(metric) is not None}
        for name, metric in PERPLEXITY.items():
            if row.get(f"train/off_policy/{metric}"):
                values[name] = math.log(row[f"train/off_policy/{metric}"])
        rollouts.append({"rollout": row["rollout"]} | {name: float(f"{v:.4g}") for name, v in values.items()})
    return rollouts


def _median(metrics: Iterable[Mapping[str, Any]], name: str) -> float | None:
    values = [row[name] for row in metrics if row.get(name) is not None]
    return float(f"{statistics.median(values):.3g}") if values else None


def _recommended(of: Settings, panel: str, arm: str, seed: int, done: list[Row]) -> str | None:
    """Returns the correction of arm G, from B's line of the same seed."""
    if arm != FOLLOWER:
        return None
    name = _advised(of, panel, seed, done)
    if name is None:
        raise ConfigError(
            f"{panel}: {FOLLOWER} seed {seed}: expected {SOURCE}'s line before it, got none: run {SOURCE}"
        )
    return name


def _advised(of: Settings, panel: str, seed: int, done: Iterable[Row]) -> str | None:
    """Returns what analyze recommended according to B's line; None without such a line."""
    source = panel, SOURCE, seed, of.digest(panel, SOURCE)
    return next((row.recommended for row in done if row.key == source), None)


def train(words: list[str], environment: Mapping[str, str], folder: Path) -> str | None:
    """Runs `slime-ext` with the words. Returns its message if the run diverged, else None.

    Raises:
        ConfigError: the run stopped for another reason.
    """
    ended = _slime_ext(words, environment)
    if ended.returncode == 0:
        return None
    said = (ended.stderr.strip() or ended.stdout.strip()).splitlines()[-1:] or ["nothing"]
    if any(word in said[0] for word in DIVERGED) and (folder / METRICS).exists():
        return said[0][:300]
    raise ConfigError(f"{folder}: expected the run to end, got: {said[0]}: see its log, then start again")


def analyse(folder: Path, rollouts: int) -> tuple[str, dict[str, tuple[float, float]]]:
    """Returns the correction that analyze recommends after the run's first rollouts, and each one's effect.

    An effect is (share of tokens kept, effective sample size) on those rollouts.
    """
    file = folder / "analysis.json"
    words = ["analyze", str(folder / DUMP), "--rollouts", f"0-{rollouts - 1}", "--json", str(file)]
    ended = _slime_ext(words)
    if not file.exists():
        raise ConfigError(f"{folder}: expected analyze to read the dumps, got: {ended.stderr.strip()[-300:]}")
    document = json.loads(file.read_text())
    known = (effect for effect in document["effects"] if effect["ess"] is not None)
    effects = {e["name"]: (round(e["kept_tokens"] / e["tokens"], 4), round(e["ess"], 4)) for e in known}
    return document["recommendation"]["name"], effects


def _slime_ext(
    words: list[str], environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT)} | dict(environment or {})
    started = [sys.executable, "-m", "slime_ext.tools.commands.cli", *words]
    return subprocess.run(started, cwd=ROOT, env=env, text=True, capture_output=True, check=False)


def commit() -> str:
    """Returns the commit of the code.

    It has a plus if a file other than the lines has changed.
    """

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, text=True, capture_output=True, check=False)
        return done.stdout.strip()

    status = git("status", "--porcelain", "-uno").splitlines()
    changed = [line for line in status if not line.endswith(".jsonl")]
    return git("rev-parse", "--short=10", "HEAD") + "+" * bool(changed)


@cache
def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that compute, in the host's environment."""
    asked = [sys.executable, "-c", VERSIONS, *COMPUTE]
    return json.loads(subprocess.run(asked, text=True, capture_output=True, check=True).stdout)


def commit_line(row: Row, path: Path) -> None:
    """Commits the new line, and nothing else."""
    file = str(path.relative_to(ROOT))
    message = f"Evidence: {row.panel}, arm {row.arm}, seed {row.seed}"
    for words in (("add", file), ("commit", "-q", "-m", message, "--", file)):
        subprocess.run(["git", *words], cwd=ROOT, check=True)
