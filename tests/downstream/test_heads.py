"""Score centering through a host's own policy loss: A_t m_t C_t and its gradient, against loops in float64.

What centering adds is the loss with it less the loss without: the host's own part is the same in both.
Bounds: the hosts compute in float32; losses are sums of about 40 terms of size 1, and differ by less than
1e-5. A gradient is off by less than 5e-7 in every logit, so that any two layouts agree to 1e-6.
"""

from __future__ import annotations

import contextlib
import functools
import io
import math
from argparse import Namespace
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist

from slime_ext import host as slime_host
from slime_ext.host import heads
from slime_ext.host.heads import HEADS
from tests import oracle
from tests.downstream.host_loss import DEFAULTS, VOCAB, Layout, _as_one, _step, loaded, samples
from tests.ranks import run_ranks

pytestmark = [pytest.mark.slow]
BOUND, OF_LOGIT = 1e-5, 5e-7
TEMPERATURE = 0.8
PLAIN = {"numerator": "target", "surrogate": "reinforce"}
CAP = {"steps": ["reweight", {"truncate": {"high": 1.2}}]}
CAPPED = (("reweight", "token"), ("truncate", 1.2))
EPS = DEFAULTS["eps_clip"], DEFAULTS["eps_clip_high"]
TOP_P = 0.8


@dataclass(frozen=True)
class Case:
    """A correction, and what the oracle reads of it.

    Args:
        top_k: of the head; None: the support that top-p leaves.
        f: the oracle's steps.
        is_hosts: whether it multiplies the host's PPO loss; else it is REINFORCE.
        has_moved: whether the proximal policy is another than the target.
    """

    correction: dict
    top_k: int | None
    temperature: float = TEMPERATURE
    f: tuple = ()
    is_hosts: bool = False
    has_moved: bool = False

    @property
    def loss(self):
        return ("ppo", "proximal", *EPS) if self.is_hosts else ("reinforce",)


CASES = {
    "f = 1, all tokens": Case(PLAIN, VOCAB, 1.0),
    "truncated, head of 5": Case(PLAIN | CAP, 5, f=CAPPED),
    "the host's PPO, one step, head of 5": Case(CAP, 5, f=CAPPED, is_hosts=True),
    "the host's PPO, four steps, head of 5": Case(CAP, 5, f=CAPPED, is_hosts=True, has_moved=True),
}
OVER_SUPPORTS = {  # of hosts that normalise log-probs over what top-p leaves
    "truncated, support": Case(PLAIN | CAP, None, f=CAPPED),
    "the host's PPO, four steps, support": Case(CAP, None, f=CAPPED, is_hosts=True, has_moved=True),
}
LOSS, SUPPORT = (
    "slime.backends.megatron_utils.loss",
    ("rollout_top_p_token_ids", "rollout_top_p_token_offsets"),
)
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


def noisy(s, case, nats, seed):
    """[R, V] logits of another policy at the response tokens, at the sampling temperature."""
    draw = torch.Generator().manual_seed(s.total + seed)
    rows = (s.logits / case.temperature).double()[s.total - s.response - 1 : s.total - 1]
    return rows + nats * torch.randn(rows.shape, generator=draw, dtype=torch.float64)


def candidates_of(s, case):
    """[R] ids of each token's candidates, and the sampler's log-probs of them, in float32."""
    rows = noisy(s, case, 0.3, 0)
    if case.top_k is not None:
        log_probs, ids = rows.log_softmax(-1).topk(case.top_k)
        return ids.tolist(), log_probs.float().tolist()
    found = []
    for row, y in zip(rows, s.tokens[-s.response :].tolist(), strict=True):
        order, mass = row.argsort(descending=True), row.softmax(-1).sort(descending=True).values.cumsum(0)
        found.append(sorted({y, *order[: int((mass < TOP_P).sum()) + 1].tolist()}))
    own = [row[ids].log_softmax(-1).float().tolist() for row, ids in zip(rows, found, strict=True)]
    return found, own


