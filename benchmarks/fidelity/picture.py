"""Draws the figures of docs/what_each_method_does.md.

    python -m benchmarks.fidelity --figures

Each figure is drawn twice, for the site's light and dark palette. Large letters are readable on a telephone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from benchmarks.fidelity import page
from benchmarks.fidelity.page import LEAST_KEPT, NONE, PRODUCT, TOKEN, Row, against

FOLDER = Path(__file__).parents[2] / "docs/img"
WORLDS = ("stale", "far")
WIDTH, SIZE, DPI = 5.6, 11, 220  # inches; points, of which 11 are 10 pixels if the figure is 370 pixels wide


@dataclass(frozen=True)
class Palette:
    """The colours of one variant of the figures."""

    ink: str
    faint: str
    smaller: str
    larger: str
    same: str
    background: str


LIGHT = Palette("#222222", "#bbbbbb", "#1f6fb2", "#c2571a", "#707070", "white")
DARK = Palette("#e2e4e9", "#565a66", "#6db3f2", "#f0975a", "#a4a8b3", "none")

# The methods that the trade-off names: world -> method -> (label, its offset in points, its aligned side).
LABELS: dict[str, dict[str, tuple[str, tuple[float, float], str]]] = {
    "stale": {
        PRODUCT: ("product of ratios", (9, 2), "left"),
        "seq_is": ("seq_is", (7, 5), "left"),
        TOKEN: ("token_tis, icepop", (8, 7), "left"),
        NONE: ("no correction", (9, -9), "left"),
        "min_prefix": ("min_prefix", (-7, -14), "right"),
        "ipo": ("ipo", (9, -1), "left"),
        "delightful": ("delightful", (9, -1), "left"),
        "ctpo": ("ctpo", (9, 1), "left"),
        "icepop": ("", (0, 0), "left"),
    },
    "far": {
        "seq_is": ("seq_is", (-7, -12), "right"),
        "min_prefix": ("min_prefix", (-2, -15), "left"),
        TOKEN: ("token_tis", (9, -6), "left"),
        "icepop": ("icepop", (-7, 5), "right"),
        NONE: ("no correction", (9, 5), "left"),
        "dppo_tv": ("dppo_tv", (9, 5), "left"),
        "delightful": ("delightful", (9, -11), "left"),
        "ctpo": ("ctpo", (9, 1), "left"),
    },
}
WIDEST = {"stale": 1.75, "far": 4.35}  # bias at the right edge; no range ends beyond it
HIGHEST = {"stale": 4.2, "far": 5.8}  # variance at the top edge; only the product's variance is above it
LEGEND = (
    ("smaller", "smaller than token_tis"),
    ("same", "not told apart from token_tis"),
    ("larger", "larger than token_tis"),
)


def write(under_way: Callable[[list], Iterable] = iter, folder: Path = FOLDER) -> None:
    """Evaluates the methods and draws both figures, each for both palettes."""
    worlds = {name: drawn for name, drawn in page.drawn().items() if name in WORLDS}
    rows = page.short_rows(worlds, under_way)
    k3 = {name: fmean(world.k3 for world in drawn) for name, drawn in worlds.items()}
    for suffix, palette in (("", LIGHT), ("_dark", DARK)):
        figures = {"fidelity_tradeoff": tradeoff, "fidelity_bias": biases}
        for name, draw in figures.items():
            figure = draw(rows, k3, palette)
            figure.savefig(folder / f"{name}{suffix}.png", dpi=DPI, facecolor=palette.background)


def _kept(row: Row, world: str) -> float:
    return fmean(f.kept for f in row.exact[world])


def _span(values: Sequence[float]) -> tuple[float, float, float]:
    return fmean(values), min(values), max(values)


def tradeoff(rows: Mapping[str, Row], k3: Mapping[str, float], palette: Palette) -> Figure:
    """Draws the bias of each method against its variance, in one panel for each world.

    Only the methods in LABELS show a name and ranges, because all 22 would hide each other.
    """
    figure = Figure(figsize=(WIDTH, 8.2), layout="constrained")
    for ax, world in zip(figure.subplots(len(k3), 1), k3, strict=True):
        _panel(ax, f"{world}: k3 {k3[world]:.2g}", palette)
        for name, row in rows.items():
            bias, low, high = _span(row.biases(world))
            variance, least, most = _span([f.variance for f in row.exact[world]])
            if _kept(row, world) < LEAST_KEPT:
                continue
            if variance > HIGHEST[world]:
                text = f"\u2191 {name}: bias {bias:.0f}, variance {variance:.0f}"
                ax.text(0.03, 0.95, text, transform=ax.transAxes, color=palette.ink, fontsize=SIZE, va="top")
                continue
            if name not in LABELS[world]:
                ax.plot(bias, variance, "o", color=palette.same, ms=4, alpha=0.7)
                continue
            colour = palette.larger if name == NONE else palette.smaller
            ax.plot([low, high], [variance] * 2, color=colour, alpha=0.4, lw=1.3)
            ax.plot([bias] * 2, [least, most], color=colour, alpha=0.4, lw=1.3)
            ax.plot(bias, variance, "o", color=colour, ms=7)
            label, offset, side = LABELS[world][name]
            ax.annotate(
                label,
                (bias, variance),
                offset,
                textcoords="offset points",
                ha=side,
                color=palette.ink,
                fontsize=SIZE,
            )
        ax.set_xlim(-0.03 * WIDEST[world], WIDEST[world])
        ax.set_ylim(0, HIGHEST[world])
        ax.set_ylabel("variance", fontsize=SIZE, color=palette.ink)
    ax.set_xlabel("bias (0: unbiased, 1: as wrong as no gradient)", fontsize=SIZE, color=palette.ink)
    return figure


def biases(rows: Mapping[str, Row], k3: Mapping[str, float], palette: Palette) -> Figure:
    """Draws a row for each method: its bias, coloured by the comparison with token_tis."""
    order = sorted(rows, key=lambda name: fmean(rows[name].biases(WORLDS[0])))
    figure = Figure(figsize=(WIDTH, 0.29 * len(order) + 2.2), layout="constrained")
    axes = figure.subplots(1, len(k3), sharey=True)
    for ax, world in zip(axes, k3, strict=True):
        _panel(ax, f"{world}: k3 {k3[world]:.2g}", palette)
        for place, name in enumerate(order):
            bias, low, high = _span(rows[name].biases(world))
            if _kept(rows[name], world) < LEAST_KEPT:
                ax.plot(bias, place, "x", color=palette.ink, ms=6)
                continue
            colour = palette.ink if name == TOKEN else getattr(palette, side_of(rows, name, world))
            ax.plot([low, high], [place, place], color=colour, alpha=0.45, lw=2)
            ax.plot(bias, place, "D" if name == TOKEN else "o", color=colour, ms=6)
        ax.set_xlim(-0.05 * WIDEST[world], WIDEST[world])
        ax.set_xlabel("bias", fontsize=SIZE, color=palette.ink)
    axes[0].set_yticks(range(len(order)), ["no correction" if name == NONE else name for name in order])
    axes[0].invert_yaxis()
    marks = [Line2D([], [], color=getattr(palette, side), marker="o", lw=2, label=t) for side, t in LEGEND]
    marks.append(Line2D([], [], color=palette.ink, marker="x", lw=0, label=f"keeps below {LEAST_KEPT:.0%}"))
    figure.legend(
        handles=marks,
        loc="outside lower center",
        ncols=1,
        frameon=False,
        fontsize=SIZE,
        labelcolor=palette.ink,
    )
    return figure


def side_of(rows: Mapping[str, Row], name: str, world: str) -> str:
    """Compares a method's bias with that of token weights: smaller, larger, or same."""
    said = against(TOKEN, rows[name], rows[TOKEN], world)
    return said.split()[0] if said.startswith(("smaller", "larger")) else "same"


def _panel(ax: Axes, title: str, palette: Palette) -> None:
    ax.set_title(title, fontsize=SIZE, loc="left", color=palette.ink)
    ax.set_facecolor("none")
    ax.grid(alpha=0.35, color=palette.faint, lw=0.6)
    ax.tick_params(labelsize=SIZE, colors=palette.ink)
    for side, spine in ax.spines.items():
        spine.set_visible(side not in ("top", "right"))
        spine.set_color(palette.faint)
