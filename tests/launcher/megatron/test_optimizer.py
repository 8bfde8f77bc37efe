"""Training steps of every layout against transformers trained by torch, and the optimizer's own rules."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch

from slime_ext.errors import NonFiniteError
from slime_ext.launcher.megatron import optimizer, weights
from tests.launcher.distributed import each, run_ranks
from tests.launcher.megatron import tiny_model as tiny

pytestmark = pytest.mark.slow  # processes of their own

FLAGS = {"lr": 1e-2, "clip_grad": 0.3, "weight_decay": 0.1, "lr_warmup_iters": 2, "lr_decay_iters": 10}
DECAYING = {**FLAGS, "lr_decay_style": "linear"}
STEPS = 3


def _step(chunks, adam):
    adam.zero_grad()
    tiny.run_schedule(chunks, tiny.sequence_loss, forward_only=False)
    return adam.step()


def _train(layout, tied, experts, flags):
    chunks = tiny.start(layout, tied, experts=experts, **flags)
    adam = optimizer.build_optimizer(tiny.tiny_args(**flags), chunks)
    norms = [_step(chunks, adam) for _ in range(STEPS)]
    return norms, weights.gather_hf_state(chunks, tiny.tiny_config(tied, experts))


def _train_oracle(tied, experts):
    """torch's AdamW on transformers' model: warm-up by hand, torch's clipping, no decay of norms."""
    oracle = tiny.hf_model(tied, experts=experts)
    groups = [
        {"params": [p for p in oracle.parameters() if p.ndim > 1], "weight_decay": FLAGS["weight_decay"]},
        {"params": [p for p in oracle.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    adam, norms = torch.optim.AdamW(groups), []
    for step in range(STEPS):
        adam.zero_grad()
        tiny.hf_loss(oracle).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(oracle.parameters(), FLAGS["clip_grad"]).item())
        for group in adam.param_groups:
            group["lr"] = FLAGS["lr"] * min(step / 2, 1)
        adam.step()
    return norms, tiny.hf_state(oracle)


@pytest.mark.parametrize("layout", tiny.LAYOUTS)
def test_steps_are_those_of_torch_on_transformers(layout):
    cases = [(layout, *kind, FLAGS) for kind in itertools.product((False, True), tiny.mixtures(layout))]
    ranks = run_ranks(each, tiny.LAYOUTS[layout][0], _train, cases)
    for (_, *kind, _), results in zip(cases, zip(*ranks, strict=True), strict=True):
        norms, expected = _train_oracle(*kind)
        for found, _ in results:
            assert found == [(True, pytest.approx(norm, rel=1e-12)) for norm in norms], kind
            assert norms[0] > FLAGS["clip_grad"]
        state = results[0][1]
        for name, tensor in expected.items():
            torch.testing.assert_close(state[name], tensor, rtol=0, atol=1e-10)


def _interrupted():
    chunks = tiny.start("one", **DECAYING)
    adam = optimizer.build_optimizer(tiny.tiny_args(**DECAYING), chunks)
    for _ in range(2):
        _step(chunks, adam)
    saved, state = weights.gather_hf_state(chunks, tiny.tiny_config()), copy.deepcopy(adam.state_dict())
    _step(chunks, adam)
    straight = weights.gather_hf_state(chunks, tiny.tiny_config()), adam.lr
    again = optimizer.build_optimizer(tiny.tiny_args(**DECAYING), chunks)
    _step(chunks, again)  # what it did before it was loaded must not matter
    weights.load_hf_state(chunks, saved.__getitem__, tiny.tiny_config())
    again.load_state_dict(state)
    _step(chunks, again)
    return straight, (weights.gather_hf_state(chunks, tiny.tiny_config()), again.lr)


def test_a_loaded_state_continues_exactly():
    [((straight, lr), (resumed, lr_again))] = run_ranks(_interrupted, 1)
    assert lr == lr_again
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)


def _nonfinite():
    chunks = tiny.start("tp2", **FLAGS)
    adam = optimizer.build_optimizer(tiny.tiny_args(**FLAGS), chunks)
    before = [p.clone() for p in chunks[0].parameters()]
    adam.zero_grad()
    tiny.run_schedule(chunks, tiny.sequence_loss, forward_only=False)
    if torch.distributed.get_rank() == 1:
        next(chunks[0].parameters()).main_grad.view(-1)[0] = float("nan")
    with pytest.raises(NonFiniteError, match="optimizer step 0: expected a finite gradient norm, got nan"):
        adam.step()
    return all(torch.equal(p, was) for p, was in zip(chunks[0].parameters(), before, strict=True))


def test_a_nan_gradient_on_one_rank_stops_all_and_changes_nothing():
    assert run_ranks(_nonfinite, 2) == [True, True]


def _rates(flags):
    chunks = tiny.start("one", **flags)
    adam = optimizer.build_optimizer(tiny.tiny_args(**flags), chunks)
    rates = []
    for _ in range(5):
        rates.append(adam.lr)
        adam.zero_grad()
        adam.step()
    return rates


RATES = (
    ({}, [1.0] * 5),
    ({"lr_warmup_iters": 2}, [0.0, 0.5, 1.0, 1.0, 1.0]),
    ({"lr_decay_style": "linear", "lr_decay_iters": 4}, [1.0, 0.75, 0.5, 0.25, 0.0]),
    ({"lr_decay_style": "linear", "lr_decay_iters": 4, "min_lr": 0.2}, [1.0, 0.8, 0.6, 0.4, 0.2]),
)


def test_learning_rate_follows_megatrons_schedule():
    [found] = run_ranks(each, 1, _rates, [({"lr": 1.0, **flags},) for flags, _ in RATES])
    for rates, (flags, expected) in zip(found, RATES, strict=True):
        assert rates == pytest.approx(expected), flags
