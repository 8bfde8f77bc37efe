"""Translates slime's examples/train_infer_mismatch_helper/mis.yaml, as mis.py reads it.

Source: https://github.com/THUDM/slime, examples/train_infer_mismatch_helper.
"""

from __future__ import annotations

import math
from typing import Any

from slime_ext.config.foreign import MIS
from slime_ext.tools.convert.block import SAFE, Block, Reading, band, capped, native, veto

KEYS = ("use_tis", *MIS)
LEVELS = ("token", "sequence", "geometric")
MODES = ("truncate", "clip", "mask")
READ = "mis.py reads it and stops without it"
IGNORED = "mis.py ignores {key} {when}"
STEP_WIDE = "tis_batch_normalize: the mean is over the whole optimizer step, in mis.py over a micro-batch"


def read(block: Block) -> Reading:
    """Reads weights by tis_mode and rejection by use_rs. As in mis.py, rejected tokens leave the masks.

    Raises:
        ConfigError: a key that mis.py needs is missing, or mis.py would never reach a configured rejection.
    """
    if "use_tis" not in block.values:
        why = "mis.py reads it from args, where --use-tis sets it as well; without it mis.py corrects nothing"
        block.refuse("use_tis", "true or false, as in the launch", why)
    if not block.flag("use_tis"):
        return _metrics_only(block)
    rejects = block.flag("use_rs")
    if block.has("rs_veto_threshold") and not rejects:
        block.refuse("rs_veto_threshold", "null with use_rs: false", "mis.py vetoes inside use_rs only")
    weights, masks = _weights(block), _rejection(block) if rejects else []
    # If rs and tis have the same bounds, both reject the same tokens, so one step is enough.
    steps = [*weights, *(step for step in masks if step not in weights), *_normalized(block)]
    notes = (*_ignored(block, rejects), *((STEP_WIDE,) if block.flag("tis_batch_normalize") else ()))
    return native(steps, notes, mask_scope="all")


def _metrics_only(block: Block) -> Reading:
    if block.flag("use_rs"):
        block.refuse("use_rs", "false with use_tis: false", "mis.py returns before it rejects anything")
    idle = [key for key in KEYS[2:] if block.has(key) and block.values[key] is not False]
    notes = tuple(IGNORED.format(key=key, when="with use_tis: false") for key in idle)
    return Reading({"preset": "metrics_only"}, notes)


def _weights(block: Block) -> list[dict[str, Any]]:
    for key in ("tis_level", "tis_mode", "tis_upper_bound"):
        block.required(key, READ)
    level, mode = block.choice("tis_level", LEVELS, ""), block.choice("tis_mode", MODES)
    low, high = _tis_bounds(block)
    if mode == "truncate":
        return capped(level, high)
    block.interval("tis_lower_bound" if block.has("tis_lower_bound") else "tis_upper_bound", low, high)
    if mode == "clip":
        return [{"reweight": {"level": level}}, {"clip": {"low": low, "high": high}}]
    return [*capped(level, math.exp(SAFE)), band(level, low, high)]


def _tis_bounds(block: Block) -> tuple[float, float]:
    high = block.given("tis_upper_bound", math.inf, least=1)
    low = block.positive("tis_lower_bound")
    return 1 / high if low is None else low, high


def _rejection(block: Block) -> list[dict[str, Any]]:
    block.required("rs_level", READ)
    low, high = _tis_bounds(block)
    low = block.given("rs_lower_bound", low) if block.has("rs_lower_bound") else low
    if block.positive("rs_upper_bound") is not None:
        high = block.given("rs_upper_bound", high)
    block.interval("rs_lower_bound" if block.has("rs_lower_bound") else "tis_lower_bound", low, high)
    return [band(block.choice("rs_level", LEVELS, ""), low, high), *veto(block, "rs_veto_threshold")]


def _normalized(block: Block) -> list[dict[str, Any]]:
    if not block.flag("tis_batch_normalize"):
        return []
    level = block.choice("tis_level", LEVELS)
    if level == "geometric":
        block.refuse("tis_batch_normalize", "false at tis_level geometric", "mis.py raises ValueError")
    return [{"normalize": {"level": level}}]


def _ignored(block: Block, rejects: bool) -> list[str]:
    """Returns notes on settings that mis.py never reads."""
    idle = {}
    if not rejects:
        idle = dict.fromkeys(("rs_level", "rs_lower_bound", "rs_upper_bound"), "with use_rs: false")
    inherits = rejects and not block.has("rs_lower_bound")
    if block.values.get("tis_mode") == "truncate" and not inherits:
        idle["tis_lower_bound"] = "in tis_mode truncate"
    return [IGNORED.format(key=key, when=when) for key, when in idle.items() if block.has(key)]
