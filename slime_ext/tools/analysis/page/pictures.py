"""The pictures of the page: the distribution of log-ratios, the run over time, and one for each curve."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files

import matplotlib
import numpy
import yaml

from slime_ext.tools.analysis.document import Bin, Document, Numbers, Point
from slime_ext.tools.analysis.page.drawing import (
    COLOURS,
    DASHES,
    LARGE_DOT,
    SMALL_DOT,
    STYLE,
    Drawing,
    is_wide,
    label,
)

BARS = 81
SHOWN = 0.998  # share of the tokens that the axis covers; the rest is counted in the outermost bars
NARROWEST = 1e-3  # nats, how far the axis reaches at least: less is no mismatch to look at
SPARSE, DOTTED = 80, 400  # rollouts up to which dots are large, and are drawn at all
Value = Callable[[Numbers], float | None]


@dataclass(frozen=True)
class Picture:
    """A picture: its markup, and the sentence on how to read it. Without markup: why there is none."""

    name: str
    title: str
    how: str
    missing: str = ""
    x: str = ""
    scale: str | None = None  # of the x axis; None: linear or symlog, by how wide the values spread
    is_whole: bool = False  # the x axis has whole numbers
    svg: str = ""

    def drawn(self, documents: Sequence[Document]) -> Picture:
        """The picture with its markup."""
        draw = {"distribution": _distribution, "timeline": _timeline}.get(self.name, _curve)
        drawing = draw(self, documents)
        return self if drawing is None else replace(self, svg=drawing.svg(self.name), missing="")


def _undrawn() -> list[Picture]:
    words = files(__package__).joinpath("pictures.yaml").read_text("utf-8")
    return [Picture(name, **row) for name, row in yaml.safe_load(words).items()]


def pictures(documents: Sequence[Document]) -> list[Picture]:
    """Every picture of the page, in its order; none of a curve that nobody misses."""
    with matplotlib.rc_context(STYLE):
        drawn = [picture.drawn(documents) for picture in _undrawn()]
    return [picture for picture in drawn if picture.svg or picture.missing]


def _distribution(picture: Picture, documents: Sequence[Document]) -> Drawing | None:
    reach = max((_reach(d.distribution) for d in documents), default=0)
    if not reach:
        return None
    drawing = Drawing(picture.title)
    (axes,) = drawing.axes
    axes.set_yscale("log")
    edges = numpy.linspace(-reach, reach, BARS + 1)
    runs = [_shares(d.distribution, edges) for d in documents]
    smallest = min(share for shares in runs for share in shares if share)
    axes.set(xlim=(-reach, reach), ylim=(min(10 ** math.floor(math.log10(smallest)), 0.1), 1))
    for i, shares in enumerate(runs):
        held = shares.nonzero()[0]
        places = [(edges[k], edges[k + 1]) for k in held]
        hints = [_bar_hint(*place, reach, shares[k]) for place, k in zip(places, held, strict=True)]
        drawing.bars(axes, places, shares[held], hints, f"s{i}")
    axes.axvline(0, color=COLOURS["muted"], alpha=0.55, linewidth=1, zorder=1)
    drawing.name(axes, "log-ratio: log trainer − log sampler, nats", "share of tokens")
    return drawing


def _bar_hint(low: float, high: float, reach: float, share: float) -> str:
    beyond = " and beyond" if max(abs(low), abs(high)) > 0.999 * reach else ""
    return f"{label(low)} to {label(high)} nats{beyond}: {share:.3%} of the tokens"


def _reach(bins: Sequence[Bin]) -> float:
    """The distance from 0 within which nearly all tokens lie; 0 where there are none."""
    total, seen = sum(b.count for b in bins), 0
    for outer, b in sorted((max(abs(b.low), abs(b.high)), b.count) for b in bins):
        seen += b
        if seen >= SHOWN * total:
            return max(1.1 * min(outer, 1e4), NARROWEST)
    return 0.0


def _shares(bins: Sequence[Bin], edges: numpy.ndarray) -> numpy.ndarray:
    """[bars] share of the tokens in each; a bin that lies in several is shared out evenly."""
    if not bins:
        return numpy.zeros(len(edges) - 1)
    counts = numpy.array([b.count for b in bins])
    after = counts.cumsum()
    places = numpy.array([(b.low, b.high) for b in bins]).ravel()
    below = numpy.interp(edges, places, numpy.stack([after - counts, after], 1).ravel())
    below[0], below[-1] = 0, after[-1]
    return numpy.diff(below) / after[-1]


@dataclass(frozen=True)
class TimelinePanel:
    """One row of the timeline: a number of each rollout, and the range around it."""

    name: str
    value: Value
    low: Value | None = None
    high: Value | None = None
    shown: tuple[float, ...] = ()  # numbers that the axis must include
    may_be_level: bool = True  # a number that never changes is drawn
    may_be_log: bool = False


PANELS = (
    TimelinePanel("k3, nats", lambda n: n.k3, may_be_log=True),
    TimelinePanel(
        "ratio", lambda n: n.ratio_p50, lambda n: n.ratio_p01, lambda n: n.ratio_p99, (1.0,), may_be_log=True
    ),
    TimelinePanel("ESS", lambda n: n.ess_token, shown=(0.0, 1.0)),
    TimelinePanel("reward", lambda n: n.reward),
    TimelinePanel("age, versions", lambda n: n.staleness, shown=(0.0,), may_be_level=False),
)


def _timeline(picture: Picture, documents: Sequence[Document]) -> Drawing | None:
    panels = [p for p in PANELS if any(_is_worth_a_panel(p, d) for d in documents)]
    if not panels:
        return None
    drawing = Drawing(picture.title, len(panels))
    for axes, panel in zip(drawing.axes, panels, strict=True):
        for i, document in enumerate(documents):
            _draw_run(drawing, axes, panel, document, f"s{i}")
        _scale(axes, panel, documents)
        drawing.name(axes, "rollout" if axes is drawing.axes[-1] else "", panel.name, ticks=4)
    drawing.axes[-1].xaxis.get_major_locator().set_params(integer=True)
    return drawing


def _is_worth_a_panel(panel: TimelinePanel, document: Document) -> bool:
    return len({y for _, y in _series(document, panel.value)}) > (not panel.may_be_level)


def _draw_run(drawing: Drawing, axes, panel: TimelinePanel, document: Document, colour: str) -> None:
    if panel.low and panel.high:
        low, high = _series(document, panel.low), _series(document, panel.high)
        if low and len(low) == len(high):
            xs, lows = zip(*low, strict=True)
            axes.fill_between(
                xs, lows, [y for _, y in high], color=COLOURS[colour], alpha=0.18, linewidth=0, clip_on=False
            )
    points = _series(document, panel.value)
    if points:
        hints = [f"rollout {x:g}: {panel.name} {y:.4g}" for x, y in points if len(points) <= DOTTED]
        drawing.dots(axes, points, hints, colour, LARGE_DOT if len(points) < SPARSE else SMALL_DOT)


def _scale(axes, panel: TimelinePanel, documents: Sequence[Document]) -> None:
    parts = [part for part in (panel.value, panel.low, panel.high) if part]
    values = [y for d in documents for part in parts for _, y in _series(d, part)]
    if panel.may_be_log and is_wide(values) and min(values) > 0:
        axes.set_yscale("log")
        axes.set_ylim(min(values) / 1.5, max(values) * 1.5)
    else:
        low, high = min([*values, *panel.shown]), max([*values, *panel.shown])
        air = 0.06 * (high - low) or 0.5 * abs(high) or 1.0
        is_one = low == high
        axes.set_ylim(
            low - air * (is_one or low not in panel.shown), high + air * (is_one or high not in panel.shown)
        )


def _series(document: Document, value: Value) -> list[tuple[float, float]]:
    found = [(float(m.rollout_id), value(m.numbers)) for m in document.timeline]
    return [(x, y) for x, y in found if y is not None and math.isfinite(y)]


def _curve(picture: Picture, documents: Sequence[Document]) -> Drawing | None:
    runs = [next((c.points for c in d.curves if c.name == picture.name), ()) for d in documents]
    points = [p for run in runs for p in run]
    if not points:
        return None
    drawing = Drawing(picture.title, top=24)
    (axes,) = drawing.axes
    axes.set_ylim(*_around_zero(points))
    names = {p.x: p.label for p in points if p.label}
    if not names:
        scale = picture.scale or ("symlog" if is_wide([p.x for p in points]) else "linear")
        axes.set_xscale(scale, **({"linthresh": 1, "linscale": 0.4} if scale == "symlog" else {}))
    for i, run in enumerate(runs):
        if run:
            _draw_curve(drawing, run, f"s{i}")
    for style, text in (("-", "mean |l|"), (DASHES, "mean l")):
        axes.plot([], [], color=COLOURS["muted"], linestyle=style, linewidth=1.4, label=text)
    above = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0, "borderpad": 0, "ncols": 2}
    axes.legend(**above, frameon=False, labelcolor=COLOURS["muted"], handlelength=2)
    drawing.name(axes, picture.x, "nats per token")
    if picture.is_whole and axes.get_xscale() == "linear":
        axes.xaxis.get_major_locator().set_params(integer=True)
    if names:
        axes.set_xticks(list(names), list(names.values()))
        axes.set_xlim(min(names) - 0.5, max(names) + 0.5)
    return drawing


def _around_zero(points: Sequence[Point]) -> tuple[float, float]:
    values = [0.0, *(v for p in points for v in (p.mean, p.absolute) if math.isfinite(v))]
    air = 0.06 * (max(values) - min(values)) or 1.0
    return min(values) - air * (min(values) < 0), max(values) + air


def _draw_curve(drawing: Drawing, points: Sequence[Point], colour: str) -> None:
    hints = [
        f"{p.label or label(p.x)}: mean |log-ratio| {p.absolute:.3g}, mean {p.mean:.3g}, {p.count} tokens"
        for p in points
    ]
    size = LARGE_DOT if len(points) < 30 else SMALL_DOT
    line = not any(p.label for p in points)  # categories have nothing between them
    mean, distance = [(p.x, p.mean) for p in points], [(p.x, p.absolute) for p in points]
    (axes,) = drawing.axes
    drawing.dots(axes, mean, hints, colour, 0.85 * size, DASHES if line else "none", hollow=True)
    drawing.dots(axes, distance, hints, colour, size, "-" if line else "none")
