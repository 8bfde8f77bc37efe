"""The text of the two Triton kernels of a correction: straight-line code written from its steps.

A program of either kernel takes a chunk of tokens inside one sequence, so what belongs to the sequence is a
scalar to it. ``statistics`` adds up each chunk; ``correct`` reads the sums of its sequence, lets every step
decide again and writes its tokens. No float is added with atomics, so results repeat bit by bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import torch

from slime_ext.correction import Correction
from slime_ext.kernels.passes import Parts
from slime_ext.kernels.writer import Writer, literal
from slime_ext.metrics.columns import LARGEST
from slime_ext.metrics.layout import BINS, COLUMNS, CURVE_COLUMNS, FIRST, LOG_PROBABILITIES, SHIFT, SIDE
from slime_ext.ops.statistics import Need
from slime_ext.outcome import largest_factor

HEAD = """import triton.language as tl

from slime_ext.kernels.device import (
    INF, binary_kl, binary_kl_max, expm1, k2, k3, over, parts, put, put_highest, squares, tv
)
from slime_ext.kernels.machine_code import kernel

"""
LOAD = """    chunk = tl.program_id(0)
    owner = tl.load(owners + chunk)
    begin = tl.load(begins + chunk)
    size = tl.load(sizes + chunk)
    lane = tl.arange(0, LANES)
    here = lane < size
    at = begin + lane
    mask = tl.load(masks + at, mask=here, other=0) != 0
    num = tl.load(numerators + at, mask=here, other=0.0).to(WIDE)
    beh = tl.load(behaviors + at, mask=here, other=0.0).to(WIDE)
    finite = mask & (tl.abs(beh) < INF)
    l = tl.where(finite, num - beh, 0.0)
"""
ADVANTAGE = "    adv = tl.where(mask, tl.load(advantages + at, mask=here, other=0.0).to(WIDE), 0.0)\n"
START = """    never = size < 0
    kept = size >= 0
    all_w = tl.where(never, 0.0, 1.0).to(WIDE)
    all_clipped = never
    all_acted = tl.where(never, 1, 0)
"""
START_TOKENS = """    nowhere = lane < 0
    w = tl.where(here, all_w, 1.0)
    keep = finite
    clipped = here & all_clipped
    acted = tl.where(finite, 0, 1) | all_acted
