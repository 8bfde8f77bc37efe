"""The finding ``kv_precision``."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need
from slime_ext.tools.analysis.measures.curves import BLOCK, beyond_certainty
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="warning",
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
    title="From absolute position {{ position }} on the engine's attention is less precise.",
    evidence="""
        Mean |log-ratio| {{ before | nats }} at tokens before position {{ position }} (prompt included),
        {{ after | nats }} from there on ({{ (after / before) | factor }}, {{ "%.0f" | format(z) }}
        standard errors), to the {{ block }} positions of a block.
    """,
    threshold="""
        mean |l| 1.5 times that before the position, by 8 standard errors, and 1.3 times that of tokens as
        certain; a step there that is larger than what the blocks before it differ by
    """,
    ruled_out="""
        Errors that add up along the response: before the position the blocks differ by no more than a
        factor of {{ "%.2f" | format(spread) }}, at it by {{ "%.2f" | format(jump) }}.
    """,
    fix="""
        A KV cache in fp8 whose kernel changes its block at this length (--kv-cache-dtype auto), a sliding
        window or rotary scaling that begins here, a prefix that another kernel wrote.
    """,
)

FEWEST = 100  # tokens of a block
STEP, FLAT, MATTERS, SURE = 1.5, 1.3, 5e-3, 8.0  # after over before; within before; nats; standard errors
EVENED = 1.3  # after over before, of tokens of which the sampler was as sure


class _Step(NamedTuple):
    """A step of mean |l| at an absolute position: over the tokens before and after, in standard errors."""

    position: int
    before: float
    after: float
    z: float
    explained: float  # sum of squares that two means explain beyond one; below 0 for a step down


def _steps(positions: list[int], sums: Tensor) -> list[_Step]:
    """Returns the step at the start of each block but the first two and the last.

    Args:
        positions: of the blocks.
        sums: [blocks, COLUMNS] of their tokens.
    """
    found, until = [], sums.cumsum(0)
    for cut in range(2, len(positions) - 1):
        n, a, s, *_ = until[cut - 1].tolist()
        m, b, t, *_ = (until[-1] - until[cut - 1]).tolist()
        error = math.sqrt(max(s / n - (a / n) ** 2, 0) / n + max(t / m - (b / m) ** 2, 0) / m)
        rise = b / m - a / n
        explained = n * m / (n + m) * rise * abs(rise)
        found.append(_Step(positions[cut], a / n, b / m, rise / error if error else 0.0, explained))
    return found


def look(d: Diagnosis) -> Figures | None:
    """Finds an absolute position up to which the distance is level, and at which it steps up."""
    by_surprise = d.curves.by_surprise("block")[:-1]
    table = by_surprise.sum(1)
    blocks = (table[:, 0] >= FEWEST).nonzero()[:, 0]
    need(len(blocks) >= 4, f"4 blocks of {BLOCK} positions with {FEWEST} tokens each")
    positions, sums = (blocks * BLOCK).tolist(), table[blocks]
    best = max(_steps(positions, sums), key=lambda step: step.explained, default=None)
    if best is None or best.z < SURE or best.after < max(STEP * best.before, best.before + MATTERS):
        return None
    usual = by_surprise[blocks].sum(0)
    expected = by_surprise[blocks, :, 0] @ (usual[:, 1] / usual[:, 0].clamp_min(1))
    means = dict(zip(positions, (sums[:, 1] / expected.clamp_min(1e-30)).tolist(), strict=True))
    level = [mean for at, mean in means.items() if at < best.position]
    jump, spread = means[best.position] / max(level[-1], 1e-12), max(level) / max(min(level), 1e-12)
    if jump < FLAT * max(1.0, spread / FLAT):
        return None
    cut = best.position // BLOCK
    if beyond_certainty(by_surprise[cut:].sum(0), by_surprise[:cut].sum(0)) < EVENED:
        return None  # tokens that are less certain from there on
    return {**best._asdict(), "block": BLOCK, "jump": jump, "spread": spread}
