"""What a user pastes into a launch."""

from __future__ import annotations

from slime_ext.core.correction import Correction
from slime_ext.host.contract import INIT_FLAG


def flags_of(name: str, correction: Correction) -> str:
    """The flags, all slime's own, that make a launch use the preset ``name``."""
    switch = "--use-tis" if correction.steps or correction.needs_target else "--get-mismatch-metrics"
    plan = " --get-mismatch-metrics" if correction.needs_plan else ""
    return f"{switch} --custom-tis-function-path slime_ext.tis.{name} {INIT_FLAG}{plan}"
