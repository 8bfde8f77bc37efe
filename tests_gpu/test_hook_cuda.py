"""The hook on one CUDA device: every preset against the oracle, without a wait for it.

Log-probs in float32 and bfloat16 go to the oracle as rounded, so that what is left is float32 arithmetic: 255
u per block of a sum and an exponential, 2e-5 relative as on the CPU (tests/test_presets.py).
"""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch

from slime_ext import presets, tis
from slime_ext.core.needs import Need
from slime_ext.core.tokens import Head
from tests import oracle
from tests.test_tis import arguments, as_slime_calls, column

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
NUMBERS = ("target", "proximal", "behavior", "advantage")
BATCHES = 12


def rounded(batch, dtype):
    """The batch as it reads in ``dtype``."""
    return [
        {key: torch.tensor(v, dtype=dtype).tolist() if key in NUMBERS else v for key, v in s.items()}
        for s in batch
    ]


def many(seed, tokens=1100):
    """A batch of at least so many tokens."""
    found = []
    while sum(len(s["mask"]) for s in found) < tokens:
        seed += 1000
        found += oracle.random_batch(seed, wild=False)
    return found


@functools.cache
def given_to_the_hook(seed, dtype):
    """A batch as it reads in ``dtype``, and slime's keywords for it on the CPU."""
    batch = rounded(many(seed), dtype)
    return batch, as_slime_calls(batch)


def moved(value, dtype, device):
    """Tensors of log-probs in ``dtype``, the loss in float32, masks as they are; all on the device."""
    if isinstance(value, list) and value and isinstance(value[0], torch.Tensor):
        return [moved(x, dtype, device) for x in value]
    if isinstance(value, Head):
        return Head(*(moved(x, torch.float32, device) for x in (value.sampler, value.trainer)))
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().to(device, dtype if value.is_floating_point() else None)


@contextlib.contextmanager
def no_waits():
    """An error where the host waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def compare(name, dtype):
    """The hook's losses on the device against the oracle's."""
    args = arguments()
    for seed in range(BATCHES):
        batch, given = given_to_the_hook(seed, dtype)
        call = {key: moved(value, dtype, "cuda") for key, value in given.items() if key != "pg_loss"}
        call["pg_loss"] = moved(given["pg_loss"], torch.float32, "cuda")
        correct = getattr(tis, name)
        if not seed:
            correct(args, **call)  # what is looked up once
        with no_waits():
            loss, _, _ = correct(args, **call)
        specification = oracle.SPECS[name]
        expected = column(oracle.correct(specification, batch), "loss")
        if presets.get(name).steps or Need.TARGET in presets.get(name).needs:
            torch.testing.assert_close(loss.detach().double().cpu(), expected, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("name", presets.PRESETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_preset_is_the_oracles(dtype, name):
    compare(name, dtype)
