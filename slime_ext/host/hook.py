"""From one hook call to the corrected loss: pack, correct, hand back in the host's shapes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slime_ext.correction import Correction, Outcome, Tokens
from slime_ext.host.contract import METRICS, HookCall
from slime_ext.host.guards import require_finite
from slime_ext.host.packing import Packed, context_parallel, pack, unpack_masks
from slime_ext.host.step_plan import plan_for
from slime_ext.objectives import Bounds

Result = tuple[Tensor, list[Tensor], dict[str, Tensor]]
POISONED = (
    "the host's surrogate is poisoned by it already; look for an overflow in the trainer's forward pass"
)


def run(call: HookCall, correction: Correction) -> Result:
    """Applies a correction to one hook call.

    Returns:
        The loss [T], the masks (N x [R_i]) and the metrics of ``contract.METRICS`` [T]; unless
        ``args.use_tis`` the loss and the masks are the very objects of the call.

    Raises:
        ConfigError: the correction needs something that the host did not pass.
        DataError: a tensor has another length than this rank holds.
        NonFiniteError: a proximal or target log-prob is not finite at a response token.
    """
    _refuse(call, correction)
    packed = pack(call, context_parallel())
    _check_finite(packed, correction)
    tokens = Tokens(packed.segments, packed.proximal, packed.behavior, packed.target, packed.advantages)
    outcome = correction(tokens, plan_for(call, correction, tokens), observe=True)
    metrics = _metrics(outcome, packed.segments.mask)
    if not getattr(call.args, "use_tis", False) or correction.is_identity:
        return call.pg_loss, call.loss_masks, metrics
    loss, clipped = correction.loss(outcome, tokens, call.pg_loss, bounds_of(call.args))
    if clipped is not None:
        metrics[METRICS[1]] = torch.maximum(metrics[METRICS[1]], clipped.float())
    if correction.mask_scope == "policy":
        return loss, call.loss_masks, metrics
    return loss, unpack_masks(outcome.keep, call.loss_masks, packed.segments), metrics


def bounds_of(args: Any) -> Bounds:
    """The host's PPO clip range; ``--eps-clip-high`` defaults to ``--eps-clip``."""
    low = getattr(args, "eps_clip", 0.2)
    high = getattr(args, "eps_clip_high", None)
    return Bounds(low, low if high is None else high)


def _refuse(call: HookCall, correction: Correction) -> None:
    if correction.needs_target:
        call.require_target("numerator: target" if correction.numerator == "target" else "this surrogate")
    if correction.needs_advantages:
        call.require_advantages("this correction")


def _check_finite(packed: Packed, correction: Correction) -> None:
    require_finite("train_log_probs", packed.proximal, packed.segments, POISONED)
    if packed.target is not None:
        require_finite("cur_log_probs", packed.target, packed.segments, POISONED)
    if correction.on_nonfinite == "raise":
        require_finite(
            "rollout_log_probs", packed.behavior, packed.segments, "on_nonfinite: raise asks to stop here"
        )


def _metrics(outcome: Outcome, mask: Tensor) -> dict[str, Tensor]:
    ratio = torch.where(outcome.finite, outcome.log_ratio.exp(), 0)
    values = (ratio, outcome.clipped & outcome.finite, mask & ~outcome.keep)
    return dict(zip(METRICS, (v.float() for v in values), strict=True))