"""
EXACT = (0.0, 0.5, 1.0, -math.inf, math.inf)  # in any dtype
ROOM = 1 << (BINS - 1).bit_length()  # bins of the histogram as Triton counts them
INPUTS = "numerators, behaviors, masks, advantages, owners, begins, sizes"


class Triton:
    """The language."""

    def call(self, name: str, *arguments: str) -> str:
        return f"tl.{name}({', '.join(arguments)})"

    def no(self, flag: str) -> str:
        return f"~({flag})"

    def narrow(self, value: str) -> str:
        return f"({value}).to(WIDE)"

    def at(self, array: str, index: str | int) -> str:
        return f"tl.load({array} + {index})"

    def number(self, value: float, *, wide: bool = False) -> str:
        """With its dtype: Triton 3.4 and 3.5 round a bare number to float32, even beside a float64."""
        if value in EXACT:
            return literal(value)
        return f"tl.full((), {literal(value)}, {'tl.float64' if wide else 'WIDE'})"


def source(correction: Correction, needs: tuple[Need, ...], parts: Parts) -> str:
    """Both kernels of a correction, as a Python module."""
    reads = any(step.reads_advantages for step in correction.steps)
    load = LOAD + (ADVANTAGE if reads else "")
    writer = Writer(correction, needs, Triton())
    measured = "" if parts.layout is None else _measured(parts)
    return f"{HEAD}\n{_statistics(writer, load)}\n\n{_correct(writer, load, measured)}"


def _constants(correction: Correction) -> dict[str, int | float]:
    bins = {"SHIFT": SHIFT, "FIRST": FIRST, "SIDE": SIDE, "ROOM": ROOM}
    largest = {"LARGEST": LARGEST[torch.float32], "LARGEST_WIDE": LARGEST[torch.float64]}
    largest |= {"LARGEST_FACTOR": largest_factor(torch.float32)}
    largest |= {"LARGEST_FACTOR_WIDE": largest_factor(torch.float64)}
    return bins | largest | {"GROUP_BIT": 1 << (len(correction.steps) + 1)}


def _statistics(writer: Writer, load: str) -> str:
    sums = [
        f"    tl.store(partials + {i} * chunks + chunk, {_sum(writer, n)})\n"
        for i, n in enumerate(writer.needs)
    ]
    signature = f"{INPUTS}, partials, chunks, WIDE: tl.constexpr, LANES: tl.constexpr"
    return f"@kernel\ndef statistics({signature}):\n{load}{''.join(sums)}"


def _sum(writer: Writer, need: Need) -> str:
    return f"tl.sum(tl.where(here, {writer.summand(need)}, 0.0).to(tl.float64), 0)"


def _correct(writer: Writer, load: str, measured: str) -> str:
    loads = "".join(
        f"    s{i} = tl.load(table + {i} * sequences + owner)\n" for i in range(len(writer.needs))
    )
    lines = writer.lines()
    ahead, body = (
        "".join(f"    {name} = {value}\n" for name, value in part) for part in (writer.ahead, lines)
    )
    signature = (
        f"{INPUTS}, table, sequences, numbers, ages, groups, "
        "weights, keeps, finites, log_ratios, kepts, clippeds, acteds, "
        "losses, scales, factors, products, ratios, bounded_ones, rejected_ones, histogram, rows, chunks, "
        "WIDE: tl.constexpr, LANES: tl.constexpr, GROUPS: tl.constexpr, OUTCOME: tl.constexpr, "
        "BOUNDS: tl.constexpr, OBSERVE: tl.constexpr, LOSS: tl.constexpr, SCALED: tl.constexpr"
    )
    known = "".join(f"    {n}: tl.constexpr = {v}\n" for n, v in _constants(writer.correction).items())
    decided = f"{START}{ahead}{START_TOKENS}{body}"
    return f"@kernel\ndef correct({signature}):\n{known}{load}{loads}{decided}{STORE}{measured}"


def _measured(parts: Parts) -> str:
    """The sums of a chunk, a row each: columns, flags, extremes, and columns by bin of probability."""
    layout = parts.layout
    flags = [f"(((acted & {bits}) != 0) & mask).to(tl.float32)" for _, bits in layout.flags]
    rows = [f"put(rows, {i}, chunk, chunks, {value})" for i, value in enumerate((*VALUES, *flags))]
    rows += [f"put_highest(rows, {len(rows) + i}, chunk, chunks, {e})" for i, e in enumerate(EXTREMES)]
    lines = [*rows, *(_by_probability(len(rows)) if layout.curves else ())]
    return MEASURED + "".join(f"    {line}\n" for line in lines)


def _by_probability(row: int) -> Iterator[str]:
    edges = ("-INF", *map(Triton().number, LOG_PROBABILITIES), "INF")
    for low, high in pairwise(edges):
        yield f"inside = (log_behavior >= {low}) & (log_behavior < {high})"
        for value in VALUES[: len(CURVE_COLUMNS)]:
            yield f"put(rows, {row}, chunk, chunks, tl.where(inside, {value}, 0.0))"
            row += 1


MEASURED = """    bits = tl.abs(l).to(tl.float32).to(tl.int32, bitcast=True) >> SHIFT
    distance = tl.minimum(bits - FIRST, SIDE)
    index = tl.where(l < 0.0, SIDE + 1 + distance, distance)
    counts = tl.histogram(index, ROOM, mask=finite & (distance >= 0))
    # Whole numbers add up to the same in any order, unlike floats; nobody looks before the next kernel.
    tl.atomic_add(histogram + tl.arange(0, ROOM), counts, mask=counts > 0, sem="relaxed")
    largest = LARGEST_WIDE if WIDE == tl.float64 else LARGEST
    excess = tl.minimum(expm1(l), largest)
    bounded = tl.minimum(weight, largest)
    log_behavior = tl.where(finite, beh, 0.0)
    counted = finite.to(WIDE)
    kept_ones = keep.to(WIDE)
"""
VALUES = ("counted", "kept_ones", "excess", "bounded", "excess - l", "l", "log_behavior")
VALUES += ("excess * excess", "bounded * bounded")  # in the order of COLUMNS
EXTREMES = ("tl.where(finite, l, -INF)", "tl.where(finite, -l, -INF)", "weight")
assert len(VALUES) == len(COLUMNS)

STORE = """    if GROUPS:
        together = tl.load(groups + owner) != 0
        acted = acted | tl.where(together, 0, GROUP_BIT)
        kept = kept & together
    keep = keep & kept
    weight = tl.where(keep, w, 0.0)
    tl.store(kepts + owner, kept)
    tl.store(keeps + at, keep, mask=here)
    if OUTCOME:
        tl.store(weights + at, weight, mask=here)
        tl.store(finites + at, finite, mask=here)
        if BOUNDS:
            tl.store(log_ratios + at, l, mask=here)
            tl.store(clippeds + at, clipped, mask=here)
        if OBSERVE:
            tl.store(acteds + at, acted, mask=here)
    if LOSS:
        factor = weight
        if SCALED:
            factor = factor * tl.load(scales + owner)
        most = tl.full((), LARGEST_FACTOR_WIDE if WIDE == tl.float64 else LARGEST_FACTOR, WIDE)
        factor = tl.where(factor > most, most, factor)  # infinity times 0 is NaN
        loss = tl.load(losses + at, mask=here, other=0.0)
        tl.store(factors + at, factor, mask=here)
        tl.store(products + at, tl.where(keep, loss * factor.to(loss.dtype), 0.0), mask=here)
        tl.store(ratios + at, tl.where(finite, tl.exp(l), 0.0).to(tl.float32), mask=here)
        tl.store(bounded_ones + at, (clipped & finite).to(tl.float32), mask=here)
        tl.store(rejected_ones + at, (mask & ~keep).to(tl.float32), mask=here)
"""
