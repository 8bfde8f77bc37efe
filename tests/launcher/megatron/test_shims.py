"""Each CPU shim is still needed: without it a real two-process training step fails."""

from __future__ import annotations

import megatron.core
import pytest
import torch

from slime_ext.errors import ConfigError
from slime_ext.launcher.megatron import optimizer, shims
from tests.launcher.distributed import run_ranks
from tests.launcher.megatron import tiny_model as tiny

pytestmark = pytest.mark.slow  # processes of their own


def _step(without):
    """One step of a tied mixture of experts over two pipeline stages, micro-batches of different length."""
    shims.SHIMS = [shim for shim in shims.SHIMS if shim.__name__ not in without]
    chunks = tiny.start("pp2", tied=True, experts=tiny.MIXTURE, lr=1e-3)
    adam = optimizer.build_optimizer(tiny.tiny_args(lr=1e-3), chunks)
    adam.zero_grad()
    tiny.run_schedule(chunks, tiny.sequence_loss, forward_only=False)
    return adam.step()


def test_with_all_shims_a_step_succeeds():
    assert [successful for successful, _ in run_ranks(_step, 2, ())] == [True, True]


@pytest.mark.parametrize("name", [shim.__name__ for shim in shims.SHIMS])
def test_without_one_shim_a_step_fails_for_want_of_cuda(name):
    with pytest.raises(AssertionError, match="te_general_gemm" if name == "router_gemm" else "CUDA"):
        run_ranks(_step, 2, (name,))


def _install_twice():
    shims.install()
    device = torch.cuda.current_device
    shims.install()
    return device is torch.cuda.current_device


def test_installing_twice_is_installing_once():
    assert run_ranks(_install_twice, 1) == [True]


def test_every_shim_says_what_it_stands_for():
    assert all(".py:" in shim.__doc__ for shim in shims.SHIMS)


@pytest.mark.parametrize(
    ("target", "name", "value", "message"),
    [
        (torch.cuda, "is_available", lambda: True, "expected a machine without CUDA"),
        (megatron.core, "__version__", "0.17.0", "expected megatron-core 0.16.1, got 0.17.0: pip install"),
    ],
)
def test_refuses_other_machines_and_versions(monkeypatch, target, name, value, message):
    monkeypatch.setattr(target, name, value)
    shims.install.cache_clear()
    with pytest.raises(ConfigError, match=message):
        shims.install()
