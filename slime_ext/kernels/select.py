"""Which backend serves a correction, and why: the one place that decides.

On CUDA ``auto`` takes the kernels where they have been proven on the very device (``proof``), and stays eager
elsewhere: a run's loss is not the place to try them.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from pathlib import Path
from typing import NamedTuple

import torch

from slime_ext.correction import Correction
from slime_ext.errors import ConfigError
from slime_ext.kernels.apply import Backend, Eager
from slime_ext.kernels.built import compiler
from slime_ext.kernels.names import check_name
from slime_ext.kernels.proof import is_proven
from slime_ext.steps import STEPS


class Choice(NamedTuple):
    """A backend by name, and one phrase that says why."""

    name: str
    why: str


def choose(correction: Correction, device: torch.device | str = "cpu", backend: str = "auto") -> Choice:
    """The backend for a correction's tokens on a device.

    Raises:
        ConfigError: no such backend, or Triton on a device that it cannot serve.
    """
    check_name(backend)
    kind = torch.device(device).type
    if backend == "eager":
        return Choice("eager", "asked for")
    hindrance = _hindrance(correction)
    if hindrance:
        return Choice("eager", f"{hindrance} stays eager")
    if backend == "triton":
        _require_triton(kind)
        return Choice("triton", "asked for")
    return _on_device(kind) if backend == "auto" and kind != "cpu" else _compiled(kind)


def _on_device(kind: str) -> Choice:
    if kind != "cuda":
        return Choice("eager", f"no kernels for {kind}")
    if not _has_triton():
        return Choice("eager", "triton is not installed")
    if not is_proven():
        return Choice("eager", "slime-ext doctor --kernels has not proven the kernels on this device")
    return Choice("triton", "proven on this device")


def _compiled(kind: str) -> Choice:
    if kind == "cpu":
        found = compiler()
        return (
            Choice("compiled", f"C++ by {Path(found).name}") if found else Choice("eager", "no C++ compiler")
        )
    return (
        Choice("compiled", "torch.compile") if _has_triton() else Choice("eager", "triton is not installed")
    )


def describe(correction: Correction, device: torch.device | str = "cpu", backend: str = "auto") -> str:
    """What host start-up prints. Raises ConfigError as ``choose``.

    >>> from slime_ext import presets
    >>> describe(presets.get("turn_tis"), backend="compiled")
    'backend eager (a statistic over turns stays eager)'
    """
    chosen = choose(correction, device, backend)
    more = "; what couples samples is settled eagerly" if correction.is_coupled else ""
    return f"backend {chosen.name} ({chosen.why}{more})"


@functools.lru_cache(maxsize=256)  # what-if asks for every preset in turn
def backend_for(correction: Correction, device: str = "cpu", backend: str = "auto") -> Backend:
    """The backend itself, the same one for the same question.

    Args:
        device: its type, such as ``cuda``.
    """
    name = choose(correction, device, backend).name
    if name == "triton":
        from slime_ext.kernels.triton import Triton

        return Triton(correction)
    if name == "compiled" and device == "cpu":
        from slime_ext.kernels.loops import Loops

        return Loops(correction)
    if name == "compiled":
        from slime_ext.kernels.compiled import Compiled

        return Compiled(correction)
    if device == "cpu" and not _hindrance(correction):
        from slime_ext.kernels.vectors import Vectors

        return Vectors(correction)
    return Eager(correction)


def _hindrance(correction: Correction) -> str:
    """What neither graphs nor kernels know of a correction's steps."""
    if any(type(step) not in STEPS.values() for step in correction.steps):
        return "a step that takes statistics of its own (another system's block)"
    for need in correction.needs(observe=True):
        if need.unit == "turn":
            return "a statistic over turns"
        if need.aggregate != "sum":
            return "a minimum over prefixes" if need.aggregate == "slots" else "a maximum with a lower bound"
    return ""


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _require_triton(kind: str) -> None:
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not _has_triton() or (kind != "cuda" and not interpreted):
        raise ConfigError(
            f"slime_ext.backend: expected a CUDA device and triton beside 'triton', got {kind}: use auto, or "
            "TRITON_INTERPRET=1 to try the kernels slowly"
        )
