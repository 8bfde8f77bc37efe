"""Makes the cases that are beside the repository."""

from __future__ import annotations

import runpy
import sys
from importlib import import_module
from pathlib import Path

import numpy
import torch

from benchmarks.faults.saving import save

CASES = Path(__file__).parents[5] / "shared" / "cases"


def draw(rng: numpy.random.Generator, log_probs: numpy.ndarray) -> numpy.ndarray:
    """The tokens that ``draw`` of the cases returns, in half the time: in ``rng.gumbel`` numpy computes one
    logarithm at a time."""
    numbers = rng.random(log_probs.shape)
    times = -numpy.log(1 - numbers)
    return (log_probs - numpy.log(times)).argmax(-1)


def make(monkeypatch, script: Path, world: str, *words: str) -> None:
    """Runs a script with some arguments here, because a new process imports torch for two seconds.

    Args:
        world: the module of the script's model, in one of its folders.
    """
    folders = [str(folder) for folder in script.parents if folder.is_relative_to(CASES)]
    monkeypatch.setattr(sys, "path", [*folders, *sys.path])  # the script adds its folder, too
    monkeypatch.setattr(sys, "argv", [str(script), *words])
    monkeypatch.setattr(torch, "save", save)
    monkeypatch.setattr(import_module(world), "draw", draw)
    runpy.run_path(str(script), run_name="__main__")
