"""Exact expectations over all 81 sequences: which estimator is unbiased, and by how much the others are
not."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from benchmarks.fidelity import exact
from benchmarks.fidelity.__main__ import main
from benchmarks.fidelity.exact import World, evaluate
from slime_ext import presets
from slime_ext.core.correction import Correction
from slime_ext.core.losses import PpoClip, Reinforce
from slime_ext.core.needs import Need
from slime_ext.core.steps import MinPrefixReweight, Normalize, Reweight, Truncate
from tests import oracle

WORLD = World.of("stale + drift")
SEQUENCE, TOKEN = (Reweight("sequence"),), (Reweight("token"),)
UNBIASED = Correction("target", Reinforce(), SEQUENCE)
UNCOUPLED = [name for name, p in presets.PRESETS.items() if Need.WHOLE_STEP not in p.correction.needs]
SEQ, TOK, MINIMUM = ("reweight", "sequence"), ("reweight", "token"), ("min_prefix",)
PURE = {"numerator": "target", "loss": ("reinforce",)}
DECOUPLED = {"numerator": "proximal", "loss": ("reinforce",)}
OTHERS = {
    "no weight": (Correction("target", Reinforce()), oracle.spec(**PURE)),
    "sequence, proximal": (Correction("proximal", Reinforce(), SEQUENCE), oracle.spec(SEQ, **DECOUPLED)),
    "token, target": (Correction("target", Reinforce(), TOKEN), oracle.spec(TOK, **PURE)),
    "geometric, target": (
        Correction("target", Reinforce(), (Reweight("geometric"),)),
        oracle.spec(("reweight", "geometric"), **PURE),
    ),
    "prefix minimum": (
        Correction("target", Reinforce(), (MinPrefixReweight(),)),
        oracle.spec(MINIMUM, **PURE),
    ),
    "truncated": (presets.get("pure_is"), oracle.SPECS["pure_is"]),
}


def bias_by_hand(specification, world):
    """The bias from the oracle's weights, one sequence after the other."""
    mean = -world.true_gradient
    policies = [world.log_probs(p).tolist() for p in (world.behavior, world.proximal, world.target)]
    for i, (behavior, proximal, target) in enumerate(zip(*policies, strict=True)):
        fields = {"behavior": behavior, "proximal": proximal, "target": target}
        s = fields | {"advantage": [0.0] * 4, "host_loss": [0.0] * 4, "mask": [1] * 4}
        weights = torch.tensor(oracle.correct(specification, [s])[0]["weights"], dtype=torch.float64)
        mean = mean + math.exp(math.fsum(behavior)) * world.advantages[i] * (weights @ world.score[i])
    return mean.norm().item()


