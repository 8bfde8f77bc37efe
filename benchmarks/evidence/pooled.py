"""Pools panels that differ only in arms and seeds, and compares each pair of arms.

Most of these comparisons were chosen when the runs were known, so their intervals and p-values describe the
runs and confirm nothing. A comparison that was planned has a separate p in its panel.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from benchmarks.evidence.judge import EXACT, UNCORRECTED, Rows, Verdict, bootstrap, gaps, judge, randomised
from benchmarks.evidence.rows import Row
from benchmarks.evidence.settings import AT, Settings, base
from benchmarks.evidence.settings import Condition as Pool
from benchmarks.evidence.table import FOLLOWER, by_arm, interval, is_shown, line_of, markdown, verdicts

STEPS = "num_steps_per_rollout"
SLOW = 0.3
# The conditions of the page and of its picture -> their names there. Runs with rounded weights count with the
# scores of the trainer's weights. RESULTS.md has all conditions, and the scores of the rounded weights.
SHOWN = {
    "lag": "weights pushed every 4th rollout",
    "half_rate": "every 4th, half of the learning rate",
    "quarter_rate": "every 4th, a quarter of it",
    "no_lag": "after every rollout",
    "lag2": "every 2nd rollout",
    "lag8": "every 8th rollout",
    "four_steps": "every 4th, four steps per rollout",
    "int4_trained": "INT4 weights in the sampler",
    "fp8_trained": "FP8 weights in the sampler",
    "int8_trained": "INT8 weights in the sampler",
    "long": "every 4th, answers of 104 tokens",
    "letters": "a tiny model, every 20th, four steps",
}


@dataclass(frozen=True)
class Remedy:
    """One way to train under a condition, compared with uncorrected runs of the same seeds.

    Attributes:
        arm: the letter of the arm in settings.yaml.
        end: the mean held-out score at the end, over the seeds of this arm.
        effect, low, high: the mean difference from uncorrected runs, and its 95% interval over seeds.
        p: of Fisher's randomisation test of pairs, after Holm over the condition's arms.
        planned: panel -> p of the test that was written down before the panel ran.
    """

    arm: str
    remedy: str
    seeds: int
    end: float
    effect: float
    low: float
    high: float
    p: float
    planned: dict[str, float]

    @property
    def gain(self) -> str:
        """The effect and its interval as text."""
        effect, low, high = (round(x, 2) + 0.0 for x in (self.effect, self.low, self.high))  # no -0.00
        return f"{effect:+.2f} ({low:.2f} to {high:.2f})"


@dataclass(frozen=True)
class Condition:
    """Runs that differ only in how they train, and in their seeds.

    Attributes:
        pool: the condition in settings.yaml.
        k3: the k3 of each uncorrected run, sorted; of a run, the median over its rollouts. Empty: unknown.
        seeds, end: number and mean end of the uncorrected runs.
        remedies: sorted by effect, the largest first.
    """

    name: str
    pool: Pool
    steps_per_rollout: int
    k3: tuple[float, ...]
    seeds: int
    end: float
    remedies: tuple[Remedy, ...]

    @property
    def range(self) -> str:
        """The range of k3 as text."""
        return f"{self.k3[0]:.2g} to {self.k3[-1]:.2g}" if self.k3 else "not recorded"

    def of(self, arm: str) -> Remedy | None:
        """Returns the result of an arm; None if it did not run."""
        return next((remedy for remedy in self.remedies if remedy.arm == arm), None)


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


def conditions(of: Settings, rows: Sequence[Row]) -> dict[str, Condition]:
    """Returns what ran under each condition, by name. A condition without a complete panel is left out."""
    lines = {name: lines_of(of, name, rows) for name in of.conditions}
    return {name: _condition(of, name, of_arm, rows) for name, of_arm in lines.items() if of_arm}


def _condition(of: Settings, name: str, lines: Rows, rows: Sequence[Row]) -> Condition:
    pool, uncorrected = of.conditions[name], lines[UNCORRECTED]
    judged = judge(lines, of.judged, by_ends=True)
    planned = {panel: _planned(of, panel, rows) for panel in pool.panels}
    is_planned = pool.whose == "served"  # a panel's tests of its arms compare these scores
    remedies = []
    for arm, seeds in without_follower(lines).items():
        if arm == UNCORRECTED or (gain := judged[arm].gain) is None:
            continue
        effect, low, high = gain
        tests = {
            panel: float(f"{tests[arm].p:.2g}")
            for panel, tests in planned.items()
            if arm in tests and is_planned
        }
        remedies.append(
            Remedy(
                arm=arm,
                remedy=remedy_of(of, name, arm),
                seeds=len(gaps(seeds, uncorrected)),
                end=judged[arm].end[0],
                effect=effect,
                low=low,
                high=high,
                p=float(f"{judged[arm].p:.2g}"),
                planned=tests,
            )
        )
    return Condition(
        name=name,
        pool=pool,
        steps_per_rollout=of.panel(pool.panels[0]).flags.get(STEPS, 1),
        k3=tuple(sorted(row.k3 for row in uncorrected.values() if row.k3 is not None)),
        seeds=len(uncorrected),
        end=judged[UNCORRECTED].end[0],
        remedies=tuple(sorted(remedies, key=lambda remedy: -remedy.effect)),
    )


def all_results(measured: Mapping[str, Condition]) -> str:
    """Returns a table in Markdown: per condition the uncorrected runs, then every remedy."""
    cells = []
    for condition in measured.values():
        steps = condition.steps_per_rollout
        what = f"{condition.pool.what}; k3 {condition.range}; {steps} step{'s' * (steps > 1)} per rollout"
        if condition.pool.scored:
            what += f"; scored with {condition.pool.scored}"
        cells.append([what, "none", condition.seeds, f"{condition.end:.2f}", "", ""])
        for remedy in condition.remedies:
            tests = ", ".join(f"{panel} {p:.2g}" for panel, p in remedy.planned.items())
            cells.append(["", remedy.remedy, remedy.seeds, f"{remedy.end:.2f}", remedy.gain, tests])
    head = ["runs", "remedy", "seeds", "end", "gain over uncorrected, same seeds", "p after Holm"]
    return markdown(head, cells)


def summary(measured: Mapping[str, Condition]) -> str:
    """Returns the table of docs/evidence.md in Markdown: a row per shown condition."""
    cells = []
    for name, label in SHOWN.items():
        condition = measured[name]
        k3 = f"{statistics.median(condition.k3):.2g}" if condition.k3 else "-"
        exact, tis = condition.of(EXACT), condition.of("C")
        without = f"{exact.end:.2f}" if exact else "-"
        cells.append([label, k3, condition.seeds, f"{condition.end:.2f}", without, tis.gain if tis else "-"])
    head = ["runs", "k3", "seeds", "uncorrected", "no mismatch", "`token_tis` gains"]
    return markdown(head, cells)
