"""Rollouts of files, effects of corrections and thresholds without a document around them."""

from __future__ import annotations

from slime_ext.analysis.readers.find import RolloutRanges, find
from slime_ext.analysis.readers.stream import load
from slime_ext.analysis.suggest import Ranking
from slime_ext.analysis.whatif import WhatIf


def read(paths, rollouts=None):
    """Every rollout of the files, in order; what cannot be read comes as ``Skipped`` in its place."""
    wanted = RolloutRanges.parse(rollouts)
    for job in find(paths, wanted).jobs:
        yield from load(job, wanted)


def whatif(rollouts, corrections=None):
    """The effects of corrections (all presets when None) on rollouts."""
    found = WhatIf(corrections)
    for rollout in rollouts:
        found.add(rollout)
    return found.effects()


def suggest(read, rate):
    """Thresholds for a rejection rate; ``read`` gives the rollouts and is called twice."""
    ranking = Ranking(rate)
    for rollout in read():
        ranking.add(rollout)
    ranking.again()
    for rollout in read():
        ranking.add(rollout)
    return ranking.suggestions()
