"""Makes the tables of RESULTS.md: every panel, arm and seed, and the pilots."""

from __future__ import annotations

import functools
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean

from benchmarks.evidence.judge import UNCORRECTED, Rows, Verdict, compare, judge, sloped
from benchmarks.evidence.rows import AGAIN, PILOTS, Row, read
from benchmarks.evidence.settings import ROOT, Arm, Panel, Primary, Settings, Slope, base
from benchmarks.fidelity.exact import Fidelity, World, evaluate
from benchmarks.fidelity.page import SEEDS
from slime_ext import load_config, presets
from slime_ext.config.files import read_mapping

SOURCE, FOLLOWER = "B", "G"  # analyze read the first rollouts of B, and G trained with what it recommended
HEAD = "arm", "seeds", "collapsed", "failed", "rescued", "end", "end - A", "end - B", "p against B"
LOOP = "seed", "recommended", f"{SOURCE} ended at", f"{FOLLOWER} ended at", "best of all"
SCOUTED = Path(__file__).with_name("scout.jsonl")  # the settings that were tried in plain torch
SHOWN = "none", "token_tis", "icepop", "cispo"  # columns of their table; other corrections share a column


def is_shown(of: Settings, panel: str, lines: Rows) -> bool:
    """Whether conclusions may be shown: only once the panel's planned test is complete."""
    settings = of.panels[panel]
    asked = settings.primary
    if settings.slope is not None and _missing(settings, lines):
        return False
    return bool(lines) and (asked is None or _complete(settings, asked, lines) == len(settings.seeds))


def verdicts(of: Settings, panel: str, lines: Rows) -> dict[str, Verdict]:
    """Returns the verdict on each arm, by the panel's test."""
    return judge(lines, of.judged, _by_ends(of, panel))


def _by_ends(of: Settings, panel: str) -> bool:
    return of.panels[panel].test == "ends of a seed"


def text(of: Settings, rows: Sequence[Row]) -> str:
    """Returns all tables in Markdown: the host's panels and pilots, then the former loop's."""
    parts = [*_panels(of, rows, on_a_host=True)]
    parts += ["### Pilots on a host", pilots(row for row in read(PILOTS) if of.panels[row.panel].host)]
    parts += ["## On the former training loop", *_panels(of, rows, on_a_host=False)]
    tried = [json.loads(line) for line in SCOUTED.read_text().splitlines()]
    parts += ["### Settings looked at in plain torch", scouted(tried)]
    return "\n\n".join(parts)


def _panels(of: Settings, rows: Sequence[Row], on_a_host: bool) -> Iterator[str]:
    for name, panel in of.panels.items():
        if bool(panel.host) == on_a_host:
            yield from _panel(of, name, panel, rows)


def pilots(lines: Iterable[Row]) -> str:
    """Returns a row for each setting and seed of a host's pilots.

    It has the highest and the last score of each arm.
    """
    ends_of: dict[tuple, dict[str, str]] = defaultdict(dict)
    for row in lines:
        changed = ", ".join(f"{name} {value}" for name, value in (row.tried or {}).items()) or "the panel's"
        peak = max(value for _, value in row.heldout)
        ends_of[row.panel, changed, row.seed][row.arm] = f"{peak:.2f}, {row.end:.2f}"
    arms = sorted({arm for ends in ends_of.values() for arm in ends})
    cells = ([*key, *(ends.get(arm, "") for arm in arms)] for key, ends in ends_of.items())
    return markdown(["panel", "settings", "seed", *arms], cells)


