"""Writes what a user pastes into a launch or into a file for --custom-config-path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from slime_ext.core.needs import Need
from slime_ext.hosts.contract import GENERATE_FLAG, INIT_FLAG, OURS, TIS

if TYPE_CHECKING:
    from slime_ext.core.correction import Correction


def flags_of(name: str, correction: Correction) -> str:
    """Returns the flags of slime that use the preset ``name``. ``init`` only measures."""
    if not acts(correction):
        return INIT_FLAG
    more = " --get-mismatch-metrics" if correction.needs_plan else ""
    more += f" {GENERATE_FLAG}" if correction.center is not None else ""
    return f"--use-tis --custom-tis-function-path {TIS}.{name} {INIT_FLAG}{more}"


def file_of(mapping: Mapping[str, Any], correction: Correction) -> dict[str, Any]:
    """Returns the keys of a file with which a launch uses a native mapping."""
    functions = ["custom_megatron_init_path", "custom_rollout_log_function_path"]
    functions += ["custom_generate_function_path"] if correction.center is not None else []
    measures = correction.needs_plan or not acts(correction)  # a plan needs log-probs from before the step
    return {
        "use_tis": acts(correction),
        **({"get_mismatch_metrics": True} if measures else {}),
        "custom_tis_function_path": f"{TIS}.correct",
        **{dest: OURS[dest] for dest in functions},
        "slime_ext": dict(mapping),
    }


def acts(correction: Correction) -> bool:
    """Whether a correction does anything but measure."""
    return bool(correction.steps) or Need.TARGET in correction.needs


def needs(correction: Correction) -> str:
    """Returns what a correction needs from the host besides log-probs and masks."""
    inputs = {
        "cur_log_probs": Need.TARGET in correction.needs,
        "advantages": Need.ADVANTAGES in correction.needs,
        "whole step": correction.needs_plan,
        "the sampler's head": correction.center is not None,
    }
    return ", ".join(name for name, is_needed in inputs.items() if is_needed) or "-"
