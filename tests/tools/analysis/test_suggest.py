"""Suggested thresholds: pasted back they reject what was promised."""

from __future__ import annotations

import math

import torch
import yaml

from slime_ext import load_config
from slime_ext.tools.analysis.measures.histogram import Histogram
from slime_ext.tools.analysis.measures.suggest import Ranking
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
            suggestions = suggest(found, rate)
            impossible = noise == 5.0 and rate < 0.5  # these made-up probabilities are more than 1 apart
            assert len(suggestions) == (5 if impossible else 6)
            for s in suggestions:
                gone, units = rejected(found, s)
                assert units == s.units and abs(gone - s.reached * units) <= 1 + 2e-3 * units
                assert 0 <= int(rate * units) - round(s.reached * units) <= 1 + 5e-3 * units


def test_equal_values_are_rejected_together_or_not_at_all():
    base = rollout(samples=40)
    proximal = base.behavior + torch.where(torch.arange(base.size) % 5 == 0, 0.51, 0.0)
    tied = rollout(samples=40, proximal=proximal)
    token = next(s for s in suggest([tied], 0.1) if s.name == "ratio of a token")
    assert rejected([tied], token)[0] == round(token.reached * token.units) < 0.1 * token.units


def test_what_has_no_log_prob_is_no_unit():
    base = rollout(samples=40)
    behavior = base.behavior.clone()
    behavior[base.mask.nonzero()[3, 0]] = float("nan")
    units = {s.unit: s.units for s in suggest([rollout(samples=40, behavior=behavior)], 0.1)}
    has = int((base.segments.sum(base.mask.float()) > 0).sum())
    assert units == {"token": int(base.mask.sum()) - 1, "sequence": has - 1}


def test_several_collectors_find_what_one_finds():
    found, parts = dumps(), [Ranking(0.05) for _ in range(3)]
    for i, r in enumerate(found):
        parts[i % 3].add(r)
    for part in parts[1:]:
        parts[0].merge(part)
    assert parts[0].suggestions() == suggest(found, 0.05)


def test_quantiles_are_rounded_towards_0_by_less_than_a_bucket():
    for q in [0.01, 0.3, 0.5, 0.99, 1.0]:
        values = torch.rand(5000) * 4 - 1.5
        histogram = Histogram()
        for part in values.split(999):
            histogram.add(part)
        exact = float(values.sort().values[max(math.ceil(q * 5000), 1) - 1])
        assert abs(exact) * (1 - 2**-8) <= abs(histogram.quantiles(q)[0]) <= abs(exact)
        assert (histogram.smallest, histogram.largest) == (float(values.min()), float(values.max()))


def test_a_histogram_reads_round_weights_as_they_are():
    histogram = Histogram()
    histogram.add(torch.tensor([-0.0, 0.5, 1.0, 1.0, 2.0, 5.0]))
    assert histogram.quantiles(0.1, 0.3, 0.6, 0.8, 1.0) == [0.0, 0.5, 1.0, 2.0, 5.0]


def test_a_tail_is_the_largest_part_that_is_allowed():
    values = torch.cat([torch.rand(n) ** 3 * 10 for n in (1, 700, 3000)])
    histogram = Histogram()
    histogram.add(values)
    for share in [0.0, 0.0005, 0.3, 0.9999]:
        kept, gone, above = histogram.tail(share)
        assert above == int((values >= kept).sum()) <= share * len(values)
        assert not int(((values >= kept) & (values < gone)).sum())
        assert 0 <= int(share * len(values)) - above <= 20  # of one bin


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
            suggestions = ranking.suggestions()
            for s in suggestions:
                assert rejected(found, s) == (round(s.reached * s.units), s.units)
                assert all(math.isfinite(b) for b in (s.low, s.high) if b is not None)
            assert "product of the ratios" not in [s.name for s in suggestions]
            assert any("suggested for the product of the ratios" in note for note in ranking.notes())


def test_a_threshold_between_what_a_float_holds_and_what_it_does_not():
    found = [of_sums(*[60.0] * 36, *[-900.0] * 4)]
    product = next(s for s in suggest(found, 0.1) if s.name == "product of the ratios")
    assert rejected(found, product) == (4, 40)
