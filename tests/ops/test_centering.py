"""C_t and log-probs at chosen tokens against loops over floats, finite differences, and real processes."""

from __future__ import annotations

import math
import random

import pytest
import torch
import torch.distributed as dist

from slime_ext.ops import centering as ops
from slime_ext.ops import vocabulary
from slime_ext.ops.vocabulary import log_probs_at, log_probs_within
from slime_ext.testing.steps import on_ranks
from tests import oracle
from tests.ranks import GROUP, run_ranks

WEIGHTS = {
    "f = 1": lambda r: 1.0,
    "truncated": lambda r: min(r, 2.0),
    "icepop": lambda r: r if 0.5 <= r <= 1.5 else 0.0,
    "unbounded": lambda r: r,
}


def centering(sampler, trainer, weight):
    return ops.centering(sampler, trainer, weight, torch.ones(len(sampler), dtype=torch.bool))


def log_softmax(logits):
    top = max(logits)
    total = top + math.log(math.fsum(math.exp(x - top) for x in logits))
    return [x - total for x in logits]


def random_heads(seed, tokens=4, vocabulary=7, k=3, spread=0.5):
    """[tokens] of logits of the trainer, ids of the sampler's head, and its log-probs."""
    rng = random.Random(seed)
    logits = [[rng.gauss(0, 1.5) for _ in range(vocabulary)] for _ in range(tokens)]
    sampler = [log_softmax([x + rng.gauss(0, spread) for x in row]) for row in logits]
    ids = [sorted(range(vocabulary), key=lambda v, row=row: -row[v])[:k] for row in sampler]
    return logits, ids, [[row[v] for v in head] for row, head in zip(sampler, ids, strict=True)]


def as_tensor(f):
    """A weight of the ratio as ``centering`` calls it."""

    def weight(given):
        ratios = (given.trainer - given.sampler).double().exp()
        return ratios.apply_(f).to(given.trainer.dtype)

    return weight


