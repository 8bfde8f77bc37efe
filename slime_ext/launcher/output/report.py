"""report.png: reward, mismatch, ratios, clipping and staleness against the optimizer step.

``python -m slime_ext.launcher.output.report runs/a runs/b --out both.png`` puts several into one picture.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_ext.errors import DataError, SlimeExtError
from slime_ext.launcher.output.metrics_log import read_metrics

Row = dict[str, Any]
Points = tuple[list[float], list[float]]
# Okabe and Ito's palette: told apart with every kind of colour vision
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
PICTURES = (".png", ".pdf", ".svg")
SMOOTH = 10
STALENESS = ("rollout/staleness_mean", "train/staleness")
CLIPPED = (
    "train/off_policy/clipped_fraction",
    "train/off_policy/host/clipped",
    "train/is_clipfrac",
    "train/tis_clipfrac",
)


@dataclass(frozen=True)
class Run:
    """The metrics of a run and how it is drawn."""

    name: str
    rows: list[Row]
    colour: str
    width: float = 1.4

    def points(self, *names: str) -> Points:
        """Steps and values of the first of `names` that the run has; two empty lists when it has none."""
        for name in names:
            found = [(row["step"], row[name]) for row in self.rows if row.get(name) is not None]
            if found:
                return tuple(map(list, zip(*found, strict=True)))
        return [], []

    def names(self, prefix: str) -> list[str]:
        return sorted({name for row in self.rows for name in row if name.startswith(prefix)})


def write_report(run_path: str | Path) -> Path:
    """Draws <run_path>/report.png and returns its path.

    Raises:
        DataError: no metrics there.
    """
    return draw([run_path], Path(run_path) / "report.png")


def draw(run_paths: Sequence[str | Path], out: Path, labels: Sequence[str] = ()) -> Path:
    """Draws runs into one picture: one row per quantity that at least one of them has, one colour per run.

    Raises:
        DataError: a run without metrics, or without one that is drawn.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs = _read(run_paths, labels or [Path(path).resolve().name for path in run_paths])
    panels = [panel for panel in PANELS if any(panel.has(run) for run in runs)]
    if not panels:
        raise DataError(f"{run_paths[0]}: expected at least one metric of the report, got none")
    size = (9, 0.6 + 2.1 * len(panels))
    figure, axes = pyplot.subplots(
        len(panels), 1, figsize=size, sharex=True, squeeze=False, layout="constrained"
    )
    for panel, ax in zip(panels, axes[:, 0], strict=True):
        _draw_panel(panel, ax, runs)
    axes[-1, 0].set_xlabel("optimizer step")
    title = " and ".join(run.name for run in runs) if len(runs) < 4 else f"{len(runs)} runs"
    figure.suptitle(title, fontsize=11)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=130)
    pyplot.close(figure)
    return out


def _read(run_paths: Sequence[str | Path], names: Sequence[str]) -> list[Run]:
    """Runs in colours of their own; a line under another is wider, so that it stays visible."""
    widths = [1.4 + 0.9 * i for i in reversed(range(len(run_paths)))]
    return [
        Run(name, read_metrics(path), COLOURS[i % len(COLOURS)], width)
        for i, (name, path, width) in enumerate(zip(names, run_paths, widths, strict=True))
    ]


@dataclass(frozen=True)
class Panel:
    """One row of the picture: what it shows, which metrics it needs, how it is drawn."""

    title: str
    needs: tuple[str, ...]
    draw: Callable[[Any, Run, str], None]
    log: bool = False
    bottom: float | None = None  # where no value is below 0
    holds: tuple[float, float] | None = None  # what the axis holds even if no value is there

    def has(self, run: Run) -> bool:
        return bool(run.points(*self.needs)[0])


