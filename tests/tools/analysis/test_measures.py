"""Numbers and curves against plain Python; sums that do not care how a run is cut."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace

import pytest
import torch

from slime_ext.errors import DataError
from slime_ext.tools.analysis.findings import examine, measures
from slime_ext.tools.analysis.measures.curves import OUTCOMES, Curves, midway
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.sums import Sums
from slime_ext.tools.analysis.measures.worst_samples import KEPT, decoder
from tests.tools.analysis.rollouts import rollout
from tests.tools.analysis.synthetic import World, run

INF = math.inf


def ragged(seed=0, **changes):
    """A rollout with NaN at some tokens, of the trainer's too."""
    found = rollout(seed, samples=20)
    behavior, proximal = found.behavior.clone(), found.proximal.clone()
    behavior[3], proximal[5], behavior[7] = torch.nan, torch.nan, -INF
    rewards = torch.randint(0, 2, (found.count,), generator=torch.Generator().manual_seed(seed)).double()
    return replace(found, behavior=behavior, proximal=proximal, rewards=rewards, **changes)


def counts_of(sums):
    """The sums that are numbers, by their field."""
    return {name: value for name, value in vars(sums).items() if isinstance(value, int | float)}


def ratios_of(sums):
    return sums.sequence_ratios, sums.geometric_ratios


def plain(found):
    """Samples as lists of (log-ratio, behavior, proximal) of the tokens that count."""
    out, at = [], 0
    for length in found.lengths:
        rows = []
        for t in range(at, at + length):
            q, p = float(found.behavior[t]), float(found.proximal[t])
            if found.mask[t] and math.isfinite(q) and math.isfinite(p):
                rows.append((p - q, q, p))
        out.append(rows)
        at += length
    return out


def ess(xs):
    return sum(xs) ** 2 / (len(xs) * sum(x * x for x in xs))


def test_numbers_are_the_formulas():
    for seed in range(20):
        found = ragged(seed)
        sums = Sums()
        sums.add(found)
        numbers, samples = sums.numbers(), plain(found)
        ratios = [x for sample in samples for x, *_ in sample]
        totals = [sum(x for x, *_ in s) for s in samples if s]
        means = [total / len(s) for total, s in zip(totals, [s for s in samples if s], strict=True)]
        n = len(ratios)
        expected = {
            "tokens": int(found.mask.sum()),
            "nonfinite": int(found.mask.sum()) - n,
            "mean": sum(ratios) / n,
            "absolute": sum(map(abs, ratios)) / n,
            "k3": sum(math.exp(x) - 1 - x for x in ratios) / n,
            "chi2_token": sum(math.exp(2 * x) for x in ratios) / n - 1,
            "chi2_sequence": sum(math.exp(2 * x) for x in totals) / len(totals) - 1,
            "ess_token": ess([math.exp(x) for x in ratios]),
            "ess_sequence": ess([math.exp(x) for x in totals]),
            "ess_geometric": ess([math.exp(x) for x in means]),
            "perplexity_behavior": math.exp(-sum(q for s in samples for _, q, _ in s) / n),
            "perplexity_proximal": math.exp(-sum(p for s in samples for *_, p in s) / n),
        }
        assert {k: getattr(numbers, k) for k in expected} == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_quantiles_are_right_to_a_bucket():
    for noise in [1e-5, 0.7, 4.0]:
        found = rollout(samples=400, noise=noise)
        sums = Sums()
        sums.add(found)
        exact = sorted(found.log_ratio[found.finite].double().tolist())
        for q in (0.01, 0.25, 0.5, 0.9, 0.99):
            at_rank = exact[math.ceil(q * len(exact)) - 1]
            assert sums.histogram.quantiles(q)[0] == pytest.approx(at_rank, rel=0.004)
        assert (sums.histogram.smallest, sums.histogram.largest) == (exact[0], exact[-1])


