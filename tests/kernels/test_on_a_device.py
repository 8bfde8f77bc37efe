"""The eager path where tensors lie on no CPU: on the meta device, which has shapes and dtypes and nothing to
wait for."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slime_ext import presets, tis
from slime_ext.analysis.speed.run import OURS
from slime_ext.correction import Tokens
from slime_ext.host import step_metrics
from slime_ext.host.poison import KINDS, Poison
from slime_ext.kernels import Eager, Work
from slime_ext.metrics import Layout
from slime_ext.ops.segments import Segments
from tests import oracle
from tests.test_laws import FREE
from tests.test_tis import NAMES, arguments, as_slime_calls

CORRECTIONS = OURS | {name: presets.get(name) for name in presets.PRESETS}
META = torch.device("meta")
FILLED = "aten.scalar_tensor"  # a number beside tensors: on a CPU for nothing
LENGTHS = (130, 0, 1, 70)
FAST = ("vanilla_tis_function", "geo_rs", "bypass_pg_geo_rs", "min_prefix")  # each of another kind


def dtypes(tree):
    return {x.dtype for x in tree_leaves(tree) if isinstance(x, torch.Tensor)}


class OnDevice(TorchDispatchMode):
    """Refuses what CUDA refuses, and what it does piece by piece; counts what is queued there."""

    queued = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = str(function)
        if name.startswith(("aten.bitwise", "aten.__")) and "out" in kwargs:
            assert dtypes(args) == dtypes(kwargs["out"]), f"{name} has no kernel for another dtype"
        if name.startswith("aten.cat") and len(args[0]) > 4:
            assert len(dtypes((args, kwargs))) == 1, f"{name} copies tensors of several dtypes one by one"
        found = function(*args, **kwargs)
        there = any(x.is_meta for x in tree_leaves((args, kwargs, found)) if isinstance(x, torch.Tensor))
        self.queued += there and (not name.startswith(FREE) or name.startswith(FILLED))
        return found


def work_for(correction, lengths, *, layout, ages):
    count = sum(lengths)
    log_probs = [torch.empty(count, device=META) for _ in range(4)]
    segments = Segments.whole(lengths, torch.ones(count, dtype=torch.bool, device=META))
    seen = torch.empty(len(lengths), device=META) if ages or correction.needs_ages else None
    proximal, behavior, target, advantages = log_probs
    tokens = Tokens(segments, proximal, behavior, target.requires_grad_(), advantages, seen)
    return Work(tokens, torch.empty(count, device=META, requires_grad=True), layout=layout)


@pytest.mark.slow
@pytest.mark.parametrize("name", CORRECTIONS)
def test_the_eager_path_runs_on_a_device_and_waits_for_nothing(name, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    correction = CORRECTIONS[name]
    for layout in (None, Layout.of(correction, curves=False), Layout.of(correction)):
        for lengths, ages in ((LENGTHS, False), (LENGTHS, True), ((), False)):
            work = work_for(correction, lengths, layout=layout, ages=ages)
            with OnDevice():
                applied = Eager(correction).apply(work)
            assert applied.loss.is_meta and applied.loss.shape == (sum(lengths),)
            applied.loss.sum().backward()


@pytest.mark.parametrize(
    ("name", "ages", "limits"),
    [
        ("T", False, (8, 15, 56, 63)),
        ("T", True, (8, 15, 61, 71)),
        ("S", False, (30, 38, 75, 82)),
        ("S", True, (30, 38, 80, 90)),
    ],
)
def test_what_an_eager_call_queues_on_a_device(name, ages, limits, monkeypatch):
    """Weights and masks; the loss, with all metrics, with curves; copies and filled numbers among them."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    correction, (least, *limits) = CORRECTIONS[name], limits
    tokens = work_for(correction, LENGTHS, layout=None, ages=ages).tokens
    with OnDevice() as seen:
        Eager(correction).outcome(tokens)
    assert seen.queued <= least
    layouts = (None, Layout.of(correction, curves=False), Layout.of(correction))
    for layout, limit in zip(layouts, limits, strict=True):
        work = work_for(correction, LENGTHS, layout=layout, ages=ages)
        with OnDevice() as seen:
            Eager(correction).apply(work)
        assert seen.queued <= limit


def test_a_look_for_non_finite_log_probs_queues_five_operations():
    work = work_for(CORRECTIONS["S"], LENGTHS, layout=None, ages=False)
    log_probs = dict.fromkeys(KINDS, work.tokens.behavior)
    found = Poison()
    with OnDevice() as seen:
        for _ in range(4):
            found.look(log_probs, work.tokens.segments, None)
    assert seen.queued == 4 * 5


def there(values):
    """The same in float32 on the meta device."""
    if isinstance(values, list):
        return [there(x) for x in values]
    if not isinstance(values, torch.Tensor):
        return values
    moved = values.detach().to(META)
    return moved.float().requires_grad_() if moved.is_floating_point() else moved


ALL = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in NAMES]


@pytest.mark.parametrize("name", ALL)
def test_a_whole_hook_call_waits_for_nothing(name, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    call = {key: there(values) for key, values in as_slime_calls(oracle.random_batch(0)).items()}
    steps = {48: nullcontext()}  # by how many operations a call queues at most; m2 has no plan here
    if name in presets.PRESETS:
        layouts = {limit: Layout.of(presets.get(name), curves=limit == 97) for limit in (90, 97)}
        steps |= {limit: step_metrics.under_way(layout) for limit, layout in layouts.items()}
    for limit, step in steps.items():
        with OnDevice() as seen, step:
            loss, masks, metrics = getattr(tis, name)(arguments(), **call)
        assert seen.queued <= limit or name == "m2"
        assert all(x.is_meta for x in (loss, *masks, *metrics.values()))
        loss.sum().backward()
