"""Laws that hold for every correction and every batch, with hypothesis; and what a call may cost."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from slime_ext import presets
from slime_ext.core.correction import Correction, HookInputs, Plan, apply
from slime_ext.core.losses import Bounds
from slime_ext.core.metrics.layout import MetricsLayout
from slime_ext.core.needs import Need
from slime_ext.core.steps import Reject, Reweight, Truncate, Veto
from slime_ext.core.tokens import Head
from slime_ext.ops.segments import Segments
from tests import oracle
from tests.batches import META, tokens

NAMES = st.sampled_from(
    [name for name, p in presets.PRESETS.items() if Need.WHOLE_STEP not in p.correction.needs]
)
SEEDS = st.integers(0, 2**32)
FEW = [*presets.PRESETS][::4]
OTHERS = [name for name in presets.PRESETS if name not in FEW]
REJECTIONS = (
    Reject("token", "ratio", low=0.9, high=1.1),
    Reject("sequence", "k3", "mean", high=0.01),
    Reject("turn", "k2", "max", high=0.02),
    Veto(low=0.5),
)
law = settings(max_examples=40, deadline=None)


def evaluate(name, batch):
    """One [4, tokens] table per sequence: weights, keep, loss, gradient."""
    correction = presets.get(name)
    packed, host_loss = tokens(batch)
    outcome = correction(packed)
    loss, _ = correction.loss(outcome, packed, host_loss * packed.target, Bounds())
    (gradient,) = torch.autograd.grad(torch.where(packed.segments.mask, loss, 0).sum(), packed.target)
    table = torch.stack([outcome.weights, outcome.keep.double(), loss.detach(), gradient])
    return list(torch.where(packed.segments.mask, table, 0).split([len(s["mask"]) for s in batch], dim=1))


def equal(ours, theirs):
    return all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(ours, theirs, strict=True))


@law
@given(NAMES, SEEDS)
def test_packing_does_not_matter(name, seed):
    batch = oracle.random_batch(seed)
    assert equal(evaluate(name, batch), [evaluate(name, [s])[0] for s in batch])


@law
@given(NAMES, SEEDS)
def test_the_order_of_sequences_does_not_matter(name, seed):
    batch = oracle.random_batch(seed)
    order = random.Random(seed).sample(range(len(batch)), len(batch))
    whole = evaluate(name, batch)
    assert equal(evaluate(name, [batch[i] for i in order]), [whole[i] for i in order])


@law
@given(NAMES, SEEDS, st.integers(1, 4))
def test_micro_batches_do_not_matter(name, seed, size):
    batch = oracle.random_batch(seed)
    parts = [evaluate(name, batch[i : i + size]) for i in range(0, len(batch), size)]
    assert equal(evaluate(name, batch), [table for part in parts for table in part])


@settings(law, max_examples=10)  # of 24 orders each
@given(SEEDS)
def test_rejections_commute(seed):
    packed, _ = tokens(oracle.random_batch(seed))
    keeps = [Correction(steps=steps)(packed).keep for steps in itertools.permutations(REJECTIONS)]
    assert all(torch.equal(keep, keeps[0]) for keep in keeps)


@law
@given(SEEDS)
def test_a_rejection_changes_no_weight_that_stays(seed):
    packed, _ = tokens(oracle.random_batch(seed))
    weighted = (Reweight("sequence"), Truncate(2.0))
    plain, strict = Correction(steps=weighted)(packed), Correction(steps=(*REJECTIONS, *weighted))(packed)
    assert torch.equal(strict.weights, torch.where(strict.keep, plain.weights, 0))


@law
@given(NAMES, SEEDS, st.sampled_from([-0.5, -0.25, -2.0]))
def test_shifting_all_log_probs_changes_nothing_that_depends_on_the_ratio_alone(name, seed, shift):
    correction = presets.get(name)
    if any(
        getattr(step, "statistic", "") in ("tv", "binary_kl", "binary_kl_max") for step in correction.steps
    ):
        return
    packed, _ = tokens(oracle.random_batch(seed, wild=False))
    moved = replace(packed, **{k: getattr(packed, k) + shift for k in ("proximal", "behavior", "target")})
    one, other = correction(packed), correction(moved)
    assert torch.equal(one.keep, other.keep) and torch.allclose(
        one.weights, other.weights, rtol=1e-10, atol=1e-12
    )


@law
@given(SEEDS)
def test_levels_agree_on_sequences_of_one_token(seed):
    batch = [oracle.random_sequence(random.Random(seed + i), 1, 0.5, wild=False) for i in range(5)]
    packed, _ = tokens(batch)
    weights = [
        Correction(steps=(Reweight(u),))(packed).weights for u in ("token", "turn", "sequence", "geometric")
    ]
    assert equal(weights, [weights[0]] * 4)


@law
@given(SEEDS)
def test_a_cap_that_never_acts_is_no_cap(seed):
    packed, _ = tokens(oracle.random_batch(seed, wild=False))
    capped, plain = (Correction(steps=(Reweight("token"), *more))(packed) for more in ((Truncate(1e5),), ()))
    assert torch.equal(capped.weights, plain.weights)


# ---- cost ----


class Count(TorchDispatchMode):
    """The operations that PyTorch dispatches."""

    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


def call_on(device, packed, host_loss, correction):
    """A whole call between packing and handing back, with everything measured."""
    ages = torch.ones(packed.segments.count, dtype=torch.float64, device=device)
    segments = Segments.whole(packed.segments.lengths, packed.segments.full_mask.to(device))
    names = ("proximal", "behavior", "target", "advantages")
    moved = {name: getattr(packed, name).detach().to(device) for name in names}
    head = Head(packed.head.sampler.to(device), packed.head.trainer.to(device))
    packed = replace(packed, segments=segments, ages=ages, head=head, **moved)
    numbers = {
        step: torch.ones((), device=device) for step in correction.steps if Need.WHOLE_STEP in step.needs
    }
    plan = Plan({step: number.double() for step, number in numbers.items()})
    inputs = HookInputs(packed, host_loss.to(device), plan, layout=MetricsLayout.of(correction))
    return lambda: apply(correction, inputs)


@pytest.mark.xdist_group(META)
@pytest.mark.parametrize("names", [FEW, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["few", "others"])
def test_operations_do_not_depend_on_the_number_of_sequences_and_none_waits(names):
    """Tensors on the meta device have no values: whatever reads one raises."""
    # PyTorch's first call of an operation on the meta device dispatches a few more.
    call_on(torch.device("meta"), *tokens(oracle.random_batch(0), torch.float32), presets.get("seq_is"))()
    batch = [s for seed in range(16) for s in oracle.random_batch(seed)]
    short, long = (tokens(batch * times, torch.float32) for times in (1, 3))
    for name in names:
        found = []
        for packed in (short, long):
            with Count() as count:
                call_on(torch.device("meta"), *packed, presets.get(name))()
            found.append(count.ops)
        assert found[0] == found[1], name


@pytest.mark.xdist_group(META)
def test_a_value_that_is_read_is_seen():
    with pytest.raises((RuntimeError, NotImplementedError)):
        batch = tokens(oracle.random_batch(0), torch.float32)
        call_on(torch.device("meta"), *batch, presets.get("token_tis"))().loss.tolist()
