"""``off_policy_is_function``: one detached weight clip(target / behavior) at the policy-loss boundary."""

from __future__ import annotations

import inspect
import logging
import math
import sys
from types import SimpleNamespace

import pytest
import torch

from slime_ext import tis
from slime_ext.errors import ConfigError, DataError, NonFiniteError
from slime_ext.hosts import contract
from tests.hosts.test_contract import hook_call

ARGS = SimpleNamespace(use_tis=True, eps_clip=0.2, eps_clip_high=0.28)
NAN = math.nan


def reinforce(cur, advantages):
    """The host's REINFORCE surrogate, on per-sample lists."""
    return -torch.cat(advantages) * torch.cat(cur)


def call(cur, rollout, *, args=ARGS, masks=None, advantages=None, **extra):
    cur = [torch.as_tensor(c, dtype=torch.float64) for c in cur]
    for c in cur:
        c.requires_grad_()
    rollout = [torch.as_tensor(r, dtype=torch.float64) for r in rollout]
    lengths = [len(c) for c in cur]
    masks = [
        torch.ones(n, dtype=torch.int32) if m is None else m
        for n, m in zip(lengths, masks or [None] * len(cur), strict=True)
    ]
    advantages = advantages or [torch.full((n,), 1.5, dtype=torch.float64) for n in lengths]
    extra.setdefault("pg_loss", reinforce(cur, advantages))
    loss, returned, metrics = tis.off_policy_is_function(
        args,
        train_log_probs=[c.detach() for c in cur],
        rollout_log_probs=rollout,
        loss_masks=masks,
        total_lengths=[n + 3 for n in lengths],
        response_lengths=lengths,
        cur_log_probs=cur,
        **extra,
    )
    return SimpleNamespace(
        loss=loss, masks=returned, metrics=metrics, cur=cur, given=masks, pg_loss=extra["pg_loss"]
    )


@pytest.mark.parametrize(
    ("ratio", "weight"),
    [(1.0, 1.0), (1.1, 1.1), (2.0, 1.28), (0.5, 0.8), (1.28, 1.28), (1e30, 1.28), (1e-30, 0.8)],
)
def test_weight_is_the_clipped_ratio_of_target_to_behavior(ratio, weight):
    out = call([[-100.0]], [[-100.0 - math.log(ratio)]])
    assert out.metrics["is_weight"].item() == pytest.approx(weight, rel=1e-12)
    assert out.loss.item() == pytest.approx(1.5 * 100 * weight, rel=1e-12)


def test_a_clipped_weight_is_exactly_the_bound():
    out = call([[0.0, -9.0]], [[-5.0, -1.0]])
    assert out.metrics["is_weight"].tolist() == [1.28, 0.8]
    assert out.metrics["is_clipfrac"].tolist() == [1.0, 1.0]


def test_on_a_host_that_has_its_own_it_has_the_bounds_and_metrics_of_that_one(monkeypatch):
    """slime PR 2084 as rebased in August 2026: clip(target / behavior, --tis-clip-low, --tis-clip)."""
    monkeypatch.setitem(
        sys.modules, "slime.utils.ppo_utils", SimpleNamespace(off_policy_is_function=lambda: None)
    )
    args = SimpleNamespace(use_tis=True, eps_clip=0.2, eps_clip_high=0.28, tis_clip=1.5, tis_clip_low=0.9)
    out = call([[-6.0, -6.0, -6.0]], [[-9.0, -1.0, -6.1]], args=args)
    weights = torch.tensor([1.5, 0.9, math.exp(0.1)], dtype=torch.float64)
    torch.testing.assert_close(out.loss, weights * out.pg_loss)
    assert {"tis", "tis_clipfrac", "tis_abs"} <= set(out.metrics)
    assert out.metrics["tis_clipfrac"].tolist() == [1.0, 1.0, 0.0]


def test_on_a_reinforce_loss_it_is_cispo():
    torch.manual_seed(0)
    cur, rollout = -torch.rand(2, 7, dtype=torch.float64)
    advantages = [torch.randn(7, dtype=torch.float64)]
    out = call([cur.clone()], [rollout], advantages=advantages)
    weight = (cur - rollout).exp().clamp(0.8, 1.28)
    torch.testing.assert_close(out.loss, -weight * advantages[0] * cur, rtol=0, atol=1e-12)
    out.loss.sum().backward()
    torch.testing.assert_close(out.cur[0].grad, -weight * advantages[0], rtol=0, atol=1e-12)


def test_gradient_flows_only_through_the_surrogate():
    constant = torch.ones(2, dtype=torch.float64)
    out = call([[-1.0, -2.0]], [[-1.1, -1.9]], pg_loss=constant)
    assert not out.loss.requires_grad


