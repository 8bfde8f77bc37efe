"""The finding ``kv_precision``."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from slime_ext.tools.analysis.detectors.shared.along import Positions
from slime_ext.tools.analysis.detectors.shared.blocks import BLOCK, Blocks
from slime_ext.tools.analysis.detectors.shared.certainty import beyond_certainty
from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need
from slime_ext.tools.analysis.detectors.shared.explained import explained_by_tokens
from slime_ext.tools.analysis.detectors.shared.kinds import rather_than_position
from slime_ext.tools.analysis.detectors.shared.sampling import began_later
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

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
    title="""
        From {{ "absolute position %d" | format(position) if position else "the second token of the responses"
        }} on, the engine's attention is less precise.
    """,
    evidence="""
        {% if spread is defined -%} Mean |log-ratio| {{ before | nats }} at tokens before position {{ position
        }} (prompt included), {{ after | nats }} from there on ({{ (after / before) | factor }}, {{ "%.0f" |
        format(z) }} standard errors). The position is exact to {{ block }} tokens. {%- else -%} Mean
        |log-ratio| {{ before | nats }} at {% if position %}tokens before position {{ position }} (prompt
        included){% else %}the first token of the responses, which the engine computes with the prompt,{%
        endif %} and {{ after | nats }} at the others; equally certain ones would have {{ expected |
        nats }} ({{ "%.0f" | format([z, 999] | min) }} standard errors).{% endif %}
    """,
    threshold="""
        mean |l| 1.5 times that before the position, by 8 standard errors, and 1.3 times that of
        equally certain tokens; the step is larger than the differences between the blocks before it. Or the
        first token of the responses, or the first block of positions, has a third of |l| of equally certain
        tokens, by 4 standard errors, and less than 0.05 nats, and the second has at least three quarters
    """,
    ruled_out="""
        Errors that add up along the response, because {% if spread is defined -%} before the position the
        blocks differ by no more than a factor of {{ "%.2f" | format(spread) }}, and at it by {{ "%.2f" |
        format(jump) }}. {%- else -%} the {{ "next 16" if position else "second" }} tokens already have {{
        "%.2f" | format(jump) }} times the distance of equally certain ones. Other weights, because the
        tokens before have none of it.{% endif %}
    """,
    remedy="""
        try --kv-cache-dtype auto, and compare the attention window and the rotary scaling of both
        sides
    """,
    fix="""
        Check what changes at this length: an fp8 KV cache whose kernel switches its block (try
        --kv-cache-dtype auto), a sliding window, rotary scaling, or a prefix that another kernel
        wrote.
    """,
)

FEWEST, SEVERAL = 100, 3  # tokens of a block; places of the response
# After over before; one block over the block before; nats; standard errors.
STEP, FLAT, MATTERS, SURE = 1.5, 1.3, 5e-3, 8.0
EQUALLY_CERTAIN = 1.3  # after over before, among equally certain tokens
# |l| of the first tokens over that of equally certain ones, and of the second; standard errors; nats that two
# engines in bfloat16 stay below.
FIRST, SECOND, FIRST_SURE, AGREES = 1 / 3, 0.75, 4.0, 0.05


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
    """Finds an absolute position at which the distance steps up, or that only first tokens agree."""
    return _after_first_token(d) or _after_first_block(d) or _at_position(d)


def _after_first_token(d: Diagnosis) -> Figures | None:
    """Returns the figures if responses agree at their first token alone.

    The engine computes it with the prompt, and all others with the keys and values that it kept. If every
    prompt is as long as an attention window, the first token is also the last that the window does not cut.
    """
    table = d.of(Positions).table
    reached = table[:, :, 0].sum(1).nonzero()[:, 0]
    # A prefill that reads other weights than a decoding step also leaves the first token alone, but only
    # after a push.
    if not len(reached) or int(reached[0]) or began_later(d, FEWEST):
        return None
    figures = _first_alone(d, table[reached])
    return figures and {"position": 0, **figures}


def _after_first_block(d: Diagnosis) -> Figures | None:
    """Returns the figures if responses agree in the first block of absolute positions alone.

    The spread between blocks is unknown then. But an attention window that is cut leaves all positions within
    it as they are.
    """
    table = d.of(Blocks).table[:-1]
    reached = table[:, :, 0].sum(1).nonzero()[:, 0]
    figures = _first_alone(d, table[reached])
    return figures and {"position": BLOCK * int(reached[1]), **figures}


def _first_alone(d: Diagnosis, table: Tensor) -> Figures | None:
    """Returns the figures if tokens of the first row agree, and those of the second are as far as all others.

    Args:
        table: [rows, SURPRISES, 4] of ``by_surprise``, in the order of the tokens.
    """
    if len(table) < SEVERAL or float(table[0, :, 0].sum()) < FEWEST:
        return None
    others = table[1:].sum(0)
    usual = others[:, 1:3] / others[:, :1].clamp_min(1)  # mean |l| and mean l^2 by certainty
    first, second = table[:2, :, 1].sum(1).tolist()
    expected, square = (table[0, :, 0] @ usual).tolist()
    count, of_second = float(table[0, :, 0].sum()), float(table[1, :, 0] @ usual[:, 0])
    z, jump = (expected - first) / max(math.sqrt(square), 1e-30), second / max(of_second, 1e-30)
    if first > min(FIRST * expected, AGREES * count) or z < FIRST_SURE or jump < SECOND:
        return None
    # What a cache has lost, each later token lacks: the second is no further off, and none agrees again.
    tokens, _, squares, _ = table[1].sum(0).tolist()
    error = math.sqrt(max(squares - second * second / tokens, 0.0))
    later = table[table[:, :, 0].sum(1) >= FEWEST][1:]
    is_again = later[:, :, 1].sum(1) < FIRST * (later[:, :, 0] @ usual[:, 0])
    if second > of_second / SECOND + FIRST_SURE * error or is_again.any():
        return None
    tokens, after, _, k3 = others.sum(0).tolist()
    if after < AGREES * tokens:  # two engines in bfloat16 may differ as much
        return None
    return {
        "before": first / count,
        "after": after / tokens,
        "expected": expected / count,
        "z": z,
        "jump": jump,
        "explains": explained_by_tokens(d, tokens, k3),
    }


def _at_position(d: Diagnosis) -> Figures | None:
    """Returns the figures of an absolute position at which the distance steps up."""
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
    next_block = float(table[cut + 1, 0]) if cut + 1 < len(table) else 0.0
    if rather_than_position(d, explains, next_block / BLOCK):
        return None
    return {**best._asdict(), "block": BLOCK, "jump": jump, "spread": spread, "explains": explains}
