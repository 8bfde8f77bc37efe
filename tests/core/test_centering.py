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
from slime_ext.core.correction import Correction, plan_step
from slime_ext.core.losses import (
    Bounds,
    Delightful,
    DualClip,
    HostLoss,
    LossInputs,
    PpoClip,
    Reinforce,
    Sapo,
    score_factor,
)
from slime_ext.core.metrics.layout import MetricsLayout
from slime_ext.core.metrics.measure import measure
from slime_ext.core.needs import Need
from slime_ext.core.scoped import ScopedReject, ScopedReweight, ZeroOutside
from slime_ext.core.state import Effect, Plan
from slime_ext.core.statistics import statistics_of
from slime_ext.core.steps import (
    Clip,
    EssTruncate,
    Normalize,
    Reject,
    Reweight,
    SecondMoment,
    SignedClip,
    Step,
    Truncate,
    Veto,
)
from slime_ext.core.tokens import Head, Support, Tokens
from slime_ext.errors import ConfigError, DataError
from slime_ext.ops.segments import Segments
from tests import oracle
from tests.batches import META, tokens

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


@dataclass(frozen=True)
class Far(Step):
    """A band of a user's own."""

    effects = frozenset({Effect.BOUND})
    sets_zero = True


def test_a_bound_goes_with_its_weights_and_a_band_of_its_own_does_not():
    band, cap = ZeroOutside(low=0.5, high=2.0), Truncate(2.0)
    assert split((Reweight("sequence"), cap, band)) == ((band,), (Reweight("sequence"), cap))
    assert split((Reweight(), cap, band)) == ((Reweight(), cap, band), ())
    assert split((Reweight("sequence"), Far(), cap)) == ((Far(),), (Reweight("sequence"), cap))


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


@dataclass(frozen=True)
class Aged(Step):
    """A user's step of single tokens whose weight falls with the age of the sample."""

    needs = frozenset({Need.AGES})
    effects = frozenset({Effect.REWEIGHT})

    def __call__(self, state, inputs):
        return state.reweight("token", inputs.ratio * inputs.segments.expand(0.9**inputs.ages))


@dataclass(frozen=True)
class Young(Step):
    needs = frozenset({Need.AGE_STEPS})
    effects = frozenset({Effect.REJECT})

    def __call__(self, state, inputs):
        return state.reject("sequence", ~(inputs.age_steps > 3))


@pytest.mark.parametrize("own", [Aged(), Young()], ids=["reweights", "rejects"])
def test_a_users_step_of_tokens_that_reads_ages_is_refused_in_one_line(own):
    name = type(own).__name__
    said = rf"steps\[0\]: expected unit sequence or turn beside center, got unit token of {name}, which reads"
    with pytest.raises(ConfigError, match=said):
        Correction("target", Reinforce(), (own,), center=Center(K))


@pytest.mark.parametrize(
    "step",
    [ScopedReject("sequence", "ratio", "mean", high=1.5, over="kept"), ScopedReweight("turn", over="kept")],
    ids=["rejects", "reweights"],
)
def test_a_step_over_kept_tokens_is_refused_because_it_multiplies_without_those_that_keep(step):
    steps = (Reject("token", high=2.0), step)
    with pytest.raises(ConfigError) as caught:
        Correction("target", Reinforce(), steps, center=Center(K))
    assert str(caught.value) == (
        "steps[1].over: expected response beside center, got kept: remove over or center, because the steps "
        "that multiply the center are computed without those that reject single tokens"
    )
    Correction("target", Reinforce(), (steps[0], replace(step, over="response")), center=Center(K))


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


LEVELS = ("token", "turn", "sequence", "geometric")


@pytest.mark.parametrize("first", LEVELS)
@pytest.mark.parametrize("second", LEVELS)
def test_two_levels_of_weights_never_reach_the_center(first, second):
    """The second replaces the first's weights, so that ``split`` would give both to C_t."""
    steps = (Reweight(first), Truncate(2.0), Reweight(second), Truncate(5.0))
    with pytest.raises(ConfigError, match=r"steps\[2\].reweight: expected one step that sets weights"):
        Correction("target", Reinforce(), steps, center=Center(K))


