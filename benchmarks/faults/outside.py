"""Judges ``analyze`` on mechanisms that no detector was written for, and on healthy runs of many kinds.

python -m benchmarks.faults reports [--set first|later|third|fourth] [--unseen] [--seed N] [--only NAME]
    [--jobs N] [--rows FILE] [--against FILE] [--dumps DIR]

It judges mechanisms, healthy runs and windows of the seen seeds, or of those that are unseen, or only the
mechanisms of one seed. The mechanisms are those of the first table, or with ``--set`` those of another,
without windows. A row is appended to the file of ``--rows`` as soon as it is known, and not made again; the
table has all rows of that file, and those of ``--against`` beside them. Runs that ``report --out DIR`` and
``kind --out DIR`` wrote are read there (``--dumps DIR``), and any other is made.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch

from benchmarks.faults import judge
from benchmarks.faults.fourth_reports import FOURTH_REPORTS
from benchmarks.faults.kinds import (
    KINDS,
    LAGGING,
    SEEDS,
    UNSEEN_LAGGING,
    UNSEEN_SEEDS,
    WINDOWS,
    window,
    write_kind,
    write_lagging,
)
from benchmarks.faults.later_reports import LATER_REPORTS
from benchmarks.faults.reports import REPORTS, SEEN, UNSEEN, base, runs_of, write_report
from benchmarks.faults.third_reports import THIRD_REPORTS
from slime_ext.tools.analysis.document import Document

FIRST = "first"
SETS = {FIRST: REPORTS, "later": LATER_REPORTS, "third": THIRD_REPORTS, "fourth": FOURTH_REPORTS}
ALL_REPORTS = REPORTS | LATER_REPORTS | THIRD_REPORTS | FOURTH_REPORTS
LAG_NAMES = ("stale_weights", *judge.OPEN)  # of an error in a short window of a lagging run
WINDOW, RIGHT_WINDOW, WRONG_WINDOW = "window", "no other error", "error of another cause"


@dataclass(frozen=True)
class Row:
    """What was said of a run.

    Args:
        truth: share of k3 that the planted fault makes; None: unknown.
        explains: finding -> the share that it says it explains, and its error.
    """

    name: str
    seed: int
    verdict: str
    said: str
    k3: float
    truth: float | None = None
    explains: dict[str, tuple[float, float | None]] = field(default_factory=dict)


def row_of(name: str, seed: int, verdict: str, document: Document, healthy: float | None = None) -> Row:
    """Returns the row of a run.

    Args:
        healthy: k3 of the same run without the fault.
    """
    k3 = document.total.k3 or 0.0
    shares = {f.name: (f.explains, f.explains_error) for f in document.findings if f.explains is not None}
    truth = 1 - healthy / k3 if healthy is not None and k3 > healthy else None
    said = ", ".join(
        "|".join((f.name, *f.or_else)) + f" ({f.severity})" for f in document.findings if f.is_fault
    )
    return Row(name, seed, verdict, said or "nothing", k3, truth, shares)


@dataclass(frozen=True)
class Asked:
    """Rows that one process makes: reports of a seed, healthy runs, or windows.

    Args:
        known: (name, seed) of rows that are there already.
        dumps: the folder in which runs are kept, if any.
    """

    seed: int
    reports: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    windows: int = 0
    known: frozenset[tuple[str, int]] = frozenset()
    dumps: Path | None = None

    def rows(self) -> Iterator[Row]:
        torch.set_num_threads(1)
        yield from self._reports()
        for name in self.kinds:
            if (name, self.seed) not in self.known:
                document = self._analysed(name, partial(write_kind, name, self.seed))
                yield row_of(name, self.seed, judge.verdict_of_healthy(document), document)
        if self.windows and (WINDOW, self.seed * 100) not in self.known:
            yield from self._windows()

    def _reports(self) -> Iterator[Row]:
        runs, healthy = runs_of(self.seed), {}
        for name in self.reports:
            if (name, self.seed) in self.known:
                continue
            report = ALL_REPORTS[name]
            family = report.family
            if family not in healthy:
                plain = partial(runs.plant, base(self.seed, family), family)
                healthy[family] = self._analysed(f"healthy_{family}", plain).total.k3 or 0.0
            document = self._analysed(name, partial(write_report, report, runs))
            verdict = judge.verdict(report, document)
            yield row_of(name, self.seed, verdict, document, healthy[family])

    def _windows(self) -> Iterator[Row]:
        with tempfile.TemporaryDirectory(prefix="slime_ext_faults_") as folder:
            whole = Path(folder) / "whole"
            for number in range(self.windows):
                if not self._kept(f"{WINDOW}_{self.seed}_{number}") and not whole.exists():
                    write_lagging(self.seed, whole)
                document = self._analysed(WINDOW, partial(window, whole, number), f"_{number}")
                yield row_of(WINDOW, self.seed * 100 + number, of_window(document), document)

    def _kept(self, name: str) -> Path | None:
        kept = self.dumps / name if self.dumps else None
        return kept if kept and kept.exists() else None

    def _analysed(self, name: str, make: Callable[[Path], Path], number: str = "") -> Document:
        if kept := self._kept(f"{name}_{self.seed}{number}"):
            return judge.analysed(kept)
        with tempfile.TemporaryDirectory(prefix="slime_ext_faults_") as folder:
            return judge.analysed(make(Path(folder)))


def of_window(document: Document) -> str:
    """Returns whether a window of a lagging run has an error of another cause."""
    errors = [f for f in document.findings if f.severity == "error"]
    is_other = any(f.name not in LAG_NAMES and "stale_weights" not in f.or_else for f in errors)
    return WRONG_WINDOW if is_other else RIGHT_WINDOW


def judged(asked: Sequence[Asked], jobs: int, path: Path) -> list[Row]:
    """Returns the rows of a file, with those that are asked for."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if jobs < 2:
        for one in asked:
            _append(one, path)
    else:
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
            list(pool.map(_append, asked, [path] * len(asked)))
    return read(path)


