"""The benchmark of faults: its model is Qwen3, and what it plants is named."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks.faults import judge
from benchmarks.faults.__main__ import analysed
from benchmarks.faults.cases import ALSO, FAULTS, SMALL, healthy
from benchmarks.faults.explains import Noisy
from benchmarks.faults.mechanisms import CASES, Runs
from benchmarks.faults.model import Cache, Model, Shape, fused, random
from benchmarks.faults.world import write
from slime_ext.tools.analysis.detectors.shared.explained import whole_run
from slime_ext.tools.analysis.findings import DETECTORS, measures
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.records import join
from tests.tools.analysis import test_findings
from tests.tools.analysis.detectors import toys


def in_steps(model, weights, tokens):
    """Logits of a prompt of seven tokens and of each token after it."""
    cache = Cache()
    steps = [tokens[:, :7], *tokens[:, 7:].split(1, 1)]
    return torch.cat([model(weights, step, cache).logits for step in steps], 1)


@pytest.mark.parametrize("shape", [Shape(), Shape(experts=8)], ids=["dense", "mixture"])
def test_the_model_is_that_of_transformers(shape):
    import transformers

    generator = torch.Generator().manual_seed(0)
    weights = random(shape, generator)
    given = {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.width,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.shared,
        "head_dim": shape.head,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.theta},
        "attn_implementation": "eager",
    }
    if shape.experts:
        given |= {"moe_intermediate_size": shape.inner, "num_experts": shape.experts, "norm_topk_prob": True}
        config = transformers.Qwen3MoeConfig(**given, num_experts_per_tok=shape.active)
        theirs = transformers.Qwen3MoeForCausalLM(config)
    else:
        theirs = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**given))
    theirs.load_state_dict(weights)
    tokens = torch.randint(shape.vocabulary, (3, 20), generator=generator)
    model = Model(shape)
    with torch.no_grad():
        wanted = theirs.eval()(tokens).logits
        decoded, with_fused = (in_steps(model, held, tokens) for held in (weights, fused(weights, shape)))
        assert torch.equal(with_fused, decoded)
        # float32 over sums of 96 products of size 1
        assert torch.allclose(model(weights, tokens).logits, wanted, atol=1e-4)
        assert torch.allclose(decoded, wanted, atol=1e-4)


# What a dump of a fault is called: a symptom where nothing tells the experts, what the penalty itself is, and
# a shift that only long responses show.
AS = {"routing_flips": "sparse", "position_drift": "penalties", "unexplained": "permuted_log_probs"}


def test_every_planted_fault_has_a_detector():
    assert set(FAULTS) <= set(DETECTORS)


# Enough rollouts, samples and tokens of it to be named, on seeds 101 and 102, too.
FEWER = {
    "retokenised": {"rollouts": 2},
    "prefix_mismatch": {"rollouts": 2},
    "kept_mass": {"rollouts": 2, "length": 40},
    "frozen_sampler": {"rollouts": 6, "samples": 12, "length": 32},
    "partial_push": {"rollouts": 6, "samples": 12, "length": 32},
    "growing_mismatch": {"samples": 8, "length": 32},
    "stale_prefix": {"rollouts": 5, "samples": 16, "length": 32},
    "batch_shape": {"rollouts": 2},
    "layer": {"rollouts": 1, "length": 32},
    "kv_precision": {"rollouts": 2, "samples": 12, "length": 140},
    "position_drift": {"samples": 16},
    "expert_routing": {"samples": 24, "length": 40},
    "routing_flips": {"rollouts": 3, "samples": 24, "length": 40},
    "unexplained": {"rollouts": 2, "length": 40},
    "selection_bias": {"rollouts": 3, "samples": 24},
    "reward_collapse": {"samples": 32, "length": 24},
}
# What the smaller model of test_findings plants, too, is looked for there.
PLANTED = set().union(*(names for _, _, names in test_findings.FAULTS.values()))


@pytest.fixture(scope="module")
def unharmed():
    """The healthy run whose files several faults harm: made once."""
    return Runs(100, most_rollouts=4, base=lambda seed, family: replace(SMALL, seed=seed))


@pytest.mark.parametrize("name", [name for name in FAULTS if name not in PLANTED])
def test_a_fault_is_named_and_nothing_else(name, unharmed, tmp_path):
    world = replace(FAULTS[name], seed=100, **FEWER.get(name, {}))
    rest = replace(world, rollouts=SMALL.rollouts, harm=SMALL.harm)
    if rest == replace(SMALL, seed=100) and world.rollouts <= unharmed.most_rollouts:
        unharmed.plant(world, "dense", tmp_path)
    else:
        write(world, tmp_path)
    findings = {finding.name: finding for finding in judge.analysed(tmp_path).findings}
    right = findings.get(name) or findings[AS[name]]
    assert {right.name} <= findings.keys() <= {right.name, *ALSO.get(name, ())}
    assert right.threshold and right.ruled_out and right.evidence


def test_nothing_is_found_in_a_healthy_run():
    assert analysed(replace(healthy(7), rollouts=2)).findings == ()


@pytest.mark.slow
def test_nothing_is_found_in_healthy_runs_of_other_seeds(tmp_path):
    for number in range(100, 104):
        findings = judge.analysed(write(healthy(number), tmp_path / str(number))).findings
        assert [finding.name for finding in findings if finding.severity != "note"] == [], number


def test_every_mechanism_says_what_it_is():
    assert len(CASES) >= 45
    assert sum("#" in case.source for case in CASES.values()) >= 15
    for name, case in CASES.items():
        assert case.mechanism.endswith("."), name
        assert 1 <= len(case.right) <= 3, name


def of_dump(folder, kind, rollout=0):
    return torch.load(folder / kind / f"{rollout}.pt", weights_only=True)["samples"]


@pytest.fixture(scope="module")
def runs():
    """Small runs of one seed, so that a test takes a second."""
    return Runs(0, most_rollouts=2)


def test_a_dump_holds_what_slime_writes(runs, tmp_path):
    folder = runs.write("end_zero", tmp_path)
    (sampled, *_), (trained, *_) = of_dump(folder, "rollout_data"), of_dump(folder, "train_data")
    real = {
        "group_index",
        "index",
        "rollout_id",
        "weight_versions",
        "status",
        "metadata",
        "prefix_cache_info",
    }
    assert real <= sampled.keys()
    assert {"data_parallel_rank", "truncated", "rewards", "local_raw_reward", "returns"} <= trained.keys()
    assert {row["data_parallel_rank"] for row in of_dump(folder, "train_data")} == {0, 1, 2, 3}
    ended = [row["tokens"][-1] == 0 for row in of_dump(folder, "rollout_data")]
    assert ended == [row["status"] == "completed" for row in of_dump(folder, "rollout_data")]
    assert any(ended) and not all(ended)


def test_advantages_follow_from_rewards_by_group_unless_that_is_the_fault(runs, tmp_path):
    for name, sign in (("end_zero", 1), ("flipped_sign", -1)):
        rows = of_dump(runs.write(name, tmp_path / name), "train_data")
        for begin in range(0, len(rows), 4):
            rewards = [row["local_raw_reward"] for row in rows[begin : begin + 4]]
            mean = sum(rewards) / 4
            deviation = (sum((r - mean) ** 2 for r in rewards) / 3) ** 0.5 + 1e-6
            for row, reward in zip(rows[begin : begin + 4], rewards, strict=True):
                assert row["advantages"][0].item() == pytest.approx(sign * (reward - mean) / deviation)


def test_a_run_says_the_same_whatever_was_written_before(tmp_path):
    one, other = Runs(1, most_rollouts=2), Runs(1, most_rollouts=2)
    other.write("presence_penalty", tmp_path / "before")
    for name in ("swapped", "retried"):
        mine, theirs = one.write(name, tmp_path / "one" / name), other.write(name, tmp_path / "other" / name)
        for a, b in zip(of_dump(mine, "train_data"), of_dump(theirs, "train_data"), strict=True):
            assert torch.equal(a["rollout_log_probs"], b["rollout_log_probs"])


def finding(name, *others, severity="error"):
    return SimpleNamespace(name=name, or_else=others, is_fault=severity != "note")


@pytest.mark.parametrize(
    ("findings", "k3", "wanted"),
    [
        ((), 1e-4, "silent"),
        ((), 0.1, "silent beside k3"),
        ((finding("unexplained"),), 0.1, "cause open"),
        ((finding("penalties"),), 0.1, "named"),
        ((finding("quantised"),), 0.1, "misnamed"),
        ((finding("quantised", "penalties"),), 0.1, "one of three"),
        ((finding("quantised", "penalties", "layer", "temperature"),), 0.1, "misnamed"),
        ((finding("penalties"), finding("quantised")), 0.1, "another beside it"),
        ((finding("penalties"), finding("quantised", "layer")), 0.1, "named"),
        ((finding("penalties", severity="note"),), 0.1, "silent beside k3"),
    ],
)
def test_a_verdict(findings, k3, wanted):
    said = SimpleNamespace(findings=findings, total=SimpleNamespace(k3=k3))
    assert judge.verdict(CASES["presence_penalty"], said) == wanted


def row(name, seed, verdict="named", said="quantised"):
    return judge.Row(name, seed, verdict, said, 0.1)


def test_rows_that_a_file_has_are_not_made_again(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(
        judge, "ProcessPoolExecutor", lambda jobs, **kwargs: nullcontext(SimpleNamespace(map=map))
    )
    monkeypatch.setattr(
        judge.Asked, "rows", lambda own: map(row, made.append(own) or own.names, [own.seed] * 9)
    )
    path = tmp_path / "deep" / "rows.jsonl"
    first = judge.judged([judge.Asked(0, ("int4",), ())], 1, path)
    assert first == [row("int4", 0)]
    assert judge.judged([judge.Asked(0, ("int4", "int3"), ())], 1, path) == [row("int4", 0), row("int3", 0)]
    assert [own.names for own in made] == [("int4",), ("int3",)]


def test_every_healthy_run_is_judged_beside_one_seed():
    shares = [judge.healthy_of(seed) for seed in (*judge.SEEN, *judge.UNSEEN)]
    assert sorted(sum(shares, ())) == list(range(judge.SOUND))
    unseen = sum((judge.healthy_of(seed) for seed in judge.UNSEEN), ())
    assert sorted(unseen) == list(range(judge.FRESH, judge.SOUND))


def test_dumps_that_a_folder_has_are_read_and_others_are_made(tmp_path, monkeypatch):
    (tmp_path / "int4_14").mkdir()
    made, read = [], []
    monkeypatch.setattr(judge, "make", lambda name, number, runs, folder: made.append((name, number)))
    monkeypatch.setattr(
        judge, "analysed", lambda at: read.append(at) or SimpleNamespace(findings=(), total=row("", 0))
    )
    assert len(list(judge.Asked(14, ("int4", "int3"), (116,), tmp_path).rows())) == 3
    assert made == [("int3", 14), ("healthy", 116)] and read[0] == tmp_path / "int4_14"


def test_the_table_counts_seen_and_unseen_runs_apart(tmp_path, monkeypatch):
    rows = [
        row("int4", 0),
        row("int4", 14, "misnamed", "dropout|layer"),
        row("healthy", 0, "clean"),
        row("healthy", 117, "warning"),
    ]
    monkeypatch.setattr(judge, "judged", lambda *given: rows)
    page = tmp_path / "page.md"
    page.write_text(f"before\n{judge.MARK}\nstale\n{judge.END_MARK}\nafter\n")
    found = judge.judge(None, None, 1, None, page)
    assert page.read_text() == f"before\n{judge.MARK}\n\n{found}\n\n{judge.END_MARK}\nafter\n"
    assert "| seen | 1 | 0 | 0 | 0 | 0 | 0 | 0 | 1 |" in found
    assert "| unseen | 0 | 0 | 0 | 0 | 1 | 0 | 0 | 1 |" in found
    assert "| int4 | quantised | quantised | *misnamed*: dropout or layer, k3 0.1 |" in found
    assert found.endswith("- healthy run 117: *warning*: quantised, k3 0.1")


def test_noise_reaches_every_measure_of_rollouts_that_are_joined():
    """Analyze joins small rollouts. What is planted beside a fault is then in each of them."""
    size, rollouts = 0.3, toys.run(3)
    joined, alone = (Noisy(Diagnosis(measures=measures(None)), size) for _ in range(2))
    joined.add(join(rollouts))
    for rollout in rollouts:
        alone.add(rollout)
    k3 = [sum(s.k3 * s.tokens for s in noisy.diagnosis.rollouts) for noisy in (joined, alone)]
    assert k3[0] == pytest.approx(k3[1]) and k3[0] > 0.02 * joined.diagnosis.sums.finite
    assert whole_run(joined.diagnosis)[1] == pytest.approx(k3[0])
