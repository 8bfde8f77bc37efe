"""Draws runs as a picture: reward, mismatch, ratios, clipping and staleness over optimizer steps.

Runs with the same name are seeds of one setting. They are drawn as their mean and a band from the lowest to
the highest.
"""

from __future__ import annotations

import io
import math
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

# Okabe and Ito's palette, whose colours differ for every kind of colour vision.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
HEALTHY = "#009E73"
PICTURES = (".png", ".pdf", ".svg")
SMOOTH, LEAST_SMOOTHED = 10, 8  # rollouts of the widest moving mean; shorter rewards are drawn as they are
SEED = re.compile(r"[-_.]?(?:seed|s)[-_=.]?\d+$")
OFF = "train/off_policy/"
Points = tuple[list[float], list[list[float]]]  # steps, and for each step the values of all runs


@dataclass(frozen=True)
class Line:
    """A line for the first metric in `names` that a setting has, and its style."""

    names: tuple[str, ...]
    label: str
    style: dict[str, Any] = field(default_factory=dict)
    smooth: bool = False


@dataclass(frozen=True)
class Panel:
    """A row of the picture.

    Attributes:
        healthy: metrics of ``core.metrics.names`` whose healthy ranges bound the green band.
        height: as a multiple of the usual height.
        holds: the range that the axis always shows; it starts at the lower end unless a value is lower.
    """

    title: str
    lines: tuple[Line, ...]
    healthy: tuple[str, ...] = ()
    log: bool = False
    holds: tuple[float, float] = (math.inf, -math.inf)
    height: float = 1.0


@dataclass(frozen=True)
class Setting:
    """The runs with the same name, drawn in one colour."""

    name: str
    runs: list[Series]
    colour: str

    def seeds(self, *names: str) -> Points:
        """Returns steps, and all runs' values at each step, of the first metric there is."""
        name = next((n for n in names if any(n in run for run in self.runs)), None)
        having = [run[name] for run in self.runs if name in run]
        if not having:
            return [], []
        common = set(having[0]).intersection(*having) or set().union(*having)
        steps = sorted(common)
        return steps, [[run[step] for run in having if step in run] for step in steps]


CLIPPED = (f"{OFF}clipped_fraction", f"{OFF}host/clipped", "train/is_clipfrac", "train/tis_clipfrac")
AGE = ("rollout/staleness_mean", f"{OFF}staleness_mean")
OLDEST = ("rollout/staleness_max", f"{OFF}staleness_max")
STEPS = {"drawstyle": "steps-post"}
HELD_OUT = {"marker": "o", "markersize": 10, "linestyle": "--", "linewidth": 1, "zorder": 3}
LABELLED = 4  # held-out scores of one run that are written beside their points: more would overlap
THIN = {"linewidth": 0.8}
# Each row shows its first panel for which some setting has a metric.
ROWS = (
    (
        Panel("mismatch KL\n(nats per token)", (Line((K3,), "k3"),), ("k3_kl",), log=True),
        Panel("log-prob difference\n(nats)", (Line((DIFFERENCE,), "mean"),), log=True),
    ),
    (
        Panel(
            "ratio trainer\n/ sampler",
            (
                Line((f"{OFF}ratio_p50",), "median", {"linestyle": "--"}),
                Line((f"{OFF}ratio_p01",), "1st percentile", THIN),
                Line((f"{OFF}ratio_p99",), "99th percentile", THIN),
            ),
            ("ratio_p01", "ratio_p99"),
        ),
    ),
    (Panel("weights clipped\n(fraction)", (Line(CLIPPED, "clipped"),), ("clipped_fraction",), holds=(0, 0)),),
    (  # optimizer steps first, because versions say little if pushes are rare
        Panel(
            "staleness\n(optimizer steps)",
            (
                Line(("train/staleness", f"{OFF}staleness_steps_mean"), "mean", STEPS),
                Line((f"{OFF}staleness_steps_max",), "largest", {"linestyle": ":", **THIN, **STEPS}),
            ),
            holds=(0, 1),
        ),
        Panel(
            "staleness\n(weight versions)",
            (Line(AGE, "mean", STEPS), Line(OLDEST, "largest", {"linestyle": ":", **THIN, **STEPS})),
            holds=(0, 1),
        ),
    ),
)


