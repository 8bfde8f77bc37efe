"""slime's contract as data, written down from its source, and every public function called with it.

The hook's part is the same from v0.2.0 to 624b824: policy_loss_function of
slime/backends/megatron_utils/loss.py.
tests/downstream/test_contract_source.py reads the real source against this.
"""

from __future__ import annotations

import functools
import math
from argparse import Namespace

import pytest
import torch

from slime_ext import presets, tis
from slime_ext.core.tokens import Head
from slime_ext.host import policy_loss
from slime_ext.host.policy_loss import LossCall
from slime_ext.host.step_metrics import current_step
from slime_ext.hosts import contract

LENGTHS, PROMPTS = (4, 1, 3), (3, 2, 6)
# Keyword -> how slime makes it for one response length, and whether it carries a gradient.
HOOK_CALL = {
    "pg_loss": "one tensor of all local tokens, with gradient",
    "train_log_probs": "a list of local tensors",
    "rollout_log_probs": "a list of local tensors",
    "loss_masks": "a list of int32 tensors of the whole response",
    "total_lengths": "a list of integers",
    "response_lengths": "a list of integers",
}
SEEDS = ("vanilla_tis_function", "icepop_function", "off_policy_is_function")
NAMES = (*SEEDS, "correct", *presets.PRESETS, *presets.ALIASES)
STOCK = "stock, carried by init"
HOST_CALLS = {  # what a host's call may carry beside the contract's keywords
    STOCK: ("carried", {}),
    "patched": ("passed", {}),
    "a newer host with more": ("passed", {"step_id": 3, "rollout_mask_sums": None}),
    "current_log_probs, slime pull request 1912": ("renamed", {}),
}


def arguments(**more):
    given = {"use_tis": True, "tis_clip": 2.0, "tis_clip_low": 0.0, "eps_clip": 0.2, "eps_clip_high": 0.28}
    given["custom_generate_function_path"] = "slime_ext.host.generate"
    return Namespace(**given | {"slime_ext": {"preset": "token_tis"}} | more)


def hook_call(seed=0):
    """The keywords of HOOK_CALL, and apart from them what a stock slime keeps to itself."""
    draw = torch.Generator().manual_seed(seed)

    def local(scale=0.3):
        return [-1 + scale * torch.randn(n, generator=draw) for n in LENGTHS]

    given = {
        "pg_loss": torch.randn(sum(LENGTHS), generator=draw).requires_grad_(),
        "train_log_probs": local(),
        "rollout_log_probs": local(),
        "loss_masks": [torch.ones(n, dtype=torch.int32) for n in LENGTHS],
        "total_lengths": [p + n for p, n in zip(PROMPTS, LENGTHS, strict=True)],
        "response_lengths": list(LENGTHS),
    }
    cur = [t.requires_grad_() for t in local()]
    rows = torch.full((sum(LENGTHS), 128), math.log(1 / 200))
    return given, {"cur_log_probs": cur, "advantages": local(1.0), "head": Head(rows, rows + 0.1)}


def called(name, **flags):
    """Makes the hook calls of a run, each once, with one ``args``: a function builds its hook once."""
    args = arguments(**({"slime_ext": None} if name != "correct" else {}) | flags)
    return functools.cache(functools.partial(call, name, args))


def call(name, args, how, seed=0):
    """One hook call as a host makes it: (what it was called with, what it returned)."""
    given, kept = hook_call(seed)
    way, extra = HOST_CALLS[how]
    if way == "renamed":
        kept["current_log_probs"] = kept.pop("cur_log_probs")
    batch = {"loss_masks": given["loss_masks"], "advantages": kept["advantages"]}
    loss = LossCall(current_step(), batch, kept.get("cur_log_probs"), kept["head"])
    token = policy_loss.RUNNING.set(loss if way == "carried" else None)
    try:
        passed = {} if way == "carried" else kept
        return given, getattr(tis, name)(args=args, **given, **passed, **extra)
    finally:
        policy_loss.RUNNING.reset(token)


def test_the_data_here_and_the_contract_of_the_package_agree():
    assert ("args", *HOOK_CALL) == contract.REQUIRED


@pytest.mark.parametrize("name", NAMES)
def test_a_function_keeps_the_contract(name):
    """One case per function, because each check reads the same calls: a call is made once."""
    answered = called(name)
    each_host_gets_what_slime_unpacks(answered)
    the_loss_has_a_finite_gradient(answered)
    the_hosts_tensors_are_not_written_to(answered)
    metrics_alone_return_the_very_objects(called(name, use_tis=False))
    metrics_have_the_same_names_in_every_micro_batch(answered)
    every_way_of_carrying_gives_the_same_loss(answered)


def test_a_correction_that_masks_for_the_whole_loss_keeps_the_contract():
    """No preset has ``mask_scope: all``, in which the host's masks change, too."""
    steps = [{"reject": {"unit": "token", "statistic": "ratio", "low": 0.9, "high": 1.1}}]
    answered = called("correct", slime_ext={"steps": steps, "mask_scope": "all"})
    each_host_gets_what_slime_unpacks(answered)
    the_loss_has_a_finite_gradient(answered)
    the_hosts_tensors_are_not_written_to(answered)
    every_way_of_carrying_gives_the_same_loss(answered)
    kept = torch.cat(answered(STOCK)[1][1])
    assert 0 < int(kept.sum()) < len(kept)


def each_host_gets_what_slime_unpacks(answered):
    taken = {"loss", "pg_loss", "entropy_loss", "pg_clipfrac", "ppo_kl", "kl_loss", "ois", "opsm_clipfrac"}
    for how in HOST_CALLS:
        given, (loss, masks, metrics) = answered(how)
        assert loss.shape == given["pg_loss"].shape and loss.requires_grad, how
        assert [m.shape for m in masks] == [m.shape for m in given["loss_masks"]], how
        assert metrics and not taken & set(metrics), how
        for key, value in metrics.items():
            assert isinstance(key, str) and value.shape == loss.shape and not value.requires_grad, how


def the_loss_has_a_finite_gradient(answered):
    _, (loss, _, _) = answered(STOCK)
    leaves = torch.autograd.grad(loss.sum(), _leaves(loss), retain_graph=True)
    assert torch.isfinite(loss).all() and leaves and all(torch.isfinite(leaf).all() for leaf in leaves)


def _leaves(loss):
    """The tensors of the call that a loss depends on."""
    if loss.is_leaf:
        return [loss]
    seen, nodes = [], [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        seen += [node.variable] if hasattr(node, "variable") else []
        nodes += [before for before, _ in node.next_functions if before is not None]
    return list(dict.fromkeys(seen))


def the_hosts_tensors_are_not_written_to(answered):
    before, _ = hook_call()
    given, _ = answered(STOCK)
    for key, value in before.items():
        values = value if isinstance(value, list) else [value]
        after = given[key] if isinstance(value, list) else [given[key]]
        assert all(
            torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(values, after, strict=True)
        )


def metrics_alone_return_the_very_objects(answered):
    given, (loss, masks, _) = answered(STOCK)
    assert loss is given["pg_loss"]
    assert all(a is b for a, b in zip(masks, given["loss_masks"], strict=True))


def metrics_have_the_same_names_in_every_micro_batch(answered):
    names = [list(answered(STOCK, seed)[1][2]) for seed in range(3)]
    assert names[0] == names[1] == names[2]


def every_way_of_carrying_gives_the_same_loss(answered):
    losses = [answered(how)[1][0] for how in HOST_CALLS]
    assert all(torch.equal(loss, losses[0]) for loss in losses)
