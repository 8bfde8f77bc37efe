"""The Triton functions that no correction changes: arithmetic, sums over chunks, the metrics' last additions.

Nothing here is added with float atomics, so results repeat bit by bit.
"""

import triton
import triton.language as tl

from slime_ext.kernels.machine_code import kernel
from slime_ext.metrics.layout import (
    AGES,
    BINS,
    COLUMNS,
    CURVE_BINS,
    CURVE_COLUMNS,
    HIGHEST,
    PER_SEQUENCE,
)
from slime_ext.ops.divergences import EDGE as EDGE_OF_KPOP

INF = tl.constexpr(float("inf"))
EDGE = tl.constexpr(EDGE_OF_KPOP)
LOG_RATIO = tl.constexpr(COLUMNS.index("log_ratio"))
ROWS = tl.constexpr(len(COLUMNS))
SHOWN = tl.constexpr(len(CURVE_COLUMNS))
CELLS = tl.constexpr(CURVE_BINS * len(CURVE_COLUMNS))  # numbers of a curve
EXTREMES = tl.constexpr(3)  # of tokens; those of sequences follow
OLDEST = tl.constexpr(len(HIGHEST) - 1)
OF_SEQUENCES = tl.constexpr(len(PER_SEQUENCE))
ALL_BINS = tl.constexpr(BINS)
A1, A2, A3, A4, A5, A6, A7 = map(tl.constexpr, AGES)


@triton.jit
def expm1(x):
    """e^x - 1 by Kahan's correction: exact to rounding near 0."""
    u = tl.exp(x)
    far = (u == 0.0) | (u == INF)
    safe = tl.where(far | (u == 1.0), 2.0, u)
    near = (safe - 1.0) * (x / tl.log(safe))
    return tl.where(u == 1.0, x, tl.where(far, u - 1.0, near))


@triton.jit
def k2(x):
    return x * x / 2.0


@triton.jit
def k3(x):
    return expm1(x) - x


@triton.jit
def tv(num, beh):
    return tl.abs(tl.exp(num) - tl.exp(beh))


@triton.jit
def inner(x):
    """A probability as far from 0 and 1 as KPop has it; see ``number`` in triton_text."""
    low, high = tl.full((), EDGE, tl.float64), tl.full((), 1.0 - EDGE, tl.float64)
    return tl.minimum(tl.maximum(tl.exp(x.to(tl.float64)), low), high)


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
    return (x.to(tl.float64) / whole).to(x.dtype)


@triton.jit
def put(rows, row, chunk, chunks, values):
    """The sum of a chunk's values into its place of a row."""
    tl.store(rows + row * chunks + chunk, tl.sum(values, 0).to(tl.float64))


@triton.jit
def put_highest(rows, row, chunk, chunks, values):
    tl.store(rows + row * chunks + chunk, tl.max(values, 0).to(tl.float64))


@kernel
def totals(
    partials,
    offsets,
    table,
    histogram,
    chunks,
    sequences,
    NEEDS: tl.constexpr,
    LANES: tl.constexpr,
    ROOM: tl.constexpr,
):
    """One program per sequence: the sums of its chunks. The first also empties the histogram."""
    owner = tl.program_id(0)
    begin, end = tl.load(offsets + owner), tl.load(offsets + owner + 1)
    for need in tl.static_range(NEEDS):
        found = tl.zeros((LANES,), tl.float64)
        for start in range(begin, end, LANES):
            at = start + tl.arange(0, LANES)
            found += tl.load(partials + need * chunks + at, mask=at < end, other=0.0)
        tl.store(table + need * sequences + owner, tl.sum(found, 0))
    if owner == 0:
        tl.store(histogram + tl.arange(0, ROOM), tl.zeros((ROOM,), tl.int32))


@kernel
def reduced(
    rows,
    chunks,
    owners,
    places,
    table,
    RATIO,
    COUNT,
    kepts,
    ages,
    sequences,
    histogram,
    sums,
    highest,
    log_sums,
    FLAGS: tl.constexpr,
    CURVES: tl.constexpr,
    AGED: tl.constexpr,
    HERE: tl.constexpr,
    LANES: tl.constexpr,
):
    """One program per number, its sum over all chunks, in the order of slime_ext.metrics.layout; the last
    program is that of sequences and the histogram."""
    number = tl.program_id(0)
    added = ROWS + FLAGS
    names = added + 1 + OF_SEQUENCES
    curves = 3 * CELLS if CURVES else 0
    if number < added:
        if number != LOG_RATIO:
            tl.store(sums + number, over_chunks(rows + number * chunks, chunks, LANES))
    elif number < added + EXTREMES:
        tl.store(highest + number - added, highest_of(rows + number * chunks, chunks, LANES))
    elif number < added + EXTREMES + curves:
        cell = number - added - EXTREMES
        found = in_cell(cell, rows, added + EXTREMES, chunks, owners, places, ages, AGED, LANES)
        tl.store(sums + names + ALL_BINS + cell, found)
    else:
        tl.store(sums + added, 0.0)  # where the surrogate clipped: known to nobody yet
        count, ratio = table + COUNT * sequences, table + RATIO * sequences
        end = sequences if HERE else 0
        of_sequences(count, kepts, ages, end, sums + added + 1, highest + OLDEST, AGED, LANES)
        of_ratios(count, ratio, end, sums + LOG_RATIO, highest + EXTREMES, log_sums, LANES)
        for start in range(0, ALL_BINS, LANES):
            at = start + tl.arange(0, LANES)
            found = tl.load(histogram + at, mask=at < ALL_BINS, other=0)
            tl.store(sums + names + at, found.to(tl.float64), mask=at < ALL_BINS)


