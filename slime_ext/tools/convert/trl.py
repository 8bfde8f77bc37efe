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

MODE, MIN, MAX, CAP = (f"vllm_importance_sampling_{what}" for what in ("mode", "clip_min", "clip_max", "cap"))
CORRECTION = ("vllm_importance_sampling_correction", MODE, MIN, MAX, CAP, "off_policy_mask_threshold")
LOSS = ("loss_type", "importance_sampling_level", "epsilon", "epsilon_high", "delta")
TEMPERATURES = ("sapo_temperature_pos", "sapo_temperature_neg")
KEYS = (*CORRECTION, "use_vllm", *LOSS, *TEMPERATURES)
MODES = tuple(f"{level}_{how}" for level in ("token", "sequence") for how in ("truncate", "mask"))
SUMS = ("dapo", "bnpo")  # losses that divide by the number of tokens, like --calculate-per-token-loss
DIVISOR = "loss_type {loss} has a special divisor, for which slime has no flag"
UNBOUNDED = "nothing bounds the weights, as in TRL; to bound them, add truncate: {high: 2.0} after reweight"
IGNORED = "TRL ignores {key} {when}"
FORMER_MODE = (
    f"{MODE} is absent: read as sequence_mask, TRL's default; releases that have {CAP} and no mode cap the "
    f"weights of tokens, so write the mode, token_truncate for those"
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
    corrections = [key for key in CORRECTION if key in block.values]
    if not corrections and not block.has("use_vllm"):
        block.refuse(
            "use_vllm", "true or false", "with true TRL corrects by default, with false it never does"
        )
    loss = loss_of(block, "trl", ("grpo", *SUMS, "dr_grpo", "luspo", "cispo", "sapo", "vespo"), TEMPERATURES)
    threshold = block.number("off_policy_mask_threshold")
    if not block.flag("use_vllm", True):
        if threshold is not None:
            why = "with false the mask compares the target with the policy before the step"
            block.refuse("off_policy_mask_threshold", "use_vllm: true beside it", why)
        return loss.under(Reading({"preset": "metrics_only"}, (UNUSED,)))
    corrects = block.flag("vllm_importance_sampling_correction", True)
    if threshold is not None:
        if corrects:
            why = "the mask uses the target's ratio, the weights use the ratio of the policy before the step"
            block.refuse("off_policy_mask_threshold", "vllm_importance_sampling_correction: false", why)
        more = {"statistic": "k1", "when": "negative_advantage"}
        mask = reject("sequence", "mean", None, threshold, **more)
        return loss.under(native([mask], _idle(block), numerator="target"))
    return loss.under(_weights(block) if corrects else Reading({"preset": "metrics_only"}, _idle(block)))


def _idle(block: Block) -> tuple[str, ...]:
    """Returns notes on settings that TRL reads only for weights."""
    idle = block.unlike({MODE: "sequence_mask", MIN: None, MAX: 3.0, CAP: None})
    return tuple(IGNORED.format(key=key, when=f"with {CORRECTION[0]}: false") for key in idle)


def _weights(block: Block) -> Reading:
    level, _, how = block.choice(MODE, MODES, "sequence_mask").partition("_")
    cap = block.number(CAP, least=1)  # TRL prefers it to clip_max
    high = block.number(MAX, 3.0, least=1) if cap is None else cap
    low = block.number(MIN)
    if low is not None:
        block.interval(MIN, low, math.inf if high is None else high)
    elif high is None and how == "truncate":
        block.refuse(MAX, f"a number here or in {MIN}", "TRL raises ValueError")
    notes = (FORMER_MODE,) if cap is not None and not block.has(MODE) else ()
    if cap is not None and block.unlike({MAX: 3.0}):
        notes = (*notes, IGNORED.format(key=MAX, when=f"beside {CAP}"))
    return native(bounded(level, how, low, high), notes if high else (*notes, UNBOUNDED))


def loss_of(block: Block, system: str, losses: Sequence[str], temperatures: tuple[str, str]) -> Loss:
    """Reads the loss of ``loss_type``.

    Args:
        system: trl, whose default is dapo, or ms_swift, whose default is grpo.
        losses: the losses that the system has.
        temperatures: the keys of SAPO's temperatures.

    Raises:
        ConfigError: neither slime nor a surrogate here has the loss.
    """
    loss = block.choice("loss_type", losses, "dapo" if system == "trl" else "grpo")
    if loss not in ("grpo", "dr_grpo", "luspo", "cispo", "sapo", *SUMS):
        block.refuse(
            "loss_type", "a loss that slime or this project has", f"{loss} has special token weights"
        )
    per_token = block.values.get("importance_sampling_level") in (None, "token")
    if loss in ("cispo", "sapo") and not per_token:
        why = f"{loss} has no sequence ratio here"
        block.refuse("importance_sampling_level", f"token beside loss_type {loss}", why)
    if loss == "cispo":
        block.required("epsilon_high", "it is the largest weight, and 0.2 by default")
        high = block.number("epsilon_high", least=1) or 1.0
        return Loss(args=cispo(1.0, high - 1))
    if loss == "sapo":
        pos, neg = (block.temperature(key, at) for key, at in zip(temperatures, (1.0, 1.05), strict=True))
        return Loss({"sapo": {"anchor": "proximal", "tau_pos": pos, "tau_neg": neg}})
    said = [key for key in LOSS[1:] if block.has(key) and block.values[key] != "token"]
    said += ["loss_type"] * (loss in SUMS and block.has("loss_type"))
    notes = [of_loss(system, key, block.values[key]) for key in said]
    notes += [DIVISOR.format(loss=loss)] * (loss in ("dr_grpo", "luspo"))
    return Loss(notes=tuple(notes))
