"""How the log-ratio depends on something, as pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slime_ext.analysis.document import Document, Point
from slime_ext.analysis.report.picture import Picture
from slime_ext.analysis.report.scales import Kind, around, is_wide, reach, say
from slime_ext.analysis.report.svg import HEIGHT, Canvas, Plot, frame

NATS = "nats per token"
MANY = 30  # points from which dots are small


@dataclass(frozen=True)
class CurveKind:
    """A curve of the document as a picture."""

    name: str
    title: str
    x_name: str
    how: str
    missing: str = ""  # what to say where there is none; empty: no picture then
    x_kind: Kind | None = None


CURVES = (
    CurveKind(
        "position",
        "Along the response",
        "position in the response, tokens",
        "Flat is healthy; a rise is drift that accumulates, a first token that stands out a wrong alignment "
        "or a prompt that the two sides see differently.",
        "No response is longer than one token.",
    ),
    CurveKind(
        "staleness",
        "By age of the sampling weights",
        "age, weight versions",
        "Age 0 is pure numerics; what grows from there is staleness, "
        "a jump at one age is one bad weight update.",
        "The dump does not say which weights sampled which token.",
    ),
    CurveKind(
        "probability",
        "By probability under the sampler",
        "probability under the sampler",
        "A distance that grows as tokens get rarer is rounding (a narrow dtype or quantised weights); a mean "
        "that crosses 0 on a slope is a temperature.",
        "No log-prob was recorded.",
        "log",
    ),
    CurveKind(
        "length",
        "By length of the response",
        "response length, tokens",
        "Flat is healthy: long answers are no worse than short ones.",
    ),
    CurveKind(
        "turn",
        "By turn",
        "turn",
        "Turns after a tool's answer should look like the first; if not, the tool's tokens are masked or "
        "tokenised wrongly.",
    ),
    CurveKind(
        "outcome",
        "Correct against incorrect samples",
        "outcome",
        "Equal heights are healthy; otherwise a correction treats successes and failures differently.",
    ),
)


def curve(kind: CurveKind, documents: Sequence[Document]) -> Picture | None:
    """Mean |log-ratio| (solid) and mean log-ratio (dashed) against something; None where nobody misses it."""
    about = Picture(kind.name, kind.title, kind.how)
    found = [_find(d, kind.name) for d in documents]
    points = [p for curve in found for p in curve]
    if not points:
        return about.without(kind.missing) if kind.missing else None
    plot = _axes(kind, points, Canvas(about.name, about.title))
    _legend(plot)
    for i, run in enumerate(found):
        _two_lines(plot, run, i)
    return about.drawn(plot.canvas)


def _axes(kind: CurveKind, points: Sequence[Point], canvas: Canvas) -> Plot:
    xs = [p.x for p in points]
    labels = {p.x: p.label for p in points if p.label}
    x_kind = kind.x_kind or ("symlog" if is_wide(xs) else "linear")
    x = (min(xs) - 0.5, max(xs) + 0.5) if labels else reach(xs, x_kind)
    y = around([v for p in points for v in (p.mean, p.absolute)], 0.0)
    plot = Plot(canvas, *frame(x, y, top=24, height=HEIGHT - 12, x_kind=x_kind, knee=1.0))
    plot.axes(kind.x_name, NATS, labels or None)
    return plot


def _find(document: Document, name: str) -> tuple[Point, ...]:
    return next((c.points for c in document.curves if c.name == name), ())


def _legend(plot: Plot) -> None:
    """Which line is which, above the plot."""
    for x, kind, name in ((plot.x.start, "", "mean |l|"), (plot.x.start + 90, " dashed", "mean l")):
        plot.canvas.line([(x, 7), (x + 22, 7)], f"plain{kind}")
        plot.canvas.write(x + 27, 10.5, name)


def _two_lines(plot: Plot, points: Sequence[Point], i: int) -> None:
    signed = plot.place([(p.x, p.mean) for p in points])
    size = plot.place([(p.x, p.absolute) for p in points])
    hints = [
        f"{p.label or say(p.x)}: mean |log-ratio| {p.absolute:.3g}, mean {p.mean:.3g}, {p.count} tokens"
        for p in points
    ]
    if not any(p.label for p in points):  # categories have nothing between them
        plot.canvas.line(signed, f"s{i} dashed")
        plot.canvas.line(size, f"s{i}")
    radius = 2.6 if len(points) < MANY else 1.6
    plot.canvas.dots(signed, hints, f"s{i} hollow", 0.85 * radius)
    plot.canvas.dots(size, hints, f"s{i}", radius)
