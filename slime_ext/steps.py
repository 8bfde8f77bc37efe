"""Exports the steps of a correction, and the classes for writing your own.

docs/your_own_correction.md says how to write one.
"""

from slime_ext.core.needs import Need
from slime_ext.core.prefix_steps import PREFIX_STEPS, PrefixBudget, PrefixReject, PrefixReweight
from slime_ext.core.state import Effect, State, Step, StepInputs
from slime_ext.core.statistics import statistics_of
from slime_ext.core.steps import (
    STEPS,
    Clip,
    EssTruncate,
    MinPrefixReweight,
    Normalize,
    Reject,
    Reweight,
    SecondMoment,
    SignedClip,
    Truncate,
    Veto,
)
from slime_ext.ops.segments import Segments

__all__ = [
    "PREFIX_STEPS",
    "STEPS",
    "Clip",
    "Effect",
    "EssTruncate",
    "MinPrefixReweight",
    "Need",
    "Normalize",
    "PrefixBudget",
    "PrefixReject",
    "PrefixReweight",
    "Reject",
    "Reweight",
    "SecondMoment",
    "Segments",
    "SignedClip",
    "State",
    "Step",
    "StepInputs",
    "Truncate",
    "Veto",
    "statistics_of",
]
