"""Pictures as inline SVG: axes, lines, bands, bars. Colours come from the page's style sheet, so that they
follow its light and dark; text goes through ElementTree, which escapes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree import ElementTree as ET

from slime_ext.analysis.report.scales import MANY, Scale, say

WIDTH, HEIGHT = 460, 250
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 12, 42
Places = Sequence[tuple[float, float]]


@dataclass
class Canvas:
    """An <svg> that grows; ``height`` may be more than one plot's."""

    name: str
    title: str
    height: float = HEIGHT

    def __post_init__(self) -> None:
        self.root = ET.Element(
            "svg",
            {
                "viewBox": f"0 0 {WIDTH} {self.height:g}",
                "role": "img",
                "aria-label": self.title,
                "data-picture": self.name,
            },
        )

    def draw(self, tag: str, kind: str, hint: str = "", **attributes: object) -> ET.Element:
        """One element of a style-sheet class; ``hint`` is shown while the pointer rests on it."""
        named = {key.replace("_", "-"): str(value) for key, value in attributes.items()}
        element = ET.SubElement(self.root, tag, {"class": kind, **named})
        if hint:
            ET.SubElement(element, "title").text = hint
        return element

    def write(self, x: float, y: float, text: str, kind: str = "tick", **attributes: object) -> None:
        """Text whose baseline is at y."""
        self.draw("text", kind, x=round(x, 1), y=round(y, 1), **attributes).text = text

    def line(self, places: Places, kind: str) -> None:
        """A polyline through the places."""
        if len(places) > 1:
            self.draw("path", f"line {kind}", d="M" + "L".join(f"{x:g} {y:g}" for x, y in places))

    def dots(self, places: Places, hints: Sequence[str], kind: str, radius: float = 2.6) -> None:
        """A dot at every place, each with its numbers."""
        for (x, y), hint in zip(places, hints, strict=True):
            self.draw("circle", f"dot {kind}", hint, cx=x, cy=y, r=radius)

    def band(self, lower: Places, upper: Places, kind: str) -> None:
        """The area between two lines."""
        if len(lower) > 1:
            around = [*lower, *reversed(upper)]
            self.draw("path", f"band {kind}", d="M" + "L".join(f"{x:g} {y:g}" for x, y in around) + "Z")

    def text(self) -> str:
        """The picture as markup."""
        return ET.tostring(self.root, encoding="unicode")


@dataclass(frozen=True)
class Plot:
    """One pair of axes on a canvas."""

    canvas: Canvas
    x: Scale
    y: Scale

    def place(self, points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
        """Numbers -> places."""
        return [(self.x(x), self.y(y)) for x, y in points]

    def axes(self, x_name: str, y_name: str, x_labels: dict[float, str] | None = None) -> None:
        """Grid lines, ticks and names; a name left empty draws no ticks there either."""
        left, right, bottom, top = self.x.start, self.x.stop, self.y.start, self.y.stop
        for tick in self.y.ticks():
            y = self.y(tick)
            self.canvas.draw("line", "zero" if tick == 0 else "grid", x1=left, x2=right, y1=y, y2=y)
            self.canvas.write(left - 6, y + 3.5, say(tick), text_anchor="end")
        if x_name:
            for tick, label in (x_labels or {t: say(t) for t in self.x.ticks()}).items():
                x = self.x(tick)
                self.canvas.draw("line", "grid", x1=x, x2=x, y1=bottom, y2=bottom + 4)
                self.canvas.write(x, bottom + 16, label, text_anchor="middle")
            self.canvas.write((left + right) / 2, bottom + 33, x_name, "name", text_anchor="middle")
        middle = (top + bottom) / 2
        turned = f"rotate(-90 12 {middle:g})"
        self.canvas.write(12, middle, y_name, "name", text_anchor="middle", transform=turned)

    def mark(self, x: float) -> None:
        """A vertical line at a number that means something."""
        self.canvas.draw("line", "zero", x1=self.x(x), x2=self.x(x), y1=self.y.start, y2=self.y.stop)


def frame(x: tuple[float, float], y: tuple[float, float], top: float = TOP, height: float = HEIGHT, **kinds):
    """Scales of a plot in the usual margins: ``x_kind``, ``y_kind``, ``knee`` (of x) and
    ``y_many`` change the axes."""
    bottom = top + height - TOP - BOTTOM
    across = Scale(*x, LEFT, WIDTH - RIGHT, kinds.get("x_kind", "linear"), kinds.get("knee", 1.0))
    return across, Scale(*y, bottom, top, kinds.get("y_kind", "linear"), many=kinds.get("y_many", MANY))
