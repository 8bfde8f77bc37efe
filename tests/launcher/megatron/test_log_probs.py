"""Vocab-parallel log-probs and entropy against an unsharded log_softmax in float64."""

from __future__ import annotations

import pytest
import torch

from slime_ext.launcher.megatron import log_probs, parallel
from tests.launcher.distributed import run_ranks
from tests.launcher.megatron import tiny_model as tiny

VALUE, GRADIENT = (
    {torch.float64: 4e-15, torch.float32: 4e-6, torch.bfloat16: 4e-6},
    {
        torch.float64: 4e-15,
        torch.float32: 1e-6,
        torch.bfloat16: 4e-3,  # the gradient itself is rounded to bfloat16
    },
)


def _case(dtype):
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(9, 12, generator=generator, dtype=torch.float64) * 4).to(dtype)
    targets = torch.randint(0, 12, (9,), generator=generator)
    upstream = torch.randn(2, 9, generator=generator, dtype=torch.float64)
    return logits, targets, upstream


def _oracle(dtype, temperature):
    logits, targets, upstream = _case(dtype)
    leaf = logits.double().requires_grad_()
    everything = (leaf / temperature).log_softmax(-1)
    chosen = everything.gather(-1, targets[:, None])[:, 0]
    entropy = -(everything.exp() * everything).sum(-1)
    (gradient,) = torch.autograd.grad((chosen * upstream[0] + entropy * upstream[1]).sum(), leaf)
    return chosen.detach(), entropy.detach(), gradient


def _sharded(dtype, temperature):
    parallel.initialize(tiny.tiny_args(tp=torch.distributed.get_world_size()))
    group = parallel.tp_group()
    logits, targets, upstream = _case(dtype)
    leaf = logits.chunk(group.size(), -1)[group.rank()].clone().requires_grad_()
    hidden = leaf * 1  # not a leaf: writing to it would go unnoticed by autograd
    chosen, entropy = log_probs.log_probs_and_entropy(hidden, targets, temperature)
    total = (chosen * upstream[0].to(chosen) + entropy * upstream[1].to(entropy)).sum()
    first, second = (torch.autograd.grad(total, leaf, retain_graph=True)[0] for _ in range(2))
    alone = log_probs.log_probs_and_entropy(hidden, targets, temperature)[0]
    assert torch.equal(hidden, leaf)
    assert torch.equal(first, second)
    assert torch.equal(alone, chosen)
    return chosen.detach(), entropy.detach(), first


@pytest.mark.parametrize("temperature", [pytest.param(1.0, marks=pytest.mark.slow), 0.6])
@pytest.mark.parametrize("dtype", VALUE, ids=str)
@pytest.mark.parametrize("ranks", [1, 2])
def test_values_and_gradients_are_those_of_log_softmax(ranks, dtype, temperature):
    results = run_ranks(_sharded, ranks, dtype, temperature)
    chosen, entropy, gradient = _oracle(dtype, temperature)
    exact = torch.float64 if dtype is torch.float64 else torch.float32
    for found in results:
        assert found[0].dtype == exact
        torch.testing.assert_close(found[0].double(), chosen, rtol=0, atol=VALUE[dtype] * 20)
        torch.testing.assert_close(found[1].double(), entropy, rtol=0, atol=VALUE[dtype] * 20)
    found = torch.cat([gradient for *_, gradient in results], -1)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), gradient, rtol=GRADIENT[dtype], atol=GRADIENT[dtype])


def _log_probs_alone():
    parallel.initialize(tiny.tiny_args(tp=torch.distributed.get_world_size()))
    group = parallel.tp_group()
    logits, targets, upstream = _case(torch.float64)
    leaf = logits.chunk(group.size(), -1)[group.rank()].clone().requires_grad_()
    (log_probs.log_probs_and_entropy(leaf, targets)[0] * upstream[0]).sum().backward()
    return leaf.grad


def test_log_probs_alone_have_the_same_gradient():
    logits, targets, upstream = _case(torch.float64)
    leaf = logits.requires_grad_()
    (leaf.log_softmax(-1).gather(-1, targets[:, None])[:, 0] * upstream[0]).sum().backward()
    found = torch.cat(run_ranks(_log_probs_alone, 2), -1)
    torch.testing.assert_close(found, leaf.grad, rtol=0, atol=4e-15)


def _extremes():
    parallel.initialize(tiny.tiny_args(tp=2))
    rank = parallel.tp_group().rank()
    logits = torch.tensor([[[1e4, 0.0]], [[-1e4, 0.0]]][rank], dtype=torch.float32, requires_grad=True)
    chosen, entropy = log_probs.log_probs_and_entropy(logits, torch.tensor([2]))
    (chosen + entropy).sum().backward()
    empty = log_probs.log_probs_and_entropy(logits[:0], torch.tensor([], dtype=torch.long))[0]
    return chosen.item(), entropy.item(), logits.grad, empty.shape


def test_large_logits_and_no_tokens():
    for chosen, entropy, gradient, empty in run_ranks(_extremes, 2):
        assert (chosen, entropy) == (-2e4, 0.0)
        assert gradient.isfinite().all()
        assert empty == (0,)
