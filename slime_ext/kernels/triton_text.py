"""The text of the two Triton kernels of a correction: straight-line code written from its steps.

A program of either kernel takes a chunk of tokens inside one sequence, so what belongs to the sequence is a
scalar to it. ``statistics`` adds up each chunk; ``correct`` reads the sums of its sequence, lets every step
decide again and writes its tokens. No float is added with atomics, so results repeat bit by bit.
"""

from __future__ import annotations

from slime_ext.correction import Correction
from slime_ext.kernels.writer import Writer, literal
from slime_ext.metrics.layout import BINS, FIRST, SHIFT, SIDE
from slime_ext.ops.divergences import EDGE
from slime_ext.ops.statistics import Need

HEAD = '''import triton
import triton.language as tl

INF = tl.constexpr(float("inf"))


@triton.jit
def expm1(x):
    """e^x - 1 by Kahan's correction: exact to rounding near 0."""
    u = tl.exp(x)
    far = (u == 0.0) | (u == INF)
    safe = tl.where(far | (u == 1.0), 2.0, u)
    near = (safe - 1.0) * (x / tl.log(safe))
    return tl.where(u == 1.0, x, tl.where(far, u - 1.0, near))


@triton.jit
def k2(l):
    return l * l / 2.0


@triton.jit
def k3(l):
    return expm1(l) - l


@triton.jit
def tv(num, beh):
    return tl.abs(tl.exp(num) - tl.exp(beh))


@triton.jit
def inner(x):
    """A probability as far from 0 and 1 as KPop has it."""
    return tl.minimum(tl.maximum(tl.exp(x.to(tl.float64)), EDGE), 1.0 - EDGE)


@triton.jit
def bernoulli_kl(a, b):
    return a * tl.log(a / b) + (1.0 - a) * tl.log((1.0 - a) / (1.0 - b))


@triton.jit
def binary_kl(num, beh):
    return bernoulli_kl(inner(beh), inner(num))


@triton.jit
def binary_kl_max(num, beh):
    return tl.maximum(binary_kl(num, beh), binary_kl(beh, num))


@triton.jit
def squares(x):
    wide = x.to(tl.float64)
    return wide * wide


@triton.jit
def over(x, limit):
    return tl.maximum(x - limit, 0.0)


@triton.jit
def parts(x, whole):
    return (x / whole).to(x.dtype)

'''.replace("EDGE", repr(EDGE))

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
START = """    nowhere = lane < 0
    w = tl.where(here, 1.0, 1.0).to(WIDE)
    keep = finite
    clipped = nowhere
    kept = size >= 0
    acted = tl.where(finite, 0, 1)
"""
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
        return literal(value)


def source(correction: Correction, *, observe: bool) -> str:
    """Both kernels of a correction, as a Python module."""
    needs = correction.needs(observe=observe)
    reads = any(step.reads_advantages for step in correction.steps)
    load = LOAD + (ADVANTAGE if reads else "")
    constants = "".join(f"{name} = tl.constexpr({value})\n" for name, value in _constants(correction).items())
    writer = Writer(correction, needs, Triton())
    kernels = _statistics(writer, load) + "\n\n" + _correct(writer, load)
    return HEAD.replace("INF = ", constants + "INF = ", 1) + kernels


def _constants(correction: Correction) -> dict[str, int]:
    bins = {"SHIFT": SHIFT, "FIRST": FIRST, "SIDE": SIDE, "ROOM": ROOM}
    return bins | {"GROUP_BIT": 1 << (len(correction.steps) + 1)}


def _statistics(writer: Writer, load: str) -> str:
    sums = [
        f"    tl.store(partials + {i} * chunks + chunk, {_sum(writer, n)})\n"
        for i, n in enumerate(writer.needs)
    ]
    signature = f"{INPUTS}, partials, chunks, WIDE: tl.constexpr, LANES: tl.constexpr"
    return f"@triton.jit\ndef statistics({signature}):\n{load}{''.join(sums)}"


def _sum(writer: Writer, need: Need) -> str:
    return f"tl.sum(tl.where(here, {writer.summand(need)}, 0.0).to(tl.float64), 0)"


def _correct(writer: Writer, load: str) -> str:
    loads = "".join(
        f"    s{i} = tl.load(table + {i} * sequences + owner)\n" for i in range(len(writer.needs))
    )
    lines = writer.lines()
    body = "".join(f"    {name} = {value}\n" for name, value in (*writer.ahead, *lines))
    signature = (
        f"{INPUTS}, table, sequences, numbers, ages, groups, "
        "weights, keeps, finites, log_ratios, kepts, clippeds, acteds, "
        "losses, scales, products, ratios, bounded_ones, rejected_ones, histogram, "
        "WIDE: tl.constexpr, LANES: tl.constexpr, GROUPS: tl.constexpr, ACTS: tl.constexpr, "
        "LOSS: tl.constexpr, SCALED: tl.constexpr, HISTOGRAM: tl.constexpr"
    )
    return f"@triton.jit\ndef correct({signature}):\n{load}{loads}{START}{body}{STORE}"


STORE = """    if GROUPS:
        together = tl.load(groups + owner) != 0
        acted = acted | tl.where(together, 0, GROUP_BIT)
        kept = kept & together
    keep = keep & kept
    tl.store(kepts + owner, kept)
    tl.store(weights + at, tl.where(keep, w, 0.0), mask=here)
    tl.store(keeps + at, keep, mask=here)
    tl.store(finites + at, finite, mask=here)
    tl.store(log_ratios + at, l, mask=here)
    if ACTS:
        tl.store(clippeds + at, clipped, mask=here)
        tl.store(acteds + at, acted, mask=here)
    if LOSS:
        factor = tl.where(keep, w, 0.0)
        if SCALED:
            factor = factor * tl.load(scales + owner)
        loss = tl.load(losses + at, mask=here, other=0.0)
        tl.store(products + at, tl.where(keep, loss * factor.to(loss.dtype), 0.0), mask=here)
        tl.store(ratios + at, tl.where(finite, tl.exp(l), 0.0).to(tl.float32), mask=here)
        tl.store(bounded_ones + at, (clipped & finite).to(tl.float32), mask=here)
        tl.store(rejected_ones + at, (mask & ~keep).to(tl.float32), mask=here)
    if HISTOGRAM:
        bits = tl.abs(l).to(tl.float32).to(tl.int32, bitcast=True) >> SHIFT
        distance = tl.minimum(bits - FIRST, SIDE)
        index = tl.where(l < 0.0, SIDE + 1 + distance, distance)
        counts = tl.histogram(index, ROOM, mask=finite & (distance >= 0))
        # Whole numbers add up to the same in any order, unlike floats.
        tl.atomic_add(histogram + tl.arange(0, ROOM), counts, mask=counts > 0)
"""
