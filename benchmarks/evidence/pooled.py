"""Pools panels that differ only in arms and seeds.

Compares each pair of arms, and makes the package's table.

Most of these comparisons were chosen when the runs were known, so their intervals and p-values describe the
runs and confirm nothing. A comparison that was planned has a separate p in its panel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import yaml

from benchmarks.evidence.judge import EXACT, UNCORRECTED, Rows, Verdict, bootstrap, gaps, judge, randomised
from benchmarks.evidence.rows import Row
from benchmarks.evidence.runs import FOLLOWER, STEPS, line_of
from benchmarks.evidence.settings import AT, Settings, base
from benchmarks.evidence.table import by_arm, interval, is_shown, markdown, preset_of, verdicts
from slime_ext.tools.analysis.evidence import Evidence
from slime_ext.tools.analysis.texts import counted

HEAD = """# The results of our runs under each condition: held-out scores at the end, minus those of
# uncorrected runs of the same seeds. Made by `python -m benchmarks.evidence table` from
# benchmarks/evidence/rows.jsonl. A test compares the two, so do not edit it.
#
# k3: smallest and largest k3 of the uncorrected runs, each the median over rollouts; empty: not recorded.
# rollouts_per_push: rollouts from one push of weights to the next; 1: no lag.
# effect, low, high: mean difference and its 95% bootstrap interval over seeds.
# p: of Fisher's randomisation test of pairs, adjusted by Holm over the condition's arms.
# planned: panel -> p of the test that was written down before the panel ran.
# post_hoc: true if nobody planned to read these panels together, or to compare their ends.
"""
SLOW = 0.3


def lines_of(of: Settings, name: str, rows: Sequence[Row]) -> Rows:
    """Returns arm -> seed -> line over the panels of a condition.

    It has the cells that ``_complete`` returns, and the condition's shared arms: another panel has run the
    same commands. Arm A can be uncorrected runs without the mismatch. Their engine has the trainer's weights,
    so they have one score.
    """
    condition = of.conditions[name]
    seeds_of: dict[str, dict[int, Row]] = {}
    for panel in condition.panels:
        lines = by_arm(of, base(panel), rows)
        for cell in _complete(of, panel, lines):
            seeds_of.setdefault(base(cell), {}).update(lines[cell])
    first = condition.panels[0]
    for arm in condition.shared:
        seeds = of.panel(first).seeds
        lines = {seed: line for seed in seeds if (line := line_of(of, first, arm, seed, rows)) is not None}
        sources = {line.panel for line in lines.values()}
        if len(lines) == len(seeds) and all(is_shown(of, p, by_arm(of, p, rows)) for p in sources):
            seeds_of[arm] = lines
    scored = {
        arm: {seed: row.as_scored(condition.whose) for seed, row in seeds.items()}
        for arm, seeds in seeds_of.items()
    }
    if scored and condition.exact_runs:
        panel, cell = condition.exact_runs.panel, condition.exact_runs.cell
        scored[EXACT] = dict(by_arm(of, panel, rows)[cell])
    return {arm: scored[arm] for arm in of.arms if arm in scored}


def _complete(of: Settings, panel: str, lines: Rows) -> list[str]:
    """Returns the cells of a panel, or of ``panel@variant``, that have run on all of the panel's seeds.

    Returns none until the panel's primary comparison is complete.
    """
    if not is_shown(of, base(panel), lines):
        return []
    variant, seeds = panel.partition(AT)[2], {*of.panel(panel).seeds}
    return [cell for cell in lines if cell.partition(AT)[2] == variant and seeds <= {*lines[cell]}]


def _planned(of: Settings, panel: str, rows: Sequence[Row]) -> dict[str, Verdict]:
    """Returns the verdicts that were planned for a panel, or for ``panel@variant``.

    It has only arms that ran for this panel, because runs of an earlier panel were known before.
    """
    lines = by_arm(of, base(panel), rows)
    judged = verdicts(of, base(panel), lines)
    return {
        base(cell): judged[cell]
        for cell in _complete(of, panel, lines)
        if any(row.panel == base(panel) for row in lines[cell].values())
    }


def without_follower(lines: Rows) -> Rows:
    """Returns the lines without arm G, which trains with another arm's correction."""
    return {arm: seeds for arm, seeds in lines.items() if arm != FOLLOWER}


def remedy_of(of: Settings, condition: str, arm: str) -> str:
    """Returns what an arm does about the mismatch of a condition."""
    if arm == UNCORRECTED:
        return "uncorrected"
    return of.conditions[condition].exact if arm == EXACT else of.arms[arm].remedy or of.arms[arm].what


def report(of: Settings, rows: Sequence[Row]) -> str:
    """Returns a table per condition in Markdown.

    It compares each pair of arms on the seeds that both have.
    """
    parts = []
    for name, condition in of.conditions.items():
        if not (lines := without_follower(lines_of(of, name, rows))):
            continue
        ends = {arm: bootstrap([row.end for row in seeds.values()], 1)[0] for arm, seeds in lines.items()}
        mean = ", ".join(f"{arm} {end:.3f} ({len(lines[arm])})" for arm, end in ends.items())
        low = ", ".join(f"{arm} {n} ({gain:+.2f})" for arm, (n, gain) in slow(lines).items()) or "none"
        pairs = markdown(["pair", "seeds", "difference", "p"], _pairs(of, lines))
        parts.append(
            f"### {name}, pooled: {condition.what}\n\n"
            f"Mean end (seeds): {mean}. "
            f"Runs below {SLOW} halfway, and what they gained by the end: {low}.\n\n"
            f"{pairs}"
        )
    return "\n\n".join(parts)


