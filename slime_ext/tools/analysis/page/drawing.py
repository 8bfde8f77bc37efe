"""matplotlib figures -> inline SVG in the colours of the page's style sheet."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from xml.etree import ElementTree as ET

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator, SymmetricalLogLocator
from matplotlib.transforms import blended_transform_factory

WIDTH, HEIGHT = 460, 250  # points, which are the units of the picture's coordinates
LEFT, RIGHT, TOP, BOTTOM = 66, 12, 12, 42
PANEL, GAP = 108, 22  # height of one of several panels and the space below it
LARGE_DOT, SMALL_DOT = 6.0, 3.4  # diameters, points
FEW_DECADES = 200.0  # largest value up to which a logarithmic axis has three ticks per decade
WIDE = 50.0  # largest over smallest positive value from which an axis is logarithmic
SVG = "http://www.w3.org/2000/svg"
# matplotlib wants colours; each of these is replaced by the style sheet's variable of its name, so that a
# picture follows the page's light and dark.
COLOURS = {name: f"#{i:06x}" for i, name in enumerate(("s0", "s1", "ink", "muted", "grid", "paper"), 1)}
# matplotlib's settings while pictures are drawn.
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "slime_ext",
    "text.parse_math": False,
    "font.size": 11,
    "axes.labelsize": 11,
    "axes.labelcolor": COLOURS["ink"],
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.spines.bottom": False,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": COLOURS["grid"],
    "grid.linewidth": 1,
    "xtick.color": COLOURS["muted"],
    "xtick.labelcolor": COLOURS["muted"],
    "xtick.major.size": 4,
    "ytick.labelcolor": COLOURS["muted"],
    "ytick.color": COLOURS["muted"],
    "ytick.major.size": 4,
    "ytick.major.pad": 2,
    "lines.linewidth": 1.8,
    "lines.dash_joinstyle": "round",
}
DASHES = (0, (3, 2.2))  # in line widths
# What matplotlib writes about itself.
NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
ET.register_namespace("", SVG)
ET.register_namespace("xlink", "http://www.w3.org/1999/xlink")


class Drawing:
    """A figure with one pair of axes, or with several panels over a common x axis.

    Args:
        title: what the picture shows, for readers who cannot see it.
        panels: how many pairs of axes lie above each other.
        top: space above the axes, points.
    """

    def __init__(self, title: str, panels: int = 1, top: float = TOP) -> None:
        height = HEIGHT if panels == 1 else top + PANEL * panels - GAP + BOTTOM
        self.title = title
        self.hints: dict[str, Sequence[str]] = {}
        self.figure = Figure(figsize=(WIDTH / 72, height / 72))
        self.axes: list[Axes] = list(self.figure.subplots(panels, sharex=True, squeeze=False)[:, 0])
        self.figure.subplots_adjust(
            LEFT / WIDTH, BOTTOM / height, 1 - RIGHT / WIDTH, 1 - top / height, hspace=GAP / (PANEL - GAP)
        )
        for axes in self.axes:
            axes.margins(x=0.025, y=0.06)

    def name(self, axes: Axes, x: str, y: str, ticks: int = 7) -> None:
        """Names both axes, and puts at most ``ticks`` round numbers on the y axis. To be called after all
        marks are drawn."""
        axes.set_ylabel(y)
        along_figure = blended_transform_factory(self.figure.transFigure, axes.transAxes)
        axes.yaxis.set_label_coords(12 / WIDTH, 0.5, along_figure)
        if x:
            axes.set_xlabel(x, labelpad=5)
        for axis, most in ((axes.xaxis, 7), (axes.yaxis, ticks)):
            if axis.get_scale() == "linear":
                axis.set_major_locator(MaxNLocator(most, steps=[1, 2, 5, 10]))
            elif axis.get_scale() == "log":
                axis.set_major_locator(LogLocator(numticks=most + 1))
            elif axis.get_scale() == "symlog":
                steps = (1, 2, 5) if axis.get_data_interval()[1] <= FEW_DECADES else (1,)
                axis.set_major_locator(SymmetricalLogLocator(base=10, linthresh=1, subs=steps))
            axis.set_minor_locator(NullLocator())
            axis.set_major_formatter(FuncFormatter(label))
        if axes.get_ylim()[0] <= 0 and axes.get_yscale() == "linear":
            axes.axhline(0, color=COLOURS["muted"], alpha=0.55, linewidth=1, zorder=1)

    def dots(
        self,
        axes: Axes,
        points: Sequence[tuple[float, float]],
        hints: Sequence[str],
        colour: str,
        size: float = LARGE_DOT,
        line: str | tuple = "-",
        hollow: bool = False,
    ) -> None:
        """A line through points with a dot at each, which shows its hint under the pointer.

        Args:
            hints: one for each point; none draws the line alone.
            line: matplotlib's line style; "none" draws the dots alone.
        """
        ink = COLOURS[colour]
        (drawn,) = axes.plot(
            *zip(*points, strict=True),
            color=ink,
            linestyle=line,
            linewidth=1.4 if hollow else 1.8,
            marker="o" if hints else "",
            markersize=size,
            markeredgewidth=1.2 if hollow else 0,
            markerfacecolor=COLOURS["paper"] if hollow else ink,
            clip_on=False,
        )
        drawn.set_gid(self._remember(hints))

    def bars(
        self,
        axes: Axes,
        edges: Sequence[tuple[float, float]],
        heights: Sequence[float],
        hints: Sequence[str],
        colour: str,
    ) -> None:
        """A bar between each pair of edges, from the lower limit of the y axis up, which shows its hint under
        the pointer."""
        lows = [low for low, _ in edges]
        widths = [high - low for low, high in edges]
        floor = axes.get_ylim()[0]
        above = [height - floor for height in heights]
        drawn = axes.bar(lows, above, widths, floor, align="edge", color=COLOURS[colour], alpha=0.6, lw=0)
        for bar, hint in zip(drawn, hints, strict=True):
            bar.set(gid=self._remember([hint]), clip_on=False)

    def _remember(self, hints: Sequence[str]) -> str:
        name = f"marks{len(self.hints)}"
        self.hints[name] = hints
        return name

    def svg(self, name: str) -> str:
        """The picture as markup; ``name`` is its data-picture attribute."""
        written = io.BytesIO()
        self.figure.savefig(written, format="svg", transparent=True, metadata=NO_METADATA)
        root = ET.fromstring(written.getvalue())
        root.attrib.pop("width"), root.attrib.pop("height")
        root.attrib.update({"role": "img", "aria-label": self.title, "data-picture": name})
        for element in root.iter():
            for mark, hint in zip(_marks(element), self.hints.get(element.get("id"), ()), strict=False):
                ET.SubElement(mark, f"{{{SVG}}}title").text = hint
                if mark.tag == f"{{{SVG}}}path":  # a bar: no seam between neighbours
                    mark.set("shape-rendering", "crispEdges")
        _clean(root)
        text = ET.tostring(root, encoding="unicode")
        return re.sub("|".join(COLOURS.values()), lambda found: f"var(--{_VARIABLE[found[0]]})", text)


_VARIABLE = {colour: name for name, colour in COLOURS.items()}


def label(value: float, _: object = None) -> str:
    """A number as a tick's label.

    >>> [label(v) for v in (0.0, 0.001, 0.0001, 1500, 2e6)]
    ['0', '0.001', '1e-4', '1500', '2e6']
    """
    text = f"{value:.4g}" if not value or 1e-3 <= abs(value) < 1e5 else f"{value:.2e}"
    mantissa, _, exponent = text.partition("e")
    return f"{float(mantissa):g}e{int(exponent)}" if exponent else text


def is_wide(values: Sequence[float]) -> bool:
    """Whether positive numbers differ so much that a linear axis would hide the small ones."""
    known = [v for v in values if v > 0]
    return bool(known) and max(known) > WIDE * min(known)


def _marks(group: ET.Element) -> list[ET.Element]:
    return group.findall(f".//{{{SVG}}}use") or group.findall(f"{{{SVG}}}path")


def _clean(root: ET.Element) -> None:
    """Removes what would act on the rest of the page: style rules, fonts, ids that nothing refers to."""
    used = {value for e in root.iter() for key, value in e.attrib.items() if key.endswith("href")}
    for element in root.iter():
        for rules in element.findall(f"{{{SVG}}}style"):
            element.remove(rules)
        if f"#{element.get('id')}" not in used:
            element.attrib.pop("id", None)
        if element.tag == f"{{{SVG}}}text":
            element.set("style", re.sub(r"font: [^;]*;", "", element.get("style", "")))
