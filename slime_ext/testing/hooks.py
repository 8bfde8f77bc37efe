"""Tests a function for ``--custom-tis-function-path`` on made-up responses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from slime_ext.errors import ConfigError, DataError
from slime_ext.testing.steps import (
    Definition,
    Sample,
    compare,
    failed,
    samples,
    waits,
    without_printing,
)

ROUGH = 1e-5  # relative; a hook gets float32, as from slime
FLAGS = {"use_tis": True, "tis_clip": 2.0, "tis_clip_low": 0.0, "eps_clip": 0.2, "eps_clip_high": None}


def check_hook(hook: Callable[..., Any], definition: Definition | None = None, **flags: Any) -> None:
    """Calls a function for ``--custom-tis-function-path`` as slime does, and checks its result.

    Args:
        definition: a function in plain Python. It returns the factor of each token's loss in a sample, 0
            where the token is rejected.
        flags: attributes of the hook's ``args``, besides slime's defaults.

    Raises:
        ConfigError: says the first fault in one line.
        DataError: the result has a wrong type or shape.

    >>> import math
    >>> from slime_ext import tis
    >>> ratio = lambda s, i: math.exp(s.proximal[i] - s.behavior[i])
    >>> check_hook(tis.token_tis, lambda s: [min(ratio(s, i), 2) for i in range(len(s.mask))])
    """
    where = getattr(hook, "__name__", type(hook).__name__)
    args = SimpleNamespace(**(FLAGS | flags))
    batch = samples()
    call, loss = _checked(hook, where, args, batch)
    _check_gradient(where, call, loss)
    try:
        with without_printing():
            hook(args, **_call_of(batch, "meta"))
    except Exception as error:
        raise waits(where, error) from error
    if definition is not None:
        for batch in map(samples, range(3)):
            call, loss = _checked(hook, where, args, batch)
            compare(where, batch, loss.detach() / call["pg_loss"].detach(), definition, ROUGH)


def _checked(
    hook: Callable[..., Any], where: str, args: Any, batch: Sequence[Sample]
) -> tuple[dict[str, Any], Tensor]:
    """Calls the hook, checks the result, and returns the call's keywords and the loss."""
    call = _call_of(batch)
    try:
        out = hook(args, **call)
    except Exception as error:
        raise failed(where, error, "hook") from error
    return call, check_returned(where, out, call["pg_loss"], call["response_lengths"], frozenset())[0]


def _call_of(batch: Sequence[Sample], device: str = "cpu") -> dict[str, Any]:
    """Makes the keywords of slime's call: float32, in one process that holds every token."""

    def lists(name: str) -> list[Tensor]:
        return [torch.tensor(getattr(sample, name), dtype=torch.float32).to(device) for sample in batch]

    lengths = [len(sample.mask) for sample in batch]
    target = [values.requires_grad_() for values in lists("target")]
    masks = [torch.tensor(sample.mask, dtype=torch.int32).to(device) for sample in batch]
    return {
        "pg_loss": torch.linspace(-1, 2, sum(lengths)).to(device).requires_grad_(),
        "train_log_probs": lists("proximal"),
        "rollout_log_probs": lists("behavior"),
        "loss_masks": masks,
        "total_lengths": [length + 3 for length in lengths],
        "response_lengths": lengths,
        "cur_log_probs": target,
        "advantages": lists("advantages"),
    }


def _check_gradient(where: str, call: dict[str, Any], loss: Tensor) -> None:
    """Checks that the gradient flows through pg_loss alone and is finite at response tokens.

    The loss must be finite at masked tokens, too, because the host multiplies it by the mask.
    """
    mask = torch.cat(call["loss_masks"]).bool()
    if not loss.isfinite().all():
        raise ConfigError(
            f"{where}: expected a finite loss at every token, masked ones too, got NaN or infinity: masked "
            "tokens may hold NaN and log-ratios may be 0; select with torch.where, never multiply by a mask"
        )
    wanted = [call["pg_loss"], *call["cur_log_probs"]]
    host, *target = torch.autograd.grad(loss[mask].sum(), wanted, allow_unused=True)
    through_weight = [grad for grad in target if grad is not None and bool((grad != 0).any())]
    if host is not None and through_weight:
        raise ConfigError(
            f"{where}: expected the gradient through pg_loss alone, got one through a weight, too: weights "
            "are detached; add .detach() to what you compute from cur_log_probs"
        )
    if host is not None and not host[mask].isfinite().all():
        raise ConfigError(
            f"{where}: expected a finite gradient at response tokens, got NaN or infinity: clamp log-ratios "
            "before exp"
        )


def check_returned(
    path: str, out: Any, pg_loss: Tensor, response_lengths: Sequence[int], taken: frozenset[str]
) -> tuple[Tensor, list[Tensor], Mapping[str, Tensor]]:
    """Checks the types and shapes of what the correction at ``path`` returned, and returns it.

    It reads no value of a tensor. Without this check, a wrong shape would broadcast or fail deep inside
    torch.

    Args:
        pg_loss: [T] the loss that the correction got.
        response_lengths: N full lengths R_i.
        taken: names that its metrics may not use.

    Raises:
        DataError: the result is not (pg_loss [T], N masks [R_i], name -> [T]), or the loss lost its gradient.
    """
    where = f"--custom-tis-function-path {path}"
    if not isinstance(out, tuple | list) or len(out) != 3:
        raise DataError(f"{where}: expected it to return (pg_loss, loss_masks, metrics), got {_kind(out)}")
    loss, masks, metrics = out
    _check_tensor(f"{where}: returned pg_loss", loss, pg_loss.shape)
    if pg_loss.requires_grad and torch.is_grad_enabled() and not loss.requires_grad:
        raise DataError(
            f"{where}: returned pg_loss: expected a gradient, got a detached tensor: multiply the pg_loss "
            "that you got, and detach only the weight"
        )
    count = len(response_lengths)
    if not isinstance(masks, tuple | list) or len(masks) != count:
        raise DataError(
            f"{where}: returned loss_masks: expected a list of {count} tensors, got {_kind(masks)}"
        )
    for i, (mask, length) in enumerate(zip(masks, response_lengths, strict=True)):
        _check_tensor(f"{where}: returned loss_masks[{i}] (full response)", mask, (length,))
    if not isinstance(metrics, Mapping):
        raise DataError(
            f"{where}: returned metrics: expected a mapping of names to tensors, got {_kind(metrics)}"
        )
    for name, values in metrics.items():
        if name in taken:
            raise DataError(f"{where}: returned metrics: expected no '{name}', got it: choose another name")
        _check_tensor(f"{where}: returned metrics['{name}']", values, pg_loss.shape)
    return loss, list(masks), metrics


def _check_tensor(where: str, value: Any, shape: Sequence[int]) -> None:
    if not hasattr(value, "numel") or tuple(value.shape) != tuple(shape):
        raise DataError(f"{where}: expected a tensor of shape {list(shape)}, got {_kind(value)}")


def _kind(value: Any) -> str:
    if hasattr(value, "numel"):
        return f"one of shape {list(value.shape)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return "None" if value is None else f"a {type(value).__name__}"
