"""Laws that hold for every correction and every batch, with hypothesis; and what a call may cost."""

from __future__ import annotations

import itertools
import math
import random
from contextlib import ExitStack, nullcontext
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from slime_ext import presets, tis
from slime_ext.analysis.speed.run import OURS
from slime_ext.analysis.speed.watched import NEW, watched
from slime_ext.correction import HOST, Correction, plan_step
from slime_ext.host import hook, step_metrics
from slime_ext.kernels import Work, backend_for
from slime_ext.metrics import Layout
from slime_ext.metrics.measure import measure
from slime_ext.objectives import Bounds
from slime_ext.steps import Reject, Reweight, Truncate, Veto
from tests import oracle
from tests.batches import tokens
from tests.test_tis import arguments, as_slime_calls

NAMES = st.sampled_from([name for name, p in presets.PRESETS.items() if not p.correction.is_coupled])
SEEDS = st.integers(0, 2**32)
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


@law
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
@given(NAMES, SEEDS, st.sampled_from([-0.5, 0.25, 2.0]))
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
    capped, plain = (Correction(steps=(Reweight("token"), *more))(packed) for more in ((Truncate(1e12),), ()))
    assert torch.equal(capped.weights, plain.weights)


# ---- cost ----

FREE = ("aten.detach", "aten.view", "aten.select", "aten.split", "aten.scalar_tensor", "aten.lift_fresh")
FREE += ("aten.promote_types", "aten.squeeze", "aten.unsqueeze", "aten.slice", "aten.expand", "aten.alias")
FREE += ("aten.unbind", "aten.transpose", "aten.t.", "aten.new_empty", "aten.empty", "aten._unsafe_view")
SYNCS = ("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.equal", "aten.is_nonzero")


class Count(TorchDispatchMode):
    """Operations that are neither views nor allocations: those that PyTorch dispatches, and numpy's."""

    def __init__(self):
        super().__init__()
        self.ops, self.numpy = [], ExitStack()

    def __enter__(self):
        self.numpy.enter_context(watched(self._note))
        return super().__enter__()

    def __exit__(self, *raised):
        self.numpy.close()
        return super().__exit__(*raised)

    def _note(self, name, read, made):
        if name != NEW:
            self.ops.append(f"numpy.{name}")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not str(func).startswith(FREE):
            self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


def counted(body):
    with Count() as count:
        body()
    return count.ops


def whole(batch):
    """All tokens sampled by the policy, with finite log-probs, which nearly all batches are."""
    for s in batch:
        s["mask"] = [1] * len(s["mask"])
        s["behavior"] = [x if math.isfinite(x) and x <= 0 else -1.0 for x in s["behavior"]]
    return [s for s in batch if s["mask"]]


def both_sizes(body_of, clean=False):
    """How many operations a call takes: of some sequences as of three times as many. They have masked tokens,
    non-finite log-probs, extremes and sequences without tokens, or nothing of it if ``clean``."""
    batch = [s for seed in range(16) for s in oracle.random_batch(seed, wild=not clean)]
    batch = whole(batch) if clean else batch
    few, many = (counted(body_of(batch * times)) for times in (1, 3))
    assert few == many, "the operations depend on the number of sequences"
    assert not [op for op in few if op.startswith(SYNCS)]
    return len(few)


@pytest.mark.parametrize("name", presets.PRESETS)
def test_no_sync_and_an_operation_count_that_sequences_do_not_change(name):
    def body_of(batch):
        packed, _ = tokens(batch)
        return lambda: presets.get(name)(packed)

    # m2 settles its number: with a step plan, see below.
    limit = {"m2": 300, "min_prefix": 60, "kpop": 36, "trm": 34, "skyrl_outlier_mask": 32}.get(name, 30)
    assert both_sizes(body_of) <= limit


def test_a_coupled_step_takes_few_operations_once_its_number_is_settled():
    def body_of(batch):
        packed, _ = tokens(batch)
        plan = plan_step(presets.get("m2"), [packed])
        return lambda: presets.get("m2")(packed, plan)

    assert both_sizes(body_of) <= 15


