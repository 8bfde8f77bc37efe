"""The long laboratory against all 512 responses of 3 tokens, and the page that it fills."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.fidelity import markov, page, picture
from benchmarks.fidelity.exact import Fidelity, World
from benchmarks.fidelity.markov import Chain, evaluate
from benchmarks.fidelity.page import Row, against
from slime_ext import presets
from slime_ext.core.centering import Center
from slime_ext.core.correction import Correction
from slime_ext.core.losses import Reinforce
from slime_ext.core.steps import Reweight, Truncate

LENGTH = 3
ALL = torch.cartesian_prod(*[torch.arange(8)] * LENGTH)
LAST = torch.cat([torch.zeros(len(ALL), 1, dtype=torch.int64), ALL[:, :-1]], 1)
SAMPLED = Chain.of(0.4, LENGTH, 1024)
WHOLE = replace(SAMPLED, responses=ALL, last=LAST)


def probability(logits):
    return logits.log_softmax(-1)[LAST, ALL].sum(1).exp()


def exact_mean(correction):
    estimates = [markov._estimates(correction, WHOLE, rows)[0] for rows in markov._steps(len(ALL))]
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
        got = markov._estimates(correction, WHOLE, slice(100, 101))[0][0]
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
    chosen = (0, 1, 4, 12, 14, -1)
    text = page.results({4: 128}, under_way=lambda pairs: [pairs[i] for i in chosen], seeds=(0, 1))
    for title in (
        "How far apart",
        "Four steps",
        "Score centering",
        *(f"Markov policy, {name}" for name in ("mismatch", "stale", "far")),
        "What follows",
    ):
        assert f"\n## {title}" in text
    assert "`token_tis`, `sao_code`" in text  # one estimator where no ratio reaches a bound
    assert "centered, IcePop 0.5 to 2, all tokens" in text and "We draw 2 worlds" in text
    assert set(page.NAMES) <= set(presets.PRESETS)
    for world in ("stale", "far"):
        k3 = [by_hand(World.of(world, seed)) for seed in (0, 1)]
        assert f"| {sum(k3) / 2:.2g} ({min(k3):.2g} to {max(k3):.2g}) |" in text


def by_hand(world):
    """k3 of a world, response by response and token by token."""
    total = 0.0
    behavior, proximal = (world.log_probs(p).tolist() for p in (world.behavior, world.proximal))
    for q, p in zip(behavior, proximal, strict=True):
        each = [math.exp(b - a) - 1 - (b - a) for a, b in zip(q, p, strict=True)]
        total += math.exp(math.fsum(q)) * math.fsum(each) / len(each)
    return total


def test_the_worlds_called_far_are_as_far_as_the_runs_of_the_evidence():
    assert sum(World.of("far", seed).k3 for seed in range(60)) / 60 == pytest.approx(0.3, abs=0.02)
    for length in (64, 256):
        chain = Chain.of(markov.MISMATCHES["far"], length, 1)
        assert chain.k3 == pytest.approx(0.3, abs=0.05)
    chance = probability(WHOLE.behavior)
    ratio = WHOLE.ratios[LAST, ALL]
    assert WHOLE.k3 == pytest.approx(float(chance @ (ratio - 1 - ratio.log()).mean(1)), rel=1e-12)


def exact(bias, *, kept=1.0, mean=None):
    found = torch.tensor([bias]) if mean is None else mean
    return Fidelity(found, bias, 1.0, 1.0, 2.0, 1.0, kept)


def row(*biases, **more):
    return Row(presets.get("metrics_only"), {"stale": [exact(b, **more) for b in biases]}, {})


def test_two_methods_are_told_apart_by_a_sign_test_over_worlds():
    base = row(*[0.4] * 8)
    assert against("metrics_only", row(*[0.3] * 8), base, "stale") == "smaller than `metrics_only` on 8 of 8"
    assert against("token_tis", row(*[0.5] * 8), base, "stale") == "larger than `token_tis` on 8 of 8"
    mixed = row(*[0.3] * 6, *[0.5] * 2)
    said = "not told apart from `token_tis` (smaller on 6 of 8)"
    assert against("token_tis", mixed, base, "stale") == said
    assert against("token_tis", base, base, "stale") == "the same estimator as `token_tis`"
    assert against("token_tis", row(0.3), base, "stale") == "smaller than `token_tis` in one world"
    nothing = row(*[1.0] * 8, kept=0.0)
    assert against("geo_rs", nothing, nothing, "stale").startswith("not told apart")


def test_the_sign_test_counts_coins():
    for n in range(1, 9):
        for wins in range(n + 1):
            as_uneven = [
                abs(2 * sum(coins) - n) >= abs(2 * wins - n) for coins in itertools.product((0, 1), repeat=n)
            ]
            assert page.sign_test(wins, n - wins) == pytest.approx(sum(as_uneven) / 2**n)


ROOT = Path(__file__).parents[2]
RESULTS = (ROOT / "benchmarks/fidelity/RESULTS.md").read_text()


def test_the_committed_results_are_those_of_this_code():
    """A few rows of the exact table and of the comparison; a change of any step would show in them."""
    worlds = {name: drawn for name, drawn in page.drawn().items() if name in picture.WORLDS}
    names = (page.NONE, page.TOKEN, "icepop", "seq_is")
    rows = page.short_rows(worlds, lambda _: names)
    for name in names:
        (line,) = re.findall(rf"^\| `{name}` \| (.*/.*) \|$", section("Four steps"), re.M)
        cells = dict(zip(("mismatch", "stale", "stale + drift", "far"), line.split(" | "), strict=True))
        for world in worlds:
            assert cells[world].startswith(page._ranged(rows[name].biases(world)) + " / ")
    said = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", section("What follows"), re.M))
    for name in names[1:]:
        for world, cell in zip(worlds, said[name].split(" | "), strict=True):
            assert against(page.NONE, rows[name], rows[page.NONE], world) in cell
    assert picture.side_of(rows, "seq_is", "far") == "smaller"
    assert picture.side_of(rows, page.NONE, "far") == "larger"
    assert picture.side_of(rows, "icepop", "stale") == "same"


def section(title):
    start = RESULTS.index(f"\n## {title}")
    return RESULTS[start : RESULTS.index("\n## ", start + 1)]


NUMBER = re.compile(r"(?<![\w.])(?:\d+\.\d+|\d+ of \d+)(?![\w.])")


def test_every_number_of_the_page_is_in_the_results():
    """Numbers with decimals, and counts of draws or seeds. The evidence has those of other runs."""
    text = (ROOT / "docs/what_each_method_does.md").read_text()
    text = re.sub(r"about 0\.001|about 0\.25|weights 0\.45|p below 0\.05", "", text)
    assert {*NUMBER.findall(text)} - {"0.0007"} <= {*NUMBER.findall(RESULTS)}  # 0.00066 there


def test_the_figures_are_drawn_for_both_palettes(tmp_path, monkeypatch):
    worlds = {name: drawn for name, drawn in page.drawn(range(2)).items() if name in picture.WORLDS}
    monkeypatch.setattr(page, "drawn", lambda: worlds)
    picture.write(folder=tmp_path)
    drawn = {path.name for path in tmp_path.glob("*.png")}
    assert drawn == {path.name for path in (ROOT / "docs/img").glob("fidelity_*.png")}
    assert set(picture.LABELS) == set(picture.WORLDS) and all(
        set(named) <= {*page.NAMES, page.PRODUCT} for named in picture.LABELS.values()
    )
