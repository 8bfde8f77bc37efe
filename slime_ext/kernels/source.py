"""The text of the two Triton kernels of a correction: straight-line code written from its steps.

A program of either kernel takes a chunk of tokens inside one sequence, so what belongs to the sequence is a
scalar to it. ``statistics`` adds up each chunk; ``correct`` reads the sums of its sequence, lets every step
decide again and writes its tokens. Nothing is added with atomics, so results repeat bit by bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from slime_ext.correction import Correction
from slime_ext.coupled import Normalize, SecondMoment
from slime_ext.facts import needs_of
from slime_ext.metrics.layout import BINS, FIRST, SHIFT, SIDE
from slime_ext.ops.divergences import EDGE
from slime_ext.ops.statistics import Need, Over
from slime_ext.steps import Clip, Reject, Reweight, Taper, Truncate, Veto

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
def bernoulli_kl(a, b):
    return a * tl.log(a / b) + (1.0 - a) * tl.log((1.0 - a) / (1.0 - b))


@triton.jit
def inner(x):
    """A probability as far from 0 and 1 as KPop has it."""
    return tl.minimum(tl.maximum(tl.exp(x.to(tl.float64)), EDGE), 1.0 - EDGE)

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
VALUES = {
    "ratio": "l",
    "k1": "-l",
    "k2": "l * l / 2.0",
    "k3": "expm1(l) - l",
    "tv": "tl.where(finite, tl.abs(tl.exp(num) - tl.exp(beh)), 0.0)",
    "binary_kl": "tl.where(finite, bernoulli_kl(inner(beh), inner(num)), 0.0)",
    "binary_kl_max": "tl.where(finite, tl.maximum(bernoulli_kl(inner(beh), inner(num)), "
    "bernoulli_kl(inner(num), inner(beh))), 0.0)",
    "count": "mask.to(WIDE)",
    "sound": "tl.where(mask, tl.where(finite, 1.0, INF), 0.0)",
    "advantage": "adv",
}
ROOM = 1 << (BINS - 1).bit_length()  # bins of the histogram as Triton counts them
INPUTS = "numerators, behaviors, masks, advantages, owners, begins, sizes"


def source(correction: Correction, *, observe: bool) -> str:
    """Both kernels of a correction, as a Python module."""
    needs = correction.needs(observe=observe)
    reads = any(step.reads_advantages for step in correction.steps)
    load = LOAD + (ADVANTAGE if reads else "")
    constants = "".join(f"{name} = tl.constexpr({value})\n" for name, value in _constants(correction).items())
    kernels = _statistics(needs, load) + "\n\n" + _correct(correction, needs, load)
    return HEAD.replace("INF = ", constants + "INF = ", 1) + kernels


def _constants(correction: Correction) -> dict[str, int]:
    bins = {"SHIFT": SHIFT, "FIRST": FIRST, "SIDE": SIDE, "ROOM": ROOM}
    return bins | {"GROUP_BIT": 1 << (len(correction.steps) + 1)}


def _statistics(needs: tuple[Need, ...], load: str) -> str:
    lines = [f"    tl.store(partials + {i} * chunks + chunk, {_sum(n)})\n" for i, n in enumerate(needs)]
    signature = f"{INPUTS}, partials, chunks, WIDE: tl.constexpr, LANES: tl.constexpr"
    return f"@triton.jit\ndef statistics({signature}):\n{load}{''.join(lines)}"


def _sum(need: Need) -> str:
    if isinstance(need.name, Over):
        value = f"tl.maximum({VALUES[need.name.name]} - {number(need.name.limit)}, 0.0)"
        return f"tl.sum(tl.where(here, {value}, 0.0).to(tl.float64), 0)"
    return f"tl.sum(({VALUES[need.name]}).to(tl.float64), 0)"


def _correct(correction: Correction, needs: tuple[Need, ...], load: str) -> str:
    loads = "".join(f"    s{i} = tl.load(table + {i} * sequences + owner)\n" for i in range(len(needs)))
    body = "".join(f"    {line}\n" for line in Writer(correction, needs).lines())
    signature = (
        f"{INPUTS}, table, sequences, numbers, ages, groups, "
        "weights, keeps, finites, log_ratios, kepts, clippeds, acteds, "
        "losses, scales, products, ratios, bounded_ones, rejected_ones, histogram, "
        "WIDE: tl.constexpr, LANES: tl.constexpr, GROUPS: tl.constexpr, ACTS: tl.constexpr, "
        "LOSS: tl.constexpr, SCALED: tl.constexpr, HISTOGRAM: tl.constexpr"
    )
    return f"@triton.jit\ndef correct({signature}):\n{load}{loads}{body}{STORE}"


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


class Writer:
    """Writes the steps of a correction as lines about ``w``, ``keep``, ``clipped`` and ``acted``."""

    def __init__(self, correction: Correction, needs: tuple[Need, ...]) -> None:
        self.correction = correction
        self.slot = {need: f"s{i}" for i, need in enumerate(needs)}
        self.coupled = [step for step in correction.steps if step.is_coupled]

    def lines(self) -> Iterator[str]:
        """The state before any step, then every step."""
        yield from ("w = tl.where(here, 1.0, 1.0).to(WIDE)", "keep = finite", "clipped = lane < 0")
        yield "kept = size >= 0"
        yield "acted = tl.where(finite, 0, 1)"
        sound = Need("sum", "sequence", "sound")
        if any(step.unit == "sequence" for step in self.correction.steps):
            yield f"trusted = {self.slot[sound]} < INF"
            yield from ("kept = kept & trusted", "acted = acted | tl.where(trusted, 0, 1)")
        writers: dict[type, Any] = {
            Reweight: self._reweight,
            Taper: self._taper,
            Truncate: lambda s, i: self._bound(i, f"tl.minimum(w, {number(s.high)})"),
            Clip: lambda s, i: self._bound(
                i, f"tl.minimum(tl.maximum(w, {number(s.low)}), {number(s.high)})"
            ),
            Reject: self._reject,
            Veto: self._veto,
            SecondMoment: self._second_moment,
            Normalize: self._normalize,
        }
        for i, step in enumerate(self.correction.steps, 1):
            yield from writers[type(step)](step, i)

    def _total(self, unit: str, aggregate: str, name: str) -> str:
        if unit == "token":
            return f"({VALUES[name]})"
        slots = [self.slot[need] for need in needs_of(unit, aggregate, name)]
        return slots[0] if len(slots) == 1 else f"({slots[0]} / tl.maximum({slots[1]}, 1.0))"

    def _ratio(self, step: Reweight | Taper) -> str:
        return f"tl.exp({self._total(step.unit, step._aggregate, 'ratio')}).to(WIDE)"

    def _reweight(self, step: Reweight, i: int) -> Iterator[str]:
        yield f"w = tl.where(here, {self._ratio(step)}, 1.0)"
        yield "clipped = lane < 0"

    def _taper(self, step: Taper, i: int) -> Iterator[str]:
        yield from self._reweight(step, i)
        sides = (
            f"tl.minimum(tl.maximum(w, {number(low)}), {number(high)})"
            for low, high in (
                (step.negative_low, step.negative_high),
                (step.positive_low, step.positive_high),
            )
        )
        yield from self._bound(i, f"tl.where(adv < 0.0, {', '.join(sides)})")

    def _bound(self, i: int, bounded: str) -> Iterator[str]:
        yield f"bounded = {bounded}"
        yield from ("changed = bounded != w", "clipped = clipped | changed", "w = bounded")
        yield f"acted = acted | tl.where(changed, {1 << i}, 0)"

    def _drop(self, unit: str, i: int, inside: str) -> Iterator[str]:
        yield f"inside = {inside}"
        yield f"acted = acted | tl.where(inside, 0, {1 << i})"
        yield "keep = keep & inside" if unit == "token" else "kept = kept & inside"

    def _reject(self, step: Reject, i: int) -> Iterator[str]:
        if step.max_staleness is not None:
            yield from self._drop("sequence", i, f"~(tl.load(ages + owner) > {number(step.max_staleness)})")
        if not step._reads_ratio:
            return
        low, high = step._limits
        value = self._total(step.unit, step.aggregate, step.statistic) if not step._over else ""
        inside = (
            f"{self.slot[step._over]} == 0.0"
            if step._over
            else f"({value} >= {number(low)}) & ({value} <= {number(high)})"
        )
        yield from self._drop(
            step.unit, i, inside if step.when == "always" else f"({inside}) | ~({self._applies(step)})"
        )

    def _applies(self, step: Reject) -> str:
        advantage = self._total(step.unit, "sum", "advantage")
        if step.when == "negative_advantage":
            return f"{advantage} < 0.0"
        return f"{advantage} * {self._total(step.unit, 'sum', 'ratio')} > 0.0"

    def _veto(self, step: Veto, i: int) -> Iterator[str]:
        for need in step.needs:
            yield from self._drop("sequence", i, f"{self.slot[need]} == 0.0")

    def _second_moment(self, step: SecondMoment, i: int) -> Iterator[str]:
        yield "wide = l.to(tl.float64)"
        yield from self._drop("token", i, f"wide * wide <= tl.load(numbers + {self.coupled.index(step)})")

    def _normalize(self, step: Normalize, i: int) -> Iterator[str]:
        yield f"w = (w / tl.load(numbers + {self.coupled.index(step)})).to(WIDE)"


def number(value: float) -> str:
    """A Python float as Triton reads it."""
    if math.isinf(value):
        return "INF" if value > 0 else "-INF"
    return repr(float(value))
