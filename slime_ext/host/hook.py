"""From one hook call to the corrected loss: pack, correct, hand back in the host's shapes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from slime_ext.correction import Correction, Tokens
from slime_ext.errors import ConfigError
from slime_ext.host import ages, poison, step_metrics
from slime_ext.host.contract import CARRY, METRICS, HookCall
from slime_ext.host.guards import require_finite
from slime_ext.host.packing import Packed, check_loss, context_parallel, pack, unpack_masks
from slime_ext.host.step_plan import plan_for
from slime_ext.kernels import Work, backend_for
from slime_ext.objectives import Bounds

Result = tuple[Tensor, list[Tensor], dict[str, Tensor]]


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
    parallel = context_parallel()
    packed = pack(call, parallel)
    check_loss(call.pg_loss, packed.segments)
    check_finite(call, packed, behavior=correction.on_nonfinite == "raise")
    tokens = Tokens(packed.segments, packed.proximal, packed.behavior, packed.target, packed.advantages)
    tokens = replace(tokens, ages=_ages(call, correction))
    layout = step_metrics.layout_for(call)
    plan = plan_for(call, correction, tokens)
    acts = getattr(call.args, "use_tis", False) and not step_metrics.leaves_loss_alone()
    acts = acts and not correction.is_identity
    backend = backend_for(correction, packed.segments.device.type, backend_name(call.args))
    bounds, first = bounds_of(call.args), parallel.rank == 0
    applied = backend.apply(Work(tokens, call.pg_loss, plan, bounds, acts, layout, first))
    if applied.measured is not None:
        step_metrics.add(applied.measured)
    metrics = dict(zip(METRICS, applied.channel, strict=True))
    if not acts:
        return call.pg_loss, call.loss_masks, metrics
    if correction.mask_scope == "policy":
        return applied.loss, call.loss_masks, metrics
    return applied.loss, unpack_masks(applied.keep, call.loss_masks, packed.segments), metrics


def backend_name(args: Any) -> str:
    """The backend that the mapping under ``slime_ext:`` asks for."""
    return (getattr(args, "slime_ext", None) or {}).get("backend", "auto")


def bounds_of(args: Any) -> Bounds:
    """The host's PPO clip range, ``--eps-clip-high`` defaults to ``--eps-clip``; and its dual clip."""
    low = getattr(args, "eps_clip", 0.2)
    high = getattr(args, "eps_clip_high", None)
    return Bounds(low, low if high is None else high, getattr(args, "eps_clip_c", None))


def _refuse(call: HookCall, correction: Correction) -> None:
    if correction.needs_target:
        call.require_target("numerator: target" if correction.numerator == "target" else "this surrogate")
    if correction.needs_advantages:
        call.require_advantages("this correction")


def _ages(call: HookCall, correction: Correction) -> Tensor | None:
    found = ages.ages_of(call)
    if correction.needs_ages:
        ages.require(call, found)
    return found


def check_finite(call: HookCall, packed: Packed, *, behavior: bool = False) -> None:
    """Stops at a non-finite log-prob that has poisoned the loss: at once on CPU; elsewhere it is noted, and
    the step stops when it is reduced.

    Args:
        behavior: whether the behavior policy's have to be finite too.

    Raises:
        NonFiniteError: naming sample and position.
        ConfigError: the behavior policy's have to be, and on this device nobody would read the note.
    """
    looked = {"train_log_probs": packed.proximal, "cur_log_probs": packed.target}
    if behavior:
        looked["rollout_log_probs"] = packed.behavior
    if packed.segments.device.type != "cpu":
        if behavior and not step_metrics.is_under_way():
            raise ConfigError(
                f"slime_ext.on_nonfinite: expected {CARRY} beside raise, got a hook call without it: on "
                f"{packed.segments.device.type} a log-prob is looked at when a step's statistics are reduced"
            )
        return step_metrics.note_nonfinite(call, looked, packed.segments)
    for name, values in looked.items():
        if values is not None:
            require_finite(name, values, packed.segments, poison.KINDS[name])
