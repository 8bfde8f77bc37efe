"""Wrappers around a module with the shape of a host's loss: what the hook gets; nothing stays behind."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from slime_ext import tis
from slime_ext.errors import ConfigError
from slime_ext.host import policy_loss, startup
from slime_ext.host.configured import setup_for
from slime_ext.host.policy_loss import LossCall
from slime_ext.host.step_metrics import current_step
from slime_ext.hosts import contract
from tests import oracle
from tests.test_tis import arguments, as_slime_calls

SEEN = []
LENGTHS = [3, 2]


def reaching_hook(given):
    """What of a hook call's keywords there is: the host's own, and what the running policy loss holds."""
    lists = {key: [] for key in contract.REQUIRED[1:]}
    call = contract.HookCall.of(None, lists | given, policy_loss.current().keywords())
    every = {key: getattr(call, key) for key in (*contract.OPTIONAL, "max_seq_lens")}
    return {key: value for key, value in every.items() if value is not None}


def seeing(args, *, cur_log_probs=None, advantages=None, **kwargs):
    """Stands where the hook stands: keeps what would reach it."""
    given = reaching_hook({"cur_log_probs": cur_log_probs, "advantages": advantages, **kwargs})
    SEEN.append(given)
    return kwargs["pg_loss"].square()  # saves a tensor, so that a recomputation comes this far


def a_loss_module(form=lambda made: (None, made), passed=lambda made: {}):
    """A policy loss as a host has it: it looks the other function up in its module's globals."""
    module = types.ModuleType("slime.loss")

    def get_log_probs_and_entropy(logits):
        return form({"log_probs": list(logits.split(LENGTHS)), "entropy": []})

    def policy_loss_function(args, batch, logits, sum_of_sample_mean):
        made = module.get_log_probs_and_entropy(logits)
        cur = (made[1] if isinstance(made, tuple) else made)["log_probs"]
        return sum_of_sample_mean(seeing(args, pg_loss=-torch.cat(cur).square(), **passed(cur)))

    for function in (get_log_probs_and_entropy, policy_loss_function):
        function.__module__ = module.__name__
        setattr(module, function.__name__, function)
    return module


@pytest.fixture
def host(monkeypatch):
    """Makes a loss module the one of this process's host."""
    SEEN.clear()

    def become(module):
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return module

    return become


def wrapped():
    startup.wrap_loss(startup.host_that_trains())


def batch():
    return {"advantages": [torch.ones(n) for n in LENGTHS]}


def run(module, **how):
    logits = torch.arange(5.0).requires_grad_()
    module.policy_loss_function(None, batch(), logits, torch.sum, **how).backward()
    return logits.grad


@pytest.mark.parametrize("form", [lambda made: made, lambda made: (None, made)], ids=["bare", "in a tuple"])
def test_the_hook_gets_what_the_host_does_not_pass(host, form):
    module = host(a_loss_module(form))
    wrapped()
    run(module)
    (given,) = SEEN
    assert [t.numel() for t in given["cur_log_probs"]] == LENGTHS
    assert all(t.requires_grad for t in given["cur_log_probs"])
    assert len(given["advantages"]) == len(LENGTHS)


def test_v020_calls_its_loss_by_keyword(host):
    module = host(a_loss_module())
    wrapped()
    logits = torch.arange(5.0)
    module.policy_loss_function(args=None, batch=batch(), logits=logits, sum_of_sample_mean=torch.sum)
    assert "advantages" in SEEN[0]


@pytest.mark.parametrize("name", ["cur_log_probs", "current_log_probs"])
def test_what_the_host_passes_itself_stays(host, name):
    mark = [torch.zeros(n) for n in LENGTHS]
    module = host(a_loss_module(passed=lambda made: {name: mark}))
    wrapped()
    run(module)
    assert SEEN[0]["cur_log_probs"] is mark and set(SEEN[0]) == {"cur_log_probs", "advantages"}


def test_a_recomputed_loss_passes_them_both_times(host):
    module = host(a_loss_module())
    wrapped()
    logits = torch.arange(5.0).requires_grad_()
    loss = checkpoint(module.policy_loss_function, None, batch(), logits, torch.sum, use_reentrant=False)
    loss.backward()
    assert len(SEEN) == 2 and all("cur_log_probs" in given for given in SEEN)


def test_nothing_is_held_outside_the_policy_loss(host):
    module = host(a_loss_module())
    wrapped()
    run(module)
    module.get_log_probs_and_entropy(torch.arange(5.0))
    assert reaching_hook({}) == {}


def test_nothing_is_held_after_a_loss_that_failed(host):
    module = host(a_loss_module())
    wrapped()
    with pytest.raises(ZeroDivisionError):
        module.policy_loss_function(None, batch(), torch.arange(5.0), lambda x: 1 / 0)
    assert reaching_hook({}) == {}


def test_our_hooks_read_what_the_policy_loss_holds():
    target = [torch.full((2,), -1.0, requires_grad=True)]
    token = policy_loss.RUNNING.set(LossCall(current_step(), cur_log_probs=target))
    lists = {key: [torch.zeros(2)] for key in ("train_log_probs", "rollout_log_probs")}
    lists["loss_masks"] = [torch.ones(2)]
    args = types.SimpleNamespace(eps_clip=0.2, eps_clip_high=0.2, use_tis=True)
    try:
        loss, _, _ = tis.off_policy_is_function(
            args, pg_loss=torch.ones(2), total_lengths=[3], response_lengths=[2], **lists
        )
    finally:
        policy_loss.RUNNING.reset(token)
    assert torch.equal(loss, torch.full((2,), 0.8))


def test_without_init_the_first_call_says_that_it_is_late(host, caplog):
    host(a_loss_module())
    setup_for(types.SimpleNamespace(slime_ext={"preset": "token_tis"}, use_tis=True), "correct")
    assert "expected --custom-megatron-init-path slime_ext.host.init at start-up" in caplog.text


def test_without_init_the_first_call_checks_the_flags(host):
    host(a_loss_module())
    call = as_slime_calls(oracle.random_batch(5))
    with pytest.raises(ConfigError, match="--tis-clip: expected a number"):
        tis.vanilla_tis_function(arguments(tis_clip="2e0", tis_clip_low=0.0), **call)


def test_after_init_nothing_is_late(host, caplog):
    host(a_loss_module())
    wrapped()
    setup_for(types.SimpleNamespace(slime_ext={"preset": "token_tis"}, use_tis=True), "correct")
    assert not caplog.records
