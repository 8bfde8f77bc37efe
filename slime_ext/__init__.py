"""slime_ext: off-policy correction for Megatron RL. Names are imported on first use, so that importing costs
nothing."""

from __future__ import annotations

from slime_ext.core.lazy_attributes import lazy_attributes

__version__ = "0.2.0"

FILES = {"Correction": "core.correction", "correct": "config.flat", "load_config": "config.load"}
MODULES = ("ops", "presets", "steps", "tis")

__all__ = ["__version__", *FILES, *MODULES]
__getattr__, __dir__ = lazy_attributes(__name__, FILES, MODULES)
