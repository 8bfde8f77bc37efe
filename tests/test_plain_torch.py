"""token_tis in 25 lines of plain torch, the docs' first example, is the real one."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

import slime_ext
from tests import oracle
from tests.test_correct import flat_call

EXAMPLE = Path(__file__).parents[1] / "examples/token_tis.py"


@pytest.mark.parametrize("seed", range(20))
def test_25_lines_of_torch_give_the_same_loss_gradient_and_metrics(seed):
    token_tis = runpy.run_path(str(EXAMPLE))["token_tis"]
    call = flat_call(oracle.random_batch(seed))
    call["loss"].requires_grad_()
    ours, keep, metrics = slime_ext.correct(**call, correction="token_tis")
    plain, kept, few = token_tis(call["loss"], call["behavior"], call["proximal"], call["mask"])
    gradients = [torch.autograd.grad(loss.sum(), call["loss"])[0] for loss in (ours, plain)]
    torch.testing.assert_close(plain, ours, rtol=1e-6, atol=0)
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=0)
    assert torch.equal(keep, kept)
    found = {name: float(value) for name, value in few.items()}
    assert found == pytest.approx({name: metrics[f"off_policy/{name}"] for name in few}, rel=1e-6, abs=1e-12)


def test_the_function_has_25_lines():
    text = EXAMPLE.read_text()
    assert len(text[text.index("import torch") :].splitlines()) <= 25
