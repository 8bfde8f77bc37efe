"""Draws the pictures of the page: the distribution of log-ratios, the run over time, and three curves."""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files

import matplotlib
import numpy
import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from slime_ext.tools.analysis.document import Bin, Document
from slime_ext.tools.analysis.page.drawing import (
    COLOURS,
    DASHES,
    STYLE,
    dots,
    figure,
    is_wide,
    name_axes,
    svg,
)

BARS = 81
COVERED = 0.998  # share of the tokens that the axis covers; the outermost bars count the rest
NARROWEST = 1e-3  # nats, least reach of the axis, because a smaller mismatch does not matter
SPARSE, DOTTED = 80, 400  # with at most so many points, dots are large; with at most so many, there are dots
LARGE, SMALL = 6.0, 3.4  # diameters of dots, points


@dataclass(frozen=True)
class Picture:
    """A picture: its SVG and how to read it, or the reason why there is none."""

    name: str
    title: str
    how: str
    missing: str
    svg: str

    @property
    def address(self) -> str:
        """The SVG as the ``src`` of an image, from which nothing can act on the page."""
        return f"data:image/svg+xml;base64,{b64encode(self.svg.encode()).decode()}"


def pictures(documents: Sequence[Document]) -> list[Picture]:
    """Returns every picture of the page, in order."""
    rows = yaml.safe_load(files(__package__).joinpath("pictures.yaml").read_text("utf-8"))
    drawn_pictures = []
    with matplotlib.rc_context(STYLE):
        for name, row in rows.items():
            drawn = DRAWN.get(name, _curve)(documents, name)
            drawn_pictures.append(Picture(name, **row, svg=svg(drawn) if drawn else ""))
    return drawn_pictures


def _distribution(documents: Sequence[Document], _: str) -> Figure | None:
    reach = max((_reach(d.distribution) for d in documents), default=0)
    if not reach:
        return None
    drawn, (axes,) = figure()
    axes.set_yscale("log")
    edges = numpy.linspace(-reach, reach, BARS + 1)
    runs = [_shares(d.distribution, edges) for d in documents]
    smallest = min(share for shares in runs for share in shares if share)
    floor = min(10 ** math.floor(math.log10(smallest)), 0.1)
    axes.set(xlim=(-reach, reach), ylim=(floor, 1))
    for i, shares in enumerate(runs):
        colour = (COLOURS[f"s{i}"], 0.6)
        axes.stairs(shares.clip(floor), edges, baseline=floor, fill=True, color=colour, linewidth=0)
    axes.axvline(0, color=COLOURS["muted"], alpha=0.55, linewidth=1, zorder=1)
    name_axes(axes, "log-ratio: log trainer − log sampler, nats", "share of tokens")
    return drawn


def _reach(bins: Sequence[Bin]) -> float:
    """Returns the distance from 0 within which nearly all tokens lie; 0 without tokens."""
    total, seen = sum(b.count for b in bins), 0
    for outer, count in sorted((max(abs(b.low), abs(b.high)), b.count) for b in bins):
        seen += count
        if seen >= COVERED * total:
            return max(1.1 * min(outer, 1e4), NARROWEST)
    return 0.0


def _shares(bins: Sequence[Bin], edges: NDArray[numpy.float64]) -> NDArray[numpy.float64]:
    """Returns the share of the tokens in each bar, [bars]. A bin across several bars is split evenly."""
    if not bins:
        return numpy.zeros(len(edges) - 1)
    counts = numpy.array([b.count for b in bins])
    after = counts.cumsum()
    places = numpy.array([(b.low, b.high) for b in bins]).ravel()
    below = numpy.interp(edges, places, numpy.stack([after - counts, after], 1).ravel())
    below[0], below[-1] = 0, after[-1]
    return numpy.diff(below) / float(after[-1])


@dataclass(frozen=True)
class Panel:
    """A panel of the timeline: a field of ``Numbers``, and a range around it."""

    name: str
    value: str
    around: tuple[str, ...] = ()
    included: tuple[float, ...] = ()  # numbers that the axis must include
    may_be_log: bool = False


PANELS = (
    Panel("k3, nats", "k3", may_be_log=True),
    Panel("ratio", "ratio_p50", ("ratio_p01", "ratio_p99"), (1.0,), may_be_log=True),
    Panel("ESS", "ess_token", included=(0.0, 1.0)),
    Panel("reward", "reward"),
    Panel("age, versions", "staleness", included=(0.0,)),
)


