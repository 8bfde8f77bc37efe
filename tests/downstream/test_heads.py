"""Score centering through a host's own policy loss: A_t m_t C_t and its gradient, against loops in float64.

What centering adds is the loss with it less the loss without: the host's own part is the same in both.
Bounds: the hosts compute in float32; losses are sums of about 40 terms of size 1, and differ by less than
1e-5. A gradient is off by less than 5e-7 in every logit, so that any two layouts agree to 1e-6.
"""

from __future__ import annotations

import contextlib
import io
import math
from argparse import Namespace
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from megatron.core import mpu

from slime_ext import host as slime_host
from slime_ext.host import heads
from slime_ext.host.session import session
from tests import oracle
from tests.downstream.host_loss import DEFAULTS, HOSTS, VOCAB, Layout, _as_one, _step, samples
from tests.ranks import run_ranks

pytestmark = [pytest.mark.slow]
BOUND, OF_LOGIT = 1e-5, 5e-7
TEMPERATURE = 0.8
PLAIN = {"numerator": "target", "surrogate": "reinforce"}
CAPPED = PLAIN | {"steps": ["reweight", {"truncate": {"high": 1.2}}]}
CASES = {  # name -> correction, head, temperature
    "f = 1, all tokens": (PLAIN, VOCAB, 1.0),
    "truncated, head of 5": (CAPPED, 5, TEMPERATURE),
}
WEIGHTS = {"f = 1, all tokens": lambda r: 1.0, "truncated, head of 5": lambda r: min(r, 1.2)}
LAYOUTS = {
    "1 process": Layout(),
    "CP2": Layout(cp=2),
    "TP2": Layout(tp=2),
    "TP2 x CP2": Layout(tp=2, cp=2),
}
FLAGS = {
    "calculate_per_token_loss": True,  # a sum over tokens: nothing divides
    "custom_generate_function_path": "slime_ext.host.generate",
    "custom_rollout_log_function_path": None,
    "sglang_router_ip": "127.0.0.1",
    "save_debug_train_data": "dumps/train_data/{rollout_id}.pt",
}


def sampler_of(s, k, temperature):
    """ids and log-probs [R, K] of a sampler that is 0.3 nats away from the trainer."""
    draw = torch.Generator().manual_seed(s.total)
    rows = (s.logits / temperature).double()[s.total - s.response - 1 : s.total - 1]
    rows = rows + 0.3 * torch.randn(rows.shape, generator=draw, dtype=torch.float64)
    log_probs, ids = rows.log_softmax(-1).topk(k)
    return ids.int(), log_probs.float()


def written_out(name):
    """Sum of A_t m_t C_t over every sample, and its gradient in each sample's logits [total, V]."""
    _, k, temperature = CASES[name]
    total, gradients = 0.0, []
    for s in samples():
        gradient = torch.zeros(s.total, VOCAB, dtype=torch.float64)
        ids, sampler = (rows.tolist() for rows in sampler_of(s, k, temperature))
        for t in range(s.response):
            row = s.total - s.response - 1 + t
            log_p = (s.logits[row].double() / temperature).log_softmax(-1)
            head = [float(log_p[v]) for v in ids[t]]
            factor = float(s.advantage[t]) * int(s.mask[t])
            total += factor * oracle.centering(sampler[t], head, WEIGHTS[name])
            held = oracle.centering_coefficients(sampler[t], head, WEIGHTS[name])
            for c, v in zip(held, ids[t], strict=True):
                gradient[row, v] += factor * c / temperature
            gradient[row] -= factor * math.fsum(held) * log_p.exp() / temperature
        gradients.append(gradient)
    return total, gradients


def exactly():
    """The same for f = 1 and the whole vocabulary: sum over y of q_y grad log p_y = q - p."""
    gradients = []
    for s in samples():
        ids, sampler = sampler_of(s, VOCAB, 1.0)
        made_by = slice(s.total - s.response - 1, s.total - 1)
        q = torch.zeros(s.response, VOCAB, dtype=torch.float64).scatter(1, ids.long(), sampler.double().exp())
        gradient = torch.zeros(s.total, VOCAB, dtype=torch.float64)
        factor = s.advantage.double() * s.mask
        gradient[made_by] = factor[:, None] * (q - s.logits.double().softmax(-1)[made_by])
        gradients.append(gradient)
    return gradients


