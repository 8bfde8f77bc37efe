"""A loss times detached factors, and its gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from slime_ext.ops.segments import is_traced, selected, selected_


class Weighted(torch.autograd.Function):
    """A product of a loss and detached factors that is known already, with its gradient."""

    @staticmethod
    def forward(ctx, loss: Tensor, product: Tensor, factor: Tensor, keep: Tensor) -> Tensor:
        ctx.save_for_backward(factor, keep)
        return product.view_as(product)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        factor, keep = ctx.saved_tensors
        return selected_(keep, grad * factor.to(grad.dtype)), None, None, None


def weighted(loss: Tensor, factor: Tensor, keep: Tensor) -> Tensor:
    """[T] loss x factor where kept, 0 elsewhere whatever stands there; so is the gradient, to the loss alone.

    Args:
        factor: [T] without gradient, in the dtype of the loss.
        keep: [T] bool.
    """
    if is_traced(loss):
        return selected(keep, loss * factor)
    return Weighted.apply(loss, selected_(keep, loss.detach() * factor), factor, keep)
