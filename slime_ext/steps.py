"""The steps of a correction, and the classes to write your own with: docs/your_own_correction.md."""

from slime_ext.core.state import State, Step, StepInputs, statistics_of
from slime_ext.core.steps import (
    STEPS,
    Clip,
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
    "STEPS",
    "Clip",
    "MinPrefixReweight",
    "Normalize",
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
