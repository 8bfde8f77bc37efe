"""Draws docs/img/gains.png, evidence.png, evidence_k3.png and evidence_all.png.

README.md shows the first: the gain of every remedy over uncorrected runs of the language model, with its
interval. The second has the score at the end of each of these runs, with a row for each arm and a dot for
each seed. The third has differences of such scores against k3, over several lags. The fourth has the held-out
score over optimizer steps, with a line for each seed.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from benchmarks.evidence.judge import EXACT, UNCORRECTED, Rows, gaps
from benchmarks.evidence.pooled import evidence, lines_of, remedy_of, without_follower
from benchmarks.evidence.rows import Row
from benchmarks.evidence.settings import ROOT, Settings
from benchmarks.evidence.table import by_arm, own
from slime_ext.tools.analysis.evidence import Condition, Evidence

FOLDER = ROOT / "docs/img"
COLOUR = "#2a5d9f"
COLUMNS = 4
DPI = 130
TITLE = 72  # letters of a title's line
TASK = "SmolLM2-135M learns to add"  # of the picture of gains,
HEADING, GAINS = 100, 0.45  # with the letters of a heading's line, and the largest gain that is drawn
LAGS = {"no_lag": "no lag", "lag2": "lag of 2", "lag": "lag of 4", "lag8": "lag of 8"}  # condition -> label
COMPARED = {
    EXACT: "what the lag costs: no lag - uncorrected",
    "C": "what token_tis gains over uncorrected",
    "S": "what score centering gains over uncorrected",
}


def write(of: Settings, rows: Sequence[Row], folder: Path = FOLDER) -> None:
    """Draws the pictures. The last leaves out an arm that has only runs of another arm."""
    folder.mkdir(parents=True, exist_ok=True)
    measured = Evidence.model_validate(evidence(of, rows))
    gains(of, measured).savefig(folder / "gains.png", dpi=DPI)
    ends(of, rows).savefig(folder / "evidence.png", dpi=DPI)
    against_k3(of, rows).savefig(folder / "evidence_k3.png", dpi=DPI)
    panels = {name: lines for name in of.panels if (lines := own(by_arm(of, name, rows)))}
    draw(of, panels).savefig(folder / "evidence_all.png", dpi=DPI)


def gains(of: Settings, measured: Evidence) -> Figure:
    """Returns the figure of README.md: under each condition the gain of every remedy, in two columns."""
    conditions = [condition for condition in measured.conditions if of.is_language_model(condition.name)]
    sizes = [len(_heading(condition)) + len(condition.remedies) for condition in conditions]
    height, first = min((max(sum(sizes[:n]), sum(sizes[n:])), n) for n in range(len(sizes) + 1))
    inches = 0.19 * height + 0.9
    figure = Figure(figsize=(13.4, inches))
    blue = f"blue: p < {measured.significance:g}, after Holm over the rows below a heading"
    title = f"{TASK}: gain over uncorrected runs of the same seeds ({blue})"
    figure.text(0.005, 1 - 0.2 / inches, title, va="center", fontsize=9.5)
    for left, column in ((0.0, conditions[:first]), (0.5, conditions[first:])):
        ax = figure.add_axes((left + 0.22, 0.5 / inches, 0.142, 1 - 0.9 / inches))
        _gains(ax, column)
        ax.set_ylim(height - 0.5, -0.5)
        ax.set_xlim(-GAINS, GAINS)
    return figure


def _heading(condition: Condition) -> list[str]:
    """Returns the lines above a condition's remedies."""
    k3 = f"(k3 {condition.range})".replace(" ", "\N{NO-BREAK SPACE}")
    what = condition.what.removeprefix(TASK).lstrip(",; ")
    return textwrap.wrap(f"{what}{condition.whose} {k3}", HEADING)


def _gains(ax: Axes, conditions: Sequence[Condition]) -> None:
    """Draws a column of conditions."""
    place, beside = 0, {"transform": ax.get_yaxis_transform(), "va": "center", "fontsize": 8}
    for condition in conditions:
        for line in _heading(condition):
            ax.text(-1.52, place, line, weight="bold", **beside)
            place += 1
        for remedy in condition.remedies:
            colour = COLOUR if remedy.helped or remedy.did_harm else "#999999"
            ax.plot([remedy.low, remedy.high], [place, place], color=colour, lw=1.6, solid_capstyle="butt")
            ax.plot(remedy.effect, place, "o", ms=4.5, color=colour)
            ax.text(-1.48, place, remedy.remedy, **beside)
            ax.text(1.04, place, remedy.gain, **beside)
            place += 1
    ax.axvline(0, color="k", lw=0.8)
    ax.set_xlabel("gain, and its 95% interval", fontsize=8)
    ax.set_yticks([])
    ax.grid(axis="x", alpha=0.3)
    ax.tick_params(axis="x", labelsize=8)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)


