"""Lists keys of other systems' losses, and slime's flags for them. A correction does not have such keys."""

from __future__ import annotations

from typing import Any

from slime_ext.errors import cut
from slime_ext.tools.convert.block import is_interpolated

LOSS_SIDE = {
    **dict.fromkeys(("eps_clip", "eps_clip_low", "epsilon", "clip_ratio", "clip_ratio_low"), "--eps-clip"),
    **dict.fromkeys(
        ("eps_clip_high", "eps_clip_higher", "epsilon_high", "clip_ratio_high"), "--eps-clip-high"
    ),
    "eps_clip_low_high": "--eps-clip and --eps-clip-high",
    **dict.fromkeys(("dual_clip", "clip_ratio_c", "c_clip", "delta"), "--eps-clip-c"),
    **dict.fromkeys(("loss_agg_mode", "loss_reduction"), "--calculate-per-token-loss"),
    "loss_type": "--calculate-per-token-loss",
    **dict.fromkeys(("policy_loss_type", "importance_sampling_level"), "--advantage-estimator"),
    "beta": "--use-kl-loss and --kl-loss-coef",
}


def cispo(low: float, high: float) -> dict[str, Any]:
    """Returns slime's arguments for CISPO. Weights are the detached ratio in [1 - low, 1 + high].

    >>> cispo(1.0, 4.0)["advantage_estimator"]
    'cispo'
    """
    return {"advantage_estimator": "cispo", "eps_clip": low, "eps_clip_high": high}


def of_loss(system: str, key: str, value: Any) -> str:
    """Returns the note on a key of a system's loss.

    >>> of_loss("trl", "delta", 4.0)
    "delta: 4.0 belongs to trl's loss, not to its correction; slime has --eps-clip-c"
    """
    said = key if is_interpolated(value) else f"{key}: {cut(value)}"
    return f"{said} belongs to {system}'s loss, not to its correction; slime has {LOSS_SIDE[key]}"
