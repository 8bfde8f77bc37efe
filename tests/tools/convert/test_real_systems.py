"""Each dialect beside the system's own function, from its wheel: OpenRLHF 0.11.2, TRL 1.16.0, verl 0.9.1,
SkyRL 0.3.0; and score centering beside slime's own at 2e5cd7c.

    SLIME=CHECKOUT bash tests/adapters/real.sh -rP -k "dialect_is or centering_is"

Its environment is made by that script; without SLIME centering is skipped. Each test prints the largest
difference of the loss (the sum over response tokens of PPO's clipped loss with their weights and masks) and
of its gradient, in float64.
"""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from benchmarks.fidelity.exact import WEIGHTS
from benchmarks.speed.others import bare, need, slime_centering, trl_ratio
from slime_ext.core.centering import mean_score
from slime_ext.core.correction import Correction
from slime_ext.core.losses import Reinforce
from slime_ext.core.tokens import Head
from slime_ext.tools.convert import read
from tests.adapters.padded import EPS, of, through_slime
from tests.tools.convert.common import batch_of

SEEDS = range(20)
CLOSE = {"skyrl": 1e-5}  # of loss and gradient; SkyRL takes exp in float32, whatever it is given


def padded(seed):
    """A batch whose padding holds 0, as these systems have it."""
    b = of(batch_of(seed, far=False))
    given = {key: torch.where(b.mask != 0, getattr(b, key), 0.0) for key in ("behavior", "proximal")}
    advantages = torch.where(b.mask != 0, b.advantages, 0.0)
    return b, SimpleNamespace(**given, advantages=advantages, mask=b.mask, target=b.target)


def clipped(b):
    """[B, T] PPO's loss, 0 at padding."""
    ratio = torch.where(b.mask != 0, b.target - b.proximal, 0).exp()
    return -torch.minimum(ratio * b.advantages, ratio.clamp(1 - EPS, 1 + EPS) * b.advantages)


def weighted(weights, mask):
    return lambda b: torch.where(mask(b) != 0, clipped(b) * weights(b), 0).sum()


def openrlhf(block):
    """PolicyLoss as it stands; nothing that it calls runs deepspeed."""
    need("openrlhf")
    bare("openrlhf.models")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "deepspeed", ModuleType("deepspeed"))
        losses = importlib.import_module("openrlhf.models.loss")
    bounds = block.get("is_correction_threshold", [0.5, 5.0])
    given = {**block, "is_correction_threshold": [0.0, *bounds][-2:]}
    loss = losses.PolicyLoss(EPS, EPS, **given)

    def body(b):
        target = torch.where(b.mask != 0, b.target, 0)
        return loss(target, b.proximal, b.advantages, b.mask, b.behavior, batch_num_tokens=1)[0]

    return body


def trl(block):
    mode = block.get("vllm_importance_sampling_mode", "sequence_mask")
    low, high = (block.get(f"vllm_importance_sampling_clip_{end}") for end in ("min", "max"))
    return weighted(trl_ratio(mode, low, 3.0 if high is None else high), lambda b: b.mask)


def verl(block):
    need("verl")
    helper = importlib.import_module("verl.trainer.ppo.rollout_corr_helper")

    def body(b):
        weights, mask, _ = helper.compute_rollout_correction_and_rejection_mask(
            b.proximal, b.behavior, b.mask, **block
        )
        weights = 1.0 if weights is None else weights.batch["rollout_is_weights"]
        total = weighted(lambda _: weights, lambda _: mask)(b)
        # Its token-mean divides by the kept tokens, --calculate-per-token-loss by all: at least 1 a sample.
        count = b.mask.sum(1).clamp(min=1).sum() / mask.sum().clamp(min=1)
        return total * count if "rollout_rs" in block else total

    return body


def skyrl(block):
    need("skyrl")
    bare("skyrl.backends.skyrl_train.utils")
    utils = importlib.import_module("skyrl.backends.skyrl_train.utils.off_policy_correction_utils")
    off = ("outlier_token_is_threshold", "token_mask_is_threshold")
    keys = dict.fromkeys([f"{key}_{end}" for key in off for end in ("low", "high")])
    defaults = {"tis_ratio_type": None, "sequence_mask_metric": None}
    defaults |= {"token_tis_ratio_clip_high": 2.0, "sequence_tis_ratio_clip_high": 5.0}
    defaults |= {"geo_mask_low": 0.99, "geo_mask_high": 1.01, "product_mask_low": 0.5, "product_mask_high": 2}
    config = SimpleNamespace(**keys | defaults | block)

    def body(b):
        weights, _, mask = utils.compute_off_policy_correction(b.proximal, b.behavior, b.mask, config)
        weights = 1.0 if weights is None else weights
        return weighted(lambda _: weights, lambda _: mask)(b)

    return body