def _append(asked: Asked, path: Path) -> None:
    for row in asked.rows():
        with path.open("a") as file:
            file.write(json.dumps(asdict(row)) + "\n")


def read(path: Path | None) -> list[Row]:
    """Returns the rows of a file, none where there is no file."""
    lines = path.read_text().splitlines() if path and path.exists() else []
    return [Row(**json.loads(line)) for line in lines]


def table(columns: dict[str, list[Row]]) -> str:
    """Returns totals, mechanism by mechanism, and what was said of healthy runs and windows.

    Args:
        columns: name of a judgement -> its rows.
    """
    return "\n".join([*_totals(columns), *_by_report(columns), *_healthy(columns), *_explained(columns)])


def _groups(columns: dict[str, list[Row]]) -> Iterator[tuple[str, list[Row]]]:
    for word, is_seen in (("seen", True), ("unseen", False)):
        for set_name, reports in SETS.items():
            title = word if set_name == FIRST else f"{word}, {set_name}"
            for column, rows in columns.items():
                group = [row for row in rows if row.name in reports and (row.seed in SEEN) is is_seen]
                if group:
                    yield f"{title}, {column}", group


def _totals(columns: dict[str, list[Row]]) -> Iterator[str]:
    yield f"| reports | {' | '.join(judge.VERDICTS)} | all | named or one of three | misnamed |"
    yield f"|---|{'---:|' * (len(judge.VERDICTS) + 3)}"
    for word, rows in _groups(columns):
        count = Counter(row.verdict for row in rows)
        good = (count[judge.NAMED] + count[judge.OF_THREE]) / len(rows)
        wrong = count[judge.MISNAMED] / len(rows)
        numbers = " | ".join(str(count[v]) for v in judge.VERDICTS)
        yield f"| {word} | {numbers} | {len(rows)} | {good:.0%} | {wrong:.0%} |"
    yield ""