def recorded(s, case):
    """A sample's heads, or its supports, as the rollout leaves them."""
    ids, log_probs = candidates_of(s, case)
    if case.top_k is not None:
        return torch.tensor(ids, dtype=torch.int32), torch.tensor(log_probs)
    flat_ids, flat = ([x for row in rows for x in row] for rows in (ids, log_probs))
    offsets = torch.tensor([0, *map(len, ids)]).cumsum(0)
    return torch.tensor(flat_ids, dtype=torch.int32), offsets, torch.tensor(flat)


def proximal_of(s, case):
    """[R] the proximal policy's log-probs at the candidates."""
    ids, _ = candidates_of(s, case)
    rows = noisy(s, case, 0.3, 1)
    if case.top_k is not None:
        return rows.log_softmax(-1).gather(1, torch.tensor(ids)).float()
    return [row[own].log_softmax(-1).float() for row, own in zip(rows, ids, strict=True)]


def written_out(case):
    """Sum of A_t m_t C_t over every sample, and its gradient in each sample's logits [total, V]."""
    total, gradients = 0.0, []
    f = oracle.spec(*case.f, numerator="proximal" if case.is_hosts else "target")
    for s in samples():
        gradient = torch.zeros(s.total, VOCAB, dtype=torch.float64)
        (ids, sampler), proximal = candidates_of(s, case), proximal_of(s, case)
        for t in range(s.response):
            row = s.total - s.response - 1 + t
            logits = (s.logits[row].double() / case.temperature).tolist()
            log_p = oracle.log_softmax(logits, None if case.top_k is not None else ids[t])
            a = float(s.advantage[t])

            def g(p, o, q, a=a):
                return oracle.weight_alone(f, a, p, o, q) * oracle.score_factor(case.loss, a, p, o, q)

            own = [log_p[v] for v in ids[t]]
            before = proximal[t].tolist() if case.has_moved else own
            head = [*zip(own, before, sampler[t], strict=True)]
            held = oracle.candidate_coefficients(head, g, has_tail=case.top_k is not None)
            factor = a * int(s.mask[t])
            total += factor * math.fsum(c * p for c, p in zip(held, own, strict=True))
            for v, c in zip(ids[t], held, strict=True):
                gradient[row, v] += factor * c / case.temperature
            for v, p in log_p.items():
                gradient[row, v] -= factor * math.fsum(held) * math.exp(p) / case.temperature
        gradients.append(gradient)
    return total, gradients


def exactly():
    """The same for f = 1 and the whole vocabulary: sum over y of q_y grad log p_y = q - p."""
    gradients = []
    for s in samples():
        ids, sampler = recorded(s, CASES["f = 1, all tokens"])
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
    from megatron.core import mpu

    torch._dynamo.config.disable = True
    mpu.initialize_model_parallel(layout.tp, 1, context_parallel_size=layout.cp)
    host, found = loaded(name, folder), []
    host.join()
    for key, case in cases.items():
        HEADS.value[0] = {i: recorded(s, case) for i, s in enumerate(samples())}
        centered = case.correction | {"center": {"top_k": case.top_k or 5}}
        with contextlib.redirect_stdout(io.StringIO()):
            (plain, base, *_), (loss, gradient, metrics, dumped) = (
                _trained(host, layout, mapping, case) for mapping in (case.correction, centered)
            )
        wanted = [written_out(case)[1]] + ([exactly()] if key.startswith("f = 1") else [])
        apart = [_apart(host, gradient - base, one) for one in wanted]
        sums = torch.tensor([loss - plain, *apart], dtype=torch.float64)
        dist.all_reduce(sums[:1])
        dist.all_reduce(sums[1:], op=dist.ReduceOp.MAX)
        found.append((float(sums[0]), float(sums[1:].max()), metrics["off_policy/tail_fraction"]))
        found[-1] += (dumped and _off(dumped, case),)
    return found if dist.get_rank() == 0 else None