def slow(lines: Rows) -> dict[str, tuple[int, float]]:
    """Returns arm -> (number of slow runs, their mean gain).

    A run is slow if its held-out score is below ``SLOW`` halfway. Its gain is from there to the end.
    """
    gains = {}
    for arm, seeds in lines.items():
        halves = [(dict(row.heldout).get(row.heldout[-1][0] // 2), row.end) for row in seeds.values()]
        gained = [end - half for half, end in halves if half is not None and half < SLOW]
        if gained:
            gains[arm] = len(gained), sum(gained) / len(gained)
    return gains


def _pairs(of: Settings, lines: Rows) -> Iterator[list[object]]:
    for first, second in combinations(lines, 2):
        one, other = (second, first) if first == UNCORRECTED else (first, second)
        differences = list(gaps(lines[one], lines[other]).values())
        if differences:
            difference = interval(bootstrap(differences, of.judged.resamples))
            yield [f"{one} - {other}", len(differences), difference, f"{randomised(differences):.2g}"]


def evidence(of: Settings, rows: Sequence[Row]) -> dict[str, Any]:
    """Returns what the package's table holds."""
    conditions = {name: lines_of(of, name, rows) for name in of.conditions}
    return {
        "significance": of.judged.significance,
        "conditions": [_condition(of, name, lines, rows) for name, lines in conditions.items() if lines],
    }


def _condition(of: Settings, name: str, lines: Rows, rows: Sequence[Row]) -> dict[str, Any]:
    condition, uncorrected = of.conditions[name], lines[UNCORRECTED]
    judged = judge(lines, of.judged, by_ends=True)
    panels = [of.panel(panel) for panel in condition.panels]
    planned = {panel: tests for panel in condition.panels if (tests := _planned(of, panel, rows))}
    is_planned = condition.whose == "served"  # a panel's tests of its arms compare these scores
    k3 = [row.k3 for row in uncorrected.values() if row.k3 is not None]
    remedies = []
    for arm, seeds in without_follower(lines).items():
        if arm == UNCORRECTED:
            continue
        if (gain := judged[arm].gain) is None:
            continue
        effect, low, high = gain
        remedies.append(
            {
                "arm": arm,
                "remedy": remedy_of(of, name, arm),
                "preset": None if arm in condition.shared else preset_of(of.arms[arm], arm),
                "seeds": len(gaps(seeds, uncorrected)),
                "end": round(judged[arm].end[0], 4),
                **{key: round(value, 4) for key, value in (("effect", effect), ("low", low), ("high", high))},
                "p": float(f"{judged[arm].p:.2g}"),
                "planned": {
                    panel: float(f"{of_panel[arm].p:.2g}")
                    for panel, of_panel in planned.items()
                    if arm in of_panel and is_planned
                },
            }
        )
    return {
        "name": name,
        "mismatch": condition.mismatch,
        "what": condition.what,
        "scored": condition.scored,
        "panels": list(planned),
        "steps_per_rollout": panels[0].flags.get(STEPS, 1),
        "rollouts_per_push": _rollouts_per_push(of, condition.panels[0]),
        "k3": [min(k3), max(k3)] if k3 else [],
        "post_hoc": not is_planned or len(planned) > 1 or panels[0].test != "ends of a seed",
        "uncorrected": {"seeds": len(uncorrected), "end": round(judged[UNCORRECTED].end[0], 4)},
        "remedies": sorted(remedies, key=lambda remedy: -remedy["effect"]),
    }


def _rollouts_per_push(of: Settings, panel: str) -> int:
    """Returns the rollouts from one push of weights to the next, in the uncorrected runs of a panel."""
    _, at, variant = panel.partition(AT)
    flags = of.flags(base(panel), f"{UNCORRECTED}{at}{variant}", 0)
    return int(flags.get("lag") or flags.get("update_weights_interval") or 1)


def advice(measured: Evidence) -> str:
    """Returns the package's table in Markdown: per condition the uncorrected runs, then every remedy."""
    cells = []
    for condition in measured.conditions:
        k3, steps, none = condition.range, condition.steps_per_rollout, condition.uncorrected
        per_rollout = f"{counted(steps, 'step')} per rollout"
        what = f"{condition.what}; k3 {k3 or 'not recorded'}; {per_rollout}{condition.whose}"
        cells.append([what, "none", none.seeds, f"{none.end:.2f}", "", ""])
        for remedy in condition.remedies:
            effect, interval = remedy.rounded
            tests = ", ".join(f"{panel} {p:.2g}" for panel, p in remedy.planned.items())
            row = ["", remedy.remedy, remedy.seeds, f"{remedy.end:.2f}", f"{effect} ({interval})", tests]
            cells.append(row)
    head = ["runs", "remedy", "seeds", "end", "gain over uncorrected, same seeds", "p after Holm"]
    return markdown(head, cells)


def text(table: Mapping[str, Any]) -> str:
    """Returns the package's file of what `evidence` returned."""
    return HEAD + yaml.safe_dump(table, sort_keys=False, width=116, default_flow_style=None)
