"""Losses of our own: what a host's lower precision must not cost."""

from __future__ import annotations

import pytest
import torch

from slime_ext.core.losses import SURROGATES, Bounds, HostLoss, LossInputs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_own_losses_of_lower_precision_are_computed_in_float32(dtype):
    """In bfloat16 the product with the advantage alone would be off by 2^-8."""
    torch.manual_seed(0)
    rounded = {name: torch.randn(64).to(dtype) for name in ("target", "proximal", "behavior", "advantages")}
    exact = {name: values.double() for name, values in rounded.items()}
    valid = torch.ones(64, dtype=torch.bool)
    for surrogate in (kind() for kind in SURROGATES.values() if kind is not HostLoss):
        loss, clipped = surrogate(LossInputs(rounded, valid), Bounds())
        expected, also = surrogate(LossInputs(exact, valid), Bounds())
        torch.testing.assert_close(loss.double(), expected, rtol=2e-6, atol=2e-6)
        assert loss.dtype == torch.float32 and torch.equal(clipped, also), surrogate