@pytest.mark.parametrize("name", ["token_is", "off_policy_is", "icepop", "cispo"])
def test_token_weights_take_at_most_ten_operations(name):
    def body_of(batch):
        packed, _ = tokens(batch)
        return lambda: presets.get(name)(packed)

    assert both_sizes(body_of) <= 10


def in_float32(call):
    """As hosts hand log-probs over."""
    narrow = {
        k: [x.float() if x.is_floating_point() else x for x in v] for k, v in call.items() if k in LISTS
    }
    return call | narrow | {"pg_loss": call["pg_loss"].float()}


LISTS = ("train_log_probs", "rollout_log_probs", "cur_log_probs", "advantages")


@pytest.fixture
def eager_as_on_a_device(monkeypatch):
    """Without the check that stops at once on CPU: on CUDA, where operations cost a launch, it does
    nothing."""
    monkeypatch.setattr(hook, "require_finite", lambda *_: None)
    monkeypatch.setattr(hook, "backend_for", lambda correction, *_: backend_for(correction, "cpu", "eager"))


def whole_call(name, layout=None):
    """A whole hook call, in an open optimizer step if there is a layout."""

    def body_of(batch):
        call = in_float32(as_slime_calls(batch))

        def body():
            with nullcontext() if layout is None else step_metrics.under_way(layout):
                getattr(tis, name)(arguments(), **call)

        return body

    return body_of


@pytest.mark.parametrize("name", ["decoupled_geo_rs_seq_tis", "geo_rs", "seq_is_rs", "pure_is"])
def test_a_whole_hook_call_takes_at_most_fifty(name, eager_as_on_a_device):
    assert both_sizes(whole_call(name)) <= 50


@pytest.mark.parametrize("name", [name for name in presets.PRESETS if name != "m2"])
@pytest.mark.parametrize("curves", [False, True], ids=["", "curves"])
def test_a_whole_hook_call_with_all_metrics_takes_at_most_seventy_seven(name, curves, eager_as_on_a_device):
    """And 13 for curves, 13 where masks have holes or log-probs are not finite, 13 for turns and prefixes,
    which PyTorch serves, and 5 for a loss of ours."""
    layout = Layout.of(presets.get(name), curves=curves)
    more = 13 * curves + 13 * (name in ("turn_tis", "min_prefix"))
    more += 5 * (presets.get(name).surrogate != HOST)
    assert both_sizes(whole_call(name, layout), clean=True) <= 77 + more
    assert both_sizes(whole_call(name, layout)) <= 90 + more


@pytest.mark.parametrize("correction", [*OURS.values(), presets.get("m2")], ids=[*OURS, "m2"])
@pytest.mark.parametrize(("clean", "limit"), [(True, 70), (False, 84)], ids=["whole", "wild"])
@pytest.mark.parametrize("curves", [False, True], ids=["", "curves"])
def test_with_everything_measured_an_eager_call_takes_at_most_seventy_five(correction, clean, limit, curves):
    """The configurations that speed is measured on, token weights, and sequence weights with mask and veto,
    from packed tokens to everything that the hook keeps; m2 with its plan. Curves take 13 more, and holes in
    masks and non-finite log-probs up to 14."""

    def body_of(batch):
        packed, host_loss = tokens(batch)
        packed = replace(packed, proximal=packed.proximal.float(), behavior=packed.behavior.float())
        plan = plan_step(correction, [packed])
        work = Work(packed, host_loss.float(), plan, layout=Layout.of(correction, curves=curves))
        return lambda: backend_for(correction, "cpu", "eager").apply(work)

    assert both_sizes(body_of, clean) <= limit + 13 * curves


@pytest.mark.parametrize(("curves", "limit"), [(False, 51), (True, 65)])
def test_metrics_do_not_wait_for_the_device(curves, limit):
    correction = presets.get("decoupled_geo_rs_seq_tis")

    def body_of(batch):
        packed, _ = tokens(batch)
        outcome = correction.outcome(packed, observe=True)
        return lambda: measure(packed, outcome, Layout.of(correction, curves=curves))

    assert both_sizes(body_of) <= limit
