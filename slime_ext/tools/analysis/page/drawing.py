"""Draws figures with matplotlib, as SVG in the page's light colours."""

from __future__ import annotations

import io
from collections.abc import Sequence

from matplotlib import RcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator, SymmetricalLogLocator
from matplotlib.transforms import blended_transform_factory

WIDTH, HEIGHT = 460, 250  # points, the unit of the picture's coordinates
LEFT, RIGHT, TOP, BOTTOM = 66, 12, 24, 42
PANEL, GAP = 108, 22  # height of one of several panels; space below it
FEW_DECADES = 200.0  # largest value up to which a logarithmic axis has three ticks per decade
WIDE = 50.0  # largest over smallest positive value above which an axis is logarithmic
COLOURS = {  # the light colours of style.css, which inverts pictures on a dark page
    **{"s0": "#0b62a8", "s1": "#c2540a"},
    **{"ink": "#1b1f24", "muted": "#5b6470", "grid": "#e8ebef", "paper": "#ffffff"},
}
# Settings of matplotlib while pictures are drawn.
_STYLE = {
    "svg.fonttype": "none",  # writes letters as text, not as outlines
    "svg.hashsalt": "slime_ext",
    "text.parse_math": False,
    "font.size": 11,
    "axes.labelcolor": COLOURS["ink"],
    **dict.fromkeys((f"axes.spines.{side}" for side in ("left", "right", "top", "bottom")), False),
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": COLOURS["grid"],
    "grid.linewidth": 1,
    **{f"{axis}tick.{what}": COLOURS["muted"] for axis in "xy" for what in ("color", "labelcolor")},
    "ytick.major.pad": 2,
    "lines.dash_joinstyle": "round",
}
STYLE = RcParams(_STYLE)
DASHES = (0, (3, 2.2))  # in line widths
NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))  # what matplotlib writes about itself


def figure(panels: int = 1) -> tuple[Figure, list[Axes]]:
    """Returns a figure with one pair of axes, or with several panels over a common x axis."""
    height = HEIGHT if panels == 1 else TOP + PANEL * panels - GAP + BOTTOM
    made = Figure(figsize=(WIDTH / 72, height / 72))
    panel_axes = list(made.subplots(panels, sharex=True, squeeze=False)[:, 0])
    made.subplots_adjust(
        LEFT / WIDTH, BOTTOM / height, 1 - RIGHT / WIDTH, 1 - TOP / height, hspace=GAP / (PANEL - GAP)
    )
    for axes in panel_axes:
        axes.margins(x=0.025, y=0.06)
    return made, panel_axes


def name_axes(axes: Axes, x: str, y: str, ticks: int = 7) -> None:
    """Names both axes, and puts at most ``ticks`` round numbers on the y axis.

    Call it after all marks are drawn.
    """
    axes.set_ylabel(y)
    along_figure = blended_transform_factory(axes.figure.transFigure, axes.transAxes)
    axes.yaxis.set_label_coords(12 / WIDTH, 0.5, along_figure)
    axes.set_xlabel(x, labelpad=5)
    for axis, most in ((axes.xaxis, 7), (axes.yaxis, ticks)):
        steps = (1, 2, 5) if axis.get_data_interval()[1] <= FEW_DECADES else (1,)
        locators = {
            "linear": MaxNLocator(most, steps=[1, 2, 5, 10]),
            "log": LogLocator(numticks=most + 1),
            "symlog": SymmetricalLogLocator(base=10, linthresh=1, subs=steps),
        }
        axis.set_major_locator(locators[axis.get_scale()])
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(label))
    if axes.get_ylim()[0] <= 0 and axes.get_yscale() == "linear":
        axes.axhline(0, color=COLOURS["muted"], alpha=0.55, linewidth=1, zorder=1)


def dots(
    axes: Axes,
    points: Sequence[tuple[float, float]],
    colour: str,
    size: float,
    line: str | tuple[float, tuple[float, ...]] = "-",
    hollow: bool = False,
) -> None:
    """Draws a line through points, with a dot of diameter ``size`` (points; 0: no dot) at each."""
    axes.plot(
        *zip(*points, strict=True),
        color=COLOURS[colour],
        linestyle=line,
        linewidth=1.4 if hollow else 1.8,
        marker="o" if size else "",
        markersize=size,
        markeredgewidth=1.2 if hollow else 0,
        markerfacecolor=COLOURS["paper" if hollow else colour],
        clip_on=False,
    )


def svg(drawn: Figure) -> str:
    """Returns a figure as the text of an SVG file, which is the same each time."""
    written = io.StringIO()
    drawn.savefig(written, format="svg", transparent=True, metadata=NO_METADATA)
    return written.getvalue()


def label(value: float, _: object = None) -> str:
    """Returns a number as the label of a tick.

    >>> [label(v) for v in (0.0, 0.001, 0.0001, 1500, 2e6)]
    ['0', '0.001', '1e-4', '1500', '2e6']
    """
    text = f"{value:.4g}" if not value or 1e-3 <= abs(value) < 1e5 else f"{value:.2e}"
    mantissa, _, exponent = text.partition("e")
    return f"{float(mantissa):g}e{int(exponent)}" if exponent else text


def is_wide(values: Sequence[float]) -> bool:
    """Returns whether positive numbers differ so much that a linear axis would hide the small ones."""
    known = [v for v in values if v > 0]
    return bool(known) and max(known) > WIDE * min(known)