def test_score_and_true_gradient_agree_with_autograd():
    logits = WORLD.target.clone().requires_grad_()
    value = (WORLD.log_probs(logits).sum(1).exp() * WORLD.advantages).sum()
    (gradient,) = torch.autograd.grad(value, logits)
    torch.testing.assert_close(WORLD.true_gradient, gradient.flatten(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("mismatch", exact.MISMATCHES)
def test_untruncated_sequence_weights_of_the_target_are_unbiased(mismatch):
    for seed in range(3):
        assert evaluate(UNBIASED, World.of(mismatch, seed)).bias < 1e-12


@pytest.mark.parametrize("name", OTHERS)
def test_and_they_alone(name):
    correction, specification = OTHERS[name]
    bias = evaluate(correction, WORLD).bias
    assert bias > 0.02 and bias == pytest.approx(bias_by_hand(specification, WORLD), abs=1e-12)


def unclipped(target, proximal, advantages):
    """The host's loss without a trust region: -(target / proximal) A."""
    return -(target - proximal).exp() * advantages


def test_on_the_hosts_ratio_sequence_weights_of_the_proximal_policy_are_biased_too():
    assert evaluate(Correction("proximal", steps=SEQUENCE), WORLD, host_loss=unclipped).bias > 0.02


@pytest.mark.parametrize("name", [name for name in UNCOUPLED if name != "delightful"])  # another objective
def test_on_policy_nothing_is_biased(name):
    result = evaluate(presets.get(name), World.of("on-policy"))
    assert result.bias < 1e-12 and result.kept == pytest.approx(1) and result.ess == pytest.approx(1)


def expected_gradient(correction, world):
    return evaluate(correction, world).mean


@pytest.mark.parametrize("steps", [SEQUENCE, (*SEQUENCE, Truncate(2.0)), TOKEN])
def test_decoupled_agrees_with_pure_only_where_target_is_proximal(steps):
    def gap(world):
        pure, decoupled = Correction("target", Reinforce(), steps), Correction("proximal", PpoClip(), steps)
        return (expected_gradient(pure, world) - expected_gradient(decoupled, world)).norm().item()

    assert gap(World.of("stale")) < 1e-12 < 1e-3 < gap(WORLD)


def test_decoupled_ppo_does_not_care_who_sampled():
    """verl PR 3984's batch-size invariance: staleness of the samples leaves the trust region where it is."""
    decoupled = Correction("proximal", PpoClip("proximal"), SEQUENCE)
    fresh = expected_gradient(decoupled, replace(WORLD, behavior=WORLD.proximal))
    torch.testing.assert_close(expected_gradient(decoupled, WORLD), fresh, rtol=0, atol=1e-13)
    bypass = Correction("target", PpoClip("behavior"))
    moved = expected_gradient(bypass, WORLD) - expected_gradient(
        bypass, replace(WORLD, behavior=WORLD.proximal)
    )
    assert moved.norm() > 1e-2


def test_truncation_trades_bias_for_variance():
    raw, capped = evaluate(UNBIASED, WORLD), evaluate(presets.get("pure_is"), WORLD)
    assert raw.bias < capped.bias and raw.variance > capped.variance and raw.ess < capped.ess


def test_the_clipped_token_weight_is_the_one_of_the_seed_function():
    assert evaluate(presets.get("off_policy_is"), WORLD).bias > 0.09


@pytest.fixture
def three_tokens(monkeypatch):
    """Sequences of three tokens, not four: a ninth of the pairs."""
    monkeypatch.setattr(exact, "STEPS", 3)
    for name in ("TOKENS", "PREFIXES"):
        monkeypatch.setattr(exact, name, getattr(exact, name)[::3, :3])


def test_self_normalised_weights_are_biased_less_with_every_sequence_more(three_tokens):
    steps = (*SEQUENCE, Truncate(1e5), Normalize())
    one, two = (
        evaluate(Correction("proximal", Reinforce(), steps), World.of("stale"), batch=n) for n in (1, 2)
    )
    assert one.bias > two.bias > 0.01
    assert one.ess == pytest.approx(1) and two.ess < 1


def test_the_second_moment_of_pairs(three_tokens):
    m2 = presets.get("m2")
    alone, pairs = (evaluate(m2, World.of("stale"), batch=n) for n in (1, 2))
    assert pairs.kept > alone.kept and pairs.bias != pytest.approx(alone.bias, abs=1e-3)
    assert evaluate(m2, World.of("on-policy")).bias < 1e-12


def test_the_cosine_is_one_where_nothing_is_biased_and_zero_where_nothing_is_left():
    assert evaluate(UNBIASED, World.of("stale")).cosine == pytest.approx(1.0, abs=1e-12)
    assert evaluate(presets.get("token_tis"), World.of("stale")).cosine < 0.99
    assert evaluate(presets.get("decoupled_k3_rs"), World.of("stale")).cosine == 0.0


def test_the_tables_print_within_80_columns():
    import io

    from rich.console import Console

    console = Console(width=80, file=io.StringIO())
    chosen = {name: presets.get(name) for name in ("token_tis", "skyrl_outlier_mask")}
    tables = exact.tables(chosen | exact.centerings([3]))
    for table in tables:
        console.print(table)
    text = console.file.getvalue()
    assert len(tables) == len(exact.MISMATCHES) and all(t.row_count == 8 for t in tables)
    assert "…" not in text and "centered, IcePop 0.5 to 2, all tokens" in text


@pytest.mark.parametrize("mismatch", exact.MISMATCHES)
@pytest.mark.parametrize("name", exact.WEIGHTS)
def test_centered_over_the_vocabulary_a_constant_advantage_moves_nothing(name, mismatch):
    """The paper's statement, exact: the mean of the estimate is 0. Of token ratios it is 0 without centering,
    too, where no bound acts: the sampler's mean of rho times the score is the trainer's of the score."""
    world = World.of(mismatch)
    world = replace(world, advantages=torch.ones_like(world.advantages))
    plain, centered = (evaluate(c, world).mean.norm() for c in pair(name, 3))
    assert centered < 1e-14
    acts = {"f = 1": 1e-2, "truncated at 2": 1e-3, "IcePop 0.5 to 2": 1e-2}[name]
    if mismatch == "on-policy" or (mismatch == "mismatch" and name != "f = 1"):
        assert plain < 1e-14
    else:
        assert plain > acts


def test_a_head_wider_than_the_vocabulary_is_all_of_it():
    _, centered = pair("truncated at 2", 3)
    wide = replace(centered, center=replace(centered.center, top_k=128))
    world = World.of("mismatch")
    assert torch.equal(evaluate(wide, world).mean, evaluate(centered, world).mean)


def pair(name, k):
    made = exact.centerings([k])
    return made[f"reinforce, {name}"], made[f"centered, {name}, {'all tokens' if k == 3 else f'head {k}'}"]


def test_centering_by_hand():
    """The mean of the estimate from the oracle's C_t, one sequence and token after the other."""
    world, steps = WORLD, {"f = 1": lambda r: 1.0, "truncated at 2": lambda r: min(r, 2.0)}
    behavior, target = (p.log_softmax(-1).tolist() for p in (world.behavior, world.target))
    for name, f in steps.items():
        mean = torch.zeros_like(world.true_gradient)
        for i, rows in enumerate(exact.PREFIXES.tolist()):
            drawn = exact.TOKENS[i].tolist()
            chance = math.exp(math.fsum(behavior[r][v] for r, v in zip(rows, drawn, strict=True)))
            for t, (r, v) in enumerate(zip(rows, drawn, strict=True)):
                head = sorted(range(3), key=lambda u, r=r: -behavior[r][u])[:2]
                q, p = ([policy[r][u] for u in head] for policy in (behavior, target))
                score = f(math.exp(target[r][v] - behavior[r][v])) * world.score[i, t]
                for c, u in zip(oracle.centering_coefficients(q, p, f), head, strict=True):
                    score = score - c * world.head_score[r, u]
                mean = mean + chance * world.advantages[i] * score
        got = evaluate(pair(name, 2)[1], world).mean
        torch.testing.assert_close(got, mean, rtol=0, atol=1e-12)


def test_an_estimate_of_two_sequences_is_compared_as_one_of_one(three_tokens):
    plain = Correction("target", Reinforce())
    one, two = (evaluate(plain, World.of("stale"), batch=n) for n in (1, 2))
    assert two.variance == pytest.approx(one.variance, rel=1e-12) and two.bias == pytest.approx(one.bias)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["token_ti"], "did you mean 'token_tis'?"),
        (["--results", "token_tis"], "--results: expected no preset and no --config beside it, got some"),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
    ],
    ids=str,
)
def test_a_mistake_is_one_line(words, said, capsys):
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == "" and said in err and err.count("\n") == 1


def test_a_correction_that_reads_ages_is_refused(capsys, tmp_path):
    file = tmp_path / "aged.yaml"
    file.write_text("slime_ext: {steps: [{reject: {max_staleness: 3}}]}")
    assert main(["--config", str(file)]) == 2
    assert "expected no max_staleness, got one" in capsys.readouterr().err.splitlines()[-1]


def test_a_row_is_printed_for_each_preset(capsys):
    assert main(["token_tis", "seq_is"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("token_tis", "seq_is", *exact.MISMATCHES))
