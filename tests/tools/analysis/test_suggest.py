"""Suggested thresholds: pasted back they reject exactly what was promised."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import yaml

from slime_ext import load_config
from slime_ext.tools.analysis.measures.quantiles import BitHistogram, ExactRank
from slime_ext.tools.analysis.measures.suggest import Ranking, between
from tests.tools.analysis.in_process import suggest, whatif
from tests.tools.analysis.rollouts import rollout


def dumps(noise=0.3, **changes):
    return [rollout(seed=i, rollout_id=i, samples=40, noise=noise, **changes) for i in range(5)]


def rejected(found, suggestion):
    correction = load_config(yaml.safe_load(suggestion.config)["slime_ext"])
    effect = whatif(found, {"x": correction})[0]
    if suggestion.unit == "token":
        return effect.tokens - effect.kept_tokens, effect.tokens
    return effect.sequences - effect.kept_sequences, effect.sequences


def test_what_is_pasted_rejects_what_was_promised():
    for noise in (1e-4, 0.3, 5.0):
        found = dumps(noise)
        for rate in (0.001, 0.01, 0.1, 0.5):
            suggestions = suggest(lambda found=found: iter(found), rate)
            impossible = noise == 5.0 and rate < 0.5  # these made-up probabilities are more than 1 apart
            assert len(suggestions) == (5 if impossible else 6)
            for s in suggestions:
                gone, units = rejected(found, s)
                assert (units, gone) == (s.units, round(s.reached * s.units))
                assert gone == int(rate * units)  # no ties here: as much as the rate allows


def test_equal_values_are_rejected_together_or_not_at_all():
    base = rollout(samples=40)
    proximal = base.behavior + torch.where(torch.arange(base.size) % 5 == 0, 0.5, 0.0)
    tied = rollout(samples=40, proximal=proximal)
    token = next(s for s in suggest(lambda: [tied], 0.1) if s.name == "ratio of a token")
    assert rejected([tied], token)[0] == round(token.reached * token.units) < 0.1 * token.units


def test_what_has_no_log_prob_is_no_unit():
    base = rollout(samples=40)
    behavior = base.behavior.clone()
    behavior[base.mask.nonzero()[3, 0]] = float("nan")
    found = suggest(lambda: [rollout(samples=40, behavior=behavior)], 0.1)
    units = {s.unit: s.units for s in found}
    has = int(base.segments.any(base.mask).sum())
    assert units == {"token": int(base.mask.sum()) - 1, "sequence": has - 1}


def test_several_collectors_find_what_one_finds():
    found = dumps()
    start = Ranking(0.05)
    for _ in range(2):
        parts = [copy.deepcopy(start) for _ in range(3)]
        for i, r in enumerate(found):
            parts[i % 3].add(r)
        for part in parts:
            start.merge(part)
        start.again()
    assert start.suggestions() == suggest(lambda: found, 0.05)


def test_ranks_over_several_files_are_exact():
    for rate in [0.0005, 0.3, 0.9999]:
        parts = [torch.rand(n) ** 3 * 10 for n in (1, 700, 3000)]
        rank = ExactRank(rate)
        for part in parts:
            rank.first(part)
        rank.choose()
        for part in parts:
            rank.second(part)
        ordered = torch.cat(parts).sort().values
        allowed = int(rate * len(ordered))
        kept, after, above = rank.result()
        assert (kept, above) == (float(ordered[len(ordered) - 1 - allowed]), allowed)
        assert after == (float(ordered[len(ordered) - allowed]) if allowed else math.inf)


def test_histogram_quantiles_are_within_a_bucket():
    for q in [0.01, 0.5, 0.99, 1.0]:
        values = torch.rand(5000) * 4
        histogram = BitHistogram()
        for part in values.split(999):
            histogram.add_where(part, part >= 0, len(part))
        exact = float(values.sort().values[max(math.ceil(q * 5000), 1) - 1])
        assert exact * (1 - 2**-7) <= histogram.quantile(q) <= exact


def test_histogram_reads_round_weights_as_they_are():
    histogram = BitHistogram()
    values = torch.tensor([0.0, 0.5, 1.0, 1.0, 2.0, 5.0])
    histogram.add_where(values, values >= 0, len(values))
    assert [histogram.quantile(q) for q in (0.1, 0.3, 0.6, 0.8, 1.0)] == [0.0, 0.5, 1.0, 2.0, 5.0]


def test_a_threshold_lies_between():
    for kept, gone in [(1.0, 1.5), (0.999, 0.99), (1e-9, 2e-9), (3.0, math.inf), (0.5, 0)]:
        found = between(kept, gone)
        assert min(kept, gone) < found < max(kept, gone)


@pytest.mark.slow
def test_there_is_no_limit_at_two_to_the_24():
    values = torch.arange(2**24 + 3, dtype=torch.float64).sqrt().float()
    with pytest.raises(RuntimeError, match="too large"):
        torch.quantile(values, 0.5)
    rank = ExactRank(0.25)
    rank.first(values)
    rank.choose()
    rank.second(values)
    kept, _, above = rank.result()
    assert above == int((values > kept).sum()) <= 0.25 * len(values)


def of_sums(*totals):
    """One sequence of two tokens for each sum of log-ratios."""
    behavior = torch.full((2 * len(totals),), -1.0)
    return rollout(
        samples=len(totals),
        lengths=(2,) * len(totals),
        behavior=behavior,
        proximal=behavior + torch.tensor(totals).repeat_interleave(2) / 2,
        mask=torch.ones(2 * len(totals), dtype=torch.bool),
        advantages=torch.zeros(2 * len(totals)),
    )


def test_a_threshold_that_no_float_holds_is_left_out_and_named():
    for sign in [-1, 1]:
        for size in [800.0, 40_000.0]:
            found = [of_sums(*(sign * size * (1 + i / 40) for i in range(40)))]
            ranking = Ranking(0.1)
            ranking.add(*found)
            ranking.again().add(*found)
            suggestions = ranking.suggestions()
            for s in suggestions:
                assert rejected(found, s) == (round(s.reached * s.units), s.units)
                assert all(math.isfinite(b) for b in (s.low, s.high) if b is not None)
            assert "product of the ratios" not in [s.name for s in suggestions]
            assert any("suggest: product of the ratios is left out" in note for note in ranking.notes())


def test_a_threshold_between_what_a_float_holds_and_what_it_does_not():
    found = [of_sums(*[60.0] * 36, *[-900.0] * 4)]
    product = next(s for s in suggest(lambda: found, 0.1) if s.name == "product of the ratios")
    assert rejected(found, product) == (4, 40)
