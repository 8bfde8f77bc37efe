"""The run from rollout to rollout as a picture."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slime_ext.analysis.document import Document, Numbers
from slime_ext.analysis.report.picture import Picture
from slime_ext.analysis.report.scales import around, is_wide, reach, say
from slime_ext.analysis.report.svg import BOTTOM, TOP, Canvas, Plot, frame

Value = Callable[[Numbers], float | None]


@dataclass(frozen=True)
class Panel:
    """One row of the timeline."""

    name: str
    value: Value
    low: Value | None = None
    high: Value | None = None
    fixed: tuple[float, ...] = ()  # numbers that the axis must show
    may_be_log: bool = False


PANELS = (
    Panel("k3, nats", lambda n: n.k3, may_be_log=True),
    Panel(
        "ratio", lambda n: n.ratio_p50, lambda n: n.ratio_p01, lambda n: n.ratio_p99, (1.0,), may_be_log=True
    ),
    Panel("ESS", lambda n: n.ess_token, fixed=(0.0, 1.0)),
    Panel("reward", lambda n: n.reward),
    Panel("age, versions", lambda n: n.staleness, fixed=(0.0,)),
)
ROW = 108.0
GAP = 22.0
SPARSE, DOTTED = 80, 400  # rollouts up to which dots are large, and are drawn at all


def timeline(documents: Sequence[Document]) -> Picture:
    """The run from rollout to rollout."""
    about = Picture(
        "timeline",
        "From rollout to rollout",
        "Read down a column: a k3 that climbs before the reward falls is a collapse by off-policy data, "
        "teeth in k3 with the period of the age are weights that are pushed too rarely; ratio is the median "
        "with the range from the 1st to the 99th percentile.",
        wide=True,
    )
    panels = _shown(documents)
    ids = [m.rollout_id for d in documents for m in d.timeline]
    if not panels or not ids:
        return about.without("No rollout could be analysed.")
    canvas = Canvas(about.name, about.title, TOP + ROW * len(panels) + BOTTOM - GAP)
    for k, panel in enumerate(panels):
        plot = _axes(canvas, panel, documents, TOP + ROW * k, ids)
        rounded = {float(t): say(t) for t in plot.x.ticks() if t == int(t)}
        plot.axes("rollout" if k == len(panels) - 1 else "", panel.name, rounded or None)
        _lines(plot, panel, documents)
    return about.drawn(canvas)


def _axes(canvas: Canvas, panel: Panel, documents: Sequence[Document], top: float, ids: list[int]) -> Plot:
    parts = [part for part in (panel.value, panel.low, panel.high) if part]
    values = [v for d in documents for part in parts for _, v in _row(d, part)]
    is_log = panel.may_be_log and is_wide(values) and min(values) > 0
    y = (min(values) / 1.5, max(values) * 1.5) if is_log else around(values, *panel.fixed)
    kinds = {"y_kind": "log" if is_log else "linear", "y_many": 5}
    return Plot(canvas, *frame(reach(ids, "linear"), y, top=top, height=ROW - GAP + TOP + BOTTOM, **kinds))


def _shown(documents: Sequence[Document]) -> list[Panel]:
    return [p for p in PANELS if any(_row(d, p.value) for d in documents)]


def _lines(plot: Plot, panel: Panel, documents: Sequence[Document]) -> None:
    for i, document in enumerate(documents):
        _line(plot, panel, document, f"s{i}")


def _line(plot: Plot, panel: Panel, document: Document, kind: str) -> None:
    if panel.low and panel.high:
        low, high = (plot.place(_row(document, part)) for part in (panel.low, panel.high))
        if len(low) == len(high):
            plot.canvas.band(low, high, kind)
    rows = _row(document, panel.value)
    places = plot.place(rows)
    plot.canvas.line(places, kind)
    if len(rows) <= DOTTED:
        hints = [f"rollout {x:g}: {panel.name} {v:.4g}" for x, v in rows]
        plot.canvas.dots(places, hints, kind, 2.6 if len(rows) < SPARSE else 1.2)


def _row(document: Document, value: Value) -> list[tuple[float, float]]:
    found = [(float(m.rollout_id), value(m.numbers)) for m in document.timeline]
    return [(x, v) for x, v in found if v is not None and math.isfinite(v)]
