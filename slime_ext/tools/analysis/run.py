"""Files of a run -> its ``Document``: readers, collectors and what is concluded from them."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from slime_ext import __version__, presets
from slime_ext.errors import DataError
from slime_ext.tools.analysis.document import Document
from slime_ext.tools.analysis.findings import examine
from slime_ext.tools.analysis.findings.headline import headline
from slime_ext.tools.analysis.findings.recommend import recommend
from slime_ext.tools.analysis.measures.detector_statistics import DetectorStatistics
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.exactness import Exactness
from slime_ext.tools.analysis.measures.layer_outputs import layer_distances
from slime_ext.tools.analysis.measures.suggest import Ranking
from slime_ext.tools.analysis.measures.tally import Tally
from slime_ext.tools.analysis.measures.whatif import WhatIf
from slime_ext.tools.analysis.measures.worst_samples import WorstSamples
from slime_ext.tools.analysis.pipeline import Result, collect
from slime_ext.tools.analysis.readers.find import DumpFiles, Job
from slime_ext.tools.analysis.readers.flags import flags_of
from slime_ext.tools.analysis.readers.loss_calls import first_calls
from slime_ext.tools.analysis.readers.vocabulary import vocabulary_of
from slime_ext.tools.analysis.request import Request

Progress = Callable[[Job], None]
MOST_NOTES = 20
LINE = re.compile(r":\d+$")  # at the end of what names a line of a file
INNER = ("dump", "dumps", "rollout_data", "train_data", "dump_details")  # folders whose names say nothing


def analyse(request: Request, found: DumpFiles, done: Progress = lambda job: None) -> Document:
    """The document of a run, from its files, each of which is read once.

    Args:
        found: of ``request.files``.
        done: called after each job.

    Raises:
        DataError: nothing could be read.
    """
    result = collect(found.jobs, collectors_of(request), processes=request.jobs, done=done)
    if not result.rollouts:
        first = result.skipped[0] if result.skipped else f"{request.paths[0]}: no rollout"
        raise DataError(f"{first} (nothing else could be analysed)")
    return document_of(request, found, result)


def collectors_of(request: Request) -> dict[str, Any]:
    """Name -> an empty collector of everything that a document needs."""
    tallies = {name: Tally(presets.PRESETS[name].correction) for name in request.presets}
    tallies |= {name: Tally(own.correction, own.bounds) for name, own in request.configs.items()}
    vocabulary = vocabulary_of(request.paths, request.tokenizer)
    statistics = DetectorStatistics(vocabulary=vocabulary)
    exactness = {"exactness": Exactness()} if request.exact else {}
    return exactness | {
        "diagnosis": Diagnosis(worsts=WorstSamples(request.tokenizer), statistics=statistics),
        "whatif": WhatIf(tallies),
        "ranking": Ranking(request.rate),
    }


def document_of(request: Request, found: DumpFiles, result: Result) -> Document:
    """What follows from what was collected of the files that were found."""
    diagnosis: Diagnosis = result.collectors["diagnosis"]
    whatif: WhatIf = result.collectors["whatif"]
    ranking: Ranking = result.collectors["ranking"]
    folders = list(map(Path, request.paths))
    diagnosis.layers = diagnosis.layers or next(filter(None, map(layer_distances, folders)), ())
    diagnosis.calls = diagnosis.calls or next(filter(None, map(first_calls, folders)), ())
    diagnosis.flags = flags_of(request.paths)
    diagnosis.unread = sum(not LINE.search(skipped.path) for skipped in result.skipped)
    findings, detectors = examine(diagnosis)
    total, effects, moments = diagnosis.numbers(), whatif.effects(), diagnosis.moments()
    distances = [moment.numbers.k3 for moment in moments if moment.numbers.k3 is not None]
    files = {name: own.file for name, own in request.configs.items()}
    return Document(
        name=_name(request.paths),
        paths=request.paths,
        made_with=f"slime-ext {__version__}",
        skipped=tuple(result.skipped),
        unread=_unread(diagnosis, sum(len(job.paths) for job in found.jobs)),
        notes=(
            *_of_evaluations(found.evaluations),
            *_first(result.notes),
            *diagnosis.notes(),
            *whatif.notes(),
            *ranking.notes(),
        ),
        total=total,
        findings=findings,
        detectors=detectors,
        distribution=diagnosis.sums.distribution(),
        curves=diagnosis.all_curves(),
        timeline=moments,
        worst=diagnosis.worsts.found(),
        effects=effects,
        recommendation=recommend(
            effects,
            total,
            findings,
            files,
            k3=statistics.median(distances) if distances else None,
            steps=diagnosis.steps or None,
        ),
        headline=headline(findings, detectors),
        suggestions=ranking.suggestions(),
        exact=result.collectors["exactness"].found() if request.exact else None,
    )


def _unread(diagnosis: Diagnosis, files: int) -> str:
    """How much of the run could not be read; empty if all of it was."""
    out, read = diagnosis.statistics.counts["left_out"], diagnosis.statistics.counts["samples"]
    parts = [f"{diagnosis.unread} of {files} files"] if diagnosis.unread else []
    parts += [f"{int(out)} of {int(out + read)} samples ({out / (out + read):.1%})"] if out else []
    return " and ".join(parts)


def _of_evaluations(count: int) -> tuple[str, ...]:
    return (f"{count} dumps of evaluations (eval_<number> in the name) are left out",) if count else ()


def _first(notes: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """Remarks of files as lines, one for each remark that several files share."""
    files: dict[str, list[str]] = {}
    for file, note in notes:
        files.setdefault(note, []).append(file)
    lines = [
        f"{of[0]}{f' and {len(of) - 1} more' if len(of) > 1 else ''}: {note}" for note, of in files.items()
    ]
    more = len(lines) - MOST_NOTES
    return (*lines[:MOST_NOTES], *([f"and {more} more like these"] if more > 0 else []))


def _name(paths: Sequence[str]) -> str:
    """The name of a run in the report: its last folder that says something."""
    path = Path(paths[0]).expanduser().absolute()
    return next((p for p in (path, *path.parents) if p.name not in INNER), path).name
