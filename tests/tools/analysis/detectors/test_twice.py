"""The same text in several samples: those of the same weights are compared, and only beyond bfloat16."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from slime_ext.tools.analysis.detectors import engines_apart
from slime_ext.tools.analysis.detectors.shared.detector import Lacks
from slime_ext.tools.analysis.detectors.shared.twice import Twice
from tests.tools.analysis.detectors.toys import diagnosed, findings
from tests.tools.analysis.rollouts import rollout

SAMPLES, LENGTH = 32, 12


def same_text(spread, rollout_id=0, versions=None, lengths=(LENGTH,) * SAMPLES, noises=SAMPLES):
    """All samples have the same prompt and tokens; the trainer's log-probs differ from sample to sample.

    Args:
        noises: of this many samples in a row; the next ones have the same again.
    """
    g = torch.Generator().manual_seed(rollout_id)
    tokens = torch.randint(0, 50, (LENGTH,), generator=g)
    behavior = -0.3 - torch.rand(LENGTH, generator=g)
    noise = spread * torch.randn(noises, LENGTH, generator=g).repeat(SAMPLES // noises, 1)
    there = torch.arange(LENGTH) < torch.tensor(lengths)[:, None]
    return rollout(
        samples=SAMPLES,
        rollout_id=rollout_id,
        lengths=lengths,
        behavior=behavior.expand(SAMPLES, LENGTH)[there],
        proximal=(behavior + noise)[there],
        mask=torch.ones(sum(lengths), dtype=torch.bool),
        tokens=tokens.expand(SAMPLES, LENGTH)[there],
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


@pytest.mark.parametrize("spread", [0.15, 0.3])
def test_what_depends_on_the_length_of_the_response_is_no_dropout(spread):
    """Positions that count from the end of a chunk are the same in responses of one length."""
    lengths = (LENGTH, 9, 10, 11) * (SAMPLES // 4)
    found = findings([same_text(spread, i, lengths=lengths, noises=4) for i in range(4)])
    assert found and "dropout" not in {*found, *(name for one in found.values() for name in one.or_else)}
    found = findings([same_text(spread, i, lengths=lengths) for i in range(4)])
    assert "dropout" in found


def test_without_enough_equal_text_nothing_is_said_of_the_engines(monkeypatch):
    """Even if samples agree at many positions, which would rule the engines out."""
    monkeypatch.setattr(engines_apart, "agrees_at_places", lambda d: True)
    with pytest.raises(Lacks, match="the same text"):
        engines_apart.look(diagnosed([replace(same_text(0.3), tokens=None)]))
