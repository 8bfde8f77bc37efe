"""Tests your own correction on made-up responses.

``check_step(step, definition)`` and ``check_hook(hook, definition)`` test the contracts of steps and hooks.
The definition is plain Python over one response (``Sample``), so the reference uses no tensors. At start-up,
``check_step`` runs on each of your own steps that a configuration names.
"""

from slime_ext.testing.hooks import check_hook
from slime_ext.testing.steps import Sample, check_step, samples

__all__ = ["Sample", "check_hook", "check_step", "samples"]