def _by_report(columns: dict[str, list[Row]]) -> Iterator[str]:
    groups = dict(_groups(columns))
    yield f"| mechanism | report | right | k3 | {' | '.join(groups)} |"
    yield f"|---|---|---|---|{'---|' * len(groups)}"
    for name, report in ALL_REPORTS.items():
        rows = [row for group in groups.values() for row in group if row.name == name]
        if rows:
            k3 = [row.k3 for row in rows]
            cells = (_cell([row for row in group if row.name == name]) for group in groups.values())
            span = f"{min(k3):.1g} to {max(k3):.1g}"
            yield f"| {name} | {report.source} | {', '.join(report.right)} | {span} | {' | '.join(cells)} |"
    yield ""


def _cell(rows: Sequence[Row]) -> str:
    words = Counter(
        row.verdict if row.verdict == judge.NAMED else f"*{row.verdict}*: {row.said.replace('|', ' or ')}"
        for row in rows
    )
    return "; ".join(f"{count} {word}" for word, count in words.items()) or "-"


def _healthy(columns: dict[str, list[Row]]) -> Iterator[str]:
    for column, rows in _healthy_groups(columns):
        runs = [row for row in rows if row.name in KINDS]
        windows = [row for row in rows if row.name == WINDOW]
        if runs:
            count = Counter(row.verdict for row in runs)
            said = f"{count[judge.ERROR]} have an error and {count[judge.WARNING]} a warning"
            yield f"- {column}: of {len(runs)} healthy runs {said}"
        if windows:
            wrong = [row for row in windows if row.verdict == WRONG_WINDOW]
            yield f"- {column}: of {len(windows)} windows {len(wrong)} have an error of another cause"
        for row in runs + windows:
            if row.verdict not in (judge.CLEAN, RIGHT_WINDOW):
                yield f"  - {row.name} {row.seed}: *{row.verdict}*: {row.said}, k3 {row.k3:.2g}"
    yield ""


def _healthy_groups(columns: dict[str, list[Row]]) -> Iterator[tuple[str, list[Row]]]:
    seen = {(name, seed) for name in KINDS for seed in SEEDS}
    seen |= {(WINDOW, 100 * seed + number) for seed in LAGGING for number in range(WINDOWS)}
    for is_seen, word in ((True, "seen"), (False, "unseen")):
        for column, rows in columns.items():
            group = [row for row in rows if row.name not in ALL_REPORTS]
            yield f"{word}, {column}", [row for row in group if ((row.name, row.seed) in seen) is is_seen]


def _explained(columns: dict[str, list[Row]]) -> Iterator[str]:
    for word, rows in _groups(columns):
        off: list[float] = []
        within = total = 0
        for row in rows:
            if row.truth is None or row.verdict not in (judge.NAMED, judge.OF_THREE):
                continue
            for share, error in row.explains.values():
                off.append(abs(share - row.truth))
                total += 1
                within += error is not None and abs(share - row.truth) <= 2 * error
        if off:
            yield (
                f"- {word}: {total} findings say what they explain: {statistics.median(off):.3f} from the "
                f"planted share (median; at most {max(off):.2f}), {within} within two of their errors"
            )


def judge_reports(
    only: Sequence[str] | None,
    unseen: bool,
    seed: int | None,
    set_name: str,
    jobs: int,
    path: Path | None,
    against: Path | None,
    dumps: Path | None,
) -> str:
    """Returns the table of the command."""
    with tempfile.TemporaryDirectory(prefix="slime_ext_faults_") as folder:
        path = path or Path(folder) / "rows.jsonl"
        known = frozenset((row.name, row.seed) for row in read(path))
        reports = SETS[set_name]
        names = tuple(name for name in only or reports if name in reports)
        seeds = (UNSEEN if unseen else SEEN) if seed is None else (seed,)
        asked = [Asked(one, reports=names, known=known, dumps=dumps) for one in seeds]
        kinds = tuple(name for name in only or KINDS if name in KINDS)
        if seed is None:
            asked += [Asked(s, kinds=kinds, known=known) for s in (UNSEEN_SEEDS if unseen else SEEDS)]
        if seed is None and (WINDOW in only if only else set_name == FIRST):
            lagging = UNSEEN_LAGGING if unseen else LAGGING
            asked += [Asked(one, windows=WINDOWS, known=known) for one in lagging]
        rows = judged(asked, jobs, path)
        return table(({"before": read(against)} if against else {}) | {"now": rows})