IS, VLLM = "is_correction", "vllm_importance_sampling"
CASES = [
    *((openrlhf, {f"{IS}_level": "token", **more}) for more in (
        {}, {f"{IS}_mode": "clip", f"{IS}_threshold": [0.5, 2.0]},
        {f"{IS}_gating": "binary_kl", f"{IS}_threshold": [0.05]},
        {f"{IS}_gating": "tv", f"{IS}_threshold": [0.1]})),
    *((openrlhf, {f"{IS}_level": "seq", **more}) for more in (
        {f"{IS}_threshold": [0.8, 1.2]}, {f"{IS}_gating": "binary_kl", f"{IS}_threshold": [0.1]})),
    *((trl, {f"{VLLM}_mode": f"{level}_{how}", f"{VLLM}_clip_min": low, f"{VLLM}_clip_max": 2.0})
      for level in ("token", "sequence") for how in ("truncate", "mask") for low in (None, 0.5)),
    (trl, {"use_vllm": True}),
    *((verl, block) for block in (
        {"rollout_is": "token", "rollout_is_threshold": 2.0},
        {"rollout_is": "sequence", "rollout_is_threshold": 3.0},
        {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"},
        {"rollout_is": "token", "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.7_1.2"},
        {"rollout_rs": "token_k1,seq_sum_k3,seq_max_k2", "rollout_rs_threshold": "0.5_1.5, 5.0, 3.0"})),
    *((skyrl, {"tis_ratio_type": level, "sequence_mask_metric": metric, **more})
      for level in ("token", "sequence") for metric in (None, "geometric", "product")
      for more in ({}, {"token_mask_is_threshold_low": 0.5, "token_mask_is_threshold_high": 2.0,
                        "outlier_token_is_threshold_low": 0.05})),
]  # fmt: skip


@pytest.mark.parametrize(("system", "block"), CASES, ids=lambda x: getattr(x, "__name__", str(x)))
def test_a_dialect_is_the_systems_own_loss_and_gradient(system, block):
    try:
        theirs = system(block)
    except ImportError as error:
        pytest.skip(f"{error}: bash tests/adapters/real.sh")
    mapping, most = read(system.__name__, block).mapping, torch.zeros(2, dtype=torch.float64)
    for seed in SEEDS:
        b, given = padded(seed)
        total = theirs(given)
        (slope,) = torch.autograd.grad(total, b.target)
        loss, gradient = through_slime(b, mapping, calculate_per_token_loss=True)
        apart = [(total.detach() - loss).abs(), (slope - gradient).abs().max()]
        most = torch.maximum(most, torch.stack(apart))
    print(f"{system.__name__}: loss {most[0]:.1e}, gradient {most[1]:.1e}")
    assert most.max() < CLOSE.get(system.__name__, 1e-9)


MODES = {"f = 1": {"mode": "none"}, "truncated at 2": {"mode": "tis", "low": 0.0, "high": 2.0},
         "IcePop 0.5 to 2": {"mode": "mis", "low": 0.5, "high": 2.0}}  # fmt: skip


@pytest.mark.parametrize(("double", "close"), [(True, 1e-12), (False, 1e-5)], ids=["float64", "float32"])
@pytest.mark.parametrize("name", MODES)
def test_centering_is_slimes_own(name, double, close, monkeypatch):
    if "SLIME" not in os.environ:
        pytest.skip("SLIME names a checkout of slime at 2e5cd7c")
    theirs = slime_centering(os.environ["SLIME"])
    if double:  # it computes in float32, whatever it is given
        monkeypatch.setattr(torch.Tensor, "float", lambda self: self)
    dtype = torch.float64 if double else torch.float32
    correction = Correction("target", Reinforce(), WEIGHTS[name])
    most = torch.zeros(2, dtype=torch.float64)
    for seed in SEEDS:
        draw = torch.Generator().manual_seed(seed)
        logits = 3 * torch.randn(32, 200, generator=draw, dtype=torch.float64)
        near = (logits + 0.3 * torch.randn(32, 200, generator=draw, dtype=torch.float64)).log_softmax(-1)
        sampler, ids = near.topk(32)
        trainer = logits.log_softmax(-1).gather(1, ids)
        sampler, trainer = sampler.to(dtype), trainer.to(dtype).requires_grad_()
        advantages = torch.randn(32, generator=draw, dtype=torch.float64).to(dtype)
        own = advantages * theirs(trainer, sampler, **MODES[name])[0]
        found = Head(sampler, trainer), advantages, torch.ones(32, dtype=torch.bool), correction.run, 32
        ours = advantages * mean_score(WEIGHTS[name], *found)
        slopes = [torch.autograd.grad(x.sum(), trainer)[0] for x in (own, ours)]
        apart = [(own - ours).detach().abs().max(), (slopes[0] - slopes[1]).abs().max()]
        most = torch.maximum(most, torch.stack(apart).double())
    print(f"slime, {name}, {dtype}: term {most[0]:.1e}, gradient {most[1]:.1e}")
    assert most.max() < close
