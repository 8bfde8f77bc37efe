"""The finding ``stale_cache``."""

from __future__ import annotations

import math
from dataclasses import field

import torch
from torch import Tensor

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, Margin, need
from slime_ext.tools.analysis.detectors.shared.explained import K3, explained_by_tokens
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.measure import Measure
from slime_ext.tools.analysis.measures.versions import stretches
from slime_ext.tools.analysis.records import DumpedRollout
from slime_ext.tools.analysis.tables import tabulated, zeros


class Switched(Measure):
    """Number of tokens, and sum of k3, after a change of weights inside their response, and without one.

    The second row has tokens of the same versions in responses of the same rollout without a change.
    ``rollout`` is of the rollout that is being read: version -> both rows.
    """

    sums: Tensor = field(default_factory=lambda: zeros(2, 2))
    rollout: dict[int, Tensor] = field(default_factory=dict)

    def add(self, part: DumpedRollout) -> None:
        if part.versions is None:
            return
        begins, (count, *_, near), numbers, index = stretches(part)
        sample, sums = part.segments.ids[begins].long(), torch.stack([count, near])
        none = index.new_zeros(part.count)
        first, last = (
            none.scatter_reduce(0, sample, index, of, include_self=False)[sample] for of in ("amin", "amax")
        )
        is_alone = first == last
        if is_alone.all():  # no sample has several versions
            without = tabulated(index, sums, len(numbers))
            tables = torch.stack([torch.zeros_like(without), without], 1)
        else:
            kinds = (index == last) & ~is_alone, is_alone
            tables = torch.stack([tabulated(index[kind], sums[:, kind], len(numbers)) for kind in kinds], 1)
        for number, table in zip(numbers.tolist(), tables, strict=True):
            self.rollout[number] = self.rollout.get(number, 0) + table

    def close(self, rollout: DumpedRollout) -> None:
        self.sums += sum((table for table in self.rollout.values() if table[0, 0]), zeros(2, 2))
        self.rollout = {}


DETECTOR = Detector(
    severity="error",
    side="honest",
    after=("spoilt",),
    what="the engine kept its KV cache after a weight update inside a response",
    asks="versions by token",
    title="After a weight update inside a response, the engine keeps the KV cache of the previous weights.",
    evidence="""
        k3 is {{ after | nats }} at tokens after an update inside their response, and {{ pure | nats
        }} at tokens of the same weights in responses without an update: {{ (after / [pure, 1e-12] |
        max) | factor }}.
    """,
    threshold="k3 after an update is 3 times that of the same weights elsewhere, and 2e-4 nats",
    ruled_out="Old weights, because both groups of tokens come from the same weight versions.",
    fix="""
        Flush the cache when weights change, so that running requests are prefilled again (SGLang:
        flush_cache, or abort and resume with the tokens so far).
    """,
)

FEWEST = 100  # tokens on each side
CACHE_TIMES, CACHE_MATTERS = 3.0, 2e-4  # times k3 elsewhere; nats of k3


def look(d: Diagnosis) -> Figures | None:
    """Finds that k3 is several times as large after a weight update inside a response."""
    (count, after), (count_pure, pure) = d.of(Switched).sums.tolist()
    is_enough = min(count, count_pure) >= FEWEST
    need(is_enough, "weight versions by token, and a weight update inside responses")
    k3_after, k3_pure = after / count, pure / count_pure
    if k3_after < max(CACHE_MATTERS, CACHE_TIMES * k3_pure):
        return None
    kinds = K3.of_sums(d, count, after), K3.of_sums(d, count_pure, pure)
    error = math.hypot(kinds[0].error, CACHE_TIMES * kinds[1].error)
    return {
        "after": k3_after,
        "pure": k3_pure,
        "margin": Margin(k3_after, error, max(CACHE_MATTERS, CACHE_TIMES * k3_pure)),
        "explains": explained_by_tokens(d, count, after),
    }
