"""What a call with every metric asks of a device: operations by dispatch, kernels by launch, no waits."""

from __future__ import annotations

import pytest
import torch

from slime_ext.analysis.speed.cost import count
from slime_ext.kernels import Work, built, loops
from slime_ext.kernels.loops import Loops
from slime_ext.metrics import Layout
from tests.kernels.batches import EVERY, FULL, random_tokens


def cost(backend, monkeypatch, module, launch):
    """Of one call: operations and waits that were dispatched, and launches, which are not carried out."""
    launches = []
    packed = random_tokens([700, 40, 300], wild=False)
    work = Work(packed, torch.zeros(1040), layout=Layout.of(backend.correction))
    backend.apply(work)
    monkeypatch.setattr(module, launch, lambda *given, **more: launches.append(1))
    found = count(lambda: backend.apply(work))
    return found.operations, found.waits, len(launches)


@pytest.mark.skipif(built.compiler() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("correction", [FULL, EVERY], ids=["full", "every"])
def test_compiled_takes_two_loops_and_next_to_nothing_around_them(correction, monkeypatch):
    monkeypatch.setattr(loops, "_library", built.library)
    operations, waits, launches = cost(Loops(correction), monkeypatch, loops, "_call")
    assert launches == 2 and operations + launches <= 12 and not waits


@pytest.mark.slow
@pytest.mark.parametrize("correction", [FULL, EVERY], ids=["full", "every"])
def test_triton_takes_four_kernels(correction, monkeypatch):
    pytest.importorskip("triton")
    from slime_ext.kernels import triton

    operations, waits, launches = cost(triton.Triton(correction), monkeypatch, triton, "_start")
    assert launches == 4 and operations + launches <= 5 and not waits
