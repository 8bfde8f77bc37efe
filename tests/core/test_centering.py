"""``center``: which steps give f and which multiply, against loops over floats."""

from __future__ import annotations

import math
import random
import sys
from dataclasses import dataclass, replace

import pytest
import torch

from slime_ext import load_config
from slime_ext.config.load import read_config, to_mapping
from slime_ext.core.centering import Center, split
from slime_ext.core.correction import Correction
from slime_ext.core.losses import Bounds, Reinforce
from slime_ext.core.scoped import ZeroOutside
from slime_ext.core.state import Effect, Head, statistics_of
from slime_ext.core.steps import Clip, Reject, Reweight, SignedClip, Step, Truncate, Veto
from slime_ext.errors import ConfigError, DataError
from slime_ext.ops.segments import Segments
from tests import oracle
from tests.batches import tokens

INF, K = math.inf, 3
TOKEN, SEQ = ("reweight", "token"), ("reweight", "sequence")
GEO = ("reject", "sequence", "ratio", "mean", 0.99, 1.01, "always")
BAND = ("reject", "token", "ratio", "-", 0.8, 1.2, "always")
# name -> steps, those of them that give f as the oracle has them, and those that multiply
CASES = {
    "f = 1": ((), (), ()),
    "truncated": ((Reweight(), Truncate(1.1)), (TOKEN, ("truncate", 1.1)), ()),
    "icepop": ((Reweight(), Reject("token", "ratio", low=0.8, high=1.2)), (TOKEN, BAND), ()),
    "a band, weights of 1": ((Reject("token", "ratio", low=0.8, high=1.2),), (BAND,), ()),
    "by sign": (
        (SignedClip("token", 0.9, 1.0, 0.0, 1.1),),
        (("signed_clip", "token", (0.9, 1.0), (0.0, 1.1)),),
        (),
    ),
    "outward tv": (
        (Reweight(), Reject("token", "tv", high=0.05, when="outward")),
        (TOKEN, ("reject", "token", "tv", "-", -INF, 0.05, "outward")),
        (),
    ),
    "sequences rejected": (
        (Reweight(), Clip(0.9, 1.1), Reject("sequence", "ratio", "mean", 0.99, 1.01)),
        (TOKEN, ("clip", 0.9, 1.1)),
        (GEO,),
    ),
    "weights of sequences": (
        (Reweight("sequence"), Truncate(1.05), Reject("token", "ratio", low=0.8, high=1.2)),
        (BAND,),
        (SEQ, ("truncate", 1.05)),
    ),
    "turns and a veto": (
        (Reweight("turn"), Truncate(1.5), Veto(low=0.5)),
        (),
        (("reweight", "turn"), ("truncate", 1.5), ("veto", 0.5, INF)),
    ),
}


def heads(batch, seed):
    """Sampler's and trainer's log-probs [T][K] at each token of a batch."""
    rng = random.Random(seed)
    rows = []
    for _ in range(sum(len(s["mask"]) for s in batch)):
        logits = [rng.gauss(0, 1) for _ in range(K + 3)]
        other = [x + rng.gauss(0, 0.3) for x in logits]
        totals = [math.log(math.fsum(map(math.exp, row))) for row in (logits, other)]
        rows.append(
            [[x - total for x in row[:K]] for row, total in zip((logits, other), totals, strict=True)]
        )
    return [row[0] for row in rows], [row[1] for row in rows]


def with_heads(batch, seed):
    packed, host_loss = tokens(batch)
    sampler, trainer = (torch.tensor(rows, dtype=torch.float64) for rows in heads(batch, seed))
    return replace(packed, head=Head(sampler, trainer.requires_grad_())), host_loss


def f_of(specification, advantage, sampler, trainer):
    """Weight of each token of a head and of the tail, each as a sequence of its own."""

    def weight(log_p, log_q):
        s = {"mask": [1], "target": [log_p], "behavior": [log_q], "advantage": [advantage], "proximal": [0.0]}
        (found,) = oracle.correct(specification, [s | {"host_loss": [0.0]}])
        return found["weights"][0]

    q, p = (math.fsum(map(math.exp, row)) for row in (sampler, trainer))
    tail = weight(math.log(1 - p), math.log(1 - q))
    return [weight(a, b) for a, b in zip(trainer, sampler, strict=True)], tail, (1 - q) / (1 - p)