def through_the_host(name, folder, layout, cases):
    """(loss, what is wrong with the gradient, tail_fraction, what is wrong with the dump or None without one)
    of every case on all ranks; None off rank 0."""
    torch._dynamo.config.disable = True
    mpu.initialize_model_parallel(layout.tp, 1, context_parallel_size=layout.cp)
    host, found = HOSTS[name](folder), []
    for case in cases:
        correction, k, temperature = CASES[case]
        session.heads[0] = {i: sampler_of(s, k, temperature) for i, s in enumerate(samples())}
        centered = correction | {"center": {"top_k": k}}
        with contextlib.redirect_stdout(io.StringIO()):
            (plain, base, *_), (loss, gradient, metrics, dumped) = (
                _trained(host, layout, mapping, temperature) for mapping in (correction, centered)
            )
        wanted = [written_out(case)[1]] + ([exactly()] if case.startswith("f = 1") else [])
        apart = [_apart(host, gradient - base, one) for one in wanted]
        sums = torch.tensor([loss - plain, *apart], dtype=torch.float64)
        dist.all_reduce(sums[:1])
        dist.all_reduce(sums[1:], op=dist.ReduceOp.MAX)
        found.append((float(sums[0]), float(sums[1:].max()), metrics["off_policy/tail_fraction"]))
        found[-1] += (dumped and _off(dumped, k, temperature),)
    return found if dist.get_rank() == 0 else None


def _trained(host, layout, mapping, temperature):
    """This rank's share of the loss, the gradient of its logits, the step's metrics, and the column of heads
    that the host dumps."""
    args = Namespace(**DEFAULTS | FLAGS | {"slime_ext": mapping, "rollout_temperature": temperature})
    slime_host.init(args)
    mine = samples()
    with _step(args, host, mine, [mine], 1) as step:
        logits = host.logits(args, mine)
        loss = host.loss(args, host.batch(args, mine), 1, logits)[0]
        scale = host.loss(_as_one(args), host.batch(args, mine), 1, logits.detach())[0]
        loss.backward()
    value = loss.detach().double() / scale / layout.tp
    dumped = step.rollout.get(heads.TRAINER)
    return float(value), logits.grad.double() / scale, step.reduce()[0], dumped


def _off(dumped, k, temperature):
    """The largest difference between dumped log-probs of heads and the trainer's own."""
    rows = [s.logits.double()[s.total - s.response - 1 : s.total - 1] / temperature for s in samples()]
    ids = [sampler_of(s, k, temperature)[0].long() for s in samples()]
    wanted = [row.log_softmax(-1).gather(1, at) for row, at in zip(rows, ids, strict=True)]
    return max(float((a - b).abs().max()) for a, b in zip(dumped, wanted, strict=True))


def _apart(host, gradient, wanted):
    """The largest difference to this rank's part of a gradient in every sample's logits."""
    args = Namespace(**DEFAULTS)
    local = host.logits(
        args, [replace(s, logits=one) for s, one in zip(samples(), wanted, strict=True)]
    ).detach()
    return float((gradient - local).abs().max())


@pytest.fixture(scope="module")
def centred(host):
    """What every layout gave: [(loss, error of the gradient, tail)] by its name."""
    given = {
        key: run_ranks(
            through_the_host, layout.ranks, host.name, str(host.folder), layout, list(CASES), timeout=300
        )
        for key, layout in LAYOUTS.items()
    }
    return {key: next(answer for answer in answers if answer) for key, answers in given.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_centering_adds_is_the_equation(centred, layout):
    for name, (loss, apart, *_) in zip(CASES, centred[layout], strict=True):
        assert loss == pytest.approx(written_out(name)[0], abs=BOUND), name
        assert apart < OF_LOGIT, name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_metric_is_the_mean_mass_of_the_tail(centred, layout):
    masses = [
        1 - float(row.double().exp().sum())
        for s in samples()
        for row, counts in zip(sampler_of(s, 5, TEMPERATURE)[1], s.mask, strict=True)
        if counts
    ]
    assert centred[layout][1][2] == pytest.approx(math.fsum(masses) / len(masses), abs=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_train_dumps_get_the_trainers_side_of_the_heads(centred, layout):
    for *_, off in centred[layout]:
        assert off is None if LAYOUTS[layout].cp > 1 else off < 1e-6
