"""The compiled graphs decide as the eager path does, for any sizes, without compiling again and again."""

from __future__ import annotations

import random
import threading
from dataclasses import replace

import pytest
import torch

from slime_ext.correction import Correction
from slime_ext.kernels import Eager
from slime_ext.kernels.compiled import SMALLEST, Compiled
from slime_ext.steps import Reject, Reweight, Truncate
from tests.kernels.batches import (
    CORRECTIONS,
    EVERY,
    FULL,
    assert_applied_alike,
    assert_same,
    random_tokens,
)

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("compiled")]
SIZES = ([131072], [700, 0, 900], [1] * 1500, [3] * 400, [2048, 31, 1])


@pytest.fixture(scope="module")
def full():
    return Compiled(FULL)


def test_two_threads_may_be_the_first_to_ask(full):
    assert not full._known
    packed = random_tokens([131072], noise=2e-3)
    expected = FULL(packed).keep
    found = []

    def ask():
        found.append(full.outcome(packed, observe=True).keep)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2 and all(torch.equal(keep, expected) for keep in found)
    assert len(full._known) == 2


@pytest.mark.parametrize("lengths", SIZES, ids=lambda lengths: f"{len(lengths)}x{lengths[0]}")
def test_graphs_decide_as_the_eager_path(full, lengths):
    packed = random_tokens(lengths, noise=2e-3)
    expected, got = FULL(packed, observe=True), full.outcome(packed, observe=True)
    assert_same(got, expected, packed.segments.mask)


def test_every_kind_of_step_becomes_a_graph():
    packed = random_tokens([700, 300, 5, 90, 200])
    expected, got = EVERY(packed, observe=True), Compiled(EVERY).outcome(packed, observe=True)
    assert_same(got, expected, packed.segments.mask, rtol=2e-5)


def test_a_settled_number_becomes_an_input():
    packed = random_tokens([700, 300, 90])
    expected, got = (served(CORRECTIONS["m2"]).outcome(packed, observe=True) for served in (Eager, Compiled))
    assert_same(got, replace(expected, acted=expected.acted.int()), packed.segments.mask, rtol=2e-5)


def test_ages_reject_and_are_measured():
    packed = random_tokens([700, 300, 90, 20], wild=False)
    packed = replace(packed, ages=torch.tensor([1.0, 5.0, torch.nan, 3.0]))
    stale = Reject("token", "k3", high=0.5, max_staleness=3)
    backend = Compiled(Correction(steps=(stale, Reweight("token"), Truncate(2.0))))
    assert not backend.outcome(packed).keep[700:1000].any()
    assert_applied_alike(backend, packed, None, 1e-5)


@pytest.mark.parametrize("lengths", [[], [1], [5], [SMALLEST - 1]], ids=str)
def test_small_batches_need_no_graph(lengths):
    backend = Compiled(CORRECTIONS["seq_mis"])
    packed = random_tokens(lengths, wild=False)
    assert torch.equal(backend.outcome(packed).weights, CORRECTIONS["seq_mis"](packed).weights)
    assert not backend._known


def test_fifty_random_batches_share_their_graphs(full):
    torch._dynamo.utils.counters.clear()
    rng = random.Random(0)
    for seed in range(50):
        lengths = [rng.choice([0, 1, 40, 700, 1100]) for _ in range(rng.randint(1, 40))] + [SMALLEST]
        packed = random_tokens(lengths, seed=seed, noise=2e-3)
        assert torch.equal(full.outcome(packed, observe=True).keep, FULL(packed).keep)
    assert len(full._known) <= 3
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3


def test_loss_gradient_and_metrics_are_those_of_the_eager_path(full):
    assert_applied_alike(full, random_tokens([900, 40, 300], noise=2e-3), None, 1e-6)
