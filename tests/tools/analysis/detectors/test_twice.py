"""The same text in several samples: those of the same weights are compared, and only beyond bfloat16."""

from __future__ import annotations

import pytest
import torch

from slime_ext.tools.analysis.detectors.shared.twice import Twice
from tests.tools.analysis.detectors.toys import findings
from tests.tools.analysis.rollouts import rollout

SAMPLES, LENGTH = 32, 12


def same_text(spread, rollout_id=0, versions=None):
    """All samples have the same prompt and tokens; the trainer's log-probs differ from sample to sample."""
    g = torch.Generator().manual_seed(rollout_id)
    tokens = torch.randint(0, 50, (LENGTH,), generator=g)
    behavior = (-0.3 - torch.rand(LENGTH, generator=g)).repeat(SAMPLES)
    return rollout(
        samples=SAMPLES,
        rollout_id=rollout_id,
        lengths=(LENGTH,) * SAMPLES,
        behavior=behavior,
        proximal=behavior + spread * torch.randn(SAMPLES * LENGTH, generator=g),
        mask=torch.ones(SAMPLES * LENGTH, dtype=torch.bool),
        tokens=tokens.repeat(SAMPLES),
        groups=(rollout_id,) * SAMPLES,
        versions=versions,
        advantages=None,
    )


def test_samples_of_other_weights_are_not_compared():
    for versions, count in [
        (None, SAMPLES * LENGTH),
        (torch.full((SAMPLES * LENGTH,), 7), SAMPLES * LENGTH),
        (torch.arange(SAMPLES).repeat_interleave(LENGTH), 0),
        (torch.arange(SAMPLES).remainder(2).repeat_interleave(LENGTH), SAMPLES * LENGTH),
    ]:
        twice = Twice()
        twice.add(same_text(0.1, versions=versions))
        assert int(twice.sums[0]) == count


@pytest.mark.parametrize(("spread", "is_dropout"), [(0.02, False), (0.15, True)])
def test_a_spread_that_bfloat16_makes_is_no_dropout(spread, is_dropout):
    found = findings([same_text(spread, i) for i in range(4)])
    assert ("dropout" in found) == is_dropout