def _trained(host, layout, mapping, case):
    """This rank's share of the loss, the gradient of its logits, the step's metrics, and the column of heads
    that the host dumps."""
    more = {"slime_ext": mapping, "rollout_temperature": case.temperature}
    more |= {} if case.top_k is not None else {"rollout_top_p": TOP_P}
    args = Namespace(**DEFAULTS | FLAGS | more)
    slime_host.init(args)
    mine = samples()
    with _step(args, host, mine, [mine], 1) as step:
        if case.has_moved and step.heads:  # the host's log-prob pass is tested in tests/host
            step.proximal_heads = [_local(host, s, proximal_of(s, case)) for s in mine]
        logits, batch = host.logits(args, mine), host.batch(args, mine)
        if case.top_k is None:
            both = [recorded(s, case)[:2] for s in mine]
            batch |= dict(zip(SUPPORT, zip(*both, strict=True), strict=True))
        loss = host.loss(args, batch, 1, logits)[0]
        scale = host.loss(_as_one(args), host.batch(args, mine), 1, logits.detach())[0]
        loss.backward()
    value = loss.detach().double() / scale / layout.tp
    dumped = step.rollout.get(heads.TRAINER if case.top_k is not None else heads.OF_SUPPORT)
    return float(value), logits.grad.double() / scale, step.reduce()[0], dumped


def _local(host, s, rows):
    """What a context-parallel rank holds of a row per response token, which may be ragged."""
    places = host.cut.slice_log_prob_with_cp(torch.arange(s.response), s.total, s.response).tolist()
    if isinstance(rows, torch.Tensor):
        return rows[places]
    return torch.cat([torch.zeros(0), *(rows[t] for t in places)])


def _off(dumped, case):
    """The largest difference between dumped log-probs of heads and the trainer's own."""
    apart = []
    for s, got in zip(samples(), dumped, strict=True):
        ids, _ = candidates_of(s, case)
        rows = s.logits.double()[s.total - s.response - 1 : s.total - 1] / case.temperature
        whole = [row.log_softmax(-1)[own] for row, own in zip(rows, ids, strict=True)]
        over = [row[own].log_softmax(-1) for row, own in zip(rows, ids, strict=True)]
        wanted = torch.cat(over if case.top_k is None else whole)
        apart.append(float((got.reshape(-1) - wanted).abs().max()))
    return max(apart)


def _apart(host, gradient, wanted):
    """The largest difference to this rank's part of a gradient in every sample's logits."""
    args = Namespace(**DEFAULTS)
    local = host.logits(
        args, [replace(s, logits=one) for s, one in zip(samples(), wanted, strict=True)]
    ).detach()
    return float((gradient - local).abs().max())


@pytest.fixture(scope="module")
def centred(host):
    """What every layout gave: {case: (loss, error of the gradient, tail, error of the dump)} by its name."""
    cases = CASES | (OVER_SUPPORTS if "top_p_token_ids" in host.module(LOSS) else {})
    which = host.name, str(host.folder)
    load = functools.partial(loaded, *which)
    given = {
        key: run_ranks(through_the_host, layout.ranks, *which, layout, cases, timeout=300, before=load)
        for key, layout in LAYOUTS.items()
    }
    answers = {key: next(answer for answer in answers if answer) for key, answers in given.items()}
    return {key: dict(zip(cases, answer, strict=True)) for key, answer in answers.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_centering_adds_is_the_equation(centred, layout):
    for name, (loss, apart, *_) in centred[layout].items():
        assert loss == pytest.approx(written_out((CASES | OVER_SUPPORTS)[name])[0], abs=BOUND), name
        assert apart < OF_LOGIT, name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_metric_is_the_mean_mass_of_the_tail(centred, layout):
    name = "truncated, head of 5"
    masses = [
        1 - math.fsum(map(math.exp, row))
        for s in samples()
        for row, counts in zip(candidates_of(s, CASES[name])[1], s.mask, strict=True)
        if counts
    ]
    assert centred[layout][name][2] == pytest.approx(math.fsum(masses) / len(masses), abs=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_train_dumps_get_the_trainers_side_of_the_heads(centred, layout):
    for *_, off in centred[layout].values():
        assert off is None if LAYOUTS[layout].cp > 1 else off < 1e-6


def test_a_support_has_no_tail(centred):
    found = [answer[2] for name, answer in centred["1 process"].items() if name in OVER_SUPPORTS]
    assert found == [0.0] * len(found)
