"""slime_ext: off-policy correction for Megatron RL. Names are imported on first use, so that importing costs
nothing."""

from __future__ import annotations

from slime_ext.lazily import exported

__version__ = "0.1.0"

FILES = {"Correction": "correction", "load_config": "config"}
ROOMS = ("ops", "presets", "steps", "tis")

__all__ = ["__version__", *FILES, *ROOMS]
__getattr__, __dir__ = exported(__name__, FILES, ROOMS)