def by_hand(name, batch, seed):
    """A_t m_t C_t of every token."""
    _, of_tokens, of_units = CASES[name]
    specs = [oracle.spec(*steps, numerator="target") for steps in (of_tokens, of_units)]
    factors = [w for s in oracle.correct(specs[1], batch) for w in s["weights"]]
    advantages = [a for s in batch for a in s["advantage"]]
    found = []
    for m, a, sampler, trainer in zip(factors, advantages, *heads(batch, seed), strict=True):
        if not m:
            found.append(0.0)
            continue
        f, tail, rho = f_of(specs[0], a, sampler, trainer)
        terms = [
            (math.exp(q) * w - rho * tail * math.exp(p)) * p
            for p, q, w in zip(trainer, sampler, f, strict=True)
        ]
        found.append(a * m * math.fsum(terms))
    return found


def correction(name, **fields):
    return Correction("target", Reinforce(), CASES[name][0], center=Center(K), **fields)


@pytest.mark.parametrize("name", CASES)
def test_the_steps_of_tokens_give_f_and_the_others_multiply(name):
    for seed in range(12):
        batch = oracle.random_batch(seed)
        packed, host_loss = with_heads(batch, seed)
        centered = correction(name)
        plain = replace(centered, center=None)
        outcome = centered(packed)
        loss, base = (c.loss(outcome, packed, host_loss, Bounds())[0] for c in (centered, plain))
        expected = torch.tensor(by_hand(name, batch, seed), dtype=torch.float64)
        torch.testing.assert_close(loss - base, expected, rtol=1e-9, atol=1e-12)


def test_the_gradient_is_the_loss_own_and_that_of_the_head():
    packed, host_loss = with_heads(oracle.random_batch(3), 3)
    sampler = packed.head.sampler.requires_grad_()
    packed = replace(packed, head=Head(sampler, packed.head.trainer))
    centered = correction("truncated")
    loss, _ = centered.loss(centered(packed), packed, host_loss, Bounds())
    own, head, none = torch.autograd.grad(
        loss.sum(), [packed.target, packed.head.trainer, sampler], allow_unused=True
    )
    plain = replace(centered, center=None)
    base, _ = plain.loss(plain(packed), packed, host_loss, Bounds())
    assert torch.equal(own, torch.autograd.grad(base.sum(), packed.target)[0]) and none is None
    # The term is linear in log p at the head, where its coefficients are held.
    torch.testing.assert_close((head * packed.head.trainer).sum(1), loss - base, rtol=1e-9, atol=1e-12)


FAR = {  # name -> level of the weights, dtype, and by how many nats each of 1,000 tokens is more likely
    "a sequence beyond float32": ("sequence", torch.float32, 0.1),
    "turns beyond float32": ("turn", torch.float32, 0.5),
    "a sequence beyond float64": ("sequence", torch.float64, 1.0),
    "a sequence below the limit": ("sequence", torch.float64, 0.1),
}


