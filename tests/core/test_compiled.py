"""The compiled graphs give what the eager code gives, for any sizes, without being compiled again and
again."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch

from slime_ext import presets
from slime_ext.config.load import read_config
from slime_ext.core import compiled, correction
from slime_ext.core.correction import Correction, HookInputs, Plan, plan_step
from slime_ext.core.losses import PpoClip, Reinforce
from slime_ext.core.metrics import MetricsLayout
from slime_ext.core.state import Tokens
from slime_ext.core.steps import Clip, Normalize, Reject, Reweight, SignedClip, Truncate, Veto
from slime_ext.errors import ConfigError
from slime_ext.ops.segments import Segments

FULL = Correction(
    steps=(
        Reweight("sequence"),
        Truncate(2.0),
        Reject("sequence", "ratio", "mean", 0.999, 1.001),
        Veto(low=1e-4),
    )
)
EVERY = Correction(
    "target",
    Reinforce(),
    (
        Reject("token", "binary_kl_max", high=5.0),
        Reject("sequence", "k2", "max", high=40.0, when="outward", max_staleness=3),
        SignedClip("token", negative_high=2.0),
        Clip(0.5, 1.5),
        Veto(1e-5, 1e5),
    ),
)
CORRECTIONS = {
    "every kind of step": EVERY,
    "m2": presets.get("m2"),
    "normalized": Correction(steps=(Reweight("sequence"), Clip(0.5, 2.0), Normalize("sequence"))),
    "ppo": Correction(surrogate=PpoClip(), steps=(Reject(high=1.1),)),
    "unbounded": Correction(steps=(Reweight(),)),
}
SIZES = ([131072], [700, 0, 900], [1] * 1500, [3] * 400, [2048, 31, 1])
pytestmark = pytest.mark.xdist_group("compiled")
slow = pytest.mark.slow
compiles = pytest.mark.skipif(bool(why := compiled.hindrance("cpu")), reason=why)


def inputs(lengths, seed=0, *, noise=0.02, wild=True, made_for=FULL):
    """Float32 tokens as an engine hands them over, in places masked or without a finite log-prob."""
    generator = torch.Generator().manual_seed(seed)
    size = sum(lengths)
    rand = lambda *shape: torch.rand(*shape, generator=generator)  # noqa: E731
    proximal = -rand(size) * 2
    behavior = proximal + torch.randn(size, generator=generator) * noise
    target = (proximal + torch.randn(size, generator=generator) * noise).requires_grad_()
    mask = torch.ones(size)
    if wild:
        mask = (rand(size) < 0.9).float()
        behavior = torch.where(rand(size) < 0.0005, math.nan, behavior)
    segments = Segments.whole(lengths, mask)
    ages = (rand(len(lengths)) * 5).floor().double()
    tokens = Tokens(segments, proximal, behavior, target, torch.randn(size, generator=generator), ages)
    host_loss = torch.randn(size, generator=generator).requires_grad_()
    return HookInputs(tokens, host_loss, layout=MetricsLayout.of(made_for))


def same(made, given, *, rtol=1e-5):
    """Loss, gradient, flags and metrics, compiled and eager."""
    source = given.host_loss if made.surrogate == correction.HOST else given.tokens.target
    found = [serve(made, given) for serve in (compiled.apply, correction.apply)]
    one, other = found
    assert torch.equal(one.rejected, other.rejected) and torch.equal(one.finite, other.finite)
    for name in ("loss", "weights", "ratio", "clipped", "rejected"):
        torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=rtol, atol=1e-6)
    slopes = [torch.autograd.grad(torch.where(x.rejected == 0, x.loss, 0).sum(), source)[0] for x in found]
    torch.testing.assert_close(*slopes, rtol=rtol, atol=1e-6)
    for name, rel in (("sums", rtol), ("highest", rtol), ("log_sums", rtol)):
        torch.testing.assert_close(*(getattr(x.measured, name) for x in found), rtol=rel, atol=1e-4)


@compiles
@slow
def test_graphs_decide_as_the_eager_code():
    for lengths in SIZES:
        same(FULL, inputs(lengths, noise=2e-3))


@compiles
@slow
@pytest.mark.parametrize("name", CORRECTIONS)
def test_every_kind_of_step_becomes_a_graph(name):
    made = CORRECTIONS[name]
    given = inputs([700, 300, 5, 90, 200], made_for=made)
    plan = plan_step(made, [given.tokens]) if made.is_coupled else None
    same(made, replace(given, plan=plan), rtol=2e-5)


@compiles
@slow
@pytest.mark.parametrize("layout", [None, MetricsLayout.of(FULL, curves=False)], ids=["", "no curves"])
def test_what_is_not_measured_is_in_no_graph(layout):
    given = replace(inputs([900, 400, 300], noise=2e-3), layout=layout)
    one, other = compiled.apply(FULL, given), correction.apply(FULL, given)
    torch.testing.assert_close(one.loss, other.loss, rtol=1e-5, atol=1e-6)
    assert layout is not None or one.measured is None
    if layout is not None:
        torch.testing.assert_close(one.measured.sums, other.measured.sums, rtol=1e-5, atol=1e-4)


@compiles
@slow
def test_a_plan_scales_and_rejects_sequences():
    made = replace(FULL, denominator="kept", group="atomic")
    given = inputs([900, 400, 300], noise=2e-3, made_for=made)
    plan = Plan(scale=torch.tensor([1.0, 2.0, 3.0]).double(), keep=torch.tensor([True, False, True]))
    same(made, replace(given, plan=plan))


@compiles
@slow
def test_fifty_random_batches_share_their_graphs():
    compiled._graphs.clear()
    torch._dynamo.utils.counters.clear()
    rng = random.Random(0)
    for seed in range(50):
        lengths = [rng.choice([0, 1, 40, 700, 1100]) for _ in range(rng.randint(1, 40))] + [compiled.SMALLEST]
        given = inputs(lengths, seed, noise=2e-3)
        assert torch.equal(compiled.apply(FULL, given).rejected, correction.apply(FULL, given).rejected)
    assert len(compiled._graphs) <= 3
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3


@pytest.mark.parametrize("made", [FULL, presets.get("turn_tis"), presets.get("min_prefix")], ids=str)
def test_what_no_graph_serves_is_eager(made, monkeypatch):
    monkeypatch.setattr(compiled, "_compile", lambda *_: pytest.fail("compiled"))
    lengths = [[], [1], [5], [compiled.SMALLEST - 1]] if made is FULL else [[2000]]
    for some in lengths:
        given = inputs(some, wild=False, made_for=made)
        one, other = compiled.apply(made, given), correction.apply(made, given)
        assert torch.equal(one.weights, other.weights)


HINDRANCES = {
    "no C++ compiler is installed": (compiled.shutil, "which", lambda _: None),
    "PyTorch is installed in a path with a blank": (torch, "__file__", "/my runs/torch/__init__.py"),
}


@pytest.mark.parametrize("why", HINDRANCES)
def test_where_nothing_can_be_compiled_it_says_so_once_and_is_eager(monkeypatch, caplog, why):
    monkeypatch.setattr(compiled, "_compile", lambda *_: pytest.fail("compiled"))
    monkeypatch.setattr(compiled.shutil, "which", str)
    monkeypatch.setattr(*HINDRANCES[why])
    compiled._can_serve.cache_clear()
    given = inputs([2000], wild=False)
    for _ in range(2):
        assert torch.equal(compiled.apply(FULL, given).loss, correction.apply(FULL, given).loss)
    compiled._can_serve.cache_clear()
    assert [record.getMessage() for record in caplog.records] == [
        f"slime_ext.backend: expected a compiler beside compiled, got none: {why}; it stays eager"
    ]
    assert compiled.describe(True, FULL) == f"backend eager (compiled was asked for, but {why})"
    assert compiled.describe(False, FULL) == "backend eager"


@compiles
def test_start_up_says_that_a_step_of_ones_own_runs_eager():
    own = type("Own", (Reweight,), {})()
    for steps, said in {
        (Reweight(),): "backend compiled",
        (own,): "backend eager (compiled was asked",
    }.items():
        assert compiled.describe(True, Correction(steps=steps)).startswith(said)


def test_the_names_of_backends():
    assert read_config({"preset": "token_tis", "backend": "compiled"}).backend == "compiled"
    assert read_config({"preset": "token_tis"}).backend == "eager"
    for name in ("auto", "triton", "compile"):
        with pytest.raises(ConfigError, match=f"slime_ext.backend: expected a known backend, got '{name}'"):
            read_config({"preset": "token_tis", "backend": name})
