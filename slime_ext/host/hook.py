"""Turns a hook call into the corrected loss, in the host's shapes.

``observe`` measures a policy loss that does not call ``run``, because it has no hook or a hook that is not
ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slime_ext.core.correction import Correction, HookInputs, HookResult, apply
from slime_ext.core.losses import Bounds
from slime_ext.core.tokens import Tokens
from slime_ext.errors import warn_once
from slime_ext.host import staleness
from slime_ext.host.packing import pack, require_flat, unpack_masks
from slime_ext.host.policy_loss import LossCall
from slime_ext.host.rollout_data import call_of
from slime_ext.host.step_metrics import OptimizerStep
from slime_ext.host.step_plan import plan_for
from slime_ext.hosts.contract import METRICS, HookCall

Result = tuple[Tensor, Sequence[Tensor], dict[str, Tensor]]  # pg_loss, loss_masks, metrics
Channel = Callable[[HookResult, Tokens], dict[str, Tensor]]  # makes the metrics for the host's log
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


def host_metrics(result: HookResult, tokens: Tokens) -> dict[str, Tensor]:
    """Returns ratio, clipped and rejected tokens by their names in the host's log."""
    return dict(zip(METRICS, (result.ratio, result.clipped, result.rejected), strict=True))


@dataclass(frozen=True)
class Hook:
    """A function of ``slime_ext.tis``, as a run has configured it.

    Args:
        correction: what it applies; by default it only measures.
        name: its name, for messages.
        channel: makes the metrics that the host averages over tokens.
        loss_has_ratio: whether the host's loss has the factor target / proximal, which ``center`` reads.
    """

    correction: Correction = ONLY_MEASURES
    name: str = "this correction"
    channel: Channel = host_metrics
    loss_has_ratio: bool = True


def run(call: HookCall, hook: Hook, step: OptimizerStep) -> Result:
    """Corrects the loss of one hook call and measures it.

    Without ``args.use_tis`` it only measures and returns the call's own loss and masks, the same objects.

    Args:
        step: the optimizer step that the call belongs to, which counts it once.

    Returns:
        Loss [T], masks, and the channel's metrics [T].

    Raises:
        ConfigError: the correction needs something that the host did not pass.
        DataError: a tensor has another length than this rank holds.
        NonFiniteError: a proximal or target log-prob is not finite at a response token.
    """
    correction, is_counted = hook.correction, step.count_once(call)
    call.require(correction, hook.name)
    tokens = packed(call, correction, step)
    step.check_finite(tokens, call, behavior=correction.on_nonfinite == "raise", is_counted=is_counted)
    inputs = HookInputs(
        tokens,
        call.pg_loss,
        plan=plan_for(call, correction, tokens, step) if correction.needs_plan else None,
        bounds=bounds_of(call.args, hook),
        changes_loss=changes_loss(call.args, correction, step),
        layout=step.layout if is_counted else None,
        counts_sequences=step.parallel.rank == 0,
    )
    result = apply(correction, inputs)
    if is_counted:
        step.add(result)
    metrics = hook.channel(result, tokens)
    if not inputs.changes_loss:
        return call.pg_loss, call.loss_masks, metrics
    if correction.mask_scope == "policy":
        return result.loss, call.loss_masks, metrics
    return result.loss, unpack_masks(result.rejected == 0, call.loss_masks, tokens.segments), metrics


def packed(call: HookCall, correction: Correction, step: OptimizerStep) -> Tokens:
    """Packs a call's lists into flat tensors, with the samples' ages if known or needed."""
    tokens = pack(call, step.parallel)
    require_flat("pg_loss", call.pg_loss, tokens.segments.size)
    if step.samples.versions or correction.needs_ages:
        tokens = staleness.with_ages(tokens, call.loss_masks, correction, step.samples)
    return tokens


def bounds_of(args: Any, hook: Hook) -> Bounds:
    """Reads the host's PPO clip range: --eps-clip, --eps-clip-high, --eps-clip-c."""
    low, high = getattr(args, "eps_clip", 0.2), getattr(args, "eps_clip_high", None)
    high = low if high is None else high
    return Bounds(low, high, getattr(args, "eps_clip_c", None), hook.loss_has_ratio)


def changes_loss(args: Any, correction: Correction, step: OptimizerStep) -> bool:
    """Tells whether a call changes the loss.

    It only measures without --use-tis, with an identity correction, and after a guard's ``metrics_only``.
    """
    return bool(getattr(args, "use_tis", False)) and not step.leaves_loss_alone and not correction.is_identity


@torch.no_grad()
def observe(args: Any, loss_call: LossCall) -> None:
    """Measures a micro-batch whose policy loss did not call ``run``.

    It changes neither loss nor gradient.
    """
    step, batch = loss_call.step, loss_call.batch or {}
    if step.layout is None or not step.observes or loss_call.cur_log_probs is None:
        return
    if batch.get("rollout_log_probs") is None:
        warn_once(NOT_RECORDED)
        # At the end, a step that has seen nothing warns that no call reached it. Here one did, and this
        # warning says why nothing was measured.
        step.seen[()] = []
        return
    target, proximal = [values.detach() for values in loss_call.cur_log_probs], batch.get("log_probs")
    if not proximal:
        warn_once(TARGET_INSTEAD)
    more = {"train_log_probs": proximal or target, "cur_log_probs": target, "pg_loss": torch.cat(target)}
    run(call_of(batch, args, **more), Hook(), step)