def test_a_mean_weight_divides_the_weights_of_its_level():
    """Whatever the mean is over: a bound behind it bounds the quotient."""
    mean, cap = Normalize("sequence"), Truncate(1.5)
    assert split((Reweight(), Truncate(2.0), mean, cap)) == ((Reweight(), Truncate(2.0), mean, cap), ())
    of_sequences = (Reweight("sequence"), Truncate(2.0), Normalize(), cap)
    assert split(of_sequences) == ((), of_sequences)


# ---- other losses than REINFORCE ----

PPO = ("ppo", "proximal", 0.05, 0.1)
BOUNDS = Bounds(0.05, 0.1)
FLOORED = Bounds(0.05, 0.1, 1.2)
BYPASS = ("ppo", "behavior", 0.05, 0.1)
PROXIMAL, TARGET = {"numerator": "proximal"}, {"numerator": "target"}
CAPPED = ((Reweight(), Truncate(1.1)), (TOKEN, ("truncate", 1.1)))
# name -> surrogate, bounds, the oracle's loss, numerator, steps, the oracle's that give f, and those of m
LOSSES = {
    "the host's PPO": (HostLoss(), BOUNDS, PPO, "proximal", *CAPPED, ()),
    "the host's PPO alone": (HostLoss(), BOUNDS, PPO, "proximal", (), (), ()),
    "the host's dual clip": (HostLoss(), FLOORED, (*PPO, 1.2), "proximal", *CAPPED, ()),
    "the host's REINFORCE": (HostLoss(), Bounds(has_ratio=False), ("reinforce",), "target", *CAPPED, ()),
    "ours": (PpoClip(), BOUNDS, PPO, "proximal", *CAPPED, ()),
    "our dual clip": (DualClip(eps_c=1.2), BOUNDS, (*PPO, 1.2), "proximal", *CAPPED, ()),
    "bypass": (PpoClip("behavior"), BOUNDS, BYPASS, "proximal", (), (), ()),
    "REINFORCE, proximal": (Reinforce(), BOUNDS, ("reinforce",), "proximal", *CAPPED, ()),
    "sequences dropped, an outward band": (
        HostLoss(),
        BOUNDS,
        PPO,
        "proximal",
        (
            Reweight(),
            Reject("token", "tv", high=0.05, when="outward"),
            Reject("sequence", "ratio", "mean", 0.99, 1.01),
        ),
        (TOKEN, ("reject", "token", "tv", "-", -INF, 0.05, "outward")),
        (GEO,),
    ),
    "weights of sequences": (
        HostLoss(),
        BOUNDS,
        PPO,
        "proximal",
        (Reweight("sequence"), Truncate(1.05)),
        (),
        (SEQ, ("truncate", 1.05)),
    ),
}


def three_sides(batch, seed):
    """(log_p, log_o, log_q) of the K candidates at each token: [T][K], and as a head."""
    rng = random.Random(seed + 1000)
    found = []
    for sampler, trainer in zip(*heads(batch, seed), strict=True):
        # Not normalised: a head is a part of a distribution, and its tail is never empty.
        found.append([(p, p + min(rng.gauss(0, 0.1), 0.1), q) for p, q in zip(trainer, sampler, strict=True)])
    p, o, q = (
        torch.tensor([[each[side] for each in row] for row in found], dtype=torch.float64)
        for side in range(3)
    )
    return found, Head(q, p.requires_grad_(), o)


def host_loss_of(packed, bounds):
    """As slime computes it, with its gradient; 0 at masked tokens, which may hold anything."""
    target, proximal, a = map(packed.segments.zeroed, (packed.target, packed.proximal, packed.advantages))
    if not bounds.has_ratio:
        return -target * a
    ratio = (target - proximal).exp()
    found = torch.maximum(-ratio * a, -ratio.clamp(1 - bounds.low, 1 + bounds.high) * a)
    return found if bounds.c is None else torch.where(a < 0, torch.minimum(found, -bounds.c * a), found)


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_is_centered_by_its_own_slope(name):
    surrogate, bounds, loss_of, numerator, steps, f, m = LOSSES[name]
    clipped = 0
    for seed in range(12):
        batch = oracle.random_batch(seed, wild=False)
        packed, _ = tokens(batch)
        sides, head = three_sides(batch, seed)
        packed = replace(packed, head=head)
        correction = Correction(numerator, surrogate, steps, center=Center(K))
        loss, _ = correction.loss(correction(packed), packed, host_loss_of(packed, bounds), bounds)
        of_tokens, of_units = (oracle.spec(*each, numerator=numerator) for each in (f, m))
        expected = oracle.centered(of_tokens, of_units, loss_of, batch, sides, has_tail=True)
        slopes = torch.autograd.grad(loss.sum(), [packed.target, head.trainer])
        for got, column in zip((loss, *slopes), zip(*expected, strict=True), strict=True):
            wanted = torch.tensor(list(column), dtype=torch.float64).view_as(got)
            torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-12)
        clipped += sum(
            oracle.score_factor(loss_of, a, *each) == 0
            for a, row in zip(packed.advantages.tolist(), sides, strict=True)
            for each in row
        )
    assert clipped > 0 or loss_of == ("reinforce",)