def _draw_panel(panel: Panel, ax: Any, runs: list[Run]) -> None:
    several = len(runs) > 1
    for run in runs:
        if panel.has(run):
            panel.draw(ax, run, f"{run.name}, " if several else "")
    if panel.log and any(max(run.points(*panel.needs)[1], default=0) > 0 for run in runs):
        ax.set_yscale("log")
    _limit(panel, ax)
    ax.set_ylabel(panel.title, fontsize=9)
    ax.grid(alpha=0.25, linewidth=0.6)
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(which="both", labelsize=8)
    ax.legend(fontsize=7.5, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _limit(panel: Panel, ax: Any) -> None:
    """Once all runs are drawn: an axis that was given a limit follows no value that comes later."""
    low, high = ax.get_ylim()
    if panel.holds is not None:
        ax.set_ylim(min(low, panel.holds[0]), max(high, panel.holds[1]))
    if panel.bottom is not None:
        ax.set_ylim(bottom=panel.bottom)


def _reward(ax: Any, run: Run, prefix: str) -> None:
    steps, rewards = run.points("rollout/raw_reward")
    if len(steps) > 3 * SMOOTH:
        ax.plot(steps, rewards, color=run.colour, alpha=0.25, linewidth=0.8)
        steps, rewards = running_mean(steps, rewards, SMOOTH)
        label = f"{prefix}training, mean of {SMOOTH}"
    else:
        label = f"{prefix}training"
    ax.plot(steps, rewards, color=run.colour, linewidth=1.6, label=label)
    for name in run.names("eval/"):
        held = run.points(name)
        style = {
            "marker": "o",
            "markersize": 4,
            "linestyle": "--",
            "linewidth": 1,
            "markerfacecolor": "white",
        }
        ax.plot(*held, color=run.colour, label=prefix + name.removeprefix("eval/"), **style)


def _ratios(ax: Any, run: Run, prefix: str) -> None:
    steps, low = run.points("train/off_policy/ratio_p01")
    _, high = run.points("train/off_policy/ratio_p99")
    if len(low) == len(high):
        ax.fill_between(steps, low, high, color=run.colour, alpha=0.15, linewidth=0)
        ax.plot(steps, low, color=run.colour, linewidth=0.8, label=f"{prefix}p01 to p99")
        ax.plot(steps, high, color=run.colour, linewidth=0.8)
    median = run.points("train/off_policy/ratio_p50")
    ax.plot(*median, color=run.colour, linewidth=run.width, linestyle="--", label=f"{prefix}median")


def _staleness(ax: Any, run: Run, prefix: str) -> None:
    _line(*STALENESS, label="mean", drawstyle="steps-post")(ax, run, prefix)
    largest = run.points("rollout/staleness_max")
    if largest[0] and largest != run.points(*STALENESS):
        style = {"linewidth": 0.9, "linestyle": ":", "drawstyle": "steps-post"}
        ax.plot(*largest, color=run.colour, label=f"{prefix}largest", **style)


def _line(*names: str, label: str, **style: Any) -> Callable[[Any, Run, str], None]:
    def plot(ax: Any, run: Run, prefix: str) -> None:
        ax.plot(*run.points(*names), color=run.colour, linewidth=run.width, label=prefix + label, **style)

    return plot


PANELS = (
    Panel("reward", ("rollout/raw_reward",), _reward, holds=(-0.03, 1.03)),
    Panel(
        "mismatch KL\n(nats per token)",
        ("train/off_policy/k3_kl",),
        _line("train/off_policy/k3_kl", label="k3"),
        log=True,
    ),
    Panel("ratio trainer\n/ sampler", ("train/off_policy/ratio_p50",), _ratios),
    Panel("weights clipped\n(fraction)", CLIPPED, _line(*CLIPPED, label="clipped"), bottom=-0.002),
    Panel("staleness\n(optimizer steps)", STALENESS, _staleness, bottom=-0.2),
)


def running_mean(steps: list[float], values: list[float], width: int) -> Points:
    """Mean over the last `width` values, at the steps where there are so many.

    >>> running_mean([1, 2, 3], [0.0, 1.0, 3.0], 2)
    ([2, 3], [0.5, 2.0])
    """
    ends = range(width, len(values) + 1)
    return steps[width - 1 :], [sum(values[end - width : end]) / width for end in ends]


def main(argv: list[str] | None = None) -> int:
    """Several runs in one picture."""
    parser = argparse.ArgumentParser(description="Draw runs into one picture.")
    parser.add_argument("runs", nargs="+", help="directories of runs")
    parser.add_argument("--out", type=Path, help="picture to write; default: report.png of the first run")
    parser.add_argument("--labels", nargs="+", default=(), help="names of the runs in the picture")
    args = parser.parse_args(argv)
    if args.labels and len(args.labels) != len(args.runs):
        parser.error(f"--labels: expected {len(args.runs)} names, got {len(args.labels)}")
    if args.out and args.out.suffix not in PICTURES:
        parser.error(f"--out: expected a name that ends in {', '.join(PICTURES)}, got {args.out}")
    out = args.out or Path(args.runs[0]) / "report.png"
    try:
        print(draw(args.runs, out, args.labels))
    except SlimeExtError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        where = error.filename or out  # a full disk names no file
        print(f"{where}: expected a file to read or write, got {error.strerror}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
