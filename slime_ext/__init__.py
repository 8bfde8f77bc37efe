"""slime_ext: off-policy correction for Megatron RL. Names are imported on first use, so that importing costs
nothing."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "Correction": "slime_ext.correction",
    "load_config": "slime_ext.config",
}
_ROOMS = ("ops", "presets", "steps", "tis")

__all__ = [*_HOME, *_ROOMS, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if name in _ROOMS:
        return importlib.import_module(f"slime_ext.{name}")
    raise AttributeError(f"module 'slime_ext' has no attribute '{name}'")
