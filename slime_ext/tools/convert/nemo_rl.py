"""Translates NeMo-RL's ClippedPGLossConfig (7ea279a, August 2026).

Source: https://github.com/NVIDIA-NeMo/RL, nemo_rl/algorithms/loss/loss_functions.py (ClippedPGLossFn);
nemo_rl/algorithms/grpo.py (seq_logprob_error_threshold).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from slime_ext.tools.convert.block import Block, Reading, bounded, native, reject
from slime_ext.tools.convert.loss_side import cispo, of_loss

CORRECTS, TYPE = "use_importance_sampling_correction", "truncated_importance_sampling_type"
HIGH, LOW = "truncated_importance_sampling_ratio", "truncated_importance_sampling_ratio_min"
SEQUENCE = "sequence_level_importance_ratios"
RATIOS = ("use_cispo", "force_on_policy_ratio", "disable_ppo_ratio")
PER_TOKEN, DUAL = "token_level_loss", "ratio_clip_c"
KEYS = (
    *(CORRECTS, TYPE, HIGH, LOW, SEQUENCE, "seq_logprob_error_threshold"),
    *(*RATIOS, "positive_example_nll_weight", "ratio_clip_min", "ratio_clip_max", PER_TOKEN, DUAL),
    "score_centering",
)
CLIP = 0.2  # NeMo-RL's default of ratio_clip_min and of ratio_clip_max
TOKEN = {"reweight": {"level": "token"}}
RAISES = "NeMo-RL raises AssertionError"
IGNORED = "NeMo-RL ignores {key} without {needed}"
UNBOUNDED = (
    "nothing bounds the weights, as in NeMo-RL; to bound them, add truncate: {high: 2.0} after reweight"
)


def read(block: Block) -> Reading:
    """Reads tis, icepop or seq-mask-tis, beside one of NeMo-RL's losses.

    seq-mask-tis drops sequences by the geometric mean of their ratios and leaves the weights unbounded.

    Raises:
        ConfigError: NeMo-RL itself refuses the block, or no correction here has a part of its loss.
    """
    if block.has("seq_logprob_error_threshold"):
        why = "no step here drops sequences by the mean of exp|l|"
        block.refuse("seq_logprob_error_threshold", "null", why)
    if block.number("positive_example_nll_weight", 0.0) not in (0, None):
        block.refuse("positive_example_nll_weight", "0", "no term here raises the likelihood of good samples")
    _forbid_centering(block)
    corrects = block.flag(CORRECTS)
    if block.has(TYPE) and not corrects:
        block.refuse(CORRECTS, f"true beside {TYPE}", RAISES)
    steps, notes = _weights(block) if corrects else ([], ())
    idle = (key for key in (HIGH, LOW) if block.has(key) and not block.has(TYPE))
    of_its_loss = ((key, block.values.get(key)) for key in (PER_TOKEN, DUAL))
    said = (
        *(of_loss("nemo_rl", key, value) for key, value in of_its_loss if value not in (None, False)),
        *(IGNORED.format(key=key, needed=TYPE) for key in idle),
    )
    reading = _beside_loss(block, steps, notes)
    return replace(reading, notes=(*said, *reading.notes))


def _forbid_centering(block: Block) -> None:
    """Refuses score_centering, which only the nightly has: 7ea279a and clipped_pg.py c004980 lack it."""
    value = block.values.get("score_centering")
    is_on = value.get("enabled", True) if isinstance(value, Mapping) else value
    if is_on not in (None, False):
        why = "no source that we read says what NeMo-RL's nightly centers beside its clip"
        block.refuse("score_centering", "false, or enabled: false", why)


def _weights(block: Block) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    kind = block.choice(TYPE, ("tis", "icepop", "seq-mask-tis"))
    level = "sequence" if block.flag(SEQUENCE) else "token"
    if kind is None:
        if block.has(HIGH):
            block.refuse(TYPE, f"tis, icepop or seq-mask-tis beside {HIGH}", "NeMo-RL raises ValueError")
        return [{"reweight": {"level": level}}], (UNBOUNDED,)
    block.required(HIGH, RAISES)
    high, low = block.given(HIGH, 1.0, least=1), block.number(LOW)
    if kind == "tis":
        return bounded(level, "truncate", low, high), ()
    block.required(LOW, RAISES)
    if kind == "icepop":
        return bounded(level, "mask", low, high), ()
    if level == "sequence":
        block.refuse(SEQUENCE, "false beside seq-mask-tis", RAISES)
    low, high = block.interval(LOW, low or 0.0, high)
    return [TOKEN, reject("sequence", "mean", low, high)], (UNBOUNDED,)


def _forbid_raising(block: Block, chosen: list[str]) -> None:
    """Refuses losses beside which NeMo-RL raises.

    Args:
        chosen: the keys of ``RATIOS`` that are true.
    """
    if len(chosen) > 1:
        block.refuse(chosen[1], f"false beside {chosen[0]}: true", RAISES)
    if "use_cispo" in chosen:
        if block.flag(SEQUENCE):
            block.refuse(SEQUENCE, "false beside use_cispo: true", RAISES)
        if not block.flag(PER_TOKEN, True):
            block.refuse(PER_TOKEN, "true beside use_cispo: true", RAISES)
        if block.has(DUAL):
            block.refuse(DUAL, "null beside use_cispo: true", RAISES)
    if block.flag(SEQUENCE) and block.flag(PER_TOKEN, False):
        block.refuse(PER_TOKEN, f"false beside {SEQUENCE}: true", RAISES)


def _beside_loss(block: Block, steps: list[dict[str, Any]], notes: tuple[str, ...]) -> Reading:
    """Adds the loss: PPO, GSPO, CISPO, or one without a ratio of two trainer policies."""
    chosen = [key for key in RATIOS if block.flag(key)]
    _forbid_raising(block, chosen)
    if "force_on_policy_ratio" in chosen:  # NeMo-RL then uses the target as the policy before the step
        return native(steps, notes, "target", "reinforce")
    if "disable_ppo_ratio" in chosen:
        return native(steps, notes, surrogate="reinforce")
    ends = {end: block.number(f"ratio_clip_{end}", least=0) for end in ("min", "max")}
    low, high = (CLIP if end is None else end for end in ends.values())
    args: dict[str, Any] = {}
    if "use_cispo" in chosen:
        args = cispo(low, high)
    else:
        args = {"advantage_estimator": "gspo"} if block.flag(SEQUENCE) else {}
        if ends != {"min": None, "max": None}:  # slime's --eps-clip-high would follow --eps-clip
            args |= {"eps_clip": low, "eps_clip_high": high}
    reading = native(steps, notes) if steps else Reading({"preset": "metrics_only"}, notes)
    return replace(reading, args=args)
