"""docs/img/evidence.png: held-out exact match over optimizer steps, an arm a panel, a seed a line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.evidence.rows import Row
from benchmarks.evidence.settings import ROOT, Settings
from benchmarks.evidence.table import by_arm

OUT = ROOT / "docs/img/evidence.png"
COLOUR = "#2a5d9f"
COLUMNS = 4


def write(of: Settings, rows: Sequence[Row], path: Path = OUT) -> None:
    """Draws the panels that have lines, four arms in a row."""
    panels = {name: lines for name in of.panels if (lines := by_arm(of, name, rows))}
    figure = draw(of, panels)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def draw(of: Settings, panels: Mapping[str, Mapping[str, Mapping[int, Row]]]) -> Figure:
    """The figure."""
    rows = [
        (name, list(lines.items())[i : i + COLUMNS]) for name, lines in panels.items() for i in _starts(lines)
    ]
    height = max(len(rows), 1)
    figure = Figure(figsize=(2.4 * COLUMNS + 0.6, 2.4 * height + 0.3), layout="constrained")
    axes = figure.subplots(height, COLUMNS, sharex="row", sharey=True, squeeze=False)
    for ax in axes.flat:
        ax.set_visible(False)
    for row, (name, arms) in zip(axes, rows, strict=False):
        row[0].set_ylabel(f"{name}: held-out exact match")
        for ax, (arm, seeds) in zip(row, arms, strict=False):
            _arm(ax, f"{arm}  {of.arms[arm].what}", list(seeds.values()))
    return figure


def _starts(lines: Mapping[str, object]) -> range:
    """Where a panel's rows of axes begin among its arms."""
    return range(0, len(lines), COLUMNS)


def _arm(ax: Axes, title: str, rows: Sequence[Row]) -> None:
    """Every seed a thin line, with a cross where it diverged; their mean a thick one."""
    ax.set_visible(True)
    ax.set_title(_wrapped(title), fontsize=8, loc="left")
    ax.set_ylim(-0.02, 1.02)
    ax.grid(alpha=0.25)
    ax.tick_params(labelsize=7)
    ax.set_xlabel("optimizer steps", fontsize=7)
    for row in rows:
        steps, values = zip(*row.heldout, strict=True)
        ax.plot(steps, values, color=COLOUR, alpha=0.35, linewidth=0.9)
        if row.stopped:
            ax.plot(steps[-1], values[-1], "x", color="#b03030")
    together = list(zip(*(row.heldout for row in rows), strict=False))
    means = [(points[0][0], sum(value for _, value in points) / len(points)) for points in together]
    ax.plot(*zip(*means, strict=True), color=COLOUR, linewidth=2.2)
    ax.annotate(f"{len(rows)} seeds", (0.97, 0.04), xycoords="axes fraction", ha="right", fontsize=7)


def _wrapped(title: str, width: int = 28) -> str:
    words, lines = title.split(" "), [""]
    for word in words:
        if len(lines[-1]) + len(word) > width:
            lines.append("")
        lines[-1] += f"{word} "
    return "\n".join(line.rstrip() for line in lines)