def draw(folders: Sequence[str | Path], out: Path, labels: Sequence[str] = (), title: str = "") -> Path:
    """Draws runs into one picture and returns its path.

    The picture has a row for each quantity that at least one run has. A quantity that is always 0 has none.

    Args:
        folders: folders of a run each. A folder with several runs holds seeds of one setting.
        out: path of the picture.
        labels: a name for each folder; folders with equal names are seeds of one setting. By default the
            names of the folders, without a seed at the end.
        title: the title of the picture; default: the names.

    Raises:
        DataError: a folder has no run, or no run has a metric that the picture draws.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    settings = _settings([Path(folder) for folder in folders], labels)
    rows = ((_reward(settings),), *ROWS)
    panels = [panel for row in rows for panel in [p for p in row if _has(p, settings)][:1]]
    if not panels:
        raise DataError(
            f"{folders[0]}: expected at least one metric that the picture draws, got none: launch with "
            "--custom-megatron-init-path slime_ext.host.init"
        )
    heights = [panel.height for panel in panels]
    figure, axes = pyplot.subplots(
        len(panels),
        1,
        figsize=(9, 0.9 + 1.9 * sum(heights)),
        height_ratios=heights,
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    for panel, ax in zip(panels, axes[:, 0], strict=True):
        _draw_panel(panel, ax, settings)
    axes[-1, 0].set_xlabel("optimizer step")
    axes[-1, 0].xaxis.get_major_locator().set_params(integer=True)
    figure.suptitle(plain(title) or _title(settings), fontsize=11)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=130, format=out.suffix.removeprefix("."))
    write_file(out, drawn.getvalue())
    pyplot.close(figure)
    return out


def _settings(folders: Sequence[Path], labels: Sequence[str]) -> list[Setting]:
    runs: dict[str, list[Series]] = {}
    for folder, label in zip(folders, labels or _names(folders), strict=True):
        runs.setdefault(label, []).extend(map(read_run, run_folders(folder)))
    return [
        Setting(name, of_name, COLOURS[i % len(COLOURS)]) for i, (name, of_name) in enumerate(runs.items())
    ]


def _names(folders: Sequence[Path]) -> list[str]:
    """Returns each folder's name without a seed at its end.

    If several folders have the same name, the name of the parent comes first.

    >>> _names([Path("runs/tis-seed3"), Path("runs/tis-seed4"), Path("a/lag-16"), Path("b/lag-16")])
    ['tis', 'tis', 'a/lag-16', 'b/lag-16']
    """
    paths = [folder.resolve() for folder in folders]
    counts = Counter(path.name for path in paths)
    names = [p.name if counts[p.name] == 1 else f"{p.parent.name}/{p.name}" for p in paths]
    return [SEED.sub("", name) or name for name in names]


def plain(name: str) -> str:
    """Escapes a name so that matplotlib shows each of its letters.

    Without this, matplotlib reads text between dollar signs as a formula, and omits a label that begins with
    _ from the legend.

    >>> plain("a$b"), plain("_a")
    ('a\\\\$b', ' _a')
    """
    return f"{' ' if name.startswith('_') else ''}{name}".replace("$", r"\$")


def _title(settings: Sequence[Setting]) -> str:
    few = len(settings) < 4
    names = " and ".join(plain(s.name) for s in settings) if few else f"{len(settings)} settings"
    counts = sorted({len(s.runs) for s in settings})
    if counts == [1]:
        return names
    return f"{names}\nmean of {' to '.join(map(str, counts))} runs each; band: lowest to highest"


def _reward(settings: Sequence[Setting]) -> Panel:
    """Makes the panel with the rewards of training and of evaluations.

    slime logs a reward as ``eval/NAME``, and other quantities as ``eval/NAME/...`` and ``eval/NAME-...``.
    """
    logged = sorted({n for s in settings for run in s.runs for n in run if n.startswith("eval/")})
    rewards = [n for n in logged if not any(n.startswith((f"{m}/", f"{m}-")) for m in logged)]
    held_out = (Line((name,), plain(name.removeprefix("eval/")), HELD_OUT) for name in rewards)
    training = Line((REWARD,), "training", {"linewidth": 1.8}, smooth=True)
    return Panel("reward", (training, *held_out), holds=(0, 1), height=2.0)


def _has(panel: Panel, settings: Sequence[Setting]) -> bool:
    """Whether some run has a quantity of the panel that is not always 0; 0 is news only for the reward."""
    points = [setting.seeds(*line.names)[1] for line in panel.lines for setting in settings]
    values = [value for of_line in points for of_step in of_line for value in of_step]
    return any(values) or (bool(values) and panel.lines[0].smooth)


def _draw_panel(panel: Panel, ax: Any, settings: Sequence[Setting]) -> None:
    means: list[float] = []
    for setting in settings:
        prefix = f"{plain(setting.name)}, " if len(settings) > 1 else ""
        for line in panel.lines:
            if (points := setting.seeds(*line.names))[0]:
                means += _draw_line(line, points, ax, setting.colour, prefix + line.label)
                if line.style is HELD_OUT and len(settings) == 1:
                    _write_values(points, ax, setting.colour)
    if panel.log and max(means) > 0:
        ax.set_yscale("log")
    low, high = ax.get_ylim()
    ax.set_ylim(panel.holds[0] if min(means) >= panel.holds[0] else low, max(high, panel.holds[1]))
    if panel.healthy:
        _mark_healthy(panel, ax)
    ax.set_ylabel(panel.title, fontsize=9)
    ax.grid(alpha=0.25, linewidth=0.6)
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(which="both", labelsize=8)
    ax.legend(fontsize=7.5, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _draw_line(line: Line, points: Points, ax: Any, colour: str, label: str) -> list[float]:
    """Draws the mean and the band of a setting, and returns the means."""
    steps, values = points
    means = smooth = [fmean(v) for v in values]
    if max(map(len, values)) > 1:
        lows, highs = [min(v) for v in values], [max(v) for v in values]
        ax.fill_between(steps, lows, highs, color=colour, alpha=0.15, linewidth=0)
    if line.smooth and len(steps) >= LEAST_SMOOTHED:
        ax.plot(steps, means, color=colour, alpha=0.25, linewidth=0.8)
        width = min(SMOOTH, len(steps) // 4)
        steps, smooth = running_mean(steps, means, width)
        label = f"{label}, mean of {width}"
    ax.plot(steps, smooth, label=label, **{"color": colour, "linewidth": 1.4, **line.style})
    return means


def _write_values(points: Points, ax: Any, colour: str) -> None:
    """Writes the score beside each held-out point, or beside the first and the last of many."""
    steps, values = points
    scores = list(zip(steps, map(fmean, values), strict=True))
    for step, score in scores if len(scores) <= LABELLED else (scores[0], scores[-1]):
        place = {"textcoords": "offset points", "xytext": (0, 9), "ha": "center", "fontsize": 9}
        ax.annotate(
            f"{score:.0%}" if 0 <= score <= 1 else f"{score:.3g}", (step, score), color=colour, **place
        )


def _mark_healthy(panel: Panel, ax: Any) -> None:
    """Shades the healthy range green. If the axis shows none of it, extends the axis to its nearest edge."""
    lowest, highest = zip(*(names.HEALTHY[name] for name in panel.healthy), strict=True)
    least = max((bound for bound in lowest if bound is not None), default=-math.inf)
    most = min((bound for bound in highest if bound is not None), default=math.inf)
    low, high = ax.get_ylim()
    low, high = min(low, most / 3 if panel.log else most), max(high, least)
    ax.axhspan(max(least, low), min(most, high), color=HEALTHY, alpha=0.10, lw=0, label="healthy", zorder=0)
    ax.set_ylim(low, high)


def running_mean(steps: list[float], values: list[float], width: int) -> tuple[list[float], list[float]]:
    """Averages each `width` consecutive values, and places the mean at the step in the middle.

    >>> running_mean([1, 2, 3, 4], [0.0, 1.0, 2.0, 6.0], 3)
    ([2, 3], [1.0, 3.0])
    """
    means = [fmean(values[end - width : end]) for end in range(width, len(values) + 1)]
    return steps[(width - 1) // 2 :][: len(means)], means