def _timeline(documents: Sequence[Document], _: str) -> Figure | None:
    panels = [panel for panel in PANELS if any(_is_worth_a_panel(panel, d) for d in documents)]
    if not panels:
        return None
    drawn, rows = figure(len(panels))
    for axes, panel in zip(rows, panels, strict=True):
        values = list(panel.included)
        for i, document in enumerate(documents):
            values += _draw_run(axes, panel, document, f"s{i}")
        if panel.may_be_log and is_wide(values) and min(values) > 0:
            axes.set_yscale("log")
        axes.update_datalim([(documents[0].timeline[0].rollout_id, value) for value in panel.included])
        axes.autoscale_view()
        if panel.included and min(values) >= panel.included[0]:
            axes.set_ylim(bottom=panel.included[0])
        name_axes(axes, "rollout" if axes is rows[-1] else "", panel.name, ticks=4)
    rows[-1].locator_params("x", integer=True)
    return drawn


def _is_worth_a_panel(panel: Panel, document: Document) -> bool:
    """Returns whether a panel is worth drawing. Ages that never change are only a tile."""
    return len({y for _, y in _series(document, panel.value)}) > (panel.value == "staleness")


def _draw_run(axes: Axes, panel: Panel, document: Document, colour: str) -> list[float]:
    """Draws a run. Returns the values that the axis shows."""
    points, *around = (_series(document, name) for name in (panel.value, *panel.around))
    if not points:
        return []
    if around and len(around[0]) == len(around[1]):
        low, high = ([y for _, y in side] for side in around)
        axes.fill_between([x for x, _ in around[0]], low, high, color=COLOURS[colour], alpha=0.18, lw=0)
    size = LARGE if len(points) < SPARSE else SMALL if len(points) <= DOTTED else 0
    dots(axes, points, colour, size)
    return [y for side in (points, *around) for _, y in side]


def _series(document: Document, name: str) -> list[tuple[float, float]]:
    points = [(float(m.rollout_id), getattr(m.numbers, name)) for m in document.timeline]
    return [(x, y) for x, y in points if y is not None and math.isfinite(y)]


SYMLOG = {"linthresh": 1, "linscale": 0.4}
AXES = {
    "position": "position in the response, tokens",
    "staleness": "age, weight versions",
    "probability": "probability under the sampler",
}
SEEN = "rollouts since the version first sampled"  # where the dumps hold no ages


def _curve(documents: Sequence[Document], name: str) -> Figure | None:
    runs = [next((c.points for c in d.curves if c.name == name), ()) for d in documents]
    points = [p for run in runs for p in run]
    if not points:
        return None
    drawn, (axes,) = figure()
    scale = "log" if name == "probability" else "symlog" if is_wide([p.x for p in points]) else "linear"
    axes.set_xscale(scale, **SYMLOG if scale == "symlog" else {})
    for colour, run in ((f"s{i}", run) for i, run in enumerate(runs) if run):
        size = LARGE if len(run) < 30 else SMALL
        dots(axes, [(p.x, p.mean) for p in run], colour, 0.85 * size, DASHES, hollow=True)
        dots(axes, [(p.x, p.absolute) for p in run], colour, size)
    for style, text in (("-", "mean |l|"), (DASHES, "mean l")):
        axes.plot([], [], color=COLOURS["muted"], linestyle=style, linewidth=1.4, label=text)
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1),
        borderaxespad=0,
        borderpad=0,
        ncols=2,
        frameon=False,
        labelcolor=COLOURS["muted"],
        handlelength=2,
    )
    axes.update_datalim([(points[0].x, 0.0)])
    axes.autoscale_view()
    if min(p.mean for p in points) >= 0:
        axes.set_ylim(bottom=0)
    is_bounded = name == "staleness" and any(d.total.least_staleness is not None for d in documents)
    name_axes(axes, SEEN if is_bounded else AXES[name], "nats per token")
    if scale == "linear":
        axes.locator_params("x", integer=True)
    return drawn


Draw = Callable[[Sequence[Document], str], Figure | None]
DRAWN: dict[str, Draw] = {"distribution": _distribution, "timeline": _timeline}
