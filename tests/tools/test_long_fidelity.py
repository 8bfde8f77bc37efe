"""The long laboratory against all 512 responses of 3 tokens, and the page that it fills."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from slime_ext import presets
from slime_ext.core.centering import Center
from slime_ext.core.correction import Correction
from slime_ext.core.losses import Reinforce
from slime_ext.core.steps import Reweight, Truncate
from slime_ext.tools import fidelity_page, long_fidelity
from slime_ext.tools.fidelity import Fidelity
from slime_ext.tools.fidelity_page import Row, sentence
from slime_ext.tools.long_fidelity import Chain, Sampled, evaluate

LENGTH = 3
ALL = torch.cartesian_prod(*[torch.arange(8)] * LENGTH)
LAST = torch.cat([torch.zeros(len(ALL), 1, dtype=torch.int64), ALL[:, :-1]], 1)
SAMPLED = Chain.of(0.4, LENGTH, 1024)
WHOLE = replace(SAMPLED, responses=ALL, last=LAST)


def probability(logits):
    return logits.log_softmax(-1)[LAST, ALL].sum(1).exp()


def exact_mean(correction):
    estimates = [
        long_fidelity._estimates(correction, WHOLE, rows)[0] for rows in long_fidelity._steps(len(ALL))
    ]
    return probability(WHOLE.behavior) @ torch.cat(estimates)


def test_the_true_gradient_and_the_advantages():
    logits = WHOLE.target.clone().requires_grad_()
    (expected,) = torch.autograd.grad((probability(logits) * WHOLE.advantages).sum(), logits)
    torch.testing.assert_close(WHOLE.true_gradient, expected.flatten(), rtol=1e-11, atol=1e-13)
    assert (probability(WHOLE.behavior) * WHOLE.advantages).sum().abs() < 1e-13


def test_what_the_controls_expect():
    chance = probability(WHOLE.behavior)
    torch.testing.assert_close(WHOLE.expected_pairs, chance @ WHOLE.pairs, rtol=1e-10, atol=1e-13)
    ratio = probability(WHOLE.target) / chance
    assert WHOLE.ess_of_products == pytest.approx(1 / (chance @ ratio.square()).item(), rel=1e-12)


def test_an_estimate_is_minus_the_gradient_of_the_loss_in_the_logits():
    """One response by autograd through the logits themselves, centered and not."""
    for center in (None, Center(3)):
        correction = Correction("target", Reinforce(), (Reweight(), Truncate(1.2)), center=center)
        got = long_fidelity._estimates(correction, WHOLE, slice(100, 101))[0][0]
        logits = WHOLE.target.clone().requires_grad_()
        p, q = logits.log_softmax(-1), WHOLE.behavior.log_softmax(-1)
        loss = 0.0
        for last, token in zip(LAST[100].tolist(), ALL[100].tolist(), strict=True):
            weight = min(math.exp((p - q)[last, token].item()), 1.2)
            loss = loss - weight * WHOLE.advantages[100] * p[last, token]
            if center:
                head = q[last].topk(3).indices
                b, a = q[last, head].exp(), p[last, head].exp().detach()
                rho = (1 - b.sum()) / (1 - a.sum())
                coefficients = b * (a / b).clamp(max=1.2) - rho * (1 / rho).clamp(max=1.2) * a
                loss = loss + WHOLE.advantages[100] * (coefficients * p[last, head]).sum()
        torch.testing.assert_close(
            got, -torch.autograd.grad(loss, logits)[0].flatten(), rtol=1e-9, atol=1e-12
        )


@pytest.mark.parametrize("name", ["metrics_only", "token_tis", "seq_is", "min_prefix", "skyrl_product_mask"])
def test_a_sampled_bias_lies_within_its_error_of_the_exact_one(name):
    correction = presets.get(name)
    true = SAMPLED.true_gradient
    exact = ((exact_mean(correction) - true).norm() / true.norm()).item()
    got = evaluate(correction, SAMPLED)
    assert abs(got.bias - exact) < 3 * got.error + 1e-4
    if name in ("metrics_only", "token_tis"):  # token weights: the controls take all of the noise away
        assert got.error < 1e-9 and got.bias == pytest.approx(exact, abs=1e-4)  # but of a pair unseen


def test_steps_that_couple_samples_are_steps_of_their_own():
    alone, coupled = (evaluate(presets.get(name), SAMPLED) for name in ("metrics_only", "m2"))
    assert coupled.kept < 1 == alone.kept and 0.2 < coupled.variance / alone.variance < 5


def test_the_page_has_every_method_and_reads_nothing_but_numbers_of_this_run():
    text = fidelity_page.page({4: 128}, under_way=lambda pairs: [pairs[i] for i in (0, 1, 4, 12, -1)])
    for title in (
        "Four steps",
        "Score centering",
        "Markov policy, mismatch",
        "Markov policy, stale",
        "What follows",
    ):
        assert f"\n## {title}" in text
    assert "`token_tis`" in text and "centered, IcePop 0.5 to 2, all tokens" in text
    assert set(fidelity_page.NAMES) <= set(presets.PRESETS)


def row(correction, exact, sampled):
    return Row(correction, {"stale": exact}, {("stale", 64): sampled})


def test_a_sentence_says_what_changed_and_by_how_much():
    none = torch.zeros(1)
    base = row(
        presets.get("metrics_only"), Fidelity(none, 0.4, 1, 1, 2.0, 1, 1), Sampled(0.2, 0, 1, 50, 1, 1)
    )
    better = row(
        presets.get("token_tis"), Fidelity(none, 0.1, 1, 1, 2.0, 1, 1), Sampled(0.19, 0.02, 1, 100, 1, 0.5)
    )
    assert sentence(better, base, 64, 4096) == (
        "bias 0.40 → 0.10, the same variance; 64: bias 0.19, as without, 2 times the variance, 50% kept"
    )
    gone = row(presets.get("geo_rs"), Fidelity(none, 1, 1, 0, 0, 0, 0), Sampled(1, 0, 0, 0, 0.001, 0.1))
    assert sentence(gone, base, 64, 4096) == "keeps nothing; 64: 4 of 4,096 responses carry the mean"
