"""slime_ext: off-policy correction for Megatron RL.

Importing it is cheap, because names load on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime_ext import ops, presets, steps, tis
    from slime_ext.config.flat import correct
    from slime_ext.config.load import load_config
    from slime_ext.core.correction import Correction

__version__ = "0.3.0"

FILES = {  # attribute -> the module that defines it
    "Correction": "slime_ext.core.correction",
    "correct": "slime_ext.config.flat",
    "load_config": "slime_ext.config.load",
}
MODULES = ("ops", "presets", "steps", "tis")

__all__ = ["Correction", "__version__", "correct", "load_config", "ops", "presets", "steps", "tis"]


def __getattr__(name: str) -> Any:
    if name in FILES:
        return getattr(importlib.import_module(FILES[name]), name)
    if name in MODULES:
        return importlib.import_module(f"slime_ext.{name}")
    from slime_ext.errors import did_you_mean

    raise AttributeError(f"module 'slime_ext' has no attribute '{name}'{did_you_mean(name, __all__)}")


def __dir__() -> list[str]:
    return sorted([*FILES, *MODULES])
