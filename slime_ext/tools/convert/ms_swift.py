"""Translates ms-swift's rollout correction: weights of tokens, or of the geometric mean of a sequence.

Source: ms-swift 4.6.0, swift/rlhf_trainers/grpo_trainer.py.
"""

from __future__ import annotations

from slime_ext.tools.convert.block import SAFE, Block, Reading, capped, inside, native, reject
from slime_ext.tools.convert.trl import LOSS, loss_of

TOKEN = {"reweight": {"level": "token"}}
UNBOUNDED = (
    "nothing bounds the remaining weights, as in ms-swift; to bound them, add truncate: {high: 2.0} after "
    "reweight"
)
SWIFT = (
    "rollout_importance_sampling_mode",
    "rollout_importance_sampling_threshold",
    "off_policy_sequence_mask_delta",
)
KEYS = (*SWIFT, *LOSS, "tau_pos", "tau_neg")
SWIFT_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "real", "fipo")
MODES = tuple(f"{level}_{how}" for level in ("token", "sequence") for how in ("truncate", "mask"))


def read(block: Block) -> Reading:
    """Reads GRPO's rollout correction, whose ``sequence`` level is the geometric mean.

    ``sequence_mask`` drops sequences by that mean and keeps the weights of single tokens.

    Raises:
        ConfigError: weights and the mask of negative advantages are both on, which needs two numerators.
    """
    loss = loss_of(block, "ms_swift", SWIFT_LOSSES, ("tau_pos", "tau_neg"))
    mode_key, threshold_key, delta_key = SWIFT
    mode, delta = block.choice(mode_key, MODES), block.number(delta_key)
    high = block.given(threshold_key, 2.0, least=1)
    idle = tuple(f"ms-swift ignores {key} without {mode_key}" for key in block.unlike({threshold_key: 2.0}))
    if delta is not None:
        if mode is not None:
            why = "the mask uses the target's ratio, the weights use the ratio of the policy before the step"
            block.refuse(delta_key, f"null beside {mode_key}", why)
        gate = reject("sequence", "mean", None, delta, statistic="k1", when="negative_advantage")
        return loss.under(native([gate], idle, numerator="target"))
    if mode is None:
        return loss.under(Reading({"preset": "metrics_only"}, idle))
    if mode == "sequence_truncate":
        return loss.under(native(capped("geometric", high, clamp=SAFE)))
    if mode == "sequence_mask":
        gate = reject("sequence", "mean", None, high, clamp=SAFE)
        return loss.under(native([TOKEN, gate], (UNBOUNDED,)))
    weights = capped("token", high) if mode == "token_truncate" else inside("token", 0.0, high)
    return loss.under(native(weights))
