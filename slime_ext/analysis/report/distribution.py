"""The distribution of log-ratios as a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from slime_ext.analysis.document import Bin, Document
from slime_ext.analysis.report.picture import Picture
from slime_ext.analysis.report.scales import say
from slime_ext.analysis.report.svg import Canvas, Plot, frame

BARS = 80


def distribution(documents: Sequence[Document]) -> Picture:
    """How many tokens have which log-ratio, on axes that show rare ones."""
    about = Picture(
        "distribution",
        "How far apart the two policies are, token by token",
        "Right of 0 the trainer finds a token more probable than the sampler did, left less: healthy is one "
        "narrow peak at 0, a shifted peak is a bias, and a long tail means that few tokens decide all.",
    )
    shares = [_rebinned(d.distribution) for d in documents]
    heights = [h for share in shares for _, _, h in share]
    if not heights:
        return about.without("No log-ratio could be computed.")
    edge = max(abs(e) for share in shares for low, high, _ in share for e in (low, high))
    floor = 10 ** math.floor(math.log10(min(heights)))
    canvas = Canvas(about.name, about.title)
    plot = Plot(canvas, *frame((-edge, edge), (floor, 1), x_kind="symlog", knee=KNEE, y_kind="log"))
    plot.axes("log-ratio: log trainer − log sampler, nats", "share of tokens")
    plot.mark(0)
    for i, share in enumerate(shares):
        for low, high, height in share:
            x, y = plot.x(low), plot.y(height)
            hint = f"{say(low)} to {say(high)} nats: {height:.3%} of the tokens"
            size = {"width": round(plot.x(high) - x, 2), "height": round(plot.y.start - y, 2)}
            canvas.draw("rect", f"bar s{i}", hint, x=x, y=y, **size)
    return about.drawn(canvas)


KNEE = 1e-4  # nats; below it the distribution's axis is about linear


def _rebinned(bins: Sequence[Bin]) -> list[tuple[float, float, float]]:
    """Bars of equal width on a two-sided logarithmic axis: low, high, share of the tokens."""
    total = sum(b.count for b in bins)
    if not total:
        return []
    ends = [_bent(e) for b in bins if b.count for e in (b.low, b.high) if math.isfinite(e)]
    edge = max(map(abs, ends))
    width = 2 * edge / (BARS + 1)  # odd, so that one bar is around 0
    counts: dict[int, float] = {}
    for b in bins:
        for at, share in _spread(b, edge, width):
            counts[at] = counts.get(at, 0) + share * b.count / total
    return [
        (_unbent((at - 0.5) * width), _unbent((at + 0.5) * width), share)
        for at, share in sorted(counts.items())
        if share > 0
    ]


def _spread(b: Bin, edge: float, width: float) -> list[tuple[int, float]]:
    """The bars that a bin lies in, with the part of it that each takes."""
    low, high = (min(max(_bent(e), -edge), edge) for e in (b.low, b.high))
    first, last = round(low / width), round(high / width)
    if first == last or high <= low or low < 0 < high:
        return [(round((low + high) / 2 / width), 1.0)]
    cuts = [low, *((i + 0.5) * width for i in range(first, last)), high]
    return [(first + k, (b_ - a_) / (high - low)) for k, (a_, b_) in enumerate(pairwise(cuts))]


def _bent(value: float) -> float:
    if math.isinf(value):
        return math.copysign(8.0, value)
    return math.copysign(math.log10(1 + abs(value) / KNEE), value)


def _unbent(place: float) -> float:
    return math.copysign(KNEE * (10 ** abs(place) - 1), place)
