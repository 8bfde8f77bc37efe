"""What a call with every metric asks of a device: operations by dispatch, kernels by launch, no waits."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from slime_ext.analysis.speed.cost import count
from slime_ext.kernels import Work, built, loops
from slime_ext.kernels.loops import Loops
from slime_ext.metrics import Layout
from tests.kernels.batches import CORRECTIONS, EVERY, FULL, random_tokens


def counted(backend):
    """Operations and waits that one call with every metric dispatches."""
    packed = random_tokens([700, 40, 300], wild=False)
    work = Work(packed, torch.zeros(1040), layout=Layout.of(backend.correction))
    found = count(lambda: backend.apply(work))
    return found.operations, found.waits


BOTH = pytest.mark.parametrize("correction", [FULL, EVERY], ids=["full", "every"])


@pytest.mark.skipif(built.compiler() is None, reason="needs a C++ compiler")
@BOTH
def test_compiled_takes_two_loops_and_next_to_nothing_around_them(correction, monkeypatch):
    launches = []
    library = SimpleNamespace(statistics=lambda *_: launches.append(1), correct=lambda *_: launches.append(1))
    monkeypatch.setattr(loops, "_library", lambda _: library)
    operations, waits = counted(Loops(correction))
    assert len(launches) == 2 and operations + len(launches) <= 12 and not waits


@pytest.mark.slow
@pytest.mark.skipif(built.compiler() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(("name", "size"), [("token_tis", 5), ("full", 6)])
def test_a_decision_is_weights_and_masks_and_no_more(name, size):
    packed, backend = random_tokens([131072], wild=False), Loops(CORRECTIONS[name])
    backend.outcome(packed)
    peak = count(lambda: backend.outcome(packed)).peak * 1e6
    assert size * 131072 <= peak < (size + 0.1) * 131072  # float32 weights, keep, and finite where it differs


@BOTH
def test_triton_takes_four_kernels(correction, monkeypatch):
    pytest.importorskip("triton")
    from slime_ext.kernels import triton

    launches = []
    monkeypatch.setattr(triton, "_start", lambda *given, **more: launches.append(1))
    operations, waits = counted(triton.Triton(correction))
    assert len(launches) == 4 and operations + len(launches) <= 5 and not waits
