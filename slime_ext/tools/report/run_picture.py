"""One picture of one or several runs: reward, mismatch, ratios, clipping and staleness over optimizer steps.

Runs of one name are seeds of one setting: their mean is drawn, and a band from the lowest to the highest.
"""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from slime_ext.core.metrics import names
from slime_ext.errors import DataError
from slime_ext.tools.folders import write_file
from slime_ext.tools.report.run_series import DIFFERENCE, K3, REWARD, Series, read_run, run_folders

# Okabe and Ito's palette: told apart with every kind of colour vision
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
HEALTHY = "#009E73"
PICTURES = (".png", ".pdf", ".svg")
SMOOTH = 10
SEED = re.compile(r"[-_.]?(?:seed|s)[-_=.]?\d+$")
OFF = "train/off_policy/"
Points = tuple[list[float], list[list[float]]]  # steps, and of each step the values of all runs


@dataclass(frozen=True)
class Line:
    """The first of the metrics `names` that a setting has, and how it is drawn."""

    names: tuple[str, ...]
    label: str = ""
    style: dict[str, Any] = field(default_factory=dict)
    smooth: bool = False


@dataclass(frozen=True)
class Panel:
    """One row of the picture.

    Attributes:
        between: metrics between which the panel is shaded.
        healthy: metrics of ``slime_ext.metrics.names`` whose healthy ranges bound the green band.
        bottom: lower end of the axis, where no value lies below it.
        holds: what the axis holds at least.
    """

    title: str
    lines: tuple[Line, ...]
    between: tuple[str, str] | None = None
    healthy: tuple[str, ...] = ()
    log: bool = False
    bottom: float | None = None
    holds: tuple[float, float] | None = None


@dataclass(frozen=True)
class Setting:
    """The runs of one name, in one colour."""

    name: str
    runs: list[Series]
    colour: str
    width: float

    def seeds(self, *names: str) -> Points:
        """Steps and, per step, the values of all runs of the first metric that one of them has."""
        name = next((n for n in names if any(n in run for run in self.runs)), None)
        having = [run[name] for run in self.runs if name in run]
        if not having:
            return [], []
        common = set(having[0]).intersection(*having) or set().union(*having)
        steps = sorted(common)
        return steps, [[run[step] for run in having if step in run] for step in steps]

    def mean(self, name: str) -> tuple[list[float], list[float]]:
        """Steps and the mean over the runs."""
        steps, values = self.seeds(name)
        return steps, [fmean(v) for v in values]


CLIPPED = (f"{OFF}clipped_fraction", f"{OFF}host/clipped", "train/is_clipfrac", "train/tis_clipfrac")
STEPS = {"drawstyle": "steps-post"}
OLDEST = {"linewidth": 0.9, "linestyle": ":", **STEPS}
HELD_OUT = {"marker": "o", "markersize": 4, "linestyle": "--", "linewidth": 1, "markerfacecolor": "white"}
KL = Panel("mismatch KL\n(nats per token)", (Line((K3,), "k3"),), healthy=("k3_kl",), log=True)
GAP = Panel("log-prob difference\n(nats)", (Line((DIFFERENCE,), "mean"),), log=True)
OTHERS = (
    Panel(
        "ratio trainer\n/ sampler",
        (
            Line((f"{OFF}ratio_p50",), "median", {"linestyle": "--"}),
            Line((f"{OFF}ratio_p01",), "p01 to p99", {"linewidth": 0.8}),
            Line((f"{OFF}ratio_p99",), style={"linewidth": 0.8}),
        ),
        between=(f"{OFF}ratio_p01", f"{OFF}ratio_p99"),
        healthy=("ratio_p01", "ratio_p99"),
    ),
    Panel(
        "weights clipped\n(fraction)",
        (Line(CLIPPED, "clipped"),),
        healthy=("clipped_fraction",),
        bottom=-0.002,
    ),
)
# Of `slime-ext train`: optimizer steps between the sampling and the trained weights, within a rollout too.
LAG = Panel("staleness\n(optimizer steps)", (Line(("train/staleness",), "mean", STEPS),), holds=(-0.05, 1.0))
AGE = Panel(
    "staleness\n(weight versions)",
    (
        Line(("rollout/staleness_mean", f"{OFF}staleness_mean"), "mean", STEPS),
        Line(("rollout/staleness_max", f"{OFF}staleness_max"), "largest", OLDEST),
    ),
    holds=(-0.05, 1.0),
)