@pytest.mark.parametrize("name", FAR)
def test_loss_and_center_keep_one_factor_where_no_number_holds_it(name):
    """m_t multiplies both, so what limits it limits it for both; otherwise the loss is not centered."""
    level, dtype, more = FAR[name]
    n, turn = 1000, 500
    rng = random.Random(0)
    behavior = [-rng.expovariate(1.0) - 1 for _ in range(n)]
    batch = [{
        "mask": [int(t % turn != turn - 1) for t in range(n)],
        "behavior": behavior,
        "target": [b + more for b in behavior],
        "proximal": behavior,
        "advantage": [rng.choice((0.0, 1.0, -3.0)) for _ in range(n)],
        "host_loss": [0.0] * n,
    }]  # fmt: skip
    packed, host_loss = with_heads(batch, 0)
    head = Head(packed.head.sampler.to(dtype), packed.head.trainer.detach().to(dtype).requires_grad_())
    names = ("proximal", "behavior", "target", "advantages")
    fields = {key: getattr(packed, key).detach().to(dtype) for key in names}
    packed = replace(packed, head=head, **fields | {"target": fields["target"].requires_grad_()})

    def loss_of(*steps):
        centered = Correction("target", Reinforce(), steps, center=Center(K))
        plain = replace(centered, center=None)
        outcome = centered(packed)
        loss, own = (c.loss(outcome, packed, host_loss.to(dtype), Bounds())[0] for c in (centered, plain))
        slopes = torch.autograd.grad(loss.sum(), [packed.target, head.trainer])
        return loss.detach(), own.detach(), slopes

    loss, _, slopes = loss_of(Reweight(level))
    base, own, slopes_of_1 = loss_of()  # with m_t = 1
    nats = more * sum(batch[0]["mask"]) / (2 if level == "turn" else 1)
    largest = (3.39e38 if dtype is torch.float32 else sys.float_info.max) ** 0.75  # as bfloat16 has it
    for t, size in enumerate(torch.maximum(own.abs(), (base - own).abs()).tolist()):
        factor = min(oracle.exp(nats), largest / max(size, 1.0))
        wanted = [base[t], slopes_of_1[0][t], *slopes_of_1[1][t]]
        for one, got in zip(wanted, [loss[t], slopes[0][t], *slopes[1][t]], strict=True):
            assert got.item() == pytest.approx(one.item() * factor, rel=1e-3, abs=1e-5 * factor), t
    assert not loss[packed.advantages == 0].any() and loss.isfinite().all() and loss.any()


def test_a_head_at_a_token_that_does_not_count_may_hold_anything():
    packed, host_loss = with_heads(oracle.random_batch(5), 5)
    centered = correction("sequences rejected")
    outcome = centered(packed)
    gone = outcome.head_factor == 0
    sampler = torch.where(gone[:, None], -0.5, packed.head.sampler)
    trainer = torch.where(gone[:, None], math.nan, packed.head.trainer.detach())
    garbage = Head(sampler, trainer.requires_grad_())
    loss, clean = (
        centered.loss(outcome, replace(packed, head=head), host_loss, Bounds())[0]
        for head in (garbage, packed.head)
    )
    (gradient,) = torch.autograd.grad(loss.sum(), garbage.trainer)
    assert gone.any() and torch.equal(loss, clean) and gradient.isfinite().all()


