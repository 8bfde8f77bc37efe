"""Translates ms-swift's rollout correction: weights of tokens, or of the geometric mean of a sequence.

Source: ms-swift 4.6.0, swift/rlhf_trainers/grpo_trainer.py.
"""

from __future__ import annotations

from dataclasses import replace

from slime_ext.tools.convert.block import SAFE, Block, Reading, capped, inside, native, reject
from slime_ext.tools.convert.trl import loss_of

MODE, THRESHOLD = "rollout_importance_sampling_mode", "rollout_importance_sampling_threshold"
DELTA = "off_policy_sequence_mask_delta"
DEFAULTS = {
    **{MODE: None, THRESHOLD: 2.0, DELTA: None, "beta": 0.04},
    **{"loss_type": "grpo", "importance_sampling_level": "token"},
    **{"epsilon": 0.2, "epsilon_high": None, "delta": None, "tau_pos": 1.0, "tau_neg": 1.05},
}
MODES = tuple(f"{level}_{how}" for level in ("token", "sequence") for how in ("truncate", "mask"))
LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "real", "fipo")
TOKEN = {"reweight": {"level": "token", "clamp": SAFE}}
UNBOUNDED = (
    "nothing bounds the remaining weights, as in ms-swift; to bound them, add truncate: {high: 2.0} after "
    "reweight"
)
WEIGHTED_KL = (
    "ms-swift's weights multiply the KL to the reference model, too (beta, 0.04 by default); here they "
    "multiply the policy's loss alone"
)


def read(block: Block) -> Reading:
    """Reads GRPO's rollout correction, whose ``sequence`` level is the geometric mean.

    ``sequence_mask`` drops sequences by that mean and keeps the weights of single tokens.

    Raises:
        ConfigError: weights and the mask of negative advantages are both on, which needs two numerators, or
            the mask would leave the divisor.
    """
    loss = loss_of(block, "ms_swift", LOSSES, ("tau_pos", "tau_neg"))
    mode, delta = block.choice(MODE, MODES), block.number(DELTA)
    if delta is not None:
        if mode is not None:
            why = "the mask uses the target's ratio, the weights use the ratio of the policy before the step"
            block.refuse(DELTA, f"null beside {MODE}", why)
        if block.get("loss_type") == "bnpo":
            why = "its sequences leave the divisor of bnpo, and nobody knows them before the optimizer step"
            block.refuse(DELTA, "null beside loss_type bnpo", why)
        gate = reject("sequence", "mean", None, delta, statistic="k1", when="negative_advantage")
        return loss.under(native([gate], numerator="target"))
    if mode is None:
        return loss.under(Reading({"preset": "metrics_only"}))
    high = block.required_number(THRESHOLD, least=1)
    if mode == "sequence_truncate":
        reading = native(capped("geometric", high, clamp=SAFE))
    elif mode == "sequence_mask":
        reading = native([TOKEN, reject("sequence", "mean", None, high, clamp=SAFE)], (UNBOUNDED,))
    else:
        reading = native(capped("token", high) if mode == "token_truncate" else inside("token", 0.0, high))
    if block.number("beta") != 0:
        reading = replace(reading, notes=(*reading.notes, WEIGHTED_KL))
    return loss.under(reading)
