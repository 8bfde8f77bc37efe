"""What other systems center, against transcriptions of their formulas in plain Python."""

from __future__ import annotations

import math
import os
import random

import pytest
import torch

from benchmarks.fidelity.exact import WEIGHTS
from benchmarks.speed.others import slime_centering
from slime_ext import load_config
from slime_ext.core.centering import mean_score
from slime_ext.core.correction import Correction
from slime_ext.core.losses import Bounds, Reinforce
from slime_ext.core.tokens import Head, Tokens
from slime_ext.errors import ConfigError
from slime_ext.ops.segments import Segments
from slime_ext.tools.convert import read
from tests.tools.convert import oracle_skyrl

VOCABULARY, TOKENS, K = 7, 6, 3


def policies(seed):
    """Logits of the trainer and log-probs of the sampler over a vocabulary, advantages and sampled ids."""
    rng = random.Random(seed)
    logits = [[rng.gauss(0, 1) for _ in range(VOCABULARY)] for _ in range(TOKENS)]
    sampler = [log_softmax([x + rng.gauss(0, 0.8) for x in row]) for row in logits]
    ids = [rng.randrange(VOCABULARY) for _ in logits]
    return logits, sampler, [rng.choice((-1.3, 0.7, 2.0)) for _ in logits], ids


def log_softmax(row):
    total = math.log(math.fsum(map(math.exp, row)))
    return [x - total for x in row]


def ours(mapping, logits, sampler, advantages, ids, top_k):
    """The loss of each token and its gradient in the trainer's logits, of a converted mapping."""
    correction = load_config(mapping)
    rows = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    target, q = rows.log_softmax(1), torch.tensor(sampler, dtype=torch.float64)
    chosen = q.topk(top_k).indices
    own = torch.tensor(ids)[:, None]
    behavior, of_target = (x.gather(1, own)[:, 0] for x in (q, target))
    head = Head(q.gather(1, chosen), target.gather(1, chosen))
    there = torch.ones(len(ids), dtype=torch.bool)
    segments = Segments.whole([len(ids)], there)
    given = (of_target.detach(), behavior, of_target, torch.tensor(advantages, dtype=torch.float64))
    tokens = Tokens(segments, *given, head=head)
    loss, _ = correction.loss(
        correction(tokens), tokens, torch.zeros(len(ids), dtype=torch.float64), Bounds()
    )
    return loss.detach(), torch.autograd.grad(loss.sum(), rows)[0]


SKYRL = {  # policy_loss_type and its keys -> f
    "reinforce": ({}, lambda r: 1.0),
    "rollout_is": ({"eps_clip_low": 0.5, "eps_clip_high": 1.0}, lambda r: r if 0.5 < r < 2.0 else 0.0),
}


@pytest.mark.parametrize("loss_type", SKYRL)
def test_skyrl_centers_over_the_head_with_a_modelled_tail(loss_type):
    keys, f = SKYRL[loss_type]
    block = {"policy_loss_type": loss_type, "score_centering": {"enabled": True, "top_k": K}, **keys}
    mapping = read("skyrl", block).mapping
    for seed in range(30):
        logits, sampler, advantages, ids = policies(seed)
        loss, _ = ours(mapping, logits, sampler, advantages, ids, K)
        wanted = [
            oracle_skyrl.centered_loss(log_softmax(row), q, y, a, f, K)
            for row, q, y, a in zip(logits, sampler, ids, advantages, strict=True)
        ]
        torch.testing.assert_close(loss, torch.tensor(wanted, dtype=torch.float64), rtol=1e-9, atol=1e-11)


REFUSED = [  # what a system centers and no reading here can say -> the key that is named
    ("skyrl", {"score_centering": {"enabled": True, "top_k": 8}}, "score_centering: expected enabled: false"),
    ("skyrl", {"policy_loss_type": "regular", "score_centering": {"enabled": True, "top_k": 8}},
     "score_centering: expected enabled: false beside policy_loss_type: regular"),
    ("skyrl", {"policy_loss_type": "reinforce", "score_centering": {"enabled": True}},
     "score_centering.top_k"),
    ("skyrl", {"policy_loss_type": "reinforce", "score_centering": {"top_k": 8}}, "score_centering.enabled"),
]  # fmt: skip


@pytest.mark.parametrize(("system", "block", "key"), REFUSED)
def test_centering_that_no_source_shows_is_refused_by_its_key(system, block, key):
    with pytest.raises(ConfigError) as caught:
        read(system, block)
    assert f"{system}.{key}" in str(caught.value) and "\n" not in str(caught.value)


def test_skyrls_default_loss_is_named_where_a_block_leaves_it_out():
    former = read("skyrl", {"tis_ratio_type": "token"})
    assert former.mapping["surrogate"] == "host" and "before 0.5.0" in former.notes[0]
    today = read("skyrl", {"score_centering": {"enabled": False}})
    assert today.mapping == read("skyrl", {"policy_loss_type": "dppo"}).mapping
    assert today.notes[0].startswith("policy_loss_type is absent: read as dppo, SkyRL's default since 0.5.0")
    assert not read("skyrl", {"policy_loss_type": "regular", "tis_ratio_type": "token"}).notes


SEEDS = range(20)
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
