"""A user's own step and calls type-check against the package, strictly."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mypy")
ROOT = Path(__file__).parents[1]

OWN = """
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

import slime_ext
from slime_ext.steps import Effect, Need, State, Step, StepInputs, statistics_of
from slime_ext.testing import Sample, check_step


@dataclass(frozen=True)
class Tempered(Step):
    power: float = 0.5

    effects = frozenset({Effect.REWEIGHT})
    unit = "sequence"
    statistics = statistics_of("sequence", "sum", "ratio")

    @cached_property
    def needs(self) -> frozenset[Need]:
        return frozenset({Need.ADVANTAGES}) if self.power > 1 else frozenset()

    def __call__(self, state: State, inputs: StepInputs) -> State:
        own = inputs.prefix("turn", "mean", inputs.advantages * inputs.log_ratio)
        total = inputs.total("sequence", "sum", "ratio")
        return state.reweight("sequence", (self.power * total).exp()).reject("token", own < 1)


def definition(sample: Sample) -> list[float]:
    return [0.5] * len(sample.mask)


check_step(Tempered(0.25), definition)
correction: slime_ext.Correction = slime_ext.load_config({"preset": "token_tis"})
loss, keep, metrics = slime_ext.correct(torch.ones(1), torch.ones(1), torch.ones(1), [1], correction)
kept: Tensor = keep
share: float = metrics["off_policy/kept_fraction"]
"""
WRONG = 'broken: int = slime_ext.correct(torch.ones(1), torch.ones(1), torch.ones(1), [1], "token_tis")'


@pytest.mark.slow
def test_a_step_of_ones_own_type_checks_and_a_wrong_line_alone_does_not(tmp_path):
    (tmp_path / "own.py").write_text(f"{OWN}\n{WRONG}\n")
    cache = ["--cache-dir", str(ROOT / "build/mypy")]  # torch alone takes seconds
    words = ["--config-file", str(ROOT / "pyproject.toml"), *cache, "--strict", "own.py"]
    ran = subprocess.run(
        [sys.executable, "-m", "mypy", *words],
        cwd=tmp_path,
        env={"MYPYPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    last = len((tmp_path / "own.py").read_text().splitlines())
    errors = [line for line in ran.stdout.splitlines() if ": error:" in line]
    assert ran.returncode == 1 and [line.split(":")[1] for line in errors] == [str(last)], ran.stdout
