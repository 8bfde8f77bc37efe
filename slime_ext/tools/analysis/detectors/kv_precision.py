"""The finding ``kv_precision``."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from slime_ext.tools.analysis.detectors.shared.certainty import add_by_surprise, beyond_certainty
from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need
from slime_ext.tools.analysis.detectors.shared.explained import explained_by_tokens
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.measure import Measure
from slime_ext.tools.analysis.records import SURPRISES, DumpedRollout
from slime_ext.tools.analysis.tables import zeros

# Absolute positions (prompt and response) in a block; the last block holds all later ones.
BLOCK, BLOCKS = 16, 2048


@dataclass
class Blocks(Measure):
    """Sums by block of absolute positions and bin of -log behavior, [BLOCKS, SURPRISES, 4]."""

    takes_joined: ClassVar[bool] = True
    version: ClassVar[int] = 2

    table: Tensor = field(default_factory=lambda: zeros(BLOCKS, SURPRISES, 4))

    def add(self, part: DumpedRollout) -> None:
        positions = part.segments.within + part.segments.expand(torch.tensor(part.prompt_lengths))
        blocks = min(max(int(positions.max()), 0) // BLOCK + 1, BLOCKS) if part.size else 0
        add_by_surprise(self.table[:blocks], positions / BLOCK, part)


DETECTOR = Detector(
    severity="warning",
    side="honest",
    after=(
        "spoilt",
        "other_policy",
        "prefixes",
        "pushes",
        "layer",
        "parts",
        "experts",
        "prompt_cut",
    ),
    what="from one absolute position on, the engine's attention is less precise",
    asks="4 blocks of 16 positions",
    title="From absolute position {{ position }} on, the engine's attention is less precise.",
    evidence="""
        Mean |log-ratio| {{ before | nats }} at tokens before position {{ position }} (prompt
        included), {{ after | nats }} from there on ({{ (after / before) | factor }}, {{ "%.0f" |
        format(z) }} standard errors). The position is exact to {{ block }} tokens.
    """,
    threshold="""
        mean |l| 1.5 times that before the position, by 8 standard errors, and 1.3 times that of
        equally certain tokens; the step is larger than the differences between the blocks before it
    """,
    ruled_out="""
        Errors that add up along the response, because before the position the blocks differ by no
        more than a factor of {{ "%.2f" | format(spread) }}, and at it by {{ "%.2f" | format(jump) }}.
    """,
    fix="""
        Check what changes at this length: an fp8 KV cache whose kernel switches its block (try
        --kv-cache-dtype auto), a sliding window, rotary scaling, or a prefix that another kernel
        wrote.
    """,
)

FEWEST = 100  # tokens of a block
# After over before; one block over the block before; nats; standard errors.
STEP, FLAT, MATTERS, SURE = 1.5, 1.3, 5e-3, 8.0
EQUALLY_CERTAIN = 1.3  # after over before, among equally certain tokens


class _Step(NamedTuple):
    """A step of mean |l| at an absolute position, with its standard errors."""

    position: int
    before: float
    after: float
    z: float
    explained: float  # sum of squares that two means explain beyond one mean; below 0 for a step down


def _steps(positions: list[int], sums: Tensor) -> list[_Step]:
    """Returns the step at the start of each block, except the first two and the last.

    Args:
        positions: of the starts of the blocks.
        sums: [blocks, COLUMNS] sums over the tokens of each block.
    """
    steps, until = [], sums.cumsum(0)
    for cut in range(2, len(positions) - 1):
        n, a, s, *_ = until[cut - 1].tolist()
        m, b, t, *_ = (until[-1] - until[cut - 1]).tolist()
        error = math.sqrt(max(s / n - (a / n) ** 2, 0) / n + max(t / m - (b / m) ** 2, 0) / m)
        rise = b / m - a / n
        explained = n * m / (n + m) * rise * abs(rise)
        steps.append(_Step(positions[cut], a / n, b / m, rise / error if error else 0.0, explained))
    return steps


def look(d: Diagnosis) -> Figures | None:
    """Finds an absolute position at which the distance steps up."""
    certainty = d.of(Blocks).table[:-1]
    table = certainty.sum(1)
    blocks = (table[:, 0] >= FEWEST).nonzero()[:, 0]
    need(len(blocks) >= 4, f"4 blocks of {BLOCK} positions with {FEWEST} tokens each")
    positions, sums = (blocks * BLOCK).tolist(), table[blocks]
    best = max(_steps(positions, sums), key=lambda step: step.explained, default=None)
    if best is None or best.z < SURE or best.after < max(STEP * best.before, best.before + MATTERS):
        return None
    usual = certainty[blocks].sum(0)
    expected = certainty[blocks, :, 0] @ (usual[:, 1] / usual[:, 0].clamp_min(1))
    means = dict(zip(positions, (sums[:, 1] / expected.clamp_min(1e-30)).tolist(), strict=True))
    level = [mean for at, mean in means.items() if at < best.position]
    jump, spread = means[best.position] / max(level[-1], 1e-12), max(level) / max(min(level), 1e-12)
    if jump < FLAT * max(1.0, spread / FLAT):
        return None
    cut = best.position // BLOCK
    if beyond_certainty(certainty[cut:].sum(0), certainty[:cut].sum(0)) < EQUALLY_CERTAIN:
        return None  # tokens are only less certain from there on
    count, _, _, k3 = table[cut:].sum(0).tolist()
    explains = explained_by_tokens(d, count, k3)
    return {**best._asdict(), "block": BLOCK, "jump": jump, "spread": spread, "explains": explains}
