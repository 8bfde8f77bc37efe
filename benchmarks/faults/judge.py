"""What ``analyze`` says of each fault by mechanism, and of healthy runs.

python -m benchmarks.faults judge [--only NAME] [--seed N] [--jobs N]
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch

from benchmarks.faults.mechanisms import CASES, SEEN, SOUND, UNSEEN, Runs, sound, start
from benchmarks.faults.world import write
from slime_ext.core.metrics.names import HEALTHY
from slime_ext.tools.analysis.document import Document, Finding
from slime_ext.tools.analysis.request import Request
from slime_ext.tools.analysis.run import analyse

MOST = 3  # names in an open answer
OPEN = ("unexplained", "outside_healthy")  # findings that say: not healthy, and the cause was not found
NAMED, OF_THREE, CAUSE_OPEN = "named", "one of three", "cause open"
MISNAMED, BESIDE, SILENT, RED = "misnamed", "another beside it", "silent", "silent beside k3"
VERDICTS = (NAMED, OF_THREE, CAUSE_OPEN, BESIDE, MISNAMED, SILENT, RED)
CLEAN, WARNING, ERROR = "clean", "warning", "fault"
HEALTHY_RUN = "healthy"


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
        return self.seed % 2 == 0 if self.name == HEALTHY_RUN else self.seed in SEEN


def verdict(name: str, document: Document) -> str:
    """How good the answer is: see VERDICTS."""
    case, said = CASES[name], [finding for finding in document.findings if finding.is_fault]
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
    found = {finding.severity for finding in document.findings if finding.is_fault}
    return ERROR if "error" in found else WARNING if found else CLEAN


def judged(names: Sequence[str], seeds: Sequence[int], jobs: int, healthy: int = SOUND) -> list[Row]:
    """The rows of these faults under these seeds, and of so many healthy runs."""
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        lists = pool.map(_of_seed, seeds, [names] * len(seeds))
        rows = pool.map(_of_sound, range(healthy))
        return [*(row for found in lists for row in found), *rows]


def _of_seed(seed: int, names: Sequence[str]) -> list[Row]:
    torch.set_num_threads(1)
    runs, rows = Runs(seed), []
    for name in names:
        with tempfile.TemporaryDirectory(prefix="slime_ext_faults_") as folder:
            document = _analysed(runs.write(name, Path(folder)))
        rows.append(Row(name, seed, verdict(name, document), _said(document), document.total.k3 or 0.0))
    return rows


def _of_sound(number: int) -> Row:
    torch.set_num_threads(1)
    world = sound(number)
    with tempfile.TemporaryDirectory(prefix="slime_ext_faults_") as folder:
        document = _analysed(write(world, Path(folder), [start(world)]))
    said = verdict_of_healthy(document)
    return Row(HEALTHY_RUN, number, said, _said(document), document.total.k3 or 0.0)


def _analysed(folder: Path) -> Document:
    request = Request((str(folder),))
    return analyse(request, request.files())


def _said(document: Document) -> str:
    names = ("|".join((f.name, *f.or_else)) for f in document.findings if f.is_fault)
    return ", ".join(names) or "nothing"


def table(rows: Sequence[Row]) -> str:
    """Fault by seed, then how many of each verdict on seen and on unseen runs."""
    return "\n".join([*_by_fault(rows), "", *_totals(rows)])


def _by_fault(rows: Sequence[Row]) -> Iterator[str]:
    yield "| fault | right | seed | verdict | k3 | said |"
    yield "|---|---|---:|---|---:|---|"
    for row in rows:
        if row.verdict != CLEAN:
            right = ", ".join(CASES[row.name].right) if row.name in CASES else "nothing"
            yield f"| {row.name} | {right} | {row.seed} | {row.verdict} | {row.k3:.2g} | {row.said} |"


def _totals(rows: Sequence[Row]) -> Iterator[str]:
    for verdicts, is_fault in ((VERDICTS, True), ((CLEAN, WARNING, ERROR), False)):
        yield f"| {'faults' if is_fault else 'healthy runs'} | {' | '.join(verdicts)} | all |"
        yield f"|---|{'---:|' * (len(verdicts) + 1)}"
        for group, is_seen in (("seen", True), ("unseen", False)):
            own = [row for row in rows if (row.name in CASES) is is_fault and row.is_seen is is_seen]
            count = Counter(row.verdict for row in own)
            yield f"| {group} | {' | '.join(str(count[v]) for v in verdicts)} | {len(own)} |"
        yield ""


def judge(only: Sequence[str] | None, seed: int | None, jobs: int) -> str:
    """The table of the command."""
    seeds = (*SEEN, *UNSEEN) if seed is None else (seed,)
    names = [name for name in only or CASES if name in CASES]
    return table(judged(names, seeds, jobs, 0 if only and HEALTHY_RUN not in only else SOUND))
