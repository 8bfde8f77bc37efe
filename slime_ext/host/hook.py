"""Turns a hook call into the corrected loss, in the host's shapes.

``observe`` measures a policy loss that does not call ``run``, because it has no hook or a hook that is not
ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from slime_ext.core.correction import Correction, HookInputs, HookResult, apply
from slime_ext.core.losses import Bounds, HostLoss
from slime_ext.core.tokens import Tokens
from slime_ext.errors import warn_once
from slime_ext.host import staleness, step_metrics
from slime_ext.host.configured import loss_has_ratio
from slime_ext.host.packing import pack, require_flat, unpack_masks
from slime_ext.host.ranks import Parallel, context_parallel
from slime_ext.host.rollout_data import call_of
from slime_ext.host.step_plan import plan_for
from slime_ext.hosts.contract import METRICS, HookCall

Result = tuple[Tensor, Sequence[Tensor], dict[str, Tensor]]
Channel = Callable[[HookResult, Tokens], dict[str, Tensor]]
ONLY_MEASURES = Correction()
NOT_RECORDED = (
    "rollout_log_probs: expected them in every batch, got none, so nothing is measured: in a custom generate "
    "function, set return_logprob in the requests and fill Sample.rollout_log_probs with the log-probs of "
    "the sampled tokens"
)
TARGET_INSTEAD = (
    "off_policy metrics: expected proximal log-probs, got none, because the host may skip them if a rollout "
    "is one optimizer step: the metrics use the target's log-probs, detached, instead"
)


def run(
    call: HookCall, correction: Correction, channel: Channel | None = None, who: str = "this correction"
) -> Result:
    """Corrects the loss of one hook call and measures it.

    Without ``args.use_tis`` it only measures and returns the call's own loss and masks, the same objects.

    Args:
        channel: makes the metrics that the host averages over tokens. None: ``host_metrics``.
        who: the name of the function that the host called, for messages.

    Returns:
        Loss [T], masks, and the channel's metrics [T].

    Raises:
        ConfigError: the correction needs something that the host did not pass.
        DataError: a tensor has another length than this rank holds.
        NonFiniteError: a proximal or target log-prob is not finite at a response token.
    """
    call.require(correction, who)
    parallel, step = context_parallel(), step_metrics.step_for(call)
    tokens = packed(call, correction, parallel)
    step.check_finite(tokens, call, behavior=correction.on_nonfinite == "raise")
    inputs = HookInputs(
        tokens,
        call.pg_loss,
        plan=plan_for(call, correction, tokens) if correction.needs_plan else None,
        bounds=bounds_of(call.args, correction),
        acts=changes_loss(call.args, correction),
        layout=step.layout,
        counts_sequences=parallel.rank == 0,
    )
    result = apply(correction, inputs)
    step.add(result)
    metrics = (channel or host_metrics)(result, tokens)
    if not inputs.acts:
        return call.pg_loss, call.loss_masks, metrics
    if correction.mask_scope == "policy":
        return result.loss, call.loss_masks, metrics
    return result.loss, unpack_masks(result.rejected == 0, call.loss_masks, tokens.segments), metrics


def packed(call: HookCall, correction: Correction, parallel: Parallel) -> Tokens:
    """Packs a call's lists into flat tensors, with the samples' ages if known or needed."""
    tokens, samples = pack(call, parallel), step_metrics.current_step().samples
    require_flat("pg_loss", call.pg_loss, tokens.segments.size)
    if samples.versions or correction.needs_ages:
        tokens = staleness.with_ages(tokens, call.loss_masks, correction, samples)
    return tokens


def bounds_of(args: Any, correction: Correction) -> Bounds:
    """Reads the host's PPO clip range: --eps-clip, --eps-clip-high, --eps-clip-c.

    If the correction centers the host's loss, it also asks whether that loss is PPO's.
    """
    low, high = getattr(args, "eps_clip", 0.2), getattr(args, "eps_clip_high", None)
    is_asked = correction.center is not None and isinstance(correction.surrogate, HostLoss)
    has_ratio = not is_asked or loss_has_ratio(args)
    return Bounds(low, low if high is None else high, getattr(args, "eps_clip_c", None), has_ratio)


def changes_loss(args: Any, correction: Correction) -> bool:
    """Tells whether a call changes the loss.

    It only measures without --use-tis, with an identity correction, and after a guard's ``metrics_only``.
    """
    is_on = getattr(args, "use_tis", False) and not step_metrics.LEAVES_LOSS_ALONE.value
    return bool(is_on) and not correction.is_identity


def host_metrics(result: HookResult, tokens: Tokens) -> dict[str, Tensor]:
    """Returns ratio, clipped and rejected tokens by their names in the host's log."""
    return dict(zip(METRICS, (result.ratio, result.clipped, result.rejected), strict=True))


@torch.no_grad()
def observe(args: Any, batch: Mapping[str, Any], inputs: Mapping[str, Any]) -> None:
    """Measures a micro-batch whose policy loss did not call ``run``.

    It changes neither loss nor gradient.

    Args:
        batch: the batch of the policy loss.
        inputs: what ``contract.LOSS_INPUTS`` collected while the loss ran.
    """
    step = step_metrics.current_step()
    if step.layout is None or not step.observes or "cur_log_probs" not in inputs:
        return
    if batch.get("rollout_log_probs") is None:
        warn_once(NOT_RECORDED)
        step.seen[()] = []
        return
    target, proximal = [values.detach() for values in inputs["cur_log_probs"]], batch.get("log_probs")
    if not proximal:
        warn_once(TARGET_INSTEAD)
    more = {"train_log_probs": proximal or target, "cur_log_probs": target, "pg_loss": torch.cat(target)}
    run(call_of(batch, args, **more), ONLY_MEASURES)
