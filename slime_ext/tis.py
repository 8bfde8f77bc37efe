"""Defines the functions for ``--custom-tis-function-path``.

They are slime's own three, ``correct``, and one per preset: ``slime_ext.tis.<preset>`` for every name in
``slime_ext.presets``. Each takes slime's keyword call and returns ``(pg_loss, loss_masks, metrics)``; see
``slime_ext.hosts.contract``. Without ``args.use_tis`` it returns the loss and mask objects unchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slime_ext import presets
from slime_ext.core.correction import HookResult
from slime_ext.core.tokens import Tokens
from slime_ext.host import policy_loss
from slime_ext.host.configured import setup_for
from slime_ext.host.hook import Channel, Hook, Result, host_metrics, run
from slime_ext.host.memory import Memory
from slime_ext.hosts.contract import SLIME_FUNCTIONS, HookCall, takes_tis_bounds
from slime_ext.rules.configuration import BOUNDS, near_function


class BuiltHook(NamedTuple):
    """A hook, with the host's args and those of their values that it was built from."""

    args: Any
    values: list[Any]
    hook: Hook


HOOKS: Memory[dict[str, BuiltHook]] = Memory(dict)  # function name -> the hook of its last call


def _hook(name: str, document: str, channel: Channel = host_metrics) -> Callable[..., Result]:
    """Makes the function that a host calls for the correction ``name``."""

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
        call = HookCall(
            args,
            pg_loss,
            train_log_probs,
            rollout_log_probs,
            loss_masks,
            total_lengths,
            response_lengths,
            cur_log_probs,
            advantages,
        )
        # kwargs has what only some hosts pass, and ``loss_call`` what the host's policy loss does not pass.
        loss_call = policy_loss.current()
        call = call.filled(kwargs, loss_call.keywords())
        return run(call, _configured(args, name, channel), loss_call.step)

    function.__name__ = function.__qualname__ = name
    function.__doc__, function.__module__ = document, __name__
    return function


def _configured(args: Any, name: str, channel: Channel) -> Hook:
    """Returns the hook of the function ``name`` for the host's args.

    The hook of the last call is used again, because building one takes far longer than a call. It is built
    again if the host passes another object, or changes a value that the hook was built from.
    """
    values = [getattr(args, key, None) for key in (BOUNDS if name in SLIME_FUNCTIONS else ("slime_ext",))]
    last = HOOKS.value.get(name)
    if last is not None and last.args is args and last.values == values:
        return last.hook
    setup = setup_for(args, name)
    if name == "off_policy_is_function" and takes_tis_bounds():
        channel = _tis_channel
    hook = Hook(setup.correction, name, channel, setup.has_ratio)
    HOOKS.value[name] = BuiltHook(args, values, hook)
    return hook


def _tis_channel(result: HookResult, tokens: Tokens) -> dict[str, Tensor]:
    """Makes the metrics of slime's own functions.

    A rejected token counts as clipped. A token without a behavior log-prob counts only in
    ``nonfinite_fraction``.
    """
    clipped = result.clipped + torch.where(result.finite, result.rejected, 0)
    distance = torch.where(result.finite, (result.ratio - 1).abs(), 0)
    return {"tis": result.ratio, "tis_clipfrac": clipped, "tis_abs": distance, **_nonfinite(result, tokens)}


def _is_channel(result: HookResult, tokens: Tokens) -> dict[str, Tensor]:
    """Makes the metrics of slime PR 2084 in its first form."""
    return {"is_weight": result.weights, "is_clipfrac": result.clipped, **_nonfinite(result, tokens)}


def _nonfinite(result: HookResult, tokens: Tokens) -> dict[str, Tensor]:
    """Flags response tokens without a behavior log-prob; the host averages the flags."""
    return {"nonfinite_fraction": (tokens.segments.mask & ~result.finite).float()}


correct = _hook(
    "correct",
    "Applies the correction under ``slime_ext:`` in the file of ``--custom-config-path``.",
)
vanilla_tis_function = _hook(
    "vanilla_tis_function",
    """Clips token weights: w_t = clip(proximal / behavior, --tis-clip-low, --tis-clip), slime's default.

    Metrics: ``tis`` is the ratio, ``tis_clipfrac`` is 1 where it was clipped, ``tis_abs`` is |ratio - 1|, and
    ``nonfinite_fraction`` is 1 where the behavior log-prob is not finite.

    Source: slime, loss.py; Yao et al. 2025, https://fengyao.notion.site/off-policy-rl.
    """,
    _tis_channel,
)
icepop_function = _hook(
    "icepop_function",
    """Rejects tokens outside a band: w_t = rho_t if --tis-clip-low <= rho_t <= --tis-clip, else 0.

    Metrics as ``vanilla_tis_function``. Source: slime, loss.py; IcePop, https://ringtech.notion.site/icepop.
    """,
    _tis_channel,
)
off_policy_is_function = _hook(
    "off_policy_is_function",
    """Weights tokens with w_t = clip(target / behavior, 1 - eps_clip, 1 + eps_clip_high).

    This one detached weight corrects for mismatch and for staleness. On a REINFORCE loss this is CISPO. On a
    loss with the factor target / proximal, the weight counts that ratio twice; the preset ``off_policy_is``
    does not. Metrics: ``is_weight``, ``is_clipfrac``, ``nonfinite_fraction``.

    slime PR 2084 has had two forms. The one above is the first. A host that itself has a function of this
    name (``slime.utils.ppo_utils``) gets the form of August 2026: w_t = clip(target / behavior,
    --tis-clip-low, --tis-clip), with the metrics of ``vanilla_tis_function``.

    Raises:
        ConfigError: the host passes no ``cur_log_probs``.

    Source: slime PR 2084; MiniMax-M1, https://arxiv.org/abs/2506.13585.
    """,
    _is_channel,
)


@functools.cache
def _preset(name: str) -> Callable[..., Result]:
    """Makes the function of a preset, once, so that ``slime_ext.tis.<preset>`` is always the same object."""
    preset = presets.find(name)
    return _hook(name, f"{preset.formula}.\n\nSource: {preset.source}.")


def __getattr__(name: str) -> Callable[..., Result]:
    if name in presets.NAMES:
        return _preset(name)
    raise AttributeError(f"module 'slime_ext.tis' has no function '{name}'{near_function(name)}")


def __dir__() -> list[str]:
    return sorted([*globals(), *presets.NAMES])
