"""Which backend serves a correction, and why: the one place that decides.

``auto`` stays eager. On CUDA because no kernel has run on a device yet (``PROVEN``): they were compared with
eager in Triton's interpreter and compiled for sm_90, and a run's loss is not the place to try them. On a CPU
because compiling the graphs of one correction takes tens of seconds and saves some ten nanoseconds a token,
so it pays after about 10^9 tokens, more than a run on a CPU sees.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
from typing import NamedTuple

import torch

from slime_ext.correction import Correction
from slime_ext.errors import ConfigError
from slime_ext.kernels.apply import Backend, Eager
from slime_ext.kernels.names import check_name
from slime_ext.steps import STEPS

PROVEN: tuple[str, ...] = ()  # kinds of device on which tests_gpu/test_kernels_cuda.py has passed


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
    if backend == "auto" and kind == "cpu":
        return Choice("eager", "compiling would cost more than it saves on this device")
    if backend == "auto" and kind not in PROVEN:
        return Choice("eager", f"the kernels have not been proven on {kind} yet; backend: triton takes them")
    if backend == "eager":
        return Choice("eager", "asked for")
    hindrance = _hindrance(correction)
    if hindrance:
        return Choice("eager", f"{hindrance} stays eager")
    if backend == "compiled":
        return Choice("compiled", "asked for") if _compiles(kind) else Choice("eager", "no C++ compiler here")
    if backend == "triton" or _has_triton():
        _require_triton(kind)
        return Choice("triton", "asked for" if backend == "triton" else kind)
    return Choice("eager", "triton is not installed")


def describe(correction: Correction, device: torch.device | str = "cpu", backend: str = "auto") -> str:
    """What host start-up prints. Raises ConfigError as ``choose``.

    >>> from slime_ext import presets
    >>> describe(presets.get("turn_tis"), backend="compiled")
    'backend eager (a statistic over turns stays eager)'
    """
    chosen = choose(correction, device, backend)
    more = "; what couples samples is settled eagerly" if correction.is_coupled else ""
    return f"backend {chosen.name} ({chosen.why}{more})"


@functools.lru_cache(maxsize=16)
def backend_for(correction: Correction, device: str = "cpu", backend: str = "auto") -> Backend:
    """The backend itself, the same one for the same question.

    Args:
        device: its type, such as ``cuda``.
    """
    name = choose(correction, device, backend).name
    if name == "triton":
        from slime_ext.kernels.triton import Triton

        return Triton(correction)
    if name == "compiled":
        from slime_ext.kernels.compiled import Compiled

        return Compiled(correction)
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


def _compiles(kind: str) -> bool:
    if kind != "cpu":
        return _has_triton()
    return any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "g++", "clang++"))


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _require_triton(kind: str) -> None:
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not _has_triton() or (kind != "cuda" and not interpreted):
        raise ConfigError(
            f"slime_ext.backend: expected a CUDA device and triton beside 'triton', got {kind}: use auto, or "
            "TRITON_INTERPRET=1 to try the kernels slowly"
        )