def test_the_bars_of_the_distribution_hold_every_token_once():
    found = rollout(samples=400, noise=0.7)
    found.proximal[:2] = found.behavior[:2] + torch.tensor([300.0, -300.0])
    sums = Sums()
    sums.add(found)
    values, bars = found.log_ratio[found.finite].double(), sums.distribution()
    assert sum(bar.count for bar in bars) == values.numel() and len(bars) == 2 * 8 * 27 + 3
    for bar in bars[1:-1]:
        assert bar.count == int(((values >= bar.low) & (values < bar.high)).sum())


def test_a_sequence_whose_ratio_overflows_has_an_ess():
    found = rollout(samples=4)
    far = replace(found, proximal=found.behavior + 300.0)
    sums = Sums()
    sums.add(far)
    assert 0 < sums.numbers().ess_sequence <= 1 and sums.numbers().chi2_sequence == INF


def test_ratios_whose_square_overflows_have_an_ess():
    at = torch.zeros(2)
    sums = Sums()
    sums.add(rollout(samples=1, lengths=(2,), behavior=at, proximal=at + 354.2, mask=at == 0, advantages=at))
    assert sums.numbers().ess_token == pytest.approx(1)


def test_nothing_to_count_is_no_number():
    nothing = replace(rollout(), behavior=torch.full((rollout().size,), torch.nan))
    diagnosis = Diagnosis(measures=measures(None))
    diagnosis.add(nothing)
    found, counted = diagnosis.numbers(), rollout()
    assert found.k3 is None and found.nonfinite == found.tokens == int(counted.mask.sum())
    assert found.sequences == sum(bool(m.any()) for m in counted.mask.split(counted.lengths))
    assert diagnosis.sums.distribution() == () and diagnosis.rollouts == []


def test_parts_add_up_to_the_rollout():
    for limit in [1, 7, 40, 10**6]:
        found = ragged(rollout_id=3)
        whole, cut = (Sums(), Curves()), (Sums(), Curves())
        for sums, curves, parts in ((*whole, [found]), (*cut, found.parts(limit))):
            for part in parts:
                sums.add(part)
                curves.add(part)
        assert counts_of(whole[0]) == pytest.approx(counts_of(cut[0]))
        for one, other in zip(ratios_of(whole[0]), ratios_of(cut[0]), strict=True):
            assert torch.allclose(one.logs, other.logs)
        assert torch.equal(whole[0].histogram.counts, cut[0].histogram.counts)
        for one, other in zip(vars(whole[1]).values(), vars(cut[1]).values(), strict=True):
            assert torch.allclose(one.table, other.table)


def test_merged_diagnoses_are_one_diagnosis():
    rollouts = run(World(rollouts=4, samples=12, length=20, switch=True, learning=0.05))
    together, first, second = (Diagnosis(measures=measures(None)) for _ in range(3))
    for i, r in enumerate(rollouts):
        together.add(r)
        (first if i % 2 else second).add(r)
    first.merge(second)
    assert first.timeline == together.timeline and examine(first) == examine(together)
    assert sorted(first.versions) == sorted(together.versions)
    assert torch.allclose(first.means.sums, together.means.sums)
    for one, other in zip(vars(first.curves).values(), vars(together.curves).values(), strict=True):
        assert torch.allclose(one.table, other.table)
    for name, measure in together.measures.items():
        for one, two in zip(vars(first.measures[name]).values(), vars(measure).values(), strict=True):
            if isinstance(two, torch.Tensor):
                assert torch.allclose(one, two)
            elif not isinstance(two, list):
                assert one == pytest.approx(two) if isinstance(two, float) else one == two
    assert {w.log_ratio for w in first.worsts.largest_first()} == {
        w.log_ratio for w in together.worsts.largest_first()
    }


