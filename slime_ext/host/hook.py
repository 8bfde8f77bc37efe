"""From one hook call to the corrected loss: pack, correct, measure, hand back in the host's shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from slime_ext.core import compiled
from slime_ext.core.correction import Correction, HookInputs, HookResult, apply
from slime_ext.core.losses import Bounds
from slime_ext.core.state import Tokens
from slime_ext.errors import ConfigError
from slime_ext.host import staleness, step_metrics
from slime_ext.host.contract import INIT_FLAG, METRICS, SEEDS, HookCall
from slime_ext.host.packing import (
    CONSEQUENCES,
    context_parallel,
    pack,
    require_finite,
    require_flat,
    unpack_masks,
)
from slime_ext.host.rollout_data import samples_of
from slime_ext.host.step_plan import plan_for

Result = tuple[Tensor, list[Tensor], dict[str, Tensor]]
Channel = Callable[[HookResult, Tokens], dict[str, Tensor]]


def run(
    call: HookCall, correction: Correction, channel: Channel | None = None, who: str = "this correction"
) -> Result:
    """Applies a correction to one hook call.

    Args:
        channel: what the host gets to average over tokens, [T] each; None: ``contract.METRICS``.
        who: the function that the host called, for messages.

    Returns:
        The loss [T], the masks (N x [R_i]) and the channel's metrics [T]; unless ``args.use_tis`` the loss
        and the masks are the very objects of the call.

    Raises:
        ConfigError: the correction needs something that the host did not pass.
        DataError: a tensor has another length than this rank holds.
        NonFiniteError: a proximal or target log-prob is not finite at a response token.
    """
    if correction.needs_target:
        call.require_target(who if who in SEEDS else _reads_target(correction))
    if correction.needs_advantages:
        call.require_advantages("this correction")
    parallel = context_parallel()
    tokens = pack(call, parallel)
    if call.pg_loss.shape != (size := tokens.segments.size,):
        require_flat("pg_loss", call.pg_loss, size)
    step = step_metrics.step_for(call)
    check_finite(call, tokens, step, behavior=correction.on_nonfinite == "raise")
    if call.weight_versions is not None or correction.needs_ages:
        tokens = staleness.with_ages(tokens, call, required=correction.needs_ages)
    plan = plan_for(call, correction, tokens) if correction.needs_plan else None
    flags = HostFlags.of(call.args)
    acts = flags.corrects and not step_metrics.current.leaves_loss_alone and not correction.is_identity
    layout = None if step is None else step.layout
    first = parallel.rank == 0
    inputs = HookInputs(tokens, call.pg_loss, plan, flags.bounds, acts, layout, first)
    serve = compiled.apply if flags.compiled else apply
    result = serve(correction, inputs)
    if step is not None:
        step.add(result.measured)
    shown = (result.ratio, result.clipped, result.rejected)
    metrics = channel(result, tokens) if channel else dict(zip(METRICS, shown, strict=True))
    if not acts:
        return call.pg_loss, call.loss_masks, metrics
    if correction.mask_scope == "policy":
        return result.loss, call.loss_masks, metrics
    return result.loss, unpack_masks(result.rejected == 0, call.loss_masks, tokens.segments), metrics


class HostFlags(NamedTuple):
    """What a hook call reads of the host's arguments."""

    corrects: bool  # --use-tis; otherwise the loss is only measured
    bounds: Bounds  # --eps-clip, --eps-clip-high (defaults to the former) and --eps-clip-c
    compiled: bool  # backend: compiled

    @classmethod
    def of(cls, args: Any) -> HostFlags:
        """The flags of an arguments object, which may lack some."""
        low = getattr(args, "eps_clip", 0.2)
        high = getattr(args, "eps_clip_high", None)
        bounds = Bounds(low, low if high is None else high, getattr(args, "eps_clip_c", None))
        backend = (getattr(args, "slime_ext", None) or {}).get("backend")
        return cls(bool(getattr(args, "use_tis", False)), bounds, backend == "compiled")


def _reads_target(correction: Correction) -> str:
    """The key of a correction that needs the target policy's log-probs, for messages."""
    return "numerator: target" if correction.numerator == "target" else "this surrogate"


def check_finite(
    call: HookCall, tokens: Tokens, step: step_metrics.OptimizerStep | None, *, behavior: bool = False
) -> None:
    """Stops at a non-finite log-prob that has made the loss NaN: at once on CPU; on other devices it is
    noted, and the run stops when the step's statistics are reduced.

    Args:
        step: where it is noted; None: nowhere.
        behavior: whether the behavior policy's have to be finite too.

    Raises:
        NonFiniteError: naming sample and position.
        ConfigError: the behavior policy's have to be, and on this device nobody would read the note.
    """
    log_probs = {"train_log_probs": tokens.proximal, "cur_log_probs": tokens.target}
    if behavior:
        log_probs["rollout_log_probs"] = tokens.behavior
    if (device := tokens.segments.mask.device.type) != "cpu":
        if behavior and step_metrics.current.step is None:
            raise ConfigError(
                f"slime_ext.on_nonfinite: expected {INIT_FLAG} beside raise, got a hook call without it: on "
                f"{device} a log-prob is looked at when a step's statistics are reduced"
            )
        if step is not None:
            step.tracker.look(log_probs, tokens.segments, samples_of(call.loss_masks))
        return
    for name, values in log_probs.items():
        if values is not None:
            require_finite(name, values, tokens.segments, CONSEQUENCES[name])
