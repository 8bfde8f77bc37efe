"""What ``analyze`` says of each fault by mechanism, and of healthy runs.

python -m benchmarks.faults judge [--only NAME] [--seed N] [--jobs N] [--dumps DIR] [--rows FILE]
    [--results FILE]

A run whose dumps ``mechanism --out DIR`` has written is read there, and any other is made. A row is appended
to the file of ``--rows`` as soon as it is known, and not made again. ``--results`` puts the table between two
marks of a page.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

import torch

from benchmarks.faults.mechanisms import CASES, FRESH, SEEN, SOUND, UNSEEN, Case, Runs, sound, start
from benchmarks.faults.reports import Report
from benchmarks.faults.world import write
from slime_ext.core.metrics.names import HEALTHY
from slime_ext.tools.analysis.document import UNCORRECTED, Document, Finding
from slime_ext.tools.analysis.request import Request
from slime_ext.tools.analysis.run import analyse

MOST = 3  # names in an open answer
OPEN = ("unexplained", "outside_healthy")  # findings that say: not healthy, and the cause was not found
NAMED, OF_THREE, CAUSE_OPEN = "named", "one of three", "cause open"
MISNAMED, BESIDE, SILENT, RED = "misnamed", "another beside it", "silent", "silent beside k3"
VERDICTS = (NAMED, OF_THREE, CAUSE_OPEN, BESIDE, MISNAMED, SILENT, RED)
CLEAN, WARNING, ERROR = "clean", "warning", "fault"
HEALTHY_RUN = "healthy"
MARK, END_MARK = "<!-- made by python -m benchmarks.faults judge --results -->", "<!-- end -->"  # of a page


@dataclass(frozen=True)
class Row:
    """What was said of a run."""

    name: str
    seed: int
    verdict: str
    said: str
    k3: float

    @property
    def is_seen(self) -> bool:
        return self.seed < FRESH if self.name == HEALTHY_RUN else self.seed in SEEN


def verdict(case: Case | Report, document: Document) -> str:
    """How good the answer is: see VERDICTS."""
    said = [finding for finding in document.findings if finding.is_fault]
    causes = [finding for finding in said if finding.name not in OPEN]
    right = [finding for finding in causes if _names(finding) & set(case.right)]
    if not causes:
        most = HEALTHY["k3_kl"][1] or 0.0
        return CAUSE_OPEN if said else RED if (document.total.k3 or 0.0) > most else SILENT
    if not right:
        return MISNAMED
    if any(not f.or_else and f.name not in (*case.right, *case.also) for f in causes):
        return BESIDE
    if any(not f.or_else for f in right):
        return NAMED
    return OF_THREE if any(len(_names(f)) <= MOST for f in right) else MISNAMED


def _names(finding: Finding) -> set[str]:
    return {finding.name, *finding.or_else}


def verdict_of_healthy(document: Document) -> str:
    """Whether anything was found in a run without a fault."""
    severities = {finding.severity for finding in document.findings if finding.is_fault}
    return ERROR if "error" in severities else WARNING if severities else CLEAN


@dataclass(frozen=True)
class Asked:
    """The rows that are wanted of a seed: of these faults, and of its share of the healthy runs.

    Args:
        dumps: the folder in which some of the runs are already.
    """

    seed: int
    names: tuple[str, ...]
    healthy: tuple[int, ...]
    dumps: Path | None = None

    def rows(self) -> Iterator[Row]:
        torch.set_num_threads(1)
        runs = Runs(self.seed)
        for name in self.names:
            document = self._analysed(name, self.seed, runs)
            said = verdict(CASES[name], document)
            yield Row(name, self.seed, said, _said(document), document.total.k3 or 0.0)
        for number in self.healthy:
            document = self._analysed(HEALTHY_RUN, number, runs)
            said = verdict_of_healthy(document)
            yield Row(HEALTHY_RUN, number, said, _said(document), document.total.k3 or 0.0)

    def _analysed(self, name: str, number: int, runs: Runs) -> Document:
        made = self.dumps / f"{name}_{number}" if self.dumps else None
        if made and made.exists():
            return analysed(made)
        with tempfile.TemporaryDirectory(prefix="slime_ext_faults_") as folder:
            return analysed(make(name, number, runs, Path(folder)))


def make(name: str, number: int, runs: Runs, folder: Path) -> Path:
    """Writes the dumps of a fault into a folder, or those of a healthy run."""
    if name != HEALTHY_RUN:
        return runs.write(name, folder)
    world = sound(number)
    return write(world, folder, [start(world)])


def healthy_of(seed: int) -> tuple[int, ...]:
    """The healthy runs that are judged beside a seed: each of them beside one.

    >>> healthy_of(0)[:3], healthy_of(15)[:3]
    ((0, 10, 20), (117, 119, 121))
    """
    if seed in UNSEEN:
        return tuple(range(FRESH + UNSEEN.index(seed), SOUND, len(UNSEEN)))
    return tuple(range(SEEN.index(seed), FRESH, len(SEEN))) if seed in SEEN else ()


def judged(asked: Sequence[Asked], jobs: int, path: Path) -> list[Row]:
    """Rows of a file, with those that it lacks of what is asked."""
    rows = read(path)
    known = {(row.name, row.seed) for row in rows}
    left = [
        Asked(
            a.seed,
            tuple(name for name in a.names if (name, a.seed) not in known),
            tuple(number for number in a.healthy if (HEALTHY_RUN, number) not in known),
            a.dumps,
        )
        for a in asked
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        list(pool.map(_append, left, [path] * len(left)))
    return read(path)


def _append(asked: Asked, path: Path) -> None:
    for row in asked.rows():
        with path.open("a") as file:
            file.write(json.dumps(asdict(row)) + "\n")


def read(path: Path) -> list[Row]:
    """The rows of a file, none where there is no file."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [Row(**json.loads(line)) for line in lines]


