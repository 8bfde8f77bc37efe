"""docs/img/evidence.png and evidence_all.png: held-out share right over optimizer steps, a seed a line.

evidence.png, which README.md shows, is one row: four arms of panels that differ in seeds and arms alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from benchmarks.evidence.judge import Rows
from benchmarks.evidence.rows import Row
from benchmarks.evidence.settings import ROOT, Settings
from benchmarks.evidence.table import by_arm

FOLDER = ROOT / "docs/img"
FIRST = "lm_lag", "lm_lag_again", "lm_lag_center"  # the panels of README.md
COLOUR = "#2a5d9f"
COLUMNS = 4
DPI = 130


def write(of: Settings, rows: Sequence[Row], folder: Path = FOLDER) -> None:
    """Draws the panels that have lines, four arms in a row; an arm that has those of another is left out."""
    panels = {name: lines for name in of.panels if (lines := _own(by_arm(of, name, rows)))}
    folder.mkdir(parents=True, exist_ok=True)
    draw(of, panels).savefig(folder / "evidence_all.png", dpi=DPI)
    draw(of, {FIRST[0]: together([panels[name] for name in FIRST])}).savefig(folder / "evidence.png", dpi=DPI)


def together(panels: Sequence[Rows]) -> Rows:
    """The arms that more than one panel has, their seeds together: arm -> seed -> row. A seed of an arm that
    several have is one run."""
    arms = [arm for arm in panels[0] if sum(arm in lines for lines in panels) > 1]
    return {arm: dict(item for lines in panels for item in lines.get(arm, {}).items()) for arm in arms}


def draw(of: Settings, panels: Mapping[str, Mapping[str, Mapping[int, Row]]]) -> Figure:
    """The figure."""
    rows = [
        (name, list(lines.items())[i : i + COLUMNS]) for name, lines in panels.items() for i in _starts(lines)
    ]
    height, width = max(len(rows), 1), max((len(arms) for _, arms in rows), default=1)
    figure = Figure(figsize=(2.4 * width + 0.6, 2.4 * height + 0.3), layout="constrained")
    axes = figure.subplots(height, width, sharex="row", sharey=True, squeeze=False)
    for ax in axes.flat:
        ax.set_visible(False)
    for row, (name, arms) in zip(axes, rows, strict=False):
        row[0].set_ylabel(f"{name}: held-out share right", fontsize=8)
        for ax, (arm, seeds) in zip(row, arms, strict=False):
            _arm(ax, f"{arm}  {of.arms[arm].what}", list(seeds.values()))
    return figure


def _own(lines: Rows) -> Rows:
    return {arm: seeds for arm, seeds in lines.items() if any(row.arm == arm for row in seeds.values())}


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
    ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    for row in rows:
        steps, values = zip(*row.heldout, strict=True)
        ax.plot(steps, values, color=COLOUR, alpha=0.35, linewidth=0.9)
        if row.stopped:
            ax.plot(steps[-1], values[-1], "x", color="#b03030")
    by_step = list(zip(*(row.heldout for row in rows), strict=False))
    means = [(points[0][0], sum(value for _, value in points) / len(points)) for points in by_step]
    ax.plot(*zip(*means, strict=True), color=COLOUR, linewidth=2.2)
    ax.annotate(f"{len(rows)} seeds", (0.03, 0.93), xycoords="axes fraction", fontsize=7)


def _wrapped(title: str, width: int = 28) -> str:
    words, lines = title.split(" "), [""]
    for word in words:
        if len(lines[-1]) + len(word) > width:
            lines.append("")
        lines[-1] += f"{word} "
    return "\n".join(line.rstrip() for line in lines)
