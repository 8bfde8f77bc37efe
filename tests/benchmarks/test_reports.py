"""The mechanisms of public reports are planted as their reports say, and judged apart from healthy runs."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks.faults import (
    fourth_reports,
    honest,
    judge,
    kinds,
    later_reports,
    outside,
    reports,
    third_reports,
)
from benchmarks.faults.dump import Turn
from benchmarks.faults.fourth_reports import FOURTH_REPORTS
from benchmarks.faults.later_reports import LATER_REPORTS
from benchmarks.faults.mechanisms import CASES, Runs, start
from benchmarks.faults.model import (
    BF16,
    Cache,
    How,
    Model,
    Shape,
    attend,
    image_positions,
    in_blocks,
    local_positions,
    log_softmax,
    overwritten,
    random,
    rotated_neighbours,
)
from benchmarks.faults.reports import REPORTS, base
from benchmarks.faults.third_reports import THIRD_REPORTS
from benchmarks.faults.world import write
from slime_ext.tools.analysis.document import FINDINGS


def test_every_report_says_what_it_is():
    assert len(outside.ALL_REPORTS) == sum(map(len, outside.SETS.values()))
    for name, report in outside.ALL_REPORTS.items():
        assert report.mechanism.endswith("."), name
        assert re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", report.source), name
        assert 1 <= len(report.right) <= 3 and set(report.right) & set(FINDINGS), name


@pytest.mark.parametrize(
    ("added", "known"),
    [
        (THIRD_REPORTS, (REPORTS, LATER_REPORTS, CASES)),
        (FOURTH_REPORTS, (REPORTS, LATER_REPORTS, CASES, THIRD_REPORTS)),
    ],
)
def test_threads_of_a_later_set_are_others(added, known):
    before = {one.source for group in known for one in group.values()}
    sources = [report.source for report in added.values()]
    assert len(set(sources)) == len(sources) and not set(sources) & before


def test_seeds_differ_and_unseen_ones_are_others():
    assert not set(reports.SEEN) & set(reports.UNSEEN)
    worlds = [repr(base(seed).shape) + str(base(seed).rollouts) for seed in reports.SEEN + reports.UNSEEN]
    assert len(set(worlds)) > 3


def test_positions_of_a_rank_count_over_its_two_chunks():
    assert local_positions(8, 2).tolist() == [0, 1, 0, 1, 2, 3, 2, 3]
    assert local_positions(6, 1).tolist() == list(range(6))


def test_a_sink_is_one_more_key_without_a_value():
    q, k, v = (torch.randn(1, 5, 2, 4, generator=torch.Generator().manual_seed(i)) for i in range(3))
    zeros = torch.zeros(1, 1, 2, 4)
    with_key = attend(q, torch.cat([zeros, k], 1), torch.cat([zeros, v], 1), 1)  # its score is 0
    torch.testing.assert_close(attend(q, k, v, 0, sink=0.0), with_key)


def test_coarse_logits_are_those_of_bfloat16():
    logits = 20 * torch.randn(50, 30, generator=torch.Generator().manual_seed(0))
    coarse = log_softmax(logits, How(logits=BF16))
    assert torch.equal(coarse, coarse.to(BF16).float()) and (coarse == 0).float().mean() > 0.01
    torch.testing.assert_close(coarse, logits.log_softmax(-1), atol=0.5, rtol=0.02)


def turns_of(*sizes):
    return [
        Turn(
            prompt=torch.arange(4),
            tokens=torch.arange(size),
            behavior=-torch.arange(1.0, size + 1),
            mask=torch.ones(size, dtype=torch.bool),
            kept=torch.ones(size, 3, dtype=torch.bool),
            versions=torch.ones(size, dtype=torch.int64),
            proximal=100.0 * (i + 1) + torch.arange(size),
            advantage=float(i),
        )
        for i, size in enumerate(sizes)
    ]


def a_run(**more):
    world = replace(base(100), **more)
    return SimpleNamespace(world=world, draws=torch.Generator().manual_seed(1), number=3)


def test_log_probs_from_the_end_of_padded_rows_are_shifted_by_the_padding():
    turns = turns_of(5, 8, 6, 8)
    reports.from_the_end(turns, a_run())
    assert [turn.proximal[0] for turn in turns] == [103, 200, 302, 400]
    assert [len(turn.proximal) for turn in turns] == [5, 8, 6, 8]
    assert (turns[0].proximal[2:] < 0).all()


def test_outputs_in_packed_order_are_those_of_the_next_longer_sample():
    turns = turns_of(5, 3, 4)
    reports.in_packed_order(turns, a_run())
    assert [turn.proximal[0] for turn in turns] == [200, 300, 100]
    assert turns[0].proximal.tolist() == [200, 201, 202, 0, 0]


def test_rows_of_q_k_and_v_are_read_in_another_order_and_none_is_lost():
    world = base(100)
    generator = torch.Generator().manual_seed(0)
    weights = reports.runs_of(100) and {
        f"model.layers.{i}.self_attn.{one}_proj.weight": torch.randn(rows, 4, generator=generator)
        for i in range(world.shape.layers)
        for one, rows in (("q", 64), ("k", 32), ("v", 32))
    }
    held = reports.fused_by_group(SimpleNamespace(engine=weights, world=world))
    for name, w in weights.items():
        assert held[name].shape == w.shape
    assert not torch.equal(torch.cat(list(held.values())), torch.cat(list(weights.values())))
    rows = (sorted(map(tuple, torch.cat(list(one.values())).tolist())) for one in (held, weights))
    assert next(rows) == next(rows)
    q = held["model.layers.0.self_attn.q_proj.weight"]
    assert torch.equal(q[32:48], weights["model.layers.0.self_attn.k_proj.weight"][:16])


def test_each_rank_whitens_its_own_tokens():
    turns = turns_of(8, 16, 12)
    reports.whitened_by_rank(turns, a_run())
    outer = torch.cat(
        [
            torch.cat([t.advantages[: len(t.tokens) // 4], t.advantages[-(len(t.tokens) // 4) :]])
            for t in turns
        ]
    )
    assert abs(float(outer.mean())) < 1e-6 and abs(float(outer.std()) - 1) < 1e-6


def test_a_share_of_every_kind_is_healthy_and_its_tokens_are_the_engine_s(tmp_path, monkeypatch):
    monkeypatch.setattr(kinds, "base", lambda *of: replace(base(*of), samples=4, rollouts=5, length=20))
    folder = kinds.write_kind("mixed_ages", 200, tmp_path)
    rows = torch.load(folder / "rollout_data/4.pt", weights_only=True)["samples"]
    assert {tuple(row["weight_versions"]) for row in rows[:4]} == {("5",), ("4",), ("3",), ("2",)}
    assert all(row["metadata"] == {} for row in rows)


def test_verdicts_of_windows_and_the_table():
    row = outside.Row("min_p", 100, "named", "truncated_sampling (error)", 0.1, 0.9, {"min_p": (0.8, 0.1)})
    other = outside.Row(outside.WINDOW, 30000, outside.WRONG_WINDOW, "dropout (error)", 0.1)
    third = outside.Row("groups_of_one", reports.UNSEEN[0], "misnamed", "dropout (error)", 0.1)
    page = outside.table({"now": [row, other, third]})
    assert "| seen, now | 1 | 0 | 0 | 0 | 0 | 0 | 0 | 1 | 100% | 0% |" in page
    assert "| unseen, third, now | 0 | 0 | 0 | 0 | 1 | 0 | 0 | 1 | 0% | 100% |" in page
    assert "of 1 windows 1 have an error of another cause" in page
    assert "0.100 from the planted share (median; at most 0.10), 1 within two of their errors" in page


def test_each_part_of_a_healthy_run_has_its_distance(tmp_path):
    world = replace(honest.world(1), rollouts=3)
    means = list(honest.distances(honest.diagnosis_of(write(world, tmp_path, [start(world)]))))
    parts = [part for part, _ in means]
    assert parts.count(honest.RUN) == 1 and parts.count(honest.ROLLOUT) == 3
    assert 2 <= parts.count(honest.PLACE) <= 6
    assert all(abs(z) < 5 for _, z in means)


def test_a_place_that_all_far_tokens_share_is_named_alone(tmp_path):
    """In run 112, chunks begin in the prompt of 36 samples, which therefore agree: two kinds of samples."""
    report = REPORTS["rolled_in_shard"]
    document = judge.analysed(outside.write_report(report, reports.runs_of(112), tmp_path))
    assert [finding.name for finding in document.findings if finding.is_fault] == ["shared_place"]


def heads(*size):
    return [torch.randn(*size, generator=torch.Generator().manual_seed(i)) for i in range(3)]


def test_neighbouring_pairs_turn_like_complex_numbers():
    x, angle = heads(1, 5, 2, 8)[0], torch.tensor(0.7)
    turned = rotated_neighbours(x, (angle.cos(), angle.sin()))
    pairs = torch.view_as_complex(x.view(1, 5, 2, 4, 2)) * torch.polar(torch.tensor(1.0), angle)
    torch.testing.assert_close(turned, torch.view_as_real(pairs).flatten(-2))


def test_projections_are_read_in_alternating_blocks():
    gate, up = in_blocks(torch.arange(4)[:, None], torch.arange(4, 8)[:, None], 2)
    assert gate.flatten().tolist() == [0, 1, 4, 5] and up.flatten().tolist() == [2, 3, 6, 7]


def test_lost_scores_are_those_of_keys_of_zero():
    q = heads(1, 1, 2, 4)[0]
    _, k, v = heads(1, 6, 2, 4)
    zeros = torch.cat([k[:, :4], torch.zeros(1, 2, 2, 4)], 1)
    torch.testing.assert_close(attend(q, k, v, 5, lost=4), attend(q, zeros, v, 5))


def test_the_first_chunk_sees_unwritten_slots_and_the_second_does_not():
    q, k, v = heads(1, 6, 2, 4)
    slots = torch.zeros(1, 3, 2, 4)
    diluted = Model(Shape(), How(unwritten=True))._attend(q, k, v, 0)
    assert torch.equal(diluted[:, 3:], attend(q, k, v, 0)[:, 3:])
    for at in range(3):
        seen = (torch.cat([x[:, : at + 1], slots], 1) for x in (k, v))
        torch.testing.assert_close(diluted[:, at], attend(q[:, at : at + 1], *seen, at + 3)[:, 0])


def test_a_repeated_bigram_is_banned():
    rows = SimpleNamespace(tokens=[torch.tensor([[token], [7]]) for token in (5, 6, 8, 5)])
    kept = later_reports.no_repeated_ngram(replace(base(100), seed=100))(torch.zeros(2, 10), rows)
    assert (kept == -torch.inf).nonzero().tolist() == [[0, 6], [1, 7]]


def test_a_draft_of_all_tokens_leaves_the_distribution_as_it_is():
    emits, rows = later_reports.draft_of_few(base(100)), SimpleNamespace(tokens=[])
    log_probs = heads(3, 4)[0].log_softmax(-1)
    torch.testing.assert_close(emits(log_probs, rows), log_probs.exp())
    torch.testing.assert_close(emits(heads(3, 20)[0].log_softmax(-1), rows).sum(-1), torch.ones(3))


def test_advantages_by_others_and_by_stride():
    turns = turns_of(*[2] * 8)
    for turn, reward in zip(turns, (1, 0, 0, 0, 1, 1, 0, 0), strict=True):
        turn.reward = float(reward)
    later_reports.by_others(turns, a_run())
    assert turns[0].advantage == pytest.approx(1e6) and abs(turns[1].advantage) < 1
    later_reports.by_stride(turns, a_run())
    survivors = [turn for turn in turns if not turn.dropped]
    assert 4 < len(survivors) < 8
    assert [turn.advantage for turn in survivors[4:]] == [turn.reward for turn in survivors[4:]]


def turned_by(how, count=9):
    """Angles of the slowest pair over a prompt of three tokens and single tokens after it, over its rate."""
    model = Model(Shape(), how)
    passes = [model._rotary(0, 3), *(model._rotary(at, 1) for at in range(3, count))]
    rate = model.shape.theta ** (-7 / 8)
    return torch.cat([sine[:, 0, -1] for _, sine in passes]).asin() / rate


def test_positions_after_a_cache_jump_or_stay():
    jumped = [0.0, 1.0, 2.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0]
    torch.testing.assert_close(turned_by(How(jump=5)), torch.tensor(jumped), atol=1e-3, rtol=0)
    stays = [0.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, 6.0, 8.0]
    torch.testing.assert_close(turned_by(How(verified=2)), torch.tensor(stays), atol=1e-3, rtol=0)


def test_a_block_of_every_third_row_is_that_of_the_row_before():
    keys = heads(4, 30, 2, 4)[0]
    changed = (overwritten(keys, 24) != keys).any(-1).any(-1)
    assert changed.nonzero().tolist() == [[row, at] for row in (0, 3) for at in range(8, 16)]
    assert torch.equal(overwritten(keys, 24)[3, 8:16], keys[2, 8:16])


def test_a_large_cap_leaves_scores_as_they_are():
    q, k, v = heads(1, 5, 2, 4)
    torch.testing.assert_close(attend(q, k, v, 0, cap=1e4), attend(q, k, v, 0))
    even = torch.stack([v[0, : at + 1].mean(0) for at in range(5)]).view(1, 5, 8)
    torch.testing.assert_close(attend(q, k, v, 0, cap=1e-6), even)


def test_experts_are_chosen_in_groups_with_the_largest_sums():
    shares = torch.tensor([0.30, 0.01, 0.29, 0.00, 0.16, 0.16, 0.04, 0.04])
    model = Model(Shape(experts=8), How(groups=4))
    assert model._in_groups(shares).topk(2).indices.tolist() == [0, 4]
    assert Model(Shape(experts=8))._in_groups(shares).topk(2).indices.tolist() == [0, 2]


def test_shares_of_all_experts_and_scaled_embeddings():
    shape, tokens = Shape(experts=8), torch.arange(6)[None]
    weights = random(shape, torch.Generator().manual_seed(0))
    every = replace(shape, active=8)  # whose shares add up to 1
    for one in (shape, every):
        logits = [Model(one, How(whole_shares=whole))(weights, tokens).logits for whole in (False, True)]
        assert torch.allclose(*logits, atol=1e-5) is (one is every)
    doubled = {k: 2 * w if "embed_tokens" in k else w for k, w in weights.items()}
    scaled = Model(shape, How(embedding=2.0))(weights, tokens).logits
    torch.testing.assert_close(scaled, Model(shape)(doubled, tokens).logits)


def test_tool_results_lose_their_first_tokens_and_nothing_else():
    turns = turns_of(*[20] * 30)
    for turn in turns:
        turn.mask[8:14] = False
    third_reports.cut_results(turns, a_run())
    cut = [turn for turn in turns if len(turn.tokens) < 20]
    assert 10 < len(cut) < 30
    for turn in cut:
        missing = 20 - len(turn.tokens)
        assert 2 <= missing <= 4
        assert turn.tokens.tolist() == [*range(8), *range(8 + missing, 20)]
        assert int((~turn.mask).sum()) == 6 - missing and len(turn.behavior) == len(turn.tokens)


def test_log_probs_of_a_stretch_are_those_of_the_row_before():
    turns = turns_of(*[30] * 10)
    for i, turn in enumerate(turns):
        turn.behavior = turn.behavior - 100 * i
    third_reports.of_neighbour(turns, a_run())
    moved = torch.stack([turn.behavior + 100 * i + torch.arange(1, 31) for i, turn in enumerate(turns)])
    assert set(moved.unique().tolist()) == {0, 100}
    assert not moved[:3].any() and moved[-1].bool().sum() in range(6, 16)


def test_advantages_of_groups_of_one_with_pads_and_with_nan():
    turns = turns_of(4, 8, 8, 4)
    for turn, reward in zip(turns, (1.0, 0.0, 1.0, 0.0), strict=True):
        turn.reward = reward
    third_reports.each_alone(turns, a_run())
    assert [turn.advantage for turn in turns] == [1, 0, 1, 0]
    third_reports.mean_with_pads(turns, a_run())
    low, high = turns[1].advantage, turns[0].advantage
    assert low / high == pytest.approx(-0.375 / 0.625)  # 12 of 32 places have the reward 1
    many = turns_of(*[2] * 80)
    third_reports.without_judgement(many, a_run())
    lost = torch.tensor([turn.advantage for turn in many]).isnan().view(-1, 4)
    assert 1 <= lost.any(1).sum() < 20 and torch.equal(lost.any(1), lost.all(1))


def test_rows_of_an_image_share_a_position():
    assert image_positions(torch.arange(9), 2, 4, 2).tolist() == [0, 1, 2, 2, 3, 3, 4, 5, 6]
    passes = Model(Shape(), How(image=(2, 4, 2)))
    whole, late = passes._rotary(0, 9)[0], passes._rotary(7, 2)[0]
    assert torch.equal(whole[7:], late) and torch.equal(whole[7:], Model(Shape())._rotary(5, 2)[0])


def test_rotary_frequencies_have_another_base():
    slowest = 10_000.0 ** (-7 / 8)
    smaller = turned_by(How(base=0.1))[-1] * slowest / 8
    assert smaller == pytest.approx(1000.0 ** (-7 / 8), rel=1e-3)


def test_experts_drop_the_tokens_that_come_last():
    shape, tokens = Shape(experts=8), torch.arange(30)[None] % 7
    weights = random(shape, torch.Generator().manual_seed(0))
    seen = [Model(shape, How(capacity=factor))(weights, tokens).layers[0] for factor in (0, 8, 1)]
    assert torch.equal(seen[0], seen[1])
    is_dropped = (seen[0] != seen[2]).any(-1)[0]
    assert torch.equal(seen[0][0, :7], seen[2][0, :7]) and 5 < is_dropped.sum() < 25


def test_jitter_moves_what_a_mixture_computes_alone():
    shape, tokens = Shape(experts=8), torch.arange(30)[None] % 7
    for one in (shape, Shape()):
        weights = random(one, torch.Generator().manual_seed(0))
        logits = [Model(one, How(jitter=jitter))(weights, tokens).logits for jitter in (0.0, 0.05)]
        assert torch.equal(*logits) is (one != shape)
        assert (logits[0] - logits[1]).abs().median() < 0.3


def test_a_cached_prefix_is_read_before_it_arrives():
    model, weights = Model(Shape()), random(Shape(), torch.Generator().manual_seed(0))
    prompts = torch.arange(12).repeat(4, 1)
    logits, cache = fourth_reports.read_too_early(model, weights, prompts)
    exact = Cache()
    expected = model(weights, prompts, exact).logits[:, -1]
    torch.testing.assert_close(logits[0], expected[0])
    assert ((logits - expected).abs().amax(-1) > 0.1).tolist() == [False, True, True, True]
    for (k, _), (k_exact, _) in zip(cache.layers, exact.layers, strict=True):
        torch.testing.assert_close(k[:, :, :6], k_exact[:, :, :6])
    torch.testing.assert_close(cache.layers[0][0], exact.layers[0][0])
    assert (cache.layers[1][0][1, :, 6:] - exact.layers[1][0][1, :, 6:]).abs().max() > 0.1


def test_all_prompts_get_the_first_image():
    prompts = fourth_reports.with_first_image(torch.arange(8).view(2, 4))
    assert prompts.tolist() == [[0, 1, 2, 3], [0, 1, 6, 7]]


def test_an_n_gram_draft_is_taken_unverified():
    emits, log_probs = fourth_reports.first_draft(base(100)), torch.zeros(2, 10).log_softmax(-1)
    tokens = [torch.tensor([[token], [other]]) for token, other in ((5, 1), (6, 2), (5, 3))]
    drawn = emits(log_probs, SimpleNamespace(tokens=tokens))
    assert drawn[0].nonzero().tolist() == [[6]]
    torch.testing.assert_close(drawn[1], torch.full((10,), 0.1))
    torch.testing.assert_close(emits(log_probs, SimpleNamespace(tokens=tokens[:2])), log_probs.exp())


def test_a_prefix_of_the_prompt_begins_the_response():
    (turn,) = turns_of(5)
    fourth_reports.prefix_as_response([turn], a_run())
    assert turn.prompt.tolist() == [0] and turn.tokens.tolist() == [1, 2, 3, 0, 1, 2, 3, 4]
    assert turn.behavior.tolist() == [0, 0, 0, -1, -2, -3, -4, -5] and turn.mask.all()
    assert fourth_reports.Prefixed(64, 10).prompts(2, torch.Generator())[:, -3:].tolist() == [[2, 3, 4]] * 2


def test_an_earlier_answer_comes_twice():
    (turn,) = turns_of(10)
    turn.mask[3:5] = turn.mask[7:9] = False
    fourth_reports.answers_twice([turn], a_run())
    assert turn.tokens.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 5, 6, 5, 6, 7, 8, 9]
    assert turn.mask.int().tolist() == [1, 1, 1, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 1]
    assert turn.behavior[3:6].tolist() == [0, 0, 0] and len(turn.kept) == len(turn.versions) == 15


def test_a_discount_counts_tokens_of_tools(tmp_path):
    planted = fourth_reports.through_tools(base(100))
    turns = turns_of(4)
    turns[0].reward = 2.0
    turns[0].mask[1:3] = False
    planted["credited"](turns, a_run())
    (tmp_path / "args.json").write_text("{}")
    planted["harm"](tmp_path)
    gamma = json.loads((tmp_path / "args.json").read_text())["gamma"]
    assert turns[0].advantages.tolist() == pytest.approx([2 * gamma**3, 2 * gamma**2, 2 * gamma, 2])


def small(world):
    """Fewer and shorter samples, in which a mechanism changes some number, too."""
    return replace(world, samples=12, length=30)


@pytest.fixture(scope="module")
def runs():
    """Small healthy runs of a seed: made once, for all that is planted in them."""
    return Runs(101, most_rollouts=3, base=lambda seed, family: small(base(seed, family)))


@pytest.mark.parametrize(
    "name", ["uninitialised_push", "rolled_in_shard", "thinking_budget", "prompt_routes"]
)
def test_a_planted_run_is_far_from_the_healthy_one(name, runs, tmp_path):
    report = REPORTS[name]
    for kind, world in (("healthy", base(101, report.family)), ("planted", report.world(101))):
        runs.plant(small(world), report.family, tmp_path / kind)
    healthy, planted = (judge.analysed(tmp_path / kind).total.k3 for kind in ("healthy", "planted"))
    assert planted > 5 * healthy


def planted_at(rollout, name, runs, folder):
    """The samples that the trainer gets in a rollout of a report."""
    report = outside.ALL_REPORTS[name]
    runs.plant(small(report.world(101)), report.family, folder)
    return torch.load(folder / f"train_data/{rollout}.pt", weights_only=True)["samples"]


def test_the_reference_of_a_resumed_run_is_its_checkpoint(runs, tmp_path):
    runs.plant(replace(small(THIRD_REPORTS["anchored_again"].world(101)), rollouts=3), "dense", tmp_path)
    rows = [torch.load(tmp_path / f"train_data/{r}.pt", weights_only=True)["samples"] for r in range(3)]
    equal = [all(torch.equal(row["ref_log_probs"], row["log_probs"]) for row in one) for one in rows]
    assert equal == [True, True, False]


def test_layers_replay_the_experts_of_the_layer_before(runs, tmp_path):
    rows = planted_at(1, "shifted_routes", runs, tmp_path)
    sampled = torch.load(tmp_path / "rollout_data/1.pt", weights_only=True)["samples"]
    for row, sample in zip(rows, sampled, strict=True):
        theirs = sample["rollout_routed_experts"]
        assert torch.equal(row["routed_experts"][:, 1:].int(), theirs[:, :-1])
        assert torch.equal(row["routed_experts"][:, :1].int(), theirs[:, :1])


def test_a_rank_adds_the_whole_adapter_of_v(runs, tmp_path):
    first, later = (planted_at(r, "adapter_of_each_rank", runs, tmp_path / str(r)) for r in (0, 2))
    apart = [
        torch.cat([(row["rollout_log_probs"] - row["log_probs"]).abs() for row in rows]).mean()
        for rows in (first, later)
    ]
    assert apart[1] > 3 * apart[0]


def test_an_answer_is_appended_to_the_one_before(runs, tmp_path):
    rows = planted_at(1, "chained_siblings", runs, tmp_path)
    alone = torch.load(tmp_path / "rollout_data/1.pt", weights_only=True)["samples"]
    longest = small(base(101)).length
    assert 0 < sum(row["response_lengths"] > longest for row in rows) <= len(rows) // 2
    assert all(len(one["rollout_log_probs"]) == one["response_length"] for one in alone)


@pytest.fixture(scope="module")
def healthy(runs, tmp_path_factory):
    """Returns the samples of the third rollout of a family's healthy run."""

    @functools.cache
    def samples(family):
        world = replace(small(base(101, family)), reference=True)
        folder = runs.plant(world, family, tmp_path_factory.mktemp("healthy"))
        return torch.load(folder / "train_data/2.pt", weights_only=True)["samples"]

    return samples


@pytest.mark.parametrize("name", [*LATER_REPORTS, *THIRD_REPORTS, *FOURTH_REPORTS])
def test_a_later_report_is_planted(name, runs, healthy, tmp_path):
    planted = planted_at(2, name, runs, tmp_path)
    columns = {"rollout_log_probs", "log_probs", "loss_masks", "advantages", "ref_log_probs"}
    assert any(
        one[column].shape != other[column].shape or not torch.equal(one[column], other[column])
        for one, other in zip(healthy(outside.ALL_REPORTS[name].family), planted, strict=False)
        for column in columns & other.keys()
    )