def test_a_shard_of_a_sequence_needs_nothing_of_the_others():
    """Context parallelism: a rank's slice of C_t is C_t of its slice."""
    packed, host_loss = with_heads(oracle.random_batch(7, wild=False), 7)
    centered = correction("truncated")
    whole, _ = centered.loss(centered(packed), packed, host_loss, Bounds())
    lengths = packed.segments.lengths
    pieces, index, begin = [], [], 0
    for i, n in enumerate(lengths):
        pieces.append((i, n // 2, n, 1))
        index += range(begin + n // 2, begin + n)
        begin += n
    segments = Segments(lengths, tuple(pieces), packed.segments.full_mask, 2)
    fields = {k: getattr(packed, k)[index] for k in ("proximal", "behavior", "target", "advantages")}
    head = Head(packed.head.sampler[index], packed.head.trainer[index])
    local = replace(packed, segments=segments, head=head, **fields)
    part, _ = centered.loss(centered(local), local, host_loss[index], Bounds())
    torch.testing.assert_close(part, whole[index], rtol=1e-13, atol=1e-15)


def test_a_bound_goes_with_its_weights_and_a_band_of_its_own_does_not():
    band, cap = ZeroOutside(low=0.5, high=2.0), Truncate(2.0)
    assert split((Reweight("sequence"), cap, band)) == ((band,), (Reweight("sequence"), cap))
    assert split((Reweight(), cap, band)) == ((Reweight(), cap, band), ())


@dataclass(frozen=True)
class OfSequence(Step):
    """A user's step that says unit token, its default, and reads the sum of its sequence."""

    effects = frozenset({Effect.REWEIGHT})
    statistics = statistics_of("sequence", "sum", "ratio")

    def __call__(self, state, inputs):
        return state.reweight("sequence", inputs.total("sequence", "sum", "ratio").exp())


def test_a_step_that_declares_sums_of_its_sequence_multiplies():
    assert split((OfSequence(), Truncate(2.0))) == ((), (OfSequence(), Truncate(2.0)))


def test_old_sequences_are_dropped_whole_whatever_the_unit_beside_the_age():
    band, old = Reject(low=0.5, high=2.0), Reject("sequence", max_staleness=4)
    assert split((replace(band, max_staleness=4),)) == ((band,), (old,))
    assert split((Reject(max_staleness=4),)) == ((), (old,))
    assert split((Reject(max_staleness_steps=4),)) == ((), (Reject("sequence", max_staleness_steps=4),))
    batch = oracle.random_batch(3)
    packed, host_loss = with_heads(batch, 3)
    ages = torch.tensor([float(9 * (i % 2)) for i in range(len(batch))])
    packed = replace(packed, ages=ages)
    young, both = (
        Correction("target", Reinforce(), (Reweight(), Truncate(1.1), *more), center=Center(K))
        for more in ((), (Reject(max_staleness=4),))
    )
    plain, dropped = (c.loss(c(packed), packed, host_loss, Bounds())[0] for c in (young, both))
    is_old = packed.segments.expand(ages) > 4
    assert is_old.any() and not dropped[is_old].any()
    torch.testing.assert_close(dropped[~is_old], plain[~is_old], rtol=1e-12, atol=0)


@dataclass(frozen=True)
class Relative(Step):
    """A token's ratio over the mean ratio of its sequence."""

    effects = frozenset({Effect.REWEIGHT})

    def __call__(self, state, inputs):
        mean = inputs.aggregate("sequence", "mean", inputs.log_ratio)
        return state.reweight("token", (inputs.log_ratio - inputs.segments.expand(mean)).exp())


@dataclass(frozen=True)
class Alone(Step):
    effects = frozenset({Effect.REWEIGHT})

    def __call__(self, state, inputs):
        return state.reweight("token", (inputs.log_ratio / 2).exp())


def test_a_users_step_of_tokens_that_reads_other_tokens_is_refused():
    said = (
        r"steps\[0\]: expected unit sequence or turn beside center, got unit token of Relative, which reads"
    )
    with pytest.raises(ConfigError, match=said):
        Correction("target", Reinforce(), (Relative(),), center=Center(K))
    Correction("target", Reinforce(), (Alone(),), center=Center(K))


def test_null_takes_out_the_center():
    assert read_config({"preset": "cispo", "center": None}).correction.center is None


def test_the_mapping_comes_back():
    loaded = read_config({"preset": "cispo", "center": {"top_k": 8}})
    assert loaded.correction == replace(load_config({"preset": "cispo"}), center=Center(8))
    assert load_config(to_mapping(loaded.correction)) == loaded.correction


def test_a_head_that_is_missing_or_of_another_width():
    packed, host_loss = with_heads(oracle.random_batch(1), 1)
    centered = correction("f = 1")
    with pytest.raises(ConfigError, match="center: expected the sampler's head"):
        centered.loss(centered(packed), replace(packed, head=None), host_loss, Bounds())
    wide = replace(centered, center=Center(5))
    with pytest.raises(DataError, match=r"head: expected log-probs of 5 tokens \(center.top_k\)"):
        wide.loss(wide(packed), packed, host_loss, Bounds())


def test_nothing_waits_for_the_device():
    """Tensors on the meta device have no values: whatever reads one raises."""
    packed, host_loss = with_heads(oracle.random_batch(2), 2)
    segments = Segments.whole(packed.segments.lengths, packed.segments.full_mask.to("meta"))
    names = ("proximal", "behavior", "target", "advantages")
    fields = {name: getattr(packed, name).detach().to("meta") for name in names}
    head = Head(*(values.detach().to("meta") for values in vars(packed.head).values()))
    moved = replace(packed, segments=segments, head=head, **fields)
    for name in CASES:
        centered = correction(name)
        loss, _ = centered.loss(centered(moved), moved, host_loss.to("meta"), Bounds())
        assert loss.shape == host_loss.shape
