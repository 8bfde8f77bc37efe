"""Draws docs/img/gains.png, gains_formats.png, evidence.png, evidence_k3.png and evidence_all.png.

README.md shows the first: the gain of every remedy over uncorrected runs of the language model, with its
interval and a dot for each seed, under each lag. The second has those with rounded weights in the sampler.
The third has the score at the end of each of these runs, with a row for each arm and a dot for each seed. The
fourth has differences of such scores against k3, over several lags. The fifth has the held-out score over
optimizer steps, with a line for each seed.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from benchmarks.evidence.judge import EXACT, UNCORRECTED, Rows, bootstrap, gaps
from benchmarks.evidence.pooled import evidence, lines_of, remedy_of, without_follower
from benchmarks.evidence.rows import Row
from benchmarks.evidence.settings import ROOT, Settings
from benchmarks.evidence.table import by_arm, own
from slime_ext.tools.analysis.evidence import Evidence

FOLDER = ROOT / "docs/img"
COLOUR = "#2a5d9f"
OF_LAG = "#009e73", "#0072b2", "#e69f00", "#cc79a7"  # also for readers who do not tell red from green
COLUMNS = 4
DPI = 130
TITLE = 72  # letters of a title's line
TASK = "SmolLM2-135M learns to add"  # of the picture of gains,
GAINS = 0.7  # with the largest gain that is drawn
LAGS = {  # condition -> label
    "no_lag": "no lag",
    "lag2": "lag of 2",
    "lag": "lag of 4 (other seeds and panels)",
    "lag8": "lag of 8",
}
COMPARED = {
    EXACT: "what the lag costs: no lag - uncorrected",
    "C": "what token_tis gains over uncorrected",
    "S": "what score centering gains over uncorrected",
}


def write(of: Settings, rows: Sequence[Row], folder: Path = FOLDER) -> None:
    """Draws the pictures. The last leaves out an arm that has only runs of another arm."""
    folder.mkdir(parents=True, exist_ok=True)
    measured = Evidence.model_validate(evidence(of, rows))
    gains(of, measured, rows, rounded=False).savefig(folder / "gains.png", dpi=DPI)
    gains(of, measured, rows, rounded=True).savefig(folder / "gains_formats.png", dpi=DPI)
    ends(of, rows).savefig(folder / "evidence.png", dpi=DPI)
    against_k3(of, rows).savefig(folder / "evidence_k3.png", dpi=DPI)
    panels = {name: lines for name in of.panels if (lines := own(by_arm(of, name, rows)))}
    draw(of, panels).savefig(folder / "evidence_all.png", dpi=DPI)


def gains(of: Settings, measured: Evidence, rows: Sequence[Row], *, rounded: bool) -> Figure:
    """Returns a figure with the gain of every remedy, with or without rounded weights in the sampler.

    A row has a dot for each seed, and a bar for the interval of the mean.

    The remedies are in the order of settings.yaml, because rows with different seeds must not be ranked.
    """
    conditions = [
        condition
        for condition in measured.conditions
        if bool(condition.scored) == rounded and of.is_language_model(condition.name)
    ]
    height = sum(1 + len(condition.remedies) for condition in conditions)
    inches = 0.22 * height + 1.0
    figure = Figure(figsize=(8.4, inches))
    title = f"{TASK}: gain over uncorrected runs of the same seeds"
    figure.text(0.012, 1 - 0.17 / inches, title, va="center", fontsize=10.5)
    note = "Rows can have different seeds, so compare a row with 0, not with another row."
    figure.text(0.012, 1 - 0.39 / inches, note, va="center", fontsize=9)
    ax = figure.add_axes((0.39, 0.47 / inches, 0.31, 1 - 1.05 / inches))
    place, beside = 0, {"transform": ax.get_yaxis_transform(), "va": "center", "fontsize": 9}
    for condition in conditions:
        k3 = f"{condition.whose} (k3 {condition.range})"
        heading = f"{condition.what.removeprefix(TASK).lstrip(',; ')}{k3}"
        free = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}  # of the line at 0
        ax.text(-1.22, place, heading, weight="bold", bbox=free, **(beside | {"fontsize": 8.5}))
        place += 1
        lines = lines_of(of, condition.name, rows)
        for remedy in sorted(condition.remedies, key=lambda remedy: list(of.arms).index(remedy.arm)):
            of_seeds = list(gaps(lines[remedy.arm], lines[UNCORRECTED]).values())
            ax.plot(of_seeds, [place] * len(of_seeds), "o", ms=3.5, mew=0, color=COLOUR, alpha=0.3)
            ax.plot([remedy.low, remedy.high], [place, place], color=COLOUR, lw=1.8, solid_capstyle="butt")
            ax.plot(remedy.effect, place, "D", ms=5, color=COLOUR)
            ax.text(-1.19, place, remedy.remedy, **beside)
            ax.text(1.03, place, remedy.gain, **beside)
            place += 1
    ax.set_ylim(height - 0.5, -0.5)
    ax.set_xlim(-GAINS, GAINS)
    ax.axvline(0, color="k", lw=0.8, zorder=0.5)
    ax.set_xlabel("gain: a dot for each seed; mean, with its 95% interval", fontsize=9)
    ax.set_yticks([])
    ax.grid(axis="x", alpha=0.3)
    ax.tick_params(axis="x", labelsize=8.5)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    return figure


def ends(of: Settings, rows: Sequence[Row]) -> Figure:
    """Returns the figure of the ends: a row of axes per condition of the language model."""
    lines = {
        name: without_follower(arms)
        for name in of.conditions
        if of.is_language_model(name) and (arms := lines_of(of, name, rows))
    }
    heights = [len(arms) for arms in lines.values()]
    figure = Figure(figsize=(8, 0.2 * sum(heights) + 0.65 * len(lines)), layout="constrained")
    axes = figure.subplots(len(lines), 1, height_ratios=heights, squeeze=False)
    for (ax,), (name, arms) in zip(axes, lines.items(), strict=True):
        _ends(ax, of, name, arms)
    axes[-1][0].set_xlabel("held-out score at the end", fontsize=8)
    figure.suptitle("A dot is a seed, a bar the mean", fontsize=9, x=0.01, ha="left")
    return figure


def _ends(ax: Axes, of: Settings, name: str, arms: Rows) -> None:
    """Draws the arms of a condition, the best mean on top."""
    condition = of.conditions[name]
    means = {arm: sum(row.end for row in seeds.values()) / len(seeds) for arm, seeds in arms.items()}
    order = sorted(arms, key=lambda arm: -means[arm])
    for place, arm in enumerate(order):
        for i, (_, row) in enumerate(sorted(arms[arm].items())):
            height = place + 0.36 * ((i * 0.618) % 1 - 0.5)  # the same places in every drawing
            ax.plot(row.end, height, "o", ms=4, color=COLOUR, alpha=0.6)
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
    """Returns the figure of the differences from uncorrected runs against their k3, a mark for each seed."""
    lines = {name: lines_of(of, name, rows) for name in LAGS}
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    axes = figure.subplots(1, len(COMPARED), sharex=True, sharey=True)
    for ax, (arm, title) in zip(axes, COMPARED.items(), strict=True):
        for colour, (name, label) in zip(OF_LAG, LAGS.items(), strict=True):
            uncorrected = lines[name].get(UNCORRECTED, {})
            gained = gaps(lines[name].get(arm, {}), uncorrected)
            points = [(uncorrected[seed].k3, gain) for seed, gain in gained.items() if uncorrected[seed].k3]
            if not points:
                continue
            k3, gain = zip(*points, strict=True)
            marker = "x" if name == "lag" else "o"
            ax.plot(k3, gain, marker, ms=4, color=colour, alpha=0.45)
            middle = math.exp(sum(map(math.log, k3)) / len(k3))
            mean, low, high = bootstrap(list(gain), of.judged.resamples)
            interval = [[mean - low], [high - mean]]
            ax.errorbar(middle, mean, interval, fmt=marker, ms=7, mew=2, lw=2, color=colour, label=label)
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
