"""Mean |l| along the response, against a loop over tokens in plain Python."""

from __future__ import annotations

import math
import random
from itertools import groupby, product
from operator import attrgetter
from typing import NamedTuple

import pytest
import torch

from slime_ext.tools.analysis.detectors.shared.along import (
    along,
    explained_along,
    falls,
    rather_than_rollouts,
)
from slime_ext.tools.analysis.detectors.shared.explained import explained_by_tokens
from tests.tools.analysis.detectors.toys import diagnosed
from tests.tools.analysis.rollouts import rollout


class Token(NamedTuple):
    """A response token of one sample of a rollout."""

    sample: tuple[int, int]
    place: int
    behavior: float
    log_ratio: float
    counts: bool

    @property
    def k3(self):
        return math.exp(self.log_ratio) - 1 - self.log_ratio

    @property
    def octave(self):
        """The bin of the place, four per octave."""
        return math.floor(4 * math.log2(1 + self.place))

    @property
    def certainty(self):
        """The bin of -log behavior, two per decade from 1e-5 nats on."""
        return min(max(math.floor(2 * (5 + math.log10(-self.behavior))), 0), 13)


def tokens_of(seed, spread, *, doubt=0.0, rollouts=3, samples=40, longest=60):
    """Tokens of samples of random lengths, a tenth of which do not count.

    Args:
        spread: number of the rollout, place and -log behavior -> standard deviation of l.
        doubt: how many orders of magnitude the least -log behavior grows along the response.
    """
    rng, tokens = random.Random(seed), []
    for sample in product(range(rollouts), range(samples)):
        for place in range(rng.randint(1, longest)):
            surprise = 10 ** rng.uniform(-4 + doubt * place / longest, 0.7)
            far = spread(sample[0], place, surprise) * rng.gauss(0, 1)
            tokens.append(Token(sample, place, -surprise, far, rng.random() < 0.9))
    return tokens


def diagnosis_of(tokens):
    """Of rollouts in memory."""
    made = []
    for number, some in groupby(tokens, lambda token: token.sample[0]):
        some = list(some)
        lengths = tuple(len(list(sample)) for _, sample in groupby(some, attrgetter("sample")))
        behavior = torch.tensor([token.behavior for token in some], dtype=torch.float64)
        far = torch.tensor([token.log_ratio for token in some], dtype=torch.float64)
        known = {"lengths": lengths, "behavior": behavior, "proximal": behavior + far}
        known |= {"mask": torch.tensor([token.counts for token in some]), "advantages": None}
        made.append(rollout(samples=len(lengths), rollout_id=number, **known))
    return diagnosed(made)


def parts_of(tokens):
    """The tokens of octaves that end in the first quarter, in the second or third, and in the last."""
    counted = [token for token in tokens if token.counts]
    reached = {
        octave: sum(token.octave <= octave for token in counted) / len(counted)
        for octave in {token.octave for token in counted}
    }
    early = [token for token in counted if reached[token.octave] <= 0.25]
    late = [token for token in counted if reached[token.octave] >= 0.75]
    return early, [t for t in counted if 0.25 < reached[t.octave] < 0.75], late


def mean(tokens):
    return sum(abs(token.log_ratio) for token in tokens) / len(tokens)


def error(tokens):
    return math.sqrt(sum(token.log_ratio**2 for token in tokens)) / len(tokens)


def over_equally_certain(tokens, every):
    usual = {c: mean([t for t in every if t.certainty == c]) for c in {token.certainty for token in tokens}}
    return sum(abs(t.log_ratio) for t in tokens) / sum(usual[token.certainty] for token in tokens)


def plain(tokens):
    early, middle, late = parts_of(tokens)
    every = [*early, *middle, *late]
    return {
        "early": mean(early),
        "middle": mean(middle),
        "late": mean(late),
        "first": over_equally_certain(early, every),
        "last": over_equally_certain(late, every),
        "early_error": error(early),
        "late_error": error(late),
    }


def even(number, place, surprise):
    return 0.2 * surprise**0.5


def growing(number, place, surprise):
    return 0.02 * (1 + place) ** 0.7


def falling(number, place, surprise, fades=30):
    return 0.2 * math.exp(-place / fades) * surprise**0.5


@pytest.mark.parametrize("spread", [even, growing, falling])
@pytest.mark.parametrize("seed", range(3))
def test_the_figures_of_a_response_are_those_of_its_tokens(seed, spread):
    tokens = tokens_of(seed, spread)
    assert along(diagnosis_of(tokens))._asdict() == pytest.approx(plain(tokens), rel=1e-6)


@pytest.mark.parametrize(
    ("seed", "fades", "is_sure"), [(0, 200, False), (0, 100, False), (1, 100, True), (1, 50, True)]
)
def test_a_distance_falls_along_the_response_if_it_does_by_three_standard_errors(seed, fades, is_sure):
    tokens = tokens_of(seed, lambda number, place, surprise: falling(number, place, surprise, fades))
    found = plain(tokens)
    errors = [
        found["first"] * found["early_error"] / found["early"],
        found["last"] * found["late_error"] / found["late"],
    ]
    assert (found["first"] - found["last"] >= 3 * math.hypot(*errors)) == is_sure
    assert falls(diagnosis_of(tokens)) == is_sure


@pytest.mark.parametrize(("grows", "spread"), [(True, growing), (False, falling)])
def test_k3_of_the_further_three_quarters_is_what_a_drift_explains(grows, spread):
    tokens = tokens_of(0, spread)
    d, (early, middle, late) = diagnosis_of(tokens), parts_of(tokens)
    far = [*middle, *late] if grows else [*early, *middle]
    expected = explained_by_tokens(d, len(far), sum(token.k3 for token in far))
    assert explained_along(d, grows=grows) == pytest.approx(expected, abs=2e-6)
    assert 0.3 < expected.share < 1


def between(groups):
    """Sum over groups of tokens of n (mean |l| of the group - mean |l| of all)^2."""
    groups = list(map(list, groups))
    every = mean([token for group in groups for token in group])
    return sum(len(group) * (mean(group) - every) ** 2 for group in groups)


def grouped(tokens, key):
    return (list(group) for _, group in groupby(sorted(tokens, key=key), key))


@pytest.mark.parametrize(
    ("spread", "doubt", "is_place"),
    [
        (growing, 0, True),
        (lambda number, place, surprise: growing(number, place, surprise) * 1.4**number, 0, True),
        (lambda number, place, surprise: growing(number, place, surprise) * 1.8**number, 0, False),
        (lambda number, place, surprise: growing(number, place, surprise) * (surprise / 5) ** 4, 0, False),
        (lambda number, place, surprise: 0.05 * (1 + place) ** 0.3, 0, False),  # not 2.5 times as far
        (lambda number, place, surprise: 0.2 * surprise, 4, False),  # later tokens are less certain
    ],
)
def test_a_distance_grows_along_the_response_rather_than_over_rollouts(spread, doubt, is_place):
    tokens = tokens_of(1, spread, doubt=doubt)
    found, counted = plain(tokens), [token for token in tokens if token.counts]
    grows = found["late"] >= 2.5 * found["early"] and found["last"] >= 1.7 * found["first"]
    places = between(grouped(counted, attrgetter("octave")))
    rollouts = between(grouped(counted, lambda token: token.sample[0]))
    whole = between([token] for token in counted)
    assert (grows and places > 2 * rollouts and places > 0.02 * whole) == is_place
    assert rather_than_rollouts(diagnosis_of(tokens)) == is_place