@pytest.mark.parametrize("name", LOSSES)
def test_without_proximal_log_probs_at_the_head_they_are_the_targets(name):
    surrogate, bounds, *_, steps, _, _ = LOSSES[name]
    batch = oracle.random_batch(3, wild=False)
    packed, _ = tokens(batch)
    _, head = three_sides(batch, 3)
    correction = Correction(LOSSES[name][3], surrogate, steps, center=Center(K))
    same = replace(head, proximal=head.trainer.detach())
    one, other = (
        correction.loss(correction(packed), replace(packed, head=each), packed.target * 0, bounds)[0]
        for each in (same, replace(head, proximal=None))
    )
    assert torch.equal(one, other)


@pytest.mark.parametrize(
    "surrogate", [PpoClip(), PpoClip("behavior"), DualClip(eps_c=1.5), Sapo(), Reinforce()]
)
def test_the_factor_is_the_slope_by_finite_differences_whatever_the_advantage(surrogate):
    step, bounds = 1e-6, Bounds(0.2, 0.28)
    rng = random.Random(0)
    rows = [
        (*(-rng.expovariate(1.0) for _ in range(3)), a) for a in (1.7, -0.3, 0.0, 1e-30) for _ in range(40)
    ]
    p, o, q, a = (torch.tensor(x, dtype=torch.float64) for x in zip(*rows, strict=True))
    got = score_factor(surrogate, bounds, p, o, q, a)

    def loss(target, sign):
        segments = Segments.whole([len(p)], torch.ones(len(p)))
        return surrogate(LossInputs(Tokens(segments, o, q, target, sign), segments.mask), bounds)[0]

    sign = torch.where(a < 0, -1.0, 1.0).double()
    slope = (loss(p + step, sign) - loss(p - step, sign)) / (2 * step)
    torch.testing.assert_close(got, -sign * slope, rtol=1e-5, atol=1e-7)
    assert got.isfinite().all() and not got.requires_grad


def test_far_ratios_and_weights_leave_no_nan():
    """Where the weight is infinite the clip may act: 0 times infinity. In float32, beyond all exponents."""
    sides = [
        [(0.0, -300.0, -900.0), (-300.0, -1e-3, -1.0), (-900.0, -1e-6, -2.0)],
        [(-1.0, -1.0, -900.0), (-2.0, -990.0, -0.5), (-990.0, -2.0, -3.0)],
    ]
    p, o, q = (torch.tensor([[x[i] for x in row] for row in sides]) for i in range(3))
    for sign in (1.0, -1.0):
        for steps in ((), (Reweight(),), (Reweight(), Truncate(2.0))):
            head = Head(q, p.clone().requires_grad_(), o)
            row = torch.tensor([-1.0, -1.0])
            segments = Segments.whole([2], torch.ones(2))
            packed = Tokens(
                segments, row, row, row.clone().requires_grad_(), torch.full((2,), sign), head=head
            )
            correction = Correction("proximal", HostLoss(), steps, center=Center(K))
            loss, _ = correction.loss(correction(packed), packed, packed.target * -sign, BOUNDS)
            (gradient,) = torch.autograd.grad(loss.sum(), head.trainer)
            assert loss.isfinite().all() and gradient.isfinite().all(), (sign, steps)


def test_a_gate_of_single_tokens_is_not_centered():
    with pytest.raises(ConfigError, match="expected another surrogate beside center, got delightful"):
        Correction("target", Delightful(), (), center=Center(K))
    with pytest.raises(TypeError, match=r"linear in \|A\|"):
        score_factor(Delightful(), BOUNDS, *[torch.zeros(1)] * 4)


