"""The distribution of log-ratios as a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence

from slime_ext.analysis.document import Bin, Document
from slime_ext.analysis.report.picture import Picture
from slime_ext.analysis.report.scales import say
from slime_ext.analysis.report.svg import Canvas, Plot, frame

BARS = 40  # on each side of the one around 0
SHOWN = 0.998  # share of the tokens that the axis covers; the rest is counted in its last bars
SMALLEST = 1e-3  # nats, how far the axis reaches at least: less is no mismatch to look at
Bar = tuple[float, float, float]  # low, high, share of the tokens


def distribution(documents: Sequence[Document]) -> Picture:
    """How many tokens have which log-ratio; a logarithmic height shows rare ones."""
    about = Picture(
        "distribution",
        "How far apart the two policies are, token by token",
        "Right of 0 the trainer finds a token more probable than the sampler did, left less: healthy is one "
        "narrow peak at 0, a shifted peak is a bias, and a slow descent means that few tokens decide all.",
    )
    edge = max((_edge(d.distribution) for d in documents), default=0)
    runs = [_bars(d.distribution, edge) for d in documents] if edge else []
    heights = [h for bars in runs for _, _, h in bars]
    if not heights:
        return about.without("No log-ratio could be computed.")
    floor = min(10 ** math.floor(math.log10(min(heights))), 0.1)
    canvas = Canvas(about.name, about.title)
    plot = Plot(canvas, *frame((-edge, edge), (floor, 1), y_kind="log"))
    plot.axes("log-ratio: log trainer − log sampler, nats", "share of tokens")
    plot.mark(0)
    for i, bars in enumerate(runs):
        for bar in bars:
            _draw(plot, bar, f"bar s{i}", edge)
    return about.drawn(canvas)


def _draw(plot: Plot, bar: Bar, kind: str, edge: float) -> None:
    low, high, share = bar
    beyond = " and beyond" if max(abs(low), abs(high)) >= edge * 0.999 else ""
    x, y = plot.x(low), plot.y(share)
    size = {"width": round(plot.x(high) - x, 2), "height": round(plot.y.start - y, 2)}
    hint = f"{say(low)} to {say(high)} nats{beyond}: {share:.3%} of the tokens"
    plot.canvas.draw("rect", kind, hint, x=x, y=y, **size)


def _edge(bins: Sequence[Bin]) -> float:
    """The distance from 0 within which nearly all tokens lie; 0 where there are none."""
    total, seen = sum(b.count for b in bins), 0
    for b in sorted(bins, key=_outer):
        seen += b.count
        if seen >= SHOWN * total:
            return max(1.1 * _outer(b), SMALLEST) if math.isfinite(_outer(b)) else 2 * _inner(b)
    return 0.0


def _bars(bins: Sequence[Bin], edge: float) -> list[Bar]:
    """Bars of equal width; a bin that lies in several is shared out evenly."""
    total = sum(b.count for b in bins)
    width = 2 * edge / (2 * BARS + 1)
    shares: dict[int, float] = {}
    for b in bins:
        low, high = (min(max(e, -edge * 0.9999), edge * 0.9999) for e in (b.low, b.high))
        first, last = math.floor(low / width + 0.5), math.floor(high / width + 0.5)
        for at in range(first, last + 1):
            inside = min(high, (at + 0.5) * width) - max(low, (at - 0.5) * width)
            part = inside / (high - low) if high > low else 1.0
            shares[at] = shares.get(at, 0) + part * b.count / total
    return [((k - 0.5) * width, (k + 0.5) * width, v) for k, v in sorted(shares.items()) if v > 0]


def _outer(b: Bin) -> float:
    return max(abs(b.low), abs(b.high))


def _inner(b: Bin) -> float:
    return min(abs(b.low), abs(b.high))