def scouted(lines: Iterable[dict]) -> str:
    """Returns a row for each setting of scout.jsonl. It has the held-out end of each correction and seed."""
    ends_of: dict[tuple, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for line in sorted(lines, key=lambda line: line["seed"]):
        name, end = line["preset"], f"{line['end']:.2f}"
        place = name if name in SHOWN else "others"
        ends_of[_setting(line)][place].append(end if name in SHOWN else f"`{name}` {end}")
    cells = ([*key, *(" ".join(ends[name]) for name in (*SHOWN, "others"))] for key, ends in ends_of.items())
    head = ["task", "start", "mismatch", "learning rate", "entropy bonus", "rollouts", *SHOWN, "others"]
    return markdown(head, sorted(cells, key=lambda row: [str(value) for value in row[:6]]))


def _setting(line: dict) -> tuple[object, ...]:
    task = f"{'sums' if line['chain'] else 'copy'} {line['length']}"
    task += ", no end" * line.get("endless", False) + ", counted in text" * ("reward" in line)
    mismatch = [f"lag {line['lag']}"] * (line["lag"] > 1) + [line["rounding"]] * bool(line["rounding"])
    lr = f"{line['lr'] * line['cut']:.2g} {'linear' if line['decay'] else 'constant'}"
    start = f"examples, {line['curve'][0][1]:.2f}" if line["warm"] else "random"
    return task, start, " ".join(mismatch) or "none", lr, line["entropy"], line["rollouts"]


def line_of(of: Settings, panel: str, arm: str, seed: int, rows: Sequence[Row]) -> Row | None:
    """Returns the line of a run.

    On a host, it can be the line of another arm or panel with the same command: arm G has the line of C if
    analyze recommended token_tis, and arm A has no mismatch, so it is one run for all panels with its flags.
    """
    key = panel, arm, seed, of.digest(panel, arm)
    line = next((row for row in rows if row.key == key), None)
    if line is not None or of.panels[panel].host is None:
        return line
    recommended = None
    if arm == FOLLOWER:
        source = panel, SOURCE, seed, of.digest(panel, SOURCE)
        recommended = next((row.recommended for row in rows if row.key == source), None)
        if recommended is None:
            return None
    same = seed, of.digest(panel, arm, recommended)
    return next((row for row in rows if (row.seed, row.settings) == same and row.arm != FOLLOWER), None)


def by_arm(of: Settings, panel: str, rows: Iterable[Row]) -> Rows:
    """Returns the lines of a panel's test seeds: arm -> seed -> row."""
    rows, seeds_of = list(rows), {}
    if not any(row.panel == panel for row in rows):
        return {}
    order, seeds = list(of.arms), of.panels[panel].seeds
    rows_of = {seed: [row for row in rows if row.seed == seed] for seed in seeds}
    for cell in sorted(of.panels[panel].cells, key=lambda cell: order.index(base(cell))):
        lines = {seed: line_of(of, panel, cell, seed, rows_of[seed]) for seed in seeds}
        seeds_of[cell] = {seed: line for seed, line in lines.items() if line is not None}
    return {arm: seeds for arm, seeds in seeds_of.items() if seeds}


def own(lines: Rows) -> Rows:
    """Returns the arms with separate runs. Arm G has none if each of its runs is another arm's run."""
    return {arm: seeds for arm, seeds in lines.items() if any(row.arm == arm for row in seeds.values())}


def _panel(of: Settings, name: str, panel: Panel, rows: Sequence[Row]) -> Iterable[str]:
    lines = by_arm(of, name, rows)
    yield f"### {name}: {panel.what}"
    if not lines:
        yield "No test seed has run yet."
        return
    judged = verdicts(of, name, lines)  # G counts as a comparison, because it was planned, but has no row
    yield markdown(HEAD, [_cells(cell, of.arm(cell), judged[cell]) for cell in own(lines)])
    if panel.primary is not None:
        yield primary(of, panel, panel.primary, lines)
    if panel.slope is not None:
        yield slope(of, panel, panel.slope, lines)
    yield _every_seed(own(lines))
    yield from _of_the_trainer(of, name, lines)
    yield from _shared(name, lines)
    yield from repeated(lines, [row for row in read(AGAIN) if row.panel == name])
    if SOURCE in lines:
        yield _closed_loop(lines)
    yield from effects(lines.get(SOURCE, {}).values())
    yield _exact(of, panel, lines)
    ran = [row for seeds in lines.values() for row in seeds.values()]
    commits = ", ".join(dict.fromkeys(row.commit for row in (ran[0], ran[-1])))
    yield "Versions: " + "; ".join(sorted({_versions(row) for row in ran})) + f". Commits: {commits}."


def _of_the_trainer(of: Settings, name: str, lines: Rows) -> Iterator[str]:
    """Yields the panel's tables with the scores of the trainer's weights, if all runs have them."""
    if not all(row.heldout_trained for seeds in lines.values() for row in seeds.values()):
        return
    trained = {
        cell: {seed: row.as_scored("trained") for seed, row in seeds.items()} for cell, seeds in lines.items()
    }
    judged = verdicts(of, name, trained)
    yield "The same runs, scored with the trainer's weights. These tests were not planned."
    yield markdown(HEAD, [_cells(cell, of.arm(cell), judged[cell]) for cell in own(trained)])
    yield _every_seed(own(trained))


def primary(of: Settings, panel: Panel, asked: Primary, lines: Rows) -> str:
    """Describes the result of the panel's primary comparison, once all of its seeds have run."""
    ones, others = asked.cells(panel.cells)
    name = f"{_best(ones)} - {_best(others)}"
    if asked.scored != "served":
        name += f", scored with the weights {asked.scored}"
    left = len(panel.seeds) - _complete(panel, asked, lines)
    if left:
        return f"Primary comparison, ends of {name}: {left} of {len(panel.seeds)} seeds have not run."
    if (compared := compare(lines, asked, of.judged)) is None:
        return f"Primary comparison, ends of {name}: the trainer's weights were not scored."
    equal = f"{'equal' if compared.equal else 'not shown to be equal'} within {asked.margin:g} (90% interval)"
    return (
        f"Primary comparison, ends of {name}: {interval(compared.difference)}, p {compared.p:.2g}; {equal}."
    )


def _best(cells: Sequence[str]) -> str:
    """Returns the name of one side of a comparison."""
    return cells[0] if len(cells) == 1 else f"best of {' '.join(cells)} (chosen by the other seeds)"


def _complete(panel: Panel, asked: Primary, lines: Rows) -> int:
    """Counts the test seeds that all cells of the primary comparison have run."""
    cells = [cell for side in asked.cells(panel.cells) for cell in side]
    return sum(all(seed in lines.get(cell, {}) for cell in cells) for seed in panel.seeds)


def slope(of: Settings, panel: Panel, asked: Slope, lines: Rows) -> str:
    """Describes how the arm's gain grows with k3, once all runs are complete."""
    name = f"Slope of {asked.arm} - {asked.against} on log k3 of {asked.against}, seeds as blocks"
    if left := _missing(panel, lines):
        return f"{name}: {left} of {len(panel.cells) * len(panel.seeds)} runs are missing."
    if (found := sloped(lines, asked.arm, asked.against, of.judged)) is None:
        return f"{name}: no seed has two variants."
    counts = f"{found.runs} pairs of runs, {found.seeds} seeds"
    return f"{name}: {interval(found.slope)}, p {found.p:.2g} ({counts})."


def _missing(panel: Panel, lines: Rows) -> int:
    """Counts the panel's runs that are missing."""
    return sum(seed not in lines.get(cell, {}) for cell in panel.cells for seed in panel.seeds)


def markdown(head: Sequence[str], cells: Iterable[Sequence[object]]) -> str:
    """Returns a table in Markdown."""
    rows = [head, ["---"] * len(head), *cells]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows)


