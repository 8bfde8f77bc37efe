"""Counts responses and tokens whose recorded values are not log-probs of the sampler."""

from __future__ import annotations

from collections import Counter
from dataclasses import field
from typing import ClassVar

import torch

from slime_ext.ops.divergences import LOWEST, is_log_prob
from slime_ext.tools.analysis.detectors.shared.detector import Figures
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.measure import Measure
from slime_ext.tools.analysis.records import DumpedRollout
from slime_ext.tools.analysis.tables import any_true, count_true, is_above, is_below

POSITIVE = 1e-4  # nats; rounding makes smaller ones
KINDS = 8  # sentinels of which a part of a rollout keeps the counts


class Recorded(Measure):
    """Sequences without any log-prob of the sampler, sequences that lack some, and odd values."""

    takes_joined: ClassVar[bool] = True

    silent: int = 0
    partial: int = 0
    positive: int = 0  # tokens with a value above 0
    # Numbers of -1000 or less, which servers write for minus infinity, and how many tokens have each.
    sentinels: Counter[float] = field(default_factory=Counter)

    def add(self, part: DumpedRollout) -> None:
        positive = part.mask & is_above(part.behavior, POSITIVE) & is_below(part.behavior, torch.inf)
        self.positive += count_true(positive)
        if part.has_all:
            return
        is_recorded = part.mask & (is_log_prob(part.behavior) | positive)  # positive is a finding of its own
        some, lacking = part.samples_with(is_recorded), part.samples_with(part.mask & ~is_recorded)
        self.silent += int((lacking & ~some).sum())
        self.partial += int((lacking & some).sum())
        is_low = part.mask & (part.behavior <= LOWEST) & (part.behavior > -torch.inf)
        if any_true(is_low):
            both = zip(part.by_rollout(part.behavior), part.by_rollout(is_low), strict=True)
            for values, counts in (b[low].unique(return_counts=True) for b, low in both):
                most = Counter(dict(zip(values.tolist(), counts.tolist(), strict=True))).most_common(KINDS)
                self.sentinels.update(dict(most))


def sentinels(d: Diagnosis) -> Figures:
    """Returns how many tokens have a number for minus infinity, and the most frequent number."""
    known = d.of(Recorded).sentinels
    return {"sentinels": known.total(), "sentinel": known.most_common(1)[0][0] if known else 0.0}