def analysed(folder: Path) -> Document:
    """Returns what is said of a run, without the effects of corrections, which are not judged."""
    request = Request((str(folder),), presets=(UNCORRECTED,))
    return analyse(request, request.files())


def _said(document: Document) -> str:
    names = ("|".join((f.name, *f.or_else)) for f in document.findings if f.is_fault)
    return ", ".join(names) or "nothing"


def table(rows: Sequence[Row]) -> str:
    """Totals on seen and on unseen runs, then fault by seed, then healthy runs in which something is said."""
    return "\n".join([*_totals(rows), *_by_fault(rows), "", *_by_healthy_run(rows)])


def _totals(rows: Sequence[Row]) -> Iterator[str]:
    for verdicts, is_fault in ((VERDICTS, True), ((CLEAN, WARNING, ERROR), False)):
        yield f"| {'faults' if is_fault else 'healthy runs'} | {' | '.join(verdicts)} | all |"
        yield f"|---|{'---:|' * (len(verdicts) + 1)}"
        for group, is_seen in (("seen", True), ("unseen", False)):
            counted = [row for row in rows if (row.name in CASES) is is_fault and row.is_seen is is_seen]
            count = Counter(row.verdict for row in counted)
            yield f"| {group} | {' | '.join(str(count[v]) for v in verdicts)} | {len(counted)} |"
        yield ""


def _by_fault(rows: Sequence[Row]) -> Iterator[str]:
    seeds = sorted({row.seed for row in rows if row.name in CASES})
    by_run = {(row.name, row.seed): row for row in rows}
    heads = (f"seed {seed}{'' if seed in SEEN else ' (unseen)'}" for seed in seeds)
    yield f"| fault | right | {' | '.join(heads)} |"
    yield f"|---|---|{'---|' * len(seeds)}"
    for name, case in CASES.items():
        of_seeds = [by_run.get((name, seed)) for seed in seeds]
        if any(of_seeds):
            told = (_told(row) if row else "-" for row in of_seeds)
            yield f"| {name} | {', '.join(case.right)} | {' | '.join(told)} |"


def _told(row: Row) -> str:
    said = row.said.replace("|", " or ")
    return said if row.verdict == NAMED else f"*{row.verdict}*: {said}, k3 {row.k3:.2g}"


def _by_healthy_run(rows: Sequence[Row]) -> Iterator[str]:
    odd = [row for row in rows if row.name == HEALTHY_RUN and row.verdict != CLEAN]
    for row in sorted(odd, key=lambda row: row.seed):
        yield f"- healthy run {row.seed}: *{row.verdict}*: {row.said}, k3 {row.k3:.2g}"


def judge(
    only: Sequence[str] | None,
    seed: int | None,
    jobs: int,
    path: Path | None = None,
    results: Path | None = None,
    dumps: Path | None = None,
) -> str:
    """The table of the command; with ``results`` it is put into that page, too."""
    names = tuple(name for name in only or CASES if name in CASES)
    is_healthy = not only or HEALTHY_RUN in only
    seeds = (*SEEN, *UNSEEN) if seed is None else (seed,)
    asked = [Asked(one, names, healthy_of(one) if is_healthy else (), dumps) for one in seeds]
    with tempfile.TemporaryDirectory(prefix="slime_ext_faults_") as folder:
        text = table(judged(asked, jobs, path or Path(folder) / "rows.jsonl"))
    if results:
        before, _, rest = results.read_text().partition(MARK)
        results.write_text(f"{before}{MARK}\n\n{text}\n\n{END_MARK}{rest.partition(END_MARK)[2]}")
    return text