def test_curves_are_means_at_each_place():
    found = ragged()
    curves = Curves()
    curves.add(found)
    samples, at = [], 0
    for length in found.lengths:
        samples.append([(t - at, t) for t in range(at, at + length) if found.finite[t]])
        at += length
    points = {p.x: p for p in curves.position.points()}
    for position in range(4):
        values = [float(found.log_ratio[t]) for s in samples for p, t in s if p == position]
        assert points[position].count == len(values)
        assert points[position].mean == pytest.approx(sum(values) / len(values), abs=1e-6)
    outcome = {p.label: p.count for p in curves.outcome.points(OUTCOMES)}
    right = sum(len(s) for s, reward in zip(samples, found.rewards.tolist(), strict=True) if reward > 0)
    assert outcome == {"correct": right, "incorrect": sum(map(len, samples)) - right}


def test_turns_are_counted_within_their_sample():
    mask = torch.tensor([1, 1, 0, 1, 0, 1, 0, 1, 1], dtype=torch.bool)
    values = torch.zeros(9)
    base = rollout()
    found = replace(
        base,
        lengths=(6, 3),
        prompt_lengths=(1, 1),
        positions=(0, 1),
        behavior=values,
        proximal=values,
        mask=mask,
        advantages=None,
    )
    curves = Curves()
    curves.add(found)
    assert [(p.x, p.count) for p in curves.turn.points()] == [(0, 4), (1, 1), (2, 1)]


def test_correct_is_above_the_middle():
    base = rollout()
    rewards = torch.tensor([0.2, 0.8, math.nan] + [0.2] * (base.count - 3), dtype=torch.float64)
    assert midway(replace(base, rewards=rewards)) == pytest.approx(0.5)
    assert midway(replace(base, rewards=rewards[:1].expand(base.count))) == 0.0


def test_the_worst_tokens_are_the_furthest_off():
    found = run(World(rollouts=1, samples=30, length=40))[0]
    diagnosis = Diagnosis(measures=measures(None))
    diagnosis.add(found)
    worst = diagnosis.worsts.largest_first()
    tokens = [w for w in worst if w.kind == "token"]
    furthest = found.log_ratio.abs().topk(KEPT).values.tolist()
    assert [abs(w.log_ratio) for w in tokens] == pytest.approx(furthest)
    totals = found.segments.sum(found.log_ratio).abs().topk(KEPT).values.tolist()
    assert [abs(w.log_ratio) for w in worst if w.kind == "sequence"] == pytest.approx(totals)


def test_a_worst_token_stands_among_its_neighbours():
    found = run(World(rollouts=1, samples=3, length=40))[0]
    diagnosis = Diagnosis(measures=measures(None))
    diagnosis.add(found)
    worst = next(w for w in diagnosis.worsts.largest_first() if w.kind == "token")
    begin = sum(found.lengths[: worst.position])
    ids = found.tokens[begin : begin + found.lengths[worst.position]]
    assert f" {int(ids[worst.token])}" in [span.text for span in worst.spans]
    assert worst.log_ratio in [span.log_ratio for span in worst.spans]


@pytest.mark.slow
def test_a_tokenizer_gives_text(tmp_path):
    assert "".join(decoder("configs/tiny/model")([5, 6])) != ""
    with pytest.raises(DataError, match="--tokenizer: expected a folder with a tokenizer"):
        decoder(str(tmp_path))


@pytest.mark.slow
def test_ids_that_no_tokenizer_knows_are_numbers():
    decode = decoder("configs/tiny/model")
    known = decode([5])
    assert decode([-1, -100, 16, 1 << 40, 5]) == [" -1", " -100", " 16", f" {1 << 40}", *known]
    assert known != [" 5"]


@pytest.mark.slow
def test_a_tokenizer_of_a_newer_version_says_what_to_type(tmp_path):
    shutil.copytree("configs/tiny/model", tmp_path, dirs_exist_ok=True)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model": {"type": "New", "vocab": {}}}))
    with pytest.raises(DataError, match=r"with a tokenizer, got .*: pip install -U transformers tokenizers$"):
        decoder(str(tmp_path))