def _cells(name: str, arm: Arm, v: Verdict) -> list[object]:
    p = "" if v.p is None else f"{v.p:.3g}"
    counts = [len(seeds) for seeds in (v.collapsed, v.failed, v.rescued)]
    return [f"{name} {arm.what}", v.seeds, *counts, *map(interval, (v.end, v.gap, v.gain)), p]


def interval(value: tuple[float, float, float] | None) -> str:
    return "" if value is None else "{:.3f} [{:.3f}, {:.3f}]".format(*value)


def _every_seed(lines: Rows) -> str:
    seeds = sorted({seed for of_arm in lines.values() for seed in of_arm})
    cells = [[arm, *(_end(of_arm.get(seed)) for seed in seeds)] for arm, of_arm in lines.items()]
    return markdown(["end by seed", *seeds], cells)


def _shared(panel: str, lines: Rows) -> Iterator[str]:
    """Yields a sentence if some runs are in more than one cell."""
    seeds_of: dict[tuple[str, str], list[str]] = defaultdict(list)
    for arm, of_arm in lines.items():
        for seed, row in of_arm.items():
            if (row.panel, row.arm) != (panel, arm):
                seeds_of[arm, row.arm if row.panel == panel else f"{row.arm} of {row.panel}"].append(
                    str(seed)
                )
    if seeds_of:
        same = (f"{arm} is {other} (seeds {' '.join(seeds)})" for (arm, other), seeds in seeds_of.items())
        yield f"The same runs, so no further evidence: {'; '.join(same)}."


