"""The functions that ``--custom-tis-function-path`` names: the seeds' own, ``correct``, and one per preset.

Each takes slime's keyword call and returns ``(pg_loss, loss_masks, metrics)``, see
``slime_ext.host.contract``. Unless ``args.use_tis``, loss and masks come back as the very objects that went
in. ``slime_ext.tis.<preset>`` exists for every name in ``slime_ext.presets``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from slime_ext import presets
from slime_ext.correction import Correction, Numerator, Tokens
from slime_ext.errors import did_you_mean
from slime_ext.host import step_metrics
from slime_ext.host.ages import ages_of
from slime_ext.host.carriers import completed
from slime_ext.host.configured import check_first_call, correction_for
from slime_ext.host.contract import HookCall
from slime_ext.host.guards import warn_of_double_count
from slime_ext.host.hook import Result, bounds_of, check_finite, run
from slime_ext.host.packing import Packed, check_loss, context_parallel, pack
from slime_ext.ops.ratios import finite_tokens, in_common

Body = Callable[[HookCall], Result]


def _hook(body: Body) -> Callable[..., Result]:
    """Gives a body the signature that every host calls."""

    def function(
        args: Any,
        *,
        pg_loss: Tensor,
        train_log_probs: list[Tensor],
        rollout_log_probs: list[Tensor],
        loss_masks: list[Tensor],
        total_lengths: list[int],
        response_lengths: list[int],
        cur_log_probs: list[Tensor] | None = None,
        advantages: list[Tensor] | Tensor | None = None,
        **kwargs: Any,
    ) -> Result:
        given = {
            "pg_loss": pg_loss,
            "train_log_probs": train_log_probs,
            "rollout_log_probs": rollout_log_probs,
            "loss_masks": loss_masks,
            "total_lengths": total_lengths,
            "response_lengths": response_lengths,
            "advantages": advantages,
            **kwargs,
            **({} if cur_log_probs is None else {"cur_log_probs": cur_log_probs}),
        }
        check_first_call(args)
        return body(HookCall.of(args, completed(given)))

    function.__name__ = function.__qualname__ = body.__name__
    function.__doc__, function.__module__ = body.__doc__, __name__
    return function


@_hook
def vanilla_tis_function(call: HookCall) -> Result:
    """Clipped token weights: w_t = clip(proximal / behavior, --tis-clip-low, --tis-clip), slime's default.

    Metrics: ``tis`` the ratio, ``tis_clipfrac`` where it was clipped, ``tis_abs`` |ratio - 1|,
    ``nonfinite_fraction``.

    Source: slime, loss.py; Yao et al. 2025, https://fengyao.notion.site/off-policy-rl.
    """
    return _tis(call, lambda ratio, low, high: ratio.clamp(low, high))


@_hook
def icepop_function(call: HookCall) -> Result:
    """Token weights that are 0 outside the band: w_t = rho_t if --tis-clip-low <= rho_t <= --tis-clip else 0.

    Metrics as ``vanilla_tis_function``. Source: slime, loss.py; IcePop, https://ringtech.notion.site/icepop.
    """
    return _tis(call, lambda ratio, low, high: torch.where((ratio >= low) & (ratio <= high), ratio, 0))


@_hook
def off_policy_is_function(call: HookCall) -> Result:
    """One detached weight for mismatch and staleness: w_t = clip(target / behavior, 1 - eps_clip, 1 +
    eps_clip_high).

    On a REINFORCE loss it is CISPO. On a loss that carries target / proximal already the weight counts that
    ratio twice; the preset ``off_policy_is`` does not. Metrics: ``is_weight``, ``is_clipfrac``,
    ``nonfinite_fraction``.

    Raises:
        ConfigError: the host passes no ``cur_log_probs``.

    Source: slime PR 2084; MiniMax-M1, https://arxiv.org/abs/2506.13585.
    """
    call.require_target("off_policy_is_function")
    warn_of_double_count(call.args)
    packed = _packed(call)
    bounds = bounds_of(call.args)
    ratio, finite = _ratio(packed, packed.target)
    weight = torch.where(finite, ratio.clamp(1 - bounds.low, 1 + bounds.high), 0)
    changed = weight != ratio
    metrics = {"is_weight": weight, "is_clipfrac": changed.to(weight.dtype)}
    return _weighted(call, packed, weight, finite, metrics, changed=changed, numerator="target")


@_hook
def correct(call: HookCall) -> Result:
    """The correction that stands under ``slime_ext:`` in the file of ``--custom-config-path``."""
    return run(call, correction_for(call.args))


def _tis(call: HookCall, bound: Callable[[Tensor, float, float], Tensor]) -> Result:
    packed = _packed(call)
    ratio, finite = _ratio(packed, packed.proximal)
    weight = torch.where(finite, bound(ratio, call.args.tis_clip_low, call.args.tis_clip), 0)
    off = torch.where(finite, (ratio - 1).abs(), 0)
    changed = weight != ratio
    metrics = {"tis": ratio, "tis_clipfrac": changed.to(ratio.dtype), "tis_abs": off}
    return _weighted(call, packed, weight, finite, metrics, changed=changed)


def _packed(call: HookCall) -> Packed:
    packed = pack(call, context_parallel())
    check_loss(call.pg_loss, packed.segments)
    check_finite(call, packed)
    return packed


def _ratio(packed: Packed, numerator: Tensor) -> tuple[Tensor, Tensor]:
    """[T] ratio, 0 where there is none, and [T] bool, where there is one."""
    numerator, behavior = in_common(numerator, packed.behavior)
    finite = finite_tokens(behavior, packed.segments.mask)
    return torch.where(finite, (numerator - behavior).exp(), 0), finite


def _weighted(
    call: HookCall,
    packed: Packed,
    weight: Tensor,
    finite: Tensor,
    metrics: dict[str, Tensor],
    *,
    changed: Tensor,
    numerator: Numerator = "proximal",
) -> Result:
    metrics["nonfinite_fraction"] = (packed.segments.mask & ~finite).to(weight.dtype)
    _observe(call, packed, weight, changed, numerator)
    if not getattr(call.args, "use_tis", False) or step_metrics.leaves_loss_alone():
        return call.pg_loss, call.loss_masks, metrics
    loss = torch.where(finite, call.pg_loss * weight.to(call.pg_loss.dtype), 0)
    return loss, call.loss_masks, metrics


def _observe(call: HookCall, packed: Packed, weight: Tensor, changed: Tensor, numerator: Numerator) -> None:
    """The metrics of these weights; a token of weight 0 has left the loss."""
    layout = step_metrics.layout_for(call)
    if layout is None:
        return
    tokens = Tokens(packed.segments, packed.proximal, packed.behavior, packed.target, ages=ages_of(call))
    plain = Correction(numerator)(tokens, observe=True)
    acted = plain.acted | changed.int() << 1
    outcome = replace(plain, weights=weight, keep=plain.finite & (weight > 0), clipped=changed, acted=acted)
    step_metrics.observe(layout, tokens, outcome, first=context_parallel().rank == 0)


@functools.cache
def _preset(name: str) -> Callable[..., Result]:
    def body(call: HookCall) -> Result:
        return run(call, correction_for(call.args, name))

    entry = presets.find(name)
    body.__name__, body.__doc__ = name, f"{entry.formula}.\n\nSource: {entry.source}."
    return _hook(body)


def __getattr__(name: str) -> Callable[..., Result]:
    if name in presets.NAMES:
        return _preset(name)
    near = did_you_mean(name, presets.NAMES)
    raise AttributeError(f"module 'slime_ext.tis' has no function '{name}'{near}")


def __dir__() -> list[str]:
    return sorted([*globals(), *presets.NAMES])