def test_the_hosts_loss_with_a_center_is_a_correction():
    centered = Correction(center=Center(K))
    assert not centered.is_identity and Need.ADVANTAGES in centered.needs and centered.needs_proximal_head
    assert not Correction("target", Reinforce(), CAPPED[0], center=Center(K)).needs_proximal_head
    assert Correction("proximal", Reinforce(), CAPPED[0], center=Center(K)).needs_proximal_head
    assert not Correction("proximal", Reinforce(), (), center=Center(K)).needs_proximal_head
    assert not Correction("proximal", PpoClip("behavior"), (), center=Center(K)).needs_proximal_head
    assert not Correction("proximal", HostLoss(), CAPPED[0]).needs_proximal_head


COUPLED = {
    "normalized": (Reweight(), Truncate(2.0), Normalize()),
    "normalized, mean over sequences": (Reweight(), Truncate(2.0), Normalize("sequence"), Truncate(1.1)),
    "capped at the effective sample size": (Reweight(), EssTruncate()),
    "second moment": (Reweight(), Truncate(2.0), SecondMoment(0.01)),
}


@pytest.mark.parametrize("name", COUPLED)
def test_numbers_of_the_whole_step_act_on_every_candidate(name):
    """A candidate that is the sampled token has the weight that the loss has for it."""
    batch = oracle.random_batch(4, wild=False)
    packed, _ = tokens(batch)
    columns = [x.detach()[:, None] for x in (packed.behavior, packed.target, packed.proximal)]
    head = Head(columns[0] - 1e-12, columns[1].requires_grad_(), columns[2])
    packed = replace(packed, head=head)
    correction = Correction("proximal", Reinforce(), COUPLED[name], center=Center(1))
    plan = plan_step(correction, [packed])
    outcome = correction(packed, plan)
    loss, _ = correction.loss(outcome, packed, packed.target * 0, BOUNDS)
    (slope,) = torch.autograd.grad(loss.sum(), head.trainer)
    q, p, o = (x.detach().exp() for x in columns)
    q_tail, p_tail, o_tail = ((1 - x).clamp_min(1e-6) for x in (q, p, o))
    tail = Correction("proximal", Reinforce(), COUPLED[name])
    names = ("behavior", "target", "proximal")
    sides = {key: x[:, 0].log() for key, x in zip(names, (q_tail, p_tail, o_tail), strict=True)}
    alone = replace(packed, head=None, **sides)
    alpha = (q_tail / p_tail)[:, 0] * tail(alone, plan).weights
    wanted = packed.advantages * (q[:, 0] * outcome.weights - alpha * p[:, 0])
    torch.testing.assert_close(
        slope[:, 0], torch.where(packed.segments.mask, wanted, 0), rtol=1e-9, atol=1e-10
    )


def test_a_group_that_is_rejected_has_no_center():
    batch = oracle.random_batch(3, wild=False)
    packed, host_loss = with_heads(batch, 3)
    correction = Correction(
        "proximal",
        Reinforce(),
        (Reject("sequence", "ratio", "mean", 0.01, 100.0),),
        group="atomic",
        center=Center(K),
    )
    keep = torch.tensor([i % 2 == 0 for i in range(len(batch))])
    loss, _ = correction.loss(correction(packed, Plan(keep=keep)), packed, host_loss, BOUNDS)
    gone = ~packed.segments.expand(keep)
    assert gone.any() and not loss[gone].any() and loss[~gone].any()


# ---- over a support ----