def wide(values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("k", [1, 3, 7])
def test_matches_the_loop(name, k):
    for seed in range(10):
        logits, ids, sampler = random_heads(seed, k=k)
        trainer = [[log_softmax(row)[v] for v in head] for row, head in zip(logits, ids, strict=True)]
        expected = [oracle.centering(q, p, WEIGHTS[name]) for q, p in zip(sampler, trainer, strict=True)]
        got = centering(wide(sampler), wide(trainer), as_tensor(WEIGHTS[name]))
        torch.testing.assert_close(got, wide(expected), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", WEIGHTS)
def test_the_gradient_is_that_of_log_p_alone(name):
    """Finite differences in every logit, with the coefficients held where they were."""
    logits, ids, sampler = random_heads(3)
    free = wide(logits).requires_grad_()
    (got,) = torch.autograd.grad(
        centering(wide(sampler), log_probs_at(free, torch.tensor(ids)), as_tensor(WEIGHTS[name])).sum(), free
    )
    step = 1e-6
    for t, row in enumerate(logits):
        held = oracle.centering_coefficients(sampler[t], [log_softmax(row)[v] for v in ids[t]], WEIGHTS[name])

        def value(row, t=t, held=held):
            moved = log_softmax(row)
            return math.fsum(c * moved[v] for c, v in zip(held, ids[t], strict=True))

        for j in range(len(row)):
            up, down = ([x + s * step * (i == j) for i, x in enumerate(row)] for s in (1, -1))
            assert got[t, j].item() == pytest.approx((value(up) - value(down)) / (2 * step), abs=1e-8)


def test_with_the_whole_vocabulary_the_weighted_score_has_mean_zero():
    """Sum over y of q_y f_y grad log p_y is the gradient of C_t, token by token."""
    logits, ids, sampler = random_heads(5, k=7)
    free = wide(logits).requires_grad_()
    log_p = log_probs_at(free, torch.tensor(ids))
    f = WEIGHTS["icepop"]
    (centered,) = torch.autograd.grad(centering(wide(sampler), log_p, as_tensor(f)).sum(), free)
    log_p = log_probs_at(free, torch.tensor(ids))
    ratio = (log_p.detach() - wide(sampler)).exp()
    score = wide(sampler).exp() * ratio.clone().apply_(f) * log_p
    (mean,) = torch.autograd.grad(score.sum(), free)
    assert ratio.std() > 0.1
    torch.testing.assert_close(centered, mean, rtol=0, atol=2e-6)  # what the floor of the tail leaves


def test_chunks_and_packing_do_not_matter(monkeypatch):
    _, _, sampler = random_heads(1, tokens=11)
    trainer = wide(random_heads(1, tokens=11, spread=0.1)[2])
    whole = centering(wide(sampler), trainer, as_tensor(WEIGHTS["truncated"]))
    monkeypatch.setattr(ops, "CHUNK", 8)  # two tokens
    seen = []

    def weight(given):
        seen.append(len(given.trainer))
        return as_tensor(WEIGHTS["truncated"])(given)

    assert torch.equal(whole, centering(wide(sampler), trainer, weight)) and len(seen) == 6
    parts = [
        centering(wide(sampler[i:j]), trainer[i:j], as_tensor(WEIGHTS["truncated"]))
        for i, j in ((0, 3), (3, 11))
    ]
    assert torch.equal(whole, torch.cat(parts))


def test_shorter_heads_and_none_at_all():
    _, _, sampler = random_heads(2, tokens=3, k=3)
    trainer = wide(random_heads(2, tokens=3, k=3, spread=0.3)[2])
    short = wide(sampler)
    short[0, 2], short[1] = -torch.inf, -torch.inf
    given = trainer.clone()
    given[0, 2] = torch.nan
    given.requires_grad_()
    got = centering(short, given, as_tensor(WEIGHTS["truncated"]))
    two = centering(short[:1, :2], trainer[:1, :2], as_tensor(WEIGHTS["truncated"]))
    assert got[0].item() == pytest.approx(two.item(), abs=1e-15) and got[1] == 0
    (gradient,) = torch.autograd.grad(got.sum(), given)
    assert gradient[:, :2].isfinite().all() and gradient[0, 2] == 0 and not gradient[1].any()
    short[2] = torch.nan
    not_the_last = torch.tensor([True, True, False])
    assert torch.equal(ops.centering(short, given, None, not_the_last)[1:], torch.zeros(2).double())


def test_probabilities_at_the_ends_are_finite():
    sampler = torch.tensor([[0.0, -200.0], [-1e-8, -90.0]])
    trainer = torch.tensor([[-200.0, 0.0], [-1e-9, -1.0]], requires_grad=True)
    for f in WEIGHTS.values():
        got = centering(sampler, trainer, as_tensor(f))
        assert got.isfinite().all()


@pytest.mark.parametrize(("q_tail", "p_tail"), [(1e-4, 3e-4), (1e-9, 2e-4), (5e-5, 1e-8), (1e-8, 1e-9)])
def test_a_tail_counts_down_to_a_millionth(q_tail, p_tail):
    sampler = [[math.log(x * (1 - q_tail)) for x in (0.7, 0.3)]]
    trainer = [[math.log(x * (1 - p_tail)) for x in (0.5, 0.5)]]
    for f in WEIGHTS.values():
        expected = oracle.centering(sampler[0], trainer[0], f)
        assert centering(wide(sampler), wide(trainer), as_tensor(f)).item() == pytest.approx(
            expected, abs=1e-9
        )


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_a_head_may_lie_on_any_rank_and_say_a_token_twice(parts):
    """Ids at the edges of a rank's part, and a vocabulary padded with -inf: of four ranks the last has
    nothing else."""
    logits = wide(random_heads(8, tokens=3, vocabulary=8)[0])
    logits[:, 6:] = -math.inf
    ids = torch.tensor([[0, 2, 4, 5, 5], [1, 2, 3, 4, 0], [2, 4, 5, 1, 1]])
    slope, per = wide(random_heads(9, tokens=3, k=5)[2]), 8 // parts

    def on(rank, all_sum):
        part = logits[:, rank * per : (rank + 1) * per].clone().requires_grad_()
        found = log_probs_at(part, ids, offset=rank * per, part=rank, parts=parts, all_sum=all_sum)
        return found.detach(), torch.autograd.grad((found * slope).sum(), part)[0]

    found, gradients = zip(*on_ranks(on, "", parts), strict=True)
    whole = logits.clone().requires_grad_()
    expected = whole.log_softmax(1).gather(1, ids)
    for each in found:
        torch.testing.assert_close(each, expected.detach(), rtol=1e-13, atol=1e-13)
    (gradient,) = torch.autograd.grad((expected * slope).sum(), whole)
    torch.testing.assert_close(torch.cat(gradients, 1), gradient, rtol=1e-12, atol=1e-13)


def vocabulary_shards():
    """Each rank's logits and gradient are a slice of one process's."""
    rank, size = dist.get_rank(), dist.get_world_size()
    logits, ids, sampler = random_heads(7, tokens=6, vocabulary=12, k=4)
    ids[0][1] = 99  # padding that no rank holds
    whole = wide(logits).requires_grad_()
    per = 12 // size

    def all_sum(values):
        dist.all_reduce(values)
        return values

    part = wide(logits)[:, rank * per : (rank + 1) * per].clone().requires_grad_()
    shared = {"offset": rank * per, "part": rank, "parts": size, "all_sum": all_sum}
    found = []
    for given, options in ((whole, {}), (part, shared)):
        log_p = log_probs_at(given, torch.tensor(ids), **options)
        loss = centering(wide(sampler)[1:], log_p[1:], as_tensor(WEIGHTS["truncated"])).sum() + log_p[0, 0]
        (gradient,) = torch.autograd.grad(loss, given)
        found.append((log_p.detach(), gradient))
    (one, full), (ours, local) = found
    close = torch.allclose(one, ours, rtol=1e-14, atol=1e-14)
    return close, torch.allclose(full[:, rank * per : (rank + 1) * per], local, rtol=1e-12, atol=1e-14)


@pytest.mark.slow
@pytest.mark.xdist_group(GROUP)
@pytest.mark.parametrize("size", [2, 3])
def test_log_probs_of_a_shared_vocabulary_are_those_of_one_process(size):
    assert run_ranks(vocabulary_shards, size) == [(True, True)] * size


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("at_once", [1, 16, 2**24])
def test_log_probs_at_are_the_log_softmax_with_its_gradient(monkeypatch, at_once, temperature):
    monkeypatch.setattr(vocabulary, "AT_ONCE", at_once)
    logits, ids, _ = random_heads(4)
    logits[1][2] = -math.inf  # as a vocabulary is padded
    slope = wide(random_heads(5)[2])
    for given in (wide(logits), wide(logits).bfloat16()):
        free, expected = (given.clone().requires_grad_() for _ in range(2))
        got = log_probs_at(free, torch.tensor(ids), temperature=temperature)
        reference = (expected.to(got.dtype) / temperature).log_softmax(1).gather(1, torch.tensor(ids))
        torch.testing.assert_close(got, reference)
        (got * slope).sum().backward()
        (reference * slope).sum().backward()
        torch.testing.assert_close(free.grad, expected.grad)
        assert torch.equal(free, given)  # float32 is read where it lies
    assert got.dtype == torch.float32


# ---- over a support ----


def random_supports(seed, sizes=(3, 0, 1, 5), vocabulary=7):
    """Logits of the trainer [tokens], ids of a ragged support, and the sampler's log-probs over it."""
    rng = random.Random(seed)
    logits = [[rng.gauss(0, 1.5) for _ in range(vocabulary)] for _ in sizes]
    ids = [rng.sample(range(vocabulary), n) for n in sizes]
    sampler = [log_softmax([rng.gauss(0, 1) for _ in row]) if row else [] for row in ids]
    return logits, ids, sampler


def joined(rows):
    return [x for row in rows for x in row]


def ragged(ids):
    """Flat ids, the row of each, and offsets."""
    rows = torch.tensor([t for t, row in enumerate(ids) for _ in row])
    return torch.tensor(joined(ids)), rows, torch.tensor([0, *map(len, ids)]).cumsum(0)


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("most", [2, 2**20])
def test_over_a_support_matches_the_loop(monkeypatch, name, most):
    monkeypatch.setattr(ops, "CHUNK", most)
    for seed in range(5):
        logits, ids, sampler = random_supports(seed)
        of_trainer = [oracle.log_softmax(row, own) for row, own in zip(logits, ids, strict=True)]
        f, slope = WEIGHTS[name], [0.5, 2.0, -1.0, 3.0]
        held = [
            [math.exp(q) * f(math.exp(p[v] - q)) for v, q in zip(own, qs, strict=True)]
            for p, own, qs in zip(of_trainer, ids, sampler, strict=True)
        ]
        expected = [
            math.fsum(c * p[v] for c, v in zip(row, own, strict=True))
            for row, p, own in zip(held, of_trainer, ids, strict=True)
        ]
        trainer = wide([p[v] for p, own in zip(of_trainer, ids, strict=True) for v in own]).requires_grad_()
        counts, (_, _, offsets) = torch.ones(len(ids), dtype=torch.bool), ragged(ids)
        got = ops.exact_centering(wide(joined(sampler)), trainer, offsets, as_tensor(f), counts)
        torch.testing.assert_close(got, wide(expected), rtol=1e-12, atol=1e-14)
        (gradient,) = torch.autograd.grad((got * wide(slope)).sum(), trainer)
        by_hand = [c * s for row, s in zip(held, slope, strict=True) for c in row]
        torch.testing.assert_close(gradient, wide(by_hand), rtol=1e-12, atol=1e-14)


def test_a_support_at_a_token_that_does_not_count_may_hold_anything():
    _, ids, sampler = random_supports(1)
    (_, rows, offsets), counts = ragged(ids), torch.tensor([True, True, True, False])
    clean, last = wide(joined(sampler)), rows == 3
    trainer = clean - 0.1
    broken = [torch.where(last, torch.nan, x).requires_grad_() for x in (clean, trainer)]
    found = [
        ops.exact_centering(q, p, offsets, as_tensor(WEIGHTS["unbounded"]), counts)
        for q, p in ((clean, trainer), broken)
    ]
    (gradient,) = torch.autograd.grad(found[1].sum(), broken[1])
    assert torch.equal(*found) and found[1][3] == 0 and not gradient[last].any() and gradient.isfinite().all()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_log_probs_within_are_a_masked_log_softmax_with_its_gradient(dtype, temperature):
    logits, ids, _ = random_supports(4)
    flat, rows, offsets = ragged(ids)
    slope = torch.randn(len(flat), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    free, expected = (wide(logits).to(dtype).requires_grad_() for _ in range(2))
    got = log_probs_within(free, flat, rows, offsets, temperature=temperature)
    inside = torch.zeros(len(logits), 7, dtype=torch.bool)
    inside[rows, flat] = True
    masked = (expected.to(got.dtype) / temperature).masked_fill(~inside, -math.inf)
    masked = torch.where(inside.any(1, keepdim=True), masked, 0)  # a row without ids
    reference = masked.log_softmax(1)[rows, flat]
    torch.testing.assert_close(got, reference)
    (got * slope).sum().backward()
    (reference * slope).sum().backward()
    torch.testing.assert_close(free.grad, expected.grad)
    assert got[rows == 2].item() == 0 and not free.grad[2].any()  # a support of one token


def test_log_probs_within_a_support_do_not_overflow():
    """e^200 is beyond float32."""
    logits, ids, _ = random_supports(4)
    flat, rows, offsets = ragged(ids)
    found = [log_probs_within(wide(logits).float() + far, flat, rows, offsets) for far in (0, 200, -200)]
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_a_support_may_lie_on_any_ranks(parts):
    logits, ids, _ = random_supports(8, vocabulary=8)
    (flat, rows, offsets), per = ragged(ids), 8 // parts
    slope = torch.arange(1.0, 1 + len(flat), dtype=torch.float64)

    def on(rank, all_sum):
        part = wide(logits)[:, rank * per : (rank + 1) * per].clone().requires_grad_()
        found = log_probs_within(part, flat, rows, offsets, offset=rank * per, all_sum=all_sum)
        return found.detach(), torch.autograd.grad((found * slope).sum(), part)[0]

    found, gradients = zip(*on_ranks(on, "", parts), strict=True)
    whole = wide(logits).requires_grad_()
    expected = log_probs_within(whole, flat, rows, offsets)
    (gradient,) = torch.autograd.grad((expected * slope).sum(), whole)
    assert all(torch.equal(each, expected.detach()) for each in found)
    assert torch.equal(torch.cat(gradients, 1), gradient) and gradient.any()
