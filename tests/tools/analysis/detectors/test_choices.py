"""A value and the rollouts in which it is far off are chosen by their k3, and what is chosen looks large."""

from __future__ import annotations

import math

import pytest
import torch

from slime_ext.tools.analysis.detectors.shared.parts import SURE, FarValue, Mean, _of_value
from slime_ext.tools.analysis.measures.by_sample import Part

ROLLOUTS, SAMPLES, VALUES = 8, 32, 4


def by_chance(g, spread):
    """Rollout -> the parts of a healthy run whose samples have a heavy-tailed k3, whatever their value."""
    of_rollouts = {}
    for number in range(ROLLOUTS):
        tokens = torch.randint(20, 60, (SAMPLES,), generator=g).double()
        k3 = 0.002 * (spread * torch.randn(SAMPLES, generator=g)).exp() * tokens
        rows = [(k3[value::VALUES], tokens[value::VALUES]) for value in range(VALUES)]
        of_rollouts[number] = [
            Part(
                number,
                "engine",
                f"{value}",
                len(n),
                int(n.sum()),
                *(float(x.sum()) for x in (k, k * k, k * n, n * n)),
            )
            for value, (k, n) in enumerate(rows)
        ]
    return of_rollouts


def test_hardly_any_healthy_run_has_a_far_value_by_choice_alone():
    """300 runs; the largest of 4 values and 255 sets of rollouts is chosen in each."""
    g, found = torch.Generator().manual_seed(5), 0
    for _ in range(300):
        rollouts = by_chance(g, 1.5)
        whole = sum(p.k3 for parts in rollouts.values() for p in parts)
        values = (_of_value("engine", f"{value}", rollouts, whole) for value in range(VALUES))
        found += any(one is not None for one in values)
    assert found == 0


@pytest.mark.parametrize("choices", [1, 4, 4 * math.comb(8, 3)])
def test_the_union_bound_holds_for_the_standard_errors(choices):
    """choices * Q(z of one) bounds the chance of the largest, and is near Q(z of the choice)."""
    far, others = Mean(40, 2000, 0.4, 0.08), Mean(280, 14000, 0.02, 0.002)
    one, chosen = (FarValue("engine", "3", far, others, (0,), 0.9, n).z for n in (1, choices))
    assert one > SURE and chosen <= one

    def chance(z):
        return 0.5 * math.erfc(z / math.sqrt(2))

    assert chance(chosen) >= choices * chance(one) and chance(chosen) <= 3 * choices * chance(one)
