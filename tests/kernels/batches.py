"""Batches and comparisons for the tests of backends."""

from __future__ import annotations

import torch

from slime_ext import presets
from slime_ext.correction import Correction, Tokens
from slime_ext.coupled import Normalize
from slime_ext.kernels import Eager, Work
from slime_ext.metrics import Layout
from slime_ext.ops.segments import Segments
from slime_ext.steps import Clip, Reject, Reweight, Taper, Truncate, Veto
from tests import oracle
from tests.batches import FIELDS, flat

GEO = Reject("sequence", "ratio", "mean", 0.999, 1.001)
OF_FULL = oracle.spec(
    ("reweight", "sequence"),
    ("truncate", 2.0),
    ("reject", "sequence", "ratio", "mean", 0.999, 1.001, "always"),
    ("veto", 1e-4, float("inf")),
)
FULL = Correction(steps=(Reweight("sequence"), Truncate(2.0), GEO, Veto(low=1e-4)))
EVERY = Correction(
    steps=(
        Reject("token", "k3", high=0.5),
        Reject("sequence", "tv", "mean", high=0.4),
        Reject("sequence", "binary_kl", "mean", high=2.0),
        Reject("token", "binary_kl_max", high=3.0, when="outward"),
        Reject("sequence", "ratio", "mean", 0.3, 3.0, "negative_advantage"),
        Reject("sequence", "k2", "max", high=30.0),
        Veto(0.01, 50.0),
        Taper("geometric"),
        Reweight("token"),
        Clip(0.5, 3.0),
    )
)
# Weights of sequences up to the end, and such that single tokens change.
SHARED = Correction(
    steps=(
        Reweight("sequence"),
        Clip(0.9, 1.1),
        Reweight("geometric"),
        Clip(0.95, 1.05),
        Reject("token", "ratio", low=0.8, high=1.25),
        Normalize(),
    )
)
HANDED_ON = Correction(steps=(Reweight("sequence"), Clip(0.5, 2.0), Taper("sequence"), Reweight("geometric")))
CORRECTIONS = {"full": FULL, "every": EVERY, "shared": SHARED, "handed on": HANDED_ON} | {
    name: presets.get(name)
    for name in ("token_tis", "icepop", "seq_mis", "decoupled_geo_rs_token_tis", "topr", "m2", "kpop")
}


def random_tokens(lengths, dtype=torch.float32, seed=0, noise=0.3, device="cpu", wild=True):
    """Tokens of random log-probs; some masked positions hold NaN, some behavior log-probs are not finite."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    proximal = -torch.rand(total, generator=generator) * 3
    behavior = proximal + torch.randn(total, generator=generator) * noise
    mask = torch.rand(total, generator=generator) < 0.9
    if wild and total > 40:
        behavior[~mask] = torch.nan
        behavior[7], behavior[11] = torch.nan, -torch.inf
    advantages = torch.randn(total, generator=generator)
    values = (x.to(dtype).to(device) for x in (proximal, behavior, proximal, advantages))
    return Tokens(Segments.whole(lengths, mask.to(device)), *values)


def of_oracle(seed, dtype=torch.float64, device="cpu"):
    """Tokens of an oracle batch, and the keep and weights that FULL must give, [T] on the CPU.

    The oracle sees the values as they are after rounding to ``dtype``.
    """
    batch = oracle.random_batch(seed)
    for sequence in batch:
        for key in FIELDS:
            sequence[key] = torch.tensor(sequence[key], dtype=dtype).tolist()
    expected = oracle.correct(OF_FULL, batch)
    segments = Segments.whole([len(s["mask"]) for s in batch], flat(batch, "mask", torch.int32).to(device))
    packed = Tokens(segments, *(flat(batch, key, dtype).to(device) for key in ("proximal", "behavior")))
    keep = torch.tensor([k for s in expected for k in s["keep"]])
    return packed, keep, torch.tensor([w for s in expected for w in s["weights"]], dtype=torch.float64)


def assert_same(got, expected, mask, rtol=1e-6, atol=0.0):
    """keep identical, weights and log-ratios within tolerance, everything that was observed too."""
    assert torch.equal(got.keep, expected.keep) and torch.equal(got.finite, expected.finite)
    torch.testing.assert_close(got.weights, expected.weights, rtol=rtol, atol=atol)
    torch.testing.assert_close(got.log_ratio, expected.log_ratio, rtol=rtol, atol=1e-7)
    if expected.clipped is not None:
        assert torch.equal(got.clipped & mask, expected.clipped & mask)
    if expected.sequences is not None:
        assert torch.equal(got.acted[mask], expected.acted[mask])
        assert torch.equal(got.sequences.keep, expected.sequences.keep)
        torch.testing.assert_close(
            got.sequences.log_ratio, expected.sequences.log_ratio, rtol=1e-5, atol=1e-4
        )


def assert_applied_alike(backend, packed, plan, rtol, first=True):
    """Loss, its gradient, the host's metrics and ours are those of the eager path."""
    correction = backend.correction
    start = torch.randn(packed.segments.size, generator=torch.Generator().manual_seed(1))
    losses = [start.to(packed.behavior.device, copy=True).requires_grad_() for _ in range(2)]
    expected, got = (
        each.apply(Work(packed, loss, plan, layout=Layout.of(correction), first=first))
        for each, loss in zip((Eager(correction), backend), losses, strict=True)
    )
    for applied in (expected, got):
        applied.loss.square().sum().backward()
    torch.testing.assert_close(got.loss, expected.loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(losses[1].grad, losses[0].grad, rtol=1e-6, atol=0)
    torch.testing.assert_close(got.channel, expected.channel, rtol=1e-6, atol=0)
    torch.testing.assert_close(got.measured, expected.measured, rtol=rtol, atol=rtol)
