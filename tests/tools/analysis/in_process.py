"""Rollouts of files, effects of corrections and thresholds without a document around them."""

from __future__ import annotations

from slime_ext import presets
from slime_ext.tools.analysis.document import Skipped
from slime_ext.tools.analysis.measures.suggest import Ranking
from slime_ext.tools.analysis.measures.tally import Tally
from slime_ext.tools.analysis.measures.whatif import WhatIf
from slime_ext.tools.analysis.pipeline import load
from slime_ext.tools.analysis.readers.find import RolloutRanges, find


def read(paths, rollouts=None):
    """Every wanted rollout of the files, in order; what cannot be read is a ``Skipped`` in its place."""
    for job in find(paths, RolloutRanges.parse(rollouts)).jobs:
        yield from (x for x in load(job) if isinstance(x, Skipped) or x.rollout_id in job.wanted)


def empty_whatif(corrections=None):
    """The collector of what corrections (all presets when None) do."""
    corrections = corrections or {name: preset.correction for name, preset in presets.PRESETS.items()}
    return WhatIf({name: Tally(correction) for name, correction in corrections.items()})


def whatif(rollouts, corrections=None):
    """The effects of corrections (all presets when None) on rollouts."""
    found = empty_whatif(corrections)
    for rollout in rollouts:
        found.add(rollout)
    return found.effects()


def suggest(rollouts, rate):
    """Thresholds for a rejection rate."""
    ranking = Ranking(rate)
    for rollout in rollouts:
        ranking.add(rollout)
    return ranking.suggestions()
