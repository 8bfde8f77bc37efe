"""The eager path where tensors lie on no CPU: on the meta device, which has shapes and dtypes and nothing to
wait for."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slime_ext import presets
from slime_ext.analysis.speed.run import OURS
from slime_ext.correction import Tokens
from slime_ext.kernels import Eager, Work
from slime_ext.metrics import Layout
from slime_ext.ops.segments import Segments

CORRECTIONS = OURS | {name: presets.get(name) for name in presets.PRESETS}
META = torch.device("meta")
LENGTHS = (130, 0, 1, 70)


def dtypes(tree):
    return {x.dtype for x in tree_leaves(tree) if isinstance(x, torch.Tensor)}


class OnDevice(TorchDispatchMode):
    """Refuses what CUDA refuses, and what it does piece by piece."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = str(function)
        if name.startswith(("aten.bitwise", "aten.__")) and "out" in kwargs:
            assert dtypes(args) == dtypes(kwargs["out"]), f"{name} has no kernel for another dtype"
        if name.startswith("aten.cat") and len(args[0]) > 4:
            assert len(dtypes((args, kwargs))) == 1, f"{name} copies tensors of several dtypes one by one"
        return function(*args, **kwargs)


def apply(correction, lengths, *, layout, ages):
    count = sum(lengths)
    log_probs = [torch.empty(count, device=META) for _ in range(4)]
    segments = Segments.whole(lengths, torch.ones(count, dtype=torch.bool, device=META))
    seen = torch.empty(len(lengths), device=META) if ages or correction.needs_ages else None
    proximal, behavior, target, advantages = log_probs
    tokens = Tokens(segments, proximal, behavior, target.requires_grad_(), advantages, seen)
    work = Work(tokens, torch.empty(count, device=META, requires_grad=True), layout=layout)
    return Eager(correction).apply(work)


@pytest.mark.parametrize("name", CORRECTIONS)
def test_the_eager_path_runs_on_a_device_and_waits_for_nothing(name, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    correction = CORRECTIONS[name]
    for layout in (None, Layout.of(correction, curves=False), Layout.of(correction)):
        for lengths, ages in ((LENGTHS, False), (LENGTHS, True), ((), False)):
            with OnDevice():
                applied = apply(correction, lengths, layout=layout, ages=ages)
            assert applied.loss.is_meta and applied.loss.shape == (sum(lengths),)
            applied.loss.sum().backward()
