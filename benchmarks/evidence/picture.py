"""Draws docs/img/gains.png: the gain of every remedy under the lag of four, and of token_tis elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.evidence.judge import UNCORRECTED, gaps
from benchmarks.evidence.pooled import SHOWN, Condition, Remedy, conditions, lines_of
from benchmarks.evidence.rows import Row
from benchmarks.evidence.settings import ROOT, Settings

FOLDER = ROOT / "docs/img"
COLOUR = "#2a5d9f"
DPI = 130
WIDEST = 0.95  # the largest gain that is drawn
FIRST, EVERYWHERE = "lag", "C"  # the condition with all remedies, and the arm of every other line


def write(of: Settings, rows: Sequence[Row], folder: Path = FOLDER) -> None:
    """Draws the picture."""
    folder.mkdir(parents=True, exist_ok=True)
    gains(of, conditions(of, rows), rows).savefig(folder / "gains.png", dpi=DPI)


def lines(measured: Mapping[str, Condition]) -> Iterator[tuple[str, str, Remedy | None]]:
    """Yields (condition, label, remedy) of each line, from the top; a heading has no remedy."""
    yield FIRST, "Weights pushed every 4th rollout", None
    yield from ((FIRST, remedy.remedy, remedy) for remedy in measured[FIRST].remedies)
    yield FIRST, "token_tis elsewhere", None
    for name, label in SHOWN.items():
        if name != FIRST and name in measured and (remedy := measured[name].of(EVERYWHERE)):
            yield name, label, remedy


def gains(of: Settings, measured: Mapping[str, Condition], rows: Sequence[Row]) -> Figure:
    """Returns the figure. A line has a dot for each seed, and a bar for the interval of the mean."""
    drawn = list(lines(measured))
    inches = 0.22 * len(drawn) + 0.95
    figure = Figure(figsize=(7.6, inches))
    figure.text(
        0.015, 1 - 0.17 / inches, "Gain over uncorrected runs of the same seeds", va="center", fontsize=11
    )
    ax = figure.add_axes((0.36, 0.5 / inches, 0.40, 1 - 0.85 / inches))
    beside = {"transform": ax.get_yaxis_transform(), "va": "center", "fontsize": 9}
    for place, (name, label, remedy) in enumerate(drawn):
        if remedy is None:
            ax.text(-0.86, place, label, weight="bold", **beside)
            continue
        of_arm = lines_of(of, name, rows)
        of_seeds = list(gaps(of_arm[remedy.arm], of_arm[UNCORRECTED]).values())
        ax.plot(of_seeds, [place] * len(of_seeds), "o", ms=3.5, mew=0, color=COLOUR, alpha=0.3)
        ax.plot([remedy.low, remedy.high], [place, place], color=COLOUR, lw=1.8, solid_capstyle="butt")
        ax.plot(remedy.effect, place, "D", ms=5, color=COLOUR)
        ax.text(-0.84, place, label, **beside)
        ax.text(1.03, place, remedy.gain, **beside)
    ax.set_ylim(len(drawn) - 0.5, -0.5)
    ax.set_xlim(-WIDEST, WIDEST)
    ax.axvline(0, color="k", lw=0.8, zorder=0.5)
    ax.set_xlabel("share of held-out questions: a dot for each seed; mean, with its 95% interval", fontsize=9)
    ax.set_yticks([])
    ax.grid(axis="x", alpha=0.3)
    ax.tick_params(axis="x", labelsize=8.5)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    return figure
