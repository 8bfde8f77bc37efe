"""The finding ``mixed_versions``."""

from __future__ import annotations

from dataclasses import field

import torch
from torch import Tensor

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.measure import Measure
from slime_ext.tools.analysis.records import DumpedRollout
from slime_ext.tools.analysis.tables import zeros


class Mixed(Measure):
    """Numbers of samples by how many versions lie between their oldest and their newest, up to 63."""

    gaps: Tensor = field(default_factory=lambda: zeros(64))

    def close(self, rollout: DumpedRollout) -> None:
        if rollout.version_gaps:
            gaps = torch.tensor(rollout.version_gaps).clamp(0, 63)
            self.gaps += torch.bincount(gaps, minlength=64).double()


DETECTOR = Detector(
    severity="note",
    explains=False,
    what="responses mix weight versions although the run's flags say that none is continued",
    asks="versions, args.json",
    title="""
        {{ mixed | share(samples) }} of the responses mix weight versions, although partial rollouts are off.
    """,
    evidence="""
        {{ mixed }} of {{ samples }} samples have tokens of several versions, up to {{ largest }} versions
        apart. args.json has partial_rollout false{% if is_trained %} and mask_offpolicy_in_partial_rollout
        false, so the loss trains on all of these tokens{% endif %}.
    """,
    threshold="1% of the samples have several versions, and args.json has partial_rollout false",
    ruled_out="Partial rollouts, because the run's flags turn them off.",
    fix="""
        Look for requests that are aborted at a push and put back with their tokens. Drop those tokens, turn
        on --partial-rollout (with --mask-offpolicy-in-partial-rollout if old tokens must not train), or
        reject old samples (reject: {max_staleness: ...}).
    """,
)
SHARE = 0.01  # of the samples


def look(d: Diagnosis) -> Figures | None:
    """Finds samples with several weight versions in a run that continues no response."""
    gaps, flags = d.of(Mixed).gaps, d.flags
    samples, mixed = int(gaps.sum()), int(gaps[1:].sum())
    need(samples and "partial_rollout" in flags, "weight versions of the samples, and args.json of the run")
    if flags["partial_rollout"] or mixed < max(1, SHARE * samples):
        return None
    return {
        "mixed": mixed,
        "samples": samples,
        "largest": int(gaps.nonzero()[-1, 0]),
        "is_trained": flags.get("mask_offpolicy_in_partial_rollout") is False,
    }