def with_support(batch, seed, has_proximal=True):
    """Ragged candidates: 0 to 4 at each token, and what the oracle reads."""
    rng = random.Random(seed)
    packed, host_loss = tokens(batch)
    rows = []
    for s in batch:
        for bit in s["mask"]:
            n = rng.randint(1, 4) if bit else rng.randint(0, 4)
            sides = [[rng.gauss(0, 1) for _ in range(n)] for _ in range(3)]
            own = [[*oracle.log_softmax(side).values()] for side in sides]
            rows.append([tuple(side[v] for side in own) for v in range(n)])
    p, o, q = (torch.tensor([x[i] for row in rows for x in row], dtype=torch.float64) for i in range(3))
    offsets = torch.tensor([0, *map(len, rows)]).cumsum(0)
    support = Support(q, p.requires_grad_(), offsets, o if has_proximal else None)
    return replace(packed, head=support), host_loss, rows


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_is_centered_over_a_support(name):
    surrogate, bounds, loss_of, numerator, steps, f, m = LOSSES[name]
    for seed in range(6):
        batch = oracle.random_batch(seed, wild=False)
        packed, _, rows = with_support(batch, seed)
        correction = Correction(numerator, surrogate, steps, center=Center(K))
        loss, _ = correction.loss(correction(packed), packed, host_loss_of(packed, bounds), bounds)
        of_tokens, of_units = (oracle.spec(*each, numerator=numerator) for each in (f, m))
        expected = oracle.centered(of_tokens, of_units, loss_of, batch, rows, has_tail=False)
        slopes = torch.autograd.grad(loss.sum(), [packed.target, packed.head.trainer])
        columns = [*zip(*expected, strict=True)]
        wanted = columns[0], columns[1], [c for row in columns[2] for c in row]
        for got, column in zip((loss, *slopes), wanted, strict=True):
            torch.testing.assert_close(
                got, torch.tensor(list(column), dtype=torch.float64), rtol=1e-9, atol=1e-12
            )


def test_a_support_that_does_not_fit_is_refused():
    packed, host_loss, _ = with_support(oracle.random_batch(1, wild=False), 1)
    correction = Correction("target", Reinforce(), (), center=Center(K))
    for wrong in (
        replace(packed.head, offsets=packed.head.offsets[1:]),
        replace(packed.head, sampler=packed.head.sampler[1:]),
        replace(packed.head, proximal=packed.head.sampler[1:]),
    ):
        with pytest.raises(DataError, match=r"support: expected log-probs \[N\] of the same tokens"):
            correction.loss(correction(packed), replace(packed, head=wrong), host_loss, BOUNDS)


def tail_of(packed):
    correction = Correction("target", Reinforce(), (), center=Center(K))
    layout = MetricsLayout.of(correction)
    sums = measure(packed, correction(packed, observe=True), layout)
    return dict(zip(layout.names, sums.sums.tolist(), strict=False))["tail"]


def test_the_tail_in_the_metrics_is_that_of_the_tokens_that_count():
    packed, _ = with_heads(oracle.random_batch(1), 1)
    counts = packed.segments.full_mask & torch.tensor([*map(oracle.is_log_prob, packed.behavior.tolist())])
    rows = packed.head.sampler[counts].tolist()
    masses = [math.fsum(map(math.exp, row)) for row in rows]
    assert 0 < len(rows) < len(counts)
    assert tail_of(packed) == pytest.approx(math.fsum(1 - mass for mass in masses), rel=1e-9)
    assert math.isnan(tail_of(replace(packed, head=None)))


def test_a_support_leaves_no_tail_in_the_metrics():
    packed, _, _ = with_support(oracle.random_batch(1, wild=False), 1)
    assert tail_of(packed) == 0.0


@pytest.mark.xdist_group(META)
def test_nothing_waits_for_the_device():
    """Tensors on the meta device have no values: whatever reads one raises."""
    packed, host_loss = with_heads(oracle.random_batch(2), 2)
    segments = Segments.whole(packed.segments.lengths, packed.segments.full_mask.to("meta"))
    names = ("proximal", "behavior", "target", "advantages")
    fields = {name: getattr(packed, name).detach().to("meta") for name in names}
    head = Head(*(values.detach().to("meta") for values in (packed.head.sampler, packed.head.trainer)))
    moved = replace(packed, segments=segments, head=head, **fields)
    support = Support(
        *(torch.zeros(9, device="meta") for _ in range(2)), torch.zeros(1 + len(host_loss)).long().to("meta")
    )
    for held in (head, support):
        moved = replace(moved, head=held)
        for name in CASES:
            centered = correction(name)
            loss, _ = centered.loss(centered(moved), moved, host_loss.to("meta"), Bounds())
            assert loss.shape == host_loss.shape
        for surrogate, bounds, _, numerator, steps, *_ in LOSSES.values():
            centered = Correction(numerator, surrogate, steps, center=Center(K))
            loss, _ = centered.loss(centered(moved), moved, host_loss.to("meta"), bounds)
            assert loss.shape == host_loss.shape
