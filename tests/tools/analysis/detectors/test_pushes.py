"""Pushes that lack a part of the weights, and what looks like them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from slime_ext.tools.analysis.records import DumpedRollout
from tests.tools.analysis.detectors.toys import Policy, edited, findings, sampled

Held = Callable[[list[Tensor]], Tensor]  # the trainer's tables so far -> the engine's


def without_rows(tables: list[Tensor]) -> Tensor:
    """Half of the rows have never arrived."""
    return torch.cat([tables[0][:30], tables[-1][30:]])


def rows_once(tables: list[Tensor]) -> Tensor:
    """Half of the rows have arrived with the first push alone."""
    return torch.cat([tables[:2][-1][:30], tables[-1][30:]])


def pushed(held: Held, is_far: Callable[[Tensor], Tensor] = lambda ids: ids >= 0) -> list[DumpedRollout]:
    """A run with the log-probs of the first policy, in which some samples come from what the engine holds."""
    policy, tables, rollouts = Policy(moves=0.15), [], []
    for number in range(8):
        tables.append(policy.table)
        good = sampled(policy, number)
        bad = sampled(policy, number, sampler=held(tables))
        at = is_far(good.segments.ids)
        names = ("behavior", "proximal", "tokens")
        mixed = {name: torch.where(at, getattr(bad, name), getattr(good, name)) for name in names}
        one = replace(good, **mixed)
        first = tables[0].log_softmax(1)[one.tokens.roll(1), one.tokens].float()
        reference = torch.where(one.segments.within > 0, first, torch.nan)  # the prompt is not known
        rollouts.append(replace(one, reference=reference))
        policy.step()
    return rollouts


def test_rows_that_never_arrive_are_a_partial_push():
    (finding,) = findings(pushed(without_rows)).values()
    assert finding.name == "partial_push" and finding.severity == "error"


@pytest.mark.parametrize(
    ("held", "is_far"),
    [(lambda tables: tables[0], lambda ids: ids % 2 == 0), (rows_once, lambda ids: ids >= 0)],
)
def test_a_push_that_arrives_in_other_samples_or_once_lacks_no_part(held, is_far):
    """Old weights of every second sample, and pushes of which all but the first lack a part."""
    found = findings(pushed(held, is_far))
    assert found and "partial_push" not in found


@pytest.mark.parametrize("fields", [{}, {"reference": None}])
@pytest.mark.parametrize("is_older", [lambda ids: ids % 3 == 0, lambda ids: ids % 8 > 0])
@pytest.mark.parametrize("held", [lambda tables: tables[0], without_rows, lambda tables: tables[:4][-1]])
def test_pushes_arrive_if_the_newest_weights_agree_beside_older_ones(held, is_older, fields):
    """Some samples have the version before, and are further off in each rollout."""

    def labelled(rollout):
        versions = torch.where(is_older(rollout.segments.ids), rollout.rollout_id, rollout.versions)
        return {"versions": versions.clamp(min=1)} | fields

    assert set(findings(edited(pushed(held, is_older), labelled))) == {"stale_weights"}


@pytest.mark.parametrize(
    ("share", "aside", "name"),
    [(0.0, 0.0, "frozen_sampler"), (0.3, 0.0, "partial_push"), (0.0, 0.2, "frozen_sampler")],
)
def test_a_sampler_on_the_way_of_the_trainer_gets_a_part_of_the_weights(share, aside, name):
    """An adapter without its alpha adds a part of the update; a cache of new weights moves aside."""

    def held(tables):
        update = tables[-1] - tables[0]
        return tables[0] + share * update + aside * update.roll(1, 0)

    (finding,) = findings(pushed(held)).values()
    assert finding.name == name
