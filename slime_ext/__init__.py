"""slime_ext: off-policy correction for Megatron RL.

Importing it is cheap, because names load on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime_ext.core.lazy_attributes import lazy_attributes

if TYPE_CHECKING:
    from slime_ext import ops, presets, steps, tis
    from slime_ext.config.flat import correct
    from slime_ext.config.load import load_config
    from slime_ext.core.correction import Correction

__version__ = "0.3.0"

FILES = {"Correction": "core.correction", "correct": "config.flat", "load_config": "config.load"}
MODULES = ("ops", "presets", "steps", "tis")

__all__ = ["Correction", "__version__", "correct", "load_config", "ops", "presets", "steps", "tis"]
__getattr__, __dir__ = lazy_attributes(__name__, FILES, MODULES)
