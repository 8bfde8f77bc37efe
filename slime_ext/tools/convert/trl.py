"""Translates TRL's GRPOConfig, and the losses that TRL and ms-swift share.

Source: TRL 1.16.0, trl/trainer/grpo_config.py and grpo_trainer.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from slime_ext.tools.convert.block import Block, Reading, bounded, native, reject
from slime_ext.tools.convert.loss_side import cispo, of_loss

CORRECTS, NEGATIVES = "vllm_importance_sampling_correction", "off_policy_mask_threshold"
MODE, MIN, MAX, CAP = (f"vllm_importance_sampling_{what}" for what in ("mode", "clip_min", "clip_max", "cap"))
TEMPERATURES = ("sapo_temperature_pos", "sapo_temperature_neg")
DEFAULTS = {
    **{CORRECTS: True, MODE: "sequence_mask", MIN: None, MAX: 3.0, CAP: None, NEGATIVES: None},
    "use_vllm": True,  # false in TRL; a block without the key is read as one that samples with vLLM
    **{"loss_type": "dapo", "importance_sampling_level": "token"},
    **{"epsilon": 0.2, "epsilon_high": None, "delta": None},
    **dict(zip(TEMPERATURES, (1.0, 1.05), strict=True)),
}
MODES = tuple(f"{level}_{how}" for level in ("token", "sequence") for how in ("truncate", "mask"))
PER_TOKEN = ("dapo", "bnpo")  # losses that divide by the number of tokens, like --calculate-per-token-loss
PPO = ("grpo", "dr_grpo", "luspo", *PER_TOKEN)
DIVISOR = "loss_type {loss} has a special divisor, for which slime has no flag"
UNBOUNDED = "nothing bounds the weights, as in TRL; to bound them, add truncate: {high: 2.0} after reweight"
FORMER_MODE = (
    f"{MODE} is absent: read as sequence_mask, TRL's default; releases that have {CAP} and no mode cap the "
    f"weights of tokens, so write the mode, token_truncate for those"
)
ASSUMED = (
    "without {keys}, read with the default of TRL 1.16.0: unsloth and axolotl have these keys with other "
    f"defaults (unsloth's {CORRECTS} is false, axolotl's mode token_truncate), so write what you use"
)
UNUSED = "TRL corrects nothing with use_vllm: false"


@dataclass(frozen=True)
class Loss:
    """The loss that the weights multiply: a native surrogate, or the host's loss with flags."""

    surrogate: Any = "host"
    args: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def under(self, reading: Reading) -> Reading:
        """Returns a reading in which this loss replaces the host's loss."""
        mapping, is_host = reading.mapping, self.surrogate == "host"
        if "preset" in mapping and not is_host:  # metrics_only
            mapping = native([]).mapping
        mapping = mapping if is_host else {**mapping, "surrogate": self.surrogate}
        return replace(reading, mapping=mapping, args=self.args, notes=(*self.notes, *reading.notes))


def read(block: Block) -> Reading:
    """Reads weights at a level, or the mask of negative advantages.

    Weights are capped, or 0 outside a band.

    Raises:
        ConfigError: both are on, which needs two numerators, or the file does not say whether vLLM samples.
    """
    corrections = [key for key in (CORRECTS, MODE, MIN, MAX, CAP, NEGATIVES) if key in block.values]
    if not corrections and not block.has("use_vllm"):
        why = "with true TRL corrects by default, with false it never does"
        block.refuse("use_vllm", "true or false", why)
    loss = loss_of(block, "trl", (*PPO, "cispo", "sapo", "vespo"), TEMPERATURES)
    threshold = block.number(NEGATIVES)
    if not block.flag("use_vllm"):
        if threshold is not None:
            why = "with false the mask compares the target with the policy before the step"
            block.refuse(NEGATIVES, "use_vllm: true beside it", why)
        return loss.under(Reading({"preset": "metrics_only"}, (UNUSED,)))
    corrects = block.flag(CORRECTS)
    if threshold is not None:
        if corrects:
            why = "the mask uses the target's ratio, the weights use the ratio of the policy before the step"
            block.refuse(NEGATIVES, f"{CORRECTS}: false", why)
        mask = reject("sequence", "mean", None, threshold, statistic="k1", when="negative_advantage")
        return loss.under(native([mask], numerator="target"))
    return loss.under(_weights(block) if corrects else Reading({"preset": "metrics_only"}))


def _weights(block: Block) -> Reading:
    """Reads weights at a level. TRL prefers the deprecated cap to clip_max."""
    level, _, how = block.choice(MODE, MODES).partition("_")
    cap = block.number(CAP, least=1)
    high = block.number(MAX, least=1) if cap is None else cap
    low = block.number(MIN)
    if low is not None:
        block.interval(MIN, low, math.inf if high is None else high)
    elif high is None and how == "truncate":
        block.refuse(MAX, f"a number here or in {MIN}", "TRL raises ValueError")
    notes = [FORMER_MODE] if cap is not None and not block.has(MODE) else []
    if not notes and (absent := [key for key in (CORRECTS, MODE) if not block.has(key)]):
        notes.append(ASSUMED.format(keys=" and ".join(absent)))
    return native(bounded(level, how, low, high), notes if high else (*notes, UNBOUNDED))


def loss_of(block: Block, system: str, losses: Sequence[str], temperatures: tuple[str, str]) -> Loss:
    """Reads the loss of ``loss_type``.

    Args:
        system: trl or ms_swift, for notes.
        losses: the losses that the system has.
        temperatures: the keys of SAPO's temperatures.

    Raises:
        ConfigError: neither slime nor a surrogate here has the loss.
    """
    loss, level = block.choice("loss_type", losses), block.get("importance_sampling_level")
    if loss not in (*PPO, "cispo", "sapo"):
        why = f"{loss} has special token weights"
        block.refuse("loss_type", "a loss that slime or this project has", why)
    if loss in ("cispo", "sapo") and level not in (None, "token"):
        why = f"{loss} has no sequence ratio here"
        block.refuse("importance_sampling_level", f"token beside loss_type {loss}", why)
    if loss == "cispo":
        block.required("epsilon_high", "it is the largest weight, and 0.2 by default")
        return Loss(args=cispo(1.0, block.required_number("epsilon_high", least=1) - 1))
    if loss == "sapo":
        pos, neg = map(block.temperature, temperatures)
        return Loss({"sapo": {"anchor": "proximal", "tau_pos": pos, "tau_neg": neg}})
    said = [(key, block.get(key)) for key in ("epsilon", "epsilon_high", "delta")]
    said = [(key, value) for key, value in said if block.has(key)]
    said += [("importance_sampling_level", level)] if level not in (None, "token") else []
    said += [("loss_type", loss)] if loss in PER_TOKEN else []
    notes = [of_loss(system, *each) for each in said]
    notes += [DIVISOR.format(loss=loss)] * (loss in ("dr_grpo", "luspo"))
    return Loss(notes=tuple(notes))