@triton.jit
def in_cell(cell, rows, first, chunks, owners, places, ages, AGED: tl.constexpr, LANES: tl.constexpr):
    """A number of the curves: by position, by age, by probability. A chunk lies in one bin of the first two;
    for the third ``correct`` wrote a row per number."""
    bin, column = cell % CELLS // SHOWN, cell % SHOWN
    if cell < CELLS:
        return at_position(rows + column * chunks, places, bin, chunks, LANES)
    elif cell < 2 * CELLS:
        if AGED:
            return at_age(rows + column * chunks, owners, ages, bin, chunks, LANES)
        else:
            return tl.zeros((), tl.float64)
    else:
        return over_chunks(rows + (first + cell - 2 * CELLS) * chunks, chunks, LANES)


@triton.jit
def over_chunks(row, chunks, LANES: tl.constexpr):
    found = tl.zeros((LANES,), tl.float64)
    for start in range(0, chunks, LANES):
        at = start + tl.arange(0, LANES)
        found += tl.load(row + at, mask=at < chunks, other=0.0)
    return tl.sum(found, 0)


@triton.jit
def highest_of(row, chunks, LANES: tl.constexpr):
    found = tl.full((LANES,), -INF, tl.float64)
    for start in range(0, chunks, LANES):
        at = start + tl.arange(0, LANES)
        found = tl.maximum(found, tl.load(row + at, mask=at < chunks, other=-INF))
    return tl.max(found, 0)


@triton.jit
def at_position(row, places, bin, chunks, LANES: tl.constexpr):
    """The sum over the chunks of one bin of position; no chunk lies in two."""
    found = tl.zeros((LANES,), tl.float64)
    for start in range(0, chunks, LANES):
        at = start + tl.arange(0, LANES)
        here = (at < chunks) & (tl.load(places + at, mask=at < chunks, other=-1) == bin)
        found += tl.load(row + at, mask=here, other=0.0)
    return tl.sum(found, 0)


@triton.jit
def at_age(row, owners, ages, bin, chunks, LANES: tl.constexpr):
    """The sum over the chunks of the sequences of one bin of age."""
    found = tl.zeros((LANES,), tl.float64)
    for start in range(0, chunks, LANES):
        at = start + tl.arange(0, LANES)
        owner = tl.load(owners + at, mask=at < chunks, other=0)
        age = tl.load(ages + owner).to(tl.float64)
        reached = (age >= A1).to(tl.int32) + (age >= A2).to(tl.int32) + (age >= A3).to(tl.int32)
        reached += (age >= A4).to(tl.int32) + (age >= A5).to(tl.int32) + (age >= A6).to(tl.int32)
        reached += (age >= A7).to(tl.int32)
        here = (at < chunks) & (age == age) & (reached == bin)
        found += tl.load(row + at, mask=here, other=0.0)
    return tl.sum(found, 0)


@triton.jit
def of_sequences(count, kepts, ages, end, sums, oldest, AGED: tl.constexpr, LANES: tl.constexpr):
    """Sums over the sequences that have response tokens, and the largest age."""
    zeros = tl.zeros((LANES,), tl.float64)
    tokens, all_there, all_kept, aged, age_sum = zeros, zeros, zeros, zeros, zeros
    most = zeros - INF
    for start in range(0, end, LANES):
        at = start + tl.arange(0, LANES)
        counted = tl.load(count + at, mask=at < end, other=0.0)
        there = counted > 0.0
        tokens += counted
        all_there += there.to(tl.float64)
        all_kept += ((tl.load(kepts + at, mask=there, other=0) != 0) & there).to(tl.float64)
        if AGED:
            age = tl.load(ages + at, mask=there, other=0.0).to(tl.float64)
            known = there & (age == age)
            aged += known.to(tl.float64)
            age_sum += tl.where(known, age, 0.0)
            most = tl.maximum(most, tl.where(known, age, -INF))
    tl.store(sums, tl.sum(tokens, 0))
    tl.store(sums + 1, tl.sum(all_there, 0))
    tl.store(sums + 2, tl.sum(all_kept, 0))
    tl.store(sums + 3, tl.sum(aged, 0))
    tl.store(sums + 4, tl.sum(age_sum, 0))
    tl.store(oldest, tl.max(most, 0))


@triton.jit
def of_ratios(count, ratio, end, total, highest, log_sums, LANES: tl.constexpr):
    """The sum of log-ratios, the largest and the negated smallest, the logarithms of the sums of squared
    ratios and of ratios."""
    zeros = tl.zeros((LANES,), tl.float64)
    found, most, least = zeros, zeros - INF, zeros - INF
    for start in range(0, end, LANES):
        at = start + tl.arange(0, LANES)
        there = tl.load(count + at, mask=at < end, other=0.0) > 0.0
        own = tl.load(ratio + at, mask=there, other=0.0)
        found += own
        most = tl.maximum(most, tl.where(there, own, -INF))
        least = tl.maximum(least, tl.where(there, -own, -INF))
    largest = tl.max(most, 0)
    one, two = zeros, zeros
    for start in range(0, end, LANES):
        at = start + tl.arange(0, LANES)
        there = tl.load(count + at, mask=at < end, other=0.0) > 0.0
        less = tl.where(there, tl.load(ratio + at, mask=there, other=0.0) - largest, -INF)
        one += tl.exp(less)
        two += tl.exp(2.0 * less)
    base = tl.where(largest == -INF, 0.0, largest)
    tl.store(total, tl.sum(found, 0))
    tl.store(highest, largest)
    tl.store(highest + 1, tl.max(least, 0))
    tl.store(log_sums, 2.0 * base + tl.log(tl.sum(two, 0)))
    tl.store(log_sums + 1, base + tl.log(tl.sum(one, 0)))