def ends(of: Settings, rows: Sequence[Row]) -> Figure:
    """Returns the figure of the ends: a row of axes per condition of the language model."""
    lines = {
        name: without_follower(arms)
        for name in of.conditions
        if of.is_language_model(name) and (arms := lines_of(of, name, rows))
    }
    heights = [len(arms) for arms in lines.values()]
    figure = Figure(figsize=(8, 0.2 * sum(heights) + 0.65 * len(lines)), layout="constrained")
    axes = figure.subplots(len(lines), 1, sharex=True, height_ratios=heights, squeeze=False)
    for (ax,), (name, arms) in zip(axes, lines.items(), strict=True):
        _ends(ax, of, name, arms)
    axes[-1][0].set_xlabel(
        "held-out score at the end; a dot is a seed (hollow: from a later panel), a bar the mean", fontsize=8
    )
    return figure


def _ends(ax: Axes, of: Settings, name: str, arms: Rows) -> None:
    """Draws the arms of a condition, the best mean on top."""
    condition = of.conditions[name]
    means = {arm: sum(row.end for row in seeds.values()) / len(seeds) for arm, seeds in arms.items()}
    order = sorted(arms, key=lambda arm: -means[arm])
    for place, arm in enumerate(order):
        for i, (seed, row) in enumerate(sorted(arms[arm].items())):
            is_first = seed in of.panel(condition.panels[0]).seeds
            height = place + 0.36 * ((i * 0.618) % 1 - 0.5)  # the same places in every drawing
            ax.plot(row.end, height, "o", ms=4, mec=COLOUR, mfc=COLOUR if is_first else "none", alpha=0.7)
        ax.plot([means[arm]] * 2, [place - 0.34, place + 0.34], "k", lw=2)
        ax.text(0.83, place, f"{means[arm]:.2f}  n={len(arms[arm])}", va="center", fontsize=8)
    ax.set_yticks(range(len(order)), [remedy_of(of, name, arm) for arm in order], fontsize=8)
    ax.invert_yaxis()
    ax.set_xlim(-0.02, 0.95)
    scored = f"; scored with {condition.scored}" if condition.scored else ""
    ax.set_title(textwrap.fill(f"{condition.what}{scored}", TITLE), fontsize=8.5, loc="left")
    ax.grid(axis="x", alpha=0.3)
    ax.tick_params(axis="x", labelsize=8)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)


def against_k3(of: Settings, rows: Sequence[Row]) -> Figure:
    """Returns the figure of the differences from uncorrected runs against their k3, a dot for each seed."""
    lines = {name: lines_of(of, name, rows) for name in LAGS}
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    axes = figure.subplots(1, len(COMPARED), sharex=True, sharey=True)
    for ax, (arm, title) in zip(axes, COMPARED.items(), strict=True):
        for i, (name, label) in enumerate(LAGS.items()):
            uncorrected = lines[name].get(UNCORRECTED, {})
            gained = gaps(lines[name].get(arm, {}), uncorrected)
            points = [(uncorrected[seed].k3, gain) for seed, gain in gained.items() if uncorrected[seed].k3]
            if not points:
                continue
            k3, gain = zip(*points, strict=True)
            ax.plot(k3, gain, "o", ms=4, color=f"C{i}", alpha=0.6, label=label)
            middle = math.exp(sum(map(math.log, k3)) / len(k3))
            ax.plot(middle, sum(gain) / len(gain), "_", ms=26, mew=3, color=f"C{i}")
        ax.axhline(0, color="k", lw=0.8)
        ax.set_xscale("log")
        ax.set_title(title, fontsize=8.5, loc="left")
        ax.set_xlabel("k3 of the uncorrected run, nats per token", fontsize=8)
        ax.grid(alpha=0.25)
        ax.tick_params(labelsize=8)
    axes[0].set_ylabel("difference of held-out scores", fontsize=8)
    handles, names = axes[1].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(LAGS), fontsize=8, frameon=False)
    return figure


def draw(of: Settings, panels: Mapping[str, Mapping[str, Mapping[int, Row]]]) -> Figure:
    """Returns the figure of every panel."""
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
            _arm(ax, f"{arm}  {of.arm(arm).what}", list(seeds.values()))
    return figure


def _starts(lines: Mapping[str, object]) -> range:
    """Returns the indices of the arms with which a panel's rows of axes begin."""
    return range(0, len(lines), COLUMNS)


def _arm(ax: Axes, title: str, rows: Sequence[Row]) -> None:
    """Draws a thin line for each seed, and a thick line for the mean. A cross marks a run that diverged."""
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
