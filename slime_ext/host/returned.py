"""Checks types and shapes of what the correction's function returns, once per call; never a value.

Without these checks a wrong shape would broadcast, or stop deep inside torch. Source of the rules: slime's
policy loss, which takes these very objects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from slime_ext.errors import DataError

Returned = tuple[Tensor, list[Tensor], Mapping[str, Tensor]]


def check_hook(
    path: str, out: Any, pg_loss: Tensor, response_lengths: Sequence[int], taken: frozenset[str]
) -> Returned:
    """The answer of the correction at `path`, when it is one.

    Args:
        pg_loss: [T] what it was given.
        response_lengths: N full lengths R_i.
        taken: names of metrics that it may not use.

    Raises:
        DataError: not (pg_loss [T], N masks [R_i], name -> [T]); a loss that lost its gradient.
    """
    where = f"--custom-tis-function-path {path}"
    if not isinstance(out, tuple | list) or len(out) != 3:
        raise DataError(f"{where}: expected it to return (pg_loss, loss_masks, metrics), got {_kind(out)}")
    loss, masks, metrics = out
    _check_tensor(f"{where}: returned pg_loss", loss, pg_loss.shape)
    if pg_loss.requires_grad and torch.is_grad_enabled() and not loss.requires_grad:
        raise DataError(
            f"{where}: returned pg_loss: expected a gradient, got a detached tensor: multiply the pg_loss "
            "that came in, detach the weight only"
        )
    count = len(response_lengths)
    if not isinstance(masks, tuple | list) or len(masks) != count:
        raise DataError(
            f"{where}: returned loss_masks: expected a list of {count} tensors, got {_kind(masks)}"
        )
    for i, (mask, length) in enumerate(zip(masks, response_lengths, strict=True)):
        _check_tensor(f"{where}: returned loss_masks[{i}] (full response)", mask, torch.Size([length]))
    if not isinstance(metrics, Mapping):
        raise DataError(
            f"{where}: returned metrics: expected a mapping of names to tensors, got {_kind(metrics)}"
        )
    for name, values in metrics.items():
        if name in taken:
            raise DataError(f"{where}: returned metrics: expected names of its own, got '{name}'")
        _check_tensor(f"{where}: returned metrics['{name}']", values, pg_loss.shape)
    return loss, list(masks), metrics


def _check_tensor(where: str, value: Any, shape: torch.Size) -> None:
    if not isinstance(value, Tensor) or value.shape != shape:
        raise DataError(f"{where}: expected a tensor of shape {list(shape)}, got {_kind(value)}")


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"one of shape {list(value.shape)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return "None" if value is None else f"a {type(value).__name__}"