def draw(folders: Sequence[str | Path], out: Path, labels: Sequence[str] = ()) -> Path:
    """Draws runs into one picture, one row per quantity that at least one of them has, and returns its path.

    Args:
        folders: of a run each, or of several, which are then seeds of one setting.
        labels: a name for each folder; equal names are seeds of one setting. Default: the folders' names
            without a seed at their end.

    Raises:
        DataError: a folder without a run, or no run with a metric that is drawn.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    settings = _settings([Path(folder) for folder in folders], labels)
    panels = [panel for panel in _panels(settings) if _has(panel, settings)]
    if not panels:
        raise DataError(f"{folders[0]}: expected at least one metric of the picture, got none")
    figure, axes = pyplot.subplots(
        len(panels), 1, figsize=(9, 0.7 + 2.1 * len(panels)), sharex=True, squeeze=False, layout="constrained"
    )
    for panel, ax in zip(panels, axes[:, 0], strict=True):
        _draw_panel(panel, ax, settings)
    axes[-1, 0].set_xlabel("optimizer step")
    axes[-1, 0].xaxis.get_major_locator().set_params(integer=True)
    figure.suptitle(_title(settings), fontsize=11)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=130, format=out.suffix.removeprefix("."))
    write_file(out, drawn.getvalue())
    pyplot.close(figure)
    return out


def _settings(folders: Sequence[Path], labels: Sequence[str]) -> list[Setting]:
    """One colour per setting; a line under another is wider, so that it stays visible."""
    runs: dict[str, list[Series]] = {}
    for folder, label in zip(folders, labels or _names(folders), strict=True):
        runs.setdefault(label, []).extend(map(read_run, run_folders(folder)))
    widths = [1.4 + 0.9 * i for i in reversed(range(len(runs)))]
    return [
        Setting(name, of_name, COLOURS[i % len(COLOURS)], width)
        for i, ((name, of_name), width) in enumerate(zip(runs.items(), widths, strict=True))
    ]


def _names(folders: Sequence[Path]) -> list[str]:
    """Each folder's name without a seed at its end; with its parent's where another folder has the same name.

    >>> _names([Path("runs/tis-seed3"), Path("runs/tis-seed4"), Path("a/lag-16"), Path("b/lag-16")])
    ['tis', 'tis', 'a/lag-16', 'b/lag-16']
    """
    paths = [folder.resolve() for folder in folders]
    alike = Counter(path.name for path in paths)
    names = [p.name if alike[p.name] == 1 else f"{p.parent.name}/{p.name}" for p in paths]
    return [SEED.sub("", name) or name for name in names]


def _title(settings: Sequence[Setting]) -> str:
    names = " and ".join(s.name for s in settings) if len(settings) < 4 else f"{len(settings)} settings"
    counts = sorted({len(s.runs) for s in settings})
    if counts == [1]:
        return names
    return f"{names}\nmean of {' to '.join(map(str, counts))} runs each; band: lowest to highest"


def _panels(settings: Sequence[Setting]) -> list[Panel]:
    evaluations = sorted({name for s in settings for run in s.runs for name in _evaluations(run)})
    held_out = (Line((name,), name.removeprefix("eval/"), HELD_OUT) for name in evaluations)

    def first_of(panel: Panel, other: Panel) -> Panel:
        return panel if _has(panel, settings) else other

    reward = Panel("reward", (Line((REWARD,), "training", smooth=True), *held_out), holds=(-0.03, 1.03))
    return [reward, first_of(KL, GAP), *OTHERS, first_of(LAG, AGE)]


def _evaluations(run: Series) -> list[str]:
    """The rewards among ``eval/``: slime adds ``eval/NAME/...`` and ``eval/NAME-...`` of other quantities."""
    names = [name for name in run if name.startswith("eval/")]
    return [n for n in names if not any(n.startswith((f"{m}/", f"{m}-")) for m in names)]


def _has(panel: Panel, settings: Sequence[Setting]) -> bool:
    return any(setting.seeds(*line.names)[0] for line in panel.lines for setting in settings)


def _draw_panel(panel: Panel, ax: Any, settings: Sequence[Setting]) -> None:
    highest = 0.0
    for setting in settings:
        prefix = f"{setting.name}, " if len(settings) > 1 else ""
        drawn: list[Any] = []
        for line in panel.lines:
            points = setting.seeds(*line.names)
            if points[0] and points not in drawn:  # where the largest is the mean, one line says so
                drawn.append(points)
                highest = max(highest, _draw_line(line, points, ax, setting, prefix))
        if panel.between:
            (steps, low), (others, high) = map(setting.mean, panel.between)
            if steps == others:
                ax.fill_between(steps, low, high, color=setting.colour, alpha=0.15, linewidth=0)
    if panel.log and highest > 0:
        ax.set_yscale("log")
    _limit(panel, ax)
    _mark_healthy(panel, ax)
    ax.set_ylabel(panel.title, fontsize=9)
    ax.grid(alpha=0.25, linewidth=0.6)
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(which="both", labelsize=8)
    ax.legend(fontsize=7.5, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _draw_line(line: Line, points: Points, ax: Any, setting: Setting, prefix: str) -> float:
    """Draws mean and band of a setting; the highest mean."""
    steps, values = points
    means, label = [fmean(v) for v in values], line.label
    style = {"color": setting.colour, "linewidth": setting.width, **line.style}
    if max(map(len, values)) > 1:
        ax.fill_between(
            steps,
            [min(v) for v in values],
            [max(v) for v in values],
            color=setting.colour,
            alpha=0.15,
            linewidth=0,
        )
    if line.smooth and len(steps) > 3 * SMOOTH:
        ax.plot(steps, means, color=setting.colour, alpha=0.25, linewidth=0.8)
        steps, means = running_mean(steps, means, SMOOTH)
        label = f"{label}, mean of {SMOOTH}"
    ax.plot(steps, means, label=prefix + label if label else None, **style)
    return max(means)


def _limit(panel: Panel, ax: Any) -> None:
    """Once all is drawn: an axis that was given a limit follows no value that comes later."""
    low, high = ax.get_ylim()
    if panel.holds is not None:
        ax.set_ylim(min(low, panel.holds[0]), max(high, panel.holds[1]))
    if panel.bottom is not None:
        ax.set_ylim(bottom=panel.bottom)


def _mark_healthy(panel: Panel, ax: Any) -> None:
    """Shades the healthy range green; the axis is stretched to its next edge where none of it is in sight."""
    if not panel.healthy:
        return
    low, high = ax.get_ylim()
    bounds = [names.HEALTHY[name] for name in panel.healthy]
    least = max((a for a, _ in bounds if a is not None), default=None)
    most = min((b for _, b in bounds if b is not None), default=None)
    bottom, top = low if least is None else least, high if most is None else most
    low, high = min(low, top if most is not None else low), max(high, bottom if least is not None else high)
    if panel.log and most is not None and low >= most:
        low = most / 3
    ax.axhspan(
        max(bottom, low), min(top, high), color=HEALTHY, alpha=0.10, linewidth=0, label="healthy", zorder=0
    )
    ax.set_ylim(low, high)


def running_mean(steps: list[float], values: list[float], width: int) -> tuple[list[float], list[float]]:
    """Mean over `width` values in a row, each at the step in their middle.

    >>> running_mean([1, 2, 3, 4], [0.0, 1.0, 2.0, 6.0], 3)
    ([2, 3], [1.0, 3.0])
    """
    means = [fmean(values[end - width : end]) for end in range(width, len(values) + 1)]
    return steps[(width - 1) // 2 :][: len(means)], means