def repeated(lines: Rows, repeats: Sequence[Row]) -> Iterator[str]:
    """Yields a table of the repeated runs, evaluation by evaluation, if there are any."""
    cells = [[f"{row.arm} {row.seed}", _curve(lines[row.arm][row.seed]), _curve(row)] for row in repeats]
    if cells:
        yield markdown(["run again", "held out, first", "held out, again"], cells)


def _curve(row: Row) -> str:
    return " ".join(f"{value:.3f}" for _, value in row.heldout)


def _end(row: Row | None) -> str:
    return "" if row is None else "diverged" if row.stopped else f"{row.end:.3f}"


def _closed_loop(lines: Rows) -> str:
    """Returns a table: analyze's recommendation after B's first rollouts, its end, and the best arm."""
    cells = []
    for seed, row in lines.get(SOURCE, {}).items():
        ends = {arm: of_arm[seed].end for arm, of_arm in lines.items() if seed in of_arm}
        best = max(ends, key=lambda arm: ends[arm])
        followed = lines.get(FOLLOWER, {}).get(seed)
        cells.append([seed, row.recommended, _end(row), _end(followed), f"{best} {ends[best]:.3f}"])
    return markdown(LOOP, cells)


def effects(rows: Iterable[Row]) -> Iterator[str]:
    """Yields a table of each correction's effect on B's first rollouts, according to analyze.

    The effects are means over the seeds whose lines have them. Yields nothing if no line has them.
    """
    by_seed = [row.effects for row in rows if row.effects]
    cells = []
    for name in by_seed and [name for name in by_seed[0] if all(name in of_seed for of_seed in by_seed)]:
        kept, ess = (fmean(values) for values in zip(*(of_seed[name] for of_seed in by_seed), strict=True))
        cells.append([name, f"{kept:.0%}", f"{ess:.2f}"])
    if cells:
        head = [f"would have done, {len(by_seed)} seeds", "tokens kept", "effective sample size"]
        yield markdown(head, cells)


@functools.cache
def _fidelities(preset: str, mismatch: str) -> list[Fidelity]:
    """Evaluates a preset in every random world. Panels repeat presets, so each is evaluated once."""
    return [evaluate(presets.get(preset), World.of(mismatch, seed)) for seed in SEEDS]


def _exact(of: Settings, panel: Panel, lines: Rows) -> str:
    """Returns each correction's exact bias over random worlds, beside its runs' mean end."""
    cells = []
    for arm, of_arm in own(lines).items():
        if (preset := preset_of(of.arm(arm), base(arm))) is None:
            continue
        exact = _fidelities(preset, panel.world)
        biases = [one.bias / one.true for one in exact]
        bias = f"{fmean(biases):.2f} ({min(biases):.2f} to {max(biases):.2f})"
        end = fmean(row.end for row in of_arm.values())
        cells.append([arm, preset, bias, f"{fmean(one.cosine for one in exact):.2f}", f"{end:.3f}"])
    cells.sort(key=lambda row: float(row[2].split()[0]))
    title = f"exact bias / gradient ({panel.world}, {len(SEEDS)} worlds)"
    head = ["arm", "correction", title, "cosine", "mean end"]
    return markdown(head, cells)


def preset_of(arm: Arm, name: str) -> str | None:
    if name == UNCORRECTED:
        return "metrics_only"
    if path := arm.flags.get("custom_tis_function_path"):
        return path.rpartition(".")[2]
    if file := arm.flags.get("correction"):  # this preset was a file when the panel was frozen
        correction = load_config(read_mapping(str(ROOT / file))["slime_ext"])
        return next(
            (name for name, preset in presets.PRESETS.items() if preset.correction == correction), None
        )
    return None


def _versions(row: Row) -> str:
    return " ".join(f"{name} {value}" for name, value in sorted(row.versions.items()))
