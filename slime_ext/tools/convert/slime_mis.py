"""Translates slime's examples/train_infer_mismatch_helper/mis.yaml, as mis.py reads it.

Source: https://github.com/THUDM/slime, examples/train_infer_mismatch_helper.
"""

from __future__ import annotations

import math
from typing import Any

from slime_ext.config.foreign import MIS
from slime_ext.tools.convert.block import SAFE, Block, Reading, band, capped, native, veto

SWITCHES = ("use_tis", "use_rs", "tis_batch_normalize")
DEFAULTS: dict[str, Any] = {"use_tis": False, **dict.fromkeys(MIS), **dict.fromkeys(SWITCHES, False)}
LEVELS = ("token", "sequence", "geometric")
MODES = ("truncate", "clip", "mask")
READ = "mis.py reads it and stops without it"
STEP_WIDE = "tis_batch_normalize: the mean is over the whole optimizer step, in mis.py over a micro-batch"


def read(block: Block) -> Reading:
    """Reads weights by tis_mode and rejection by use_rs. As in mis.py, rejected tokens leave the masks.

    Raises:
        ConfigError: a key that mis.py needs is missing, or mis.py would never reach a configured rejection.
    """
    if "use_tis" not in block.values:
        why = "mis.py reads it from args, where --use-tis sets it as well; without it mis.py corrects nothing"
        block.refuse("use_tis", "true or false, as in the launch", why)
    rejects = block.flag("use_rs")
    if not block.flag("use_tis"):
        if rejects:
            block.refuse("use_rs", "false with use_tis: false", "mis.py returns before it rejects anything")
        return Reading({"preset": "metrics_only"})
    if block.has("rs_veto_threshold") and not rejects:
        block.refuse("rs_veto_threshold", "null with use_rs: false", "mis.py vetoes inside use_rs only")
    weights, masks = _weights(block), _rejection(block) if rejects else []
    # If rs and tis have the same bounds, both reject the same tokens, so one step is enough.
    steps = [*weights, *(step for step in masks if step not in weights)]
    if not block.flag("tis_batch_normalize"):
        return native(steps, mask_scope="all")
    level = block.get("tis_level")
    if level == "geometric":
        block.refuse("tis_batch_normalize", "false at tis_level geometric", "mis.py raises ValueError")
    return native([*steps, {"normalize": {"level": level}}], (STEP_WIDE,), mask_scope="all")


def _weights(block: Block) -> list[dict[str, Any]]:
    for key in ("tis_level", "tis_mode", "tis_upper_bound"):
        block.required(key, READ)
    level, mode = block.choice("tis_level", LEVELS), block.choice("tis_mode", MODES)
    high = block.required_number("tis_upper_bound", least=1)
    if mode == "truncate":
        return capped(level, high)
    low = _lower_bound(block, high)
    block.interval("tis_lower_bound" if block.has("tis_lower_bound") else "tis_upper_bound", low, high)
    if mode == "clip":
        return [{"reweight": {"level": level}}, {"clip": {"low": low, "high": high}}]
    return [*capped(level, math.exp(SAFE)), band(level, low, high)]


def _lower_bound(block: Block, high: float) -> float:
    low = block.positive("tis_lower_bound")
    return 1 / high if low is None else low


def _rejection(block: Block) -> list[dict[str, Any]]:
    """Returns the steps of use_rs, whose bounds are those of tis where the block has none."""
    block.required("rs_level", READ)
    high = block.positive("rs_upper_bound")
    if high is None:
        high = block.required_number("tis_upper_bound", least=1)
    if block.has("rs_lower_bound"):
        key, low = "rs_lower_bound", block.required_number("rs_lower_bound")
    else:
        key, low = "tis_lower_bound", _lower_bound(block, block.required_number("tis_upper_bound"))
    block.interval(key, low, high)
    return [band(block.choice("rs_level", LEVELS), low, high), *veto(block, "rs_veto_threshold")]