def test_eps_clip_one_drops_the_lower_bound():
    args = SimpleNamespace(use_tis=True, eps_clip=1.0, eps_clip_high=0.28)
    out = call([[-9.0]], [[-1.0]], args=args)
    assert out.metrics["is_weight"].item() == pytest.approx(math.exp(-8.0), abs=1e-15)
    assert out.metrics["is_clipfrac"].item() == 0


def test_eps_clip_high_defaults_to_eps_clip():
    args = SimpleNamespace(use_tis=True, eps_clip=0.2, eps_clip_high=None)
    assert call([[0.0]], [[-5.0]], args=args).metrics["is_weight"].item() == 1.2


def test_empty_and_fully_masked_samples():
    out = call([[], [-1.0, -2.0], [-1.0]], [[], [NAN, -math.inf], [-1.0]], masks=[None, torch.zeros(2), None])
    assert out.loss.tolist() == pytest.approx([0.0, 0.0, 1.5])
    out.loss.sum().backward()
    assert out.cur[1].grad.tolist() == [0.0, 0.0]
    assert all(value.isfinite().all() for value in out.metrics.values())


def test_a_rank_without_any_token():
    out = call([[]], [[]])
    assert out.loss.shape == (0,) and out.loss.requires_grad


@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf])
def test_a_non_finite_behavior_log_prob_costs_its_token_alone(bad):
    out = call([[-1.0, -1.0, -1.0]], [[-1.0, bad, -1.0]])
    assert out.loss.tolist() == [1.5, 0.0, 1.5]
    assert out.metrics["nonfinite_fraction"].tolist() == [0.0, 1.0, 0.0]
    out.loss.sum().backward()
    assert out.cur[0].grad.tolist() == [-1.5, 0.0, -1.5]


@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf])
def test_a_non_finite_target_log_prob_stops_with_its_place(bad):
    with pytest.raises(NonFiniteError, match=r"train_log_probs, sequence 1 of 2, response token 2: .* got"):
        call([[-1.0], [-1.0, -1.0, bad]], [[-1.0], [-1.0, -1.0, -1.0]])


def test_masked_positions_may_hold_anything():
    mask = torch.tensor([1, 0], dtype=torch.int32)
    out = call([[-1.0, NAN]], [[-1.0, 0.0]], masks=[mask])
    assert out.loss.tolist() == [1.5, 0.0]


def test_metric_names_and_shapes_are_the_hosts():
    out = call([[-1.0, -2.0], [-1.0]], [[-1.0, -2.5], [-1.0]])
    assert list(out.metrics) == ["is_weight", "is_clipfrac", "nonfinite_fraction"]
    assert {value.shape for value in out.metrics.values()} == {(3,)}


def test_masks_come_back_as_they_went_in():
    out = call([[-1.0]], [[-9.0]])
    assert out.masks[0] is out.given[0]


def test_without_the_target_it_says_what_to_do():
    with pytest.raises(
        ConfigError, match=r"off_policy_is_function: expected cur_log_probs .* slime_ext.host.init"
    ):
        tis.off_policy_is_function(ARGS, **hook_call()[0])


def test_a_rollout_without_log_probs_is_an_error_with_advice():
    with pytest.raises(ConfigError, match="rollout_log_probs: expected one tensor per sample, got None"):
        tis.off_policy_is_function(ARGS, **hook_call()[0] | {"rollout_log_probs": None})


def test_lists_of_different_lengths_are_an_error_with_the_sample():
    with pytest.raises(
        DataError,
        match=r"rollout_log_probs, sequence 1 of 2: expected 2 tokens on this rank, got a tensor of",
    ):
        call([[-1.0], [-1.0, -1.0]], [[-1.0], [-1.0]])


@pytest.mark.parametrize(
    ("fields", "warnings"),
    [
        ({"num_steps_per_rollout": 2}, 1),
        ({"keep_old_actor": True}, 1),
        ({}, 0),
        ({"num_steps_per_rollout": 1}, 0),
    ],
)
def test_it_warns_once_where_it_counts_a_ratio_twice(fields, warnings, caplog):
    args = SimpleNamespace(**vars(ARGS), **fields)
    with caplog.at_level(logging.WARNING, logger="slime_ext"):
        for _ in range(2):
            call([[-1.0]], [[-1.0]], args=args)
    assert len([r for r in caplog.records if "slime_ext.tis.off_policy_is" in r.getMessage()]) == warnings


def test_the_signature_is_the_hosts_call():
    parameters = inspect.signature(tis.off_policy_is_function).parameters
    assert list(parameters) == [*contract.REQUIRED, *contract.OPTIONAL, "kwargs"]
