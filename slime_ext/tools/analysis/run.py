"""Turns the files of a run into its ``Document``: reads them, collects sums and draws conclusions."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from slime_ext import __version__, presets
from slime_ext.errors import DataError
from slime_ext.tools.analysis.detectors.left_out import Read
from slime_ext.tools.analysis.detectors.shared.identities import record_of
from slime_ext.tools.analysis.document import Document
from slime_ext.tools.analysis.findings import examine, measures
from slime_ext.tools.analysis.findings.recommend import recommend
from slime_ext.tools.analysis.headline import headline
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.exactness import Exactness
from slime_ext.tools.analysis.measures.layer_outputs import layer_distances
from slime_ext.tools.analysis.measures.suggest import Ranking
from slime_ext.tools.analysis.measures.tally import Tally
from slime_ext.tools.analysis.measures.whatif import WhatIf
from slime_ext.tools.analysis.measures.worst_samples import WorstSamples
from slime_ext.tools.analysis.pipeline import Result, collect
from slime_ext.tools.analysis.readers.find import DumpFiles, Job, none_of
from slime_ext.tools.analysis.readers.flags import flags_of
from slime_ext.tools.analysis.readers.loss_calls import first_calls
from slime_ext.tools.analysis.readers.vocabulary import absolute, vocabulary_of
from slime_ext.tools.analysis.request import Request
from slime_ext.tools.analysis.texts import counted

Progress = Callable[[Job], None]
MOST_NOTES = 20
LINE = re.compile(r":\d+$")  # at the end of a path that names a line of a file
INNER = ("dump", "dumps", "rollout_data", "train_data", "dump_details")  # names that identify no run


def analyse(request: Request, files: DumpFiles, done: Progress = lambda job: None) -> Document:
    """Returns the document of a run. Reads each file once.

    Args:
        files: the result of ``request.files()``.
        done: is called after each job.

    Raises:
        DataError: nothing could be read.
    """
    result = collect(files.jobs, collectors_of(request), processes=request.jobs, done=done)
    if not result.rollouts and result.unwanted:
        raise none_of(result.unwanted)
    if not result.rollouts:
        first = result.skipped[0] if result.skipped else f"{request.paths[0]}: holds no rollout"
        raise DataError(f"{first} (no other file could be analysed)")
    return document_of(request, files, result)


def collectors_of(request: Request) -> dict[str, Any]:
    """Returns an empty collector of everything that a document needs, by name."""
    tallies = {name: Tally(presets.PRESETS[name].correction) for name in request.presets}
    tallies |= {name: Tally(user.correction, user.bounds) for name, user in request.configs.items()}
    vocabulary = vocabulary_of(request.paths, request.tokenizer)
    exactness = {"exactness": Exactness()} if request.exact else {}
    return exactness | {
        "diagnosis": Diagnosis(worsts=WorstSamples(request.tokenizer), measures=measures(vocabulary)),
        "whatif": WhatIf(tallies),
        "ranking": Ranking(request.rate),
    }


def document_of(request: Request, dumps: DumpFiles, result: Result) -> Document:
    """Returns the document that follows from the collected sums of the files."""
    diagnosis: Diagnosis = result.collectors["diagnosis"]
    whatif: WhatIf = result.collectors["whatif"]
    ranking: Ranking = result.collectors["ranking"]
    folders = list(map(absolute, request.paths))
    diagnosis.layers = diagnosis.layers or next(filter(None, map(layer_distances, folders)), ())
    diagnosis.calls = diagnosis.calls or next(filter(None, map(first_calls, folders)), ())
    diagnosis.flags = flags_of(request.paths)
    diagnosis.unread = sum(not LINE.search(skipped.path) for skipped in result.skipped)
    findings, detectors = examine(diagnosis)
    record = record_of(diagnosis)
    total, effects, moments = diagnosis.numbers(), whatif.effects(), diagnosis.moments()
    files = {name: user.file for name, user in request.configs.items()}
    return Document(
        name=_name(request.paths),
        paths=request.paths,
        made_with=f"slime-ext {__version__}",
        skipped=tuple(result.skipped),
        unread=_unread(diagnosis, sum(len(job.paths) for job in dumps.jobs)),
        notes=(
            *_of_evaluations(dumps.evaluations),
            *_first(result.notes),
            *diagnosis.notes(),
            *whatif.notes(),
            *ranking.notes(),
        ),
        total=total,
        findings=findings,
        detectors=detectors,
        record=record.documented(),
        distribution=diagnosis.sums.distribution(),
        curves=diagnosis.all_curves(),
        timeline=moments,
        worst=diagnosis.worsts.largest_first(),
        effects=effects,
        recommendation=recommend(
            effects,
            total,
            findings,
            files,
            rollouts_per_push=diagnosis.rollouts_per_push(),
            flags_of_run=diagnosis.flags,
        ),
        headline=headline(findings, detectors),
        suggestions=ranking.suggestions(),
        exact=result.collectors["exactness"].comparison() if request.exact else None,
    )


def _unread(diagnosis: Diagnosis, files: int) -> str:
    """Returns how much of the run could not be read, as text; empty if all of it was."""
    out, read = diagnosis.of(Read).left_out, diagnosis.of(Read).samples
    parts = [f"{diagnosis.unread} of {files} files"] if diagnosis.unread else []
    parts += [f"{int(out)} of {int(out + read)} samples ({out / (out + read):.1%})"] if out else []
    return " and ".join(parts)


def _of_evaluations(count: int) -> tuple[str, ...]:
    return (f"left out: {counted(count, 'evaluation dump')} (eval_<number> in the name)",) if count else ()


def _first(notes: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """Returns the remarks about files as lines. Files with the same remark share a line."""
    files: dict[str, list[str]] = {}
    for file, note in notes:
        files.setdefault(note, []).append(file)
    lines = [
        f"{of[0]}{f' and {len(of) - 1} more' if len(of) > 1 else ''}: {note}" for note, of in files.items()
    ]
    more = len(lines) - MOST_NOTES
    return (*lines[:MOST_NOTES], *([f"and {more} more"] if more > 0 else []))


def _name(paths: Sequence[str]) -> str:
    """Returns the name of a run: its last folder with a name that identifies it."""
    path = Path(paths[0]).expanduser().absolute()
    return next((p for p in (path, *path.parents) if p.name not in INNER), path).name
