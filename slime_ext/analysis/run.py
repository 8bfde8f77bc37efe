"""Files of a run -> its ``Document``: readers, collectors and what is concluded from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from slime_ext import __version__, config, presets
from slime_ext.analysis.diagnosis import Diagnosis
from slime_ext.analysis.document import Document, Skipped
from slime_ext.analysis.pipeline import Result, collect
from slime_ext.analysis.readers import Job, Wanted, evaluations, find
from slime_ext.analysis.recommend import recommend
from slime_ext.analysis.suggest import Ranking
from slime_ext.analysis.whatif import BOUNDS, WhatIf
from slime_ext.analysis.worst import Worsts, decoder
from slime_ext.correction import Correction
from slime_ext.errors import ConfigError, DataError
from slime_ext.host.flags import check_flags
from slime_ext.objectives import Bounds

Progress = Callable[[Job], None]
MOST_NOTES = 20
PASSES = 2  # over the files, with a wished rejection rate


@dataclass(frozen=True)
class Own:
    """A file of --custom-config-path: its correction, and the host's clip range that it sets."""

    file: str
    correction: Correction
    bounds: Bounds


@dataclass(frozen=True)
class Request:
    """What to analyse, and how.

    Args:
        paths: folders, files, patterns.
        rollouts: ranges such as ``100-200``; None for all.
        jobs: processes.
        configs: name -> the user's own, beside all presets.
        rate: wished rejection rate of the suggestions, or None for none.
        tokenizer: folder of the tokenizer, or None.
    """

    paths: tuple[str, ...]
    rollouts: str | None = None
    jobs: int = 1
    configs: Mapping[str, Own] = field(default_factory=dict)
    rate: float | None = None
    tokenizer: str | None = None

    @property
    def passes(self) -> int:
        """How often every file is read."""
        return 1 if self.rate is None else PASSES

    def files(self) -> list[Job]:
        """The files that would be read.

        Raises:
            DataError: a path holds none.
        """
        return find(self.paths, Wanted.parse(self.rollouts))


def read_configs(files: Iterable[str], read_mapping: Callable[[str], Any]) -> dict[str, Own]:
    """``--config`` files by the name of their row: the file's, with its path behind it if that is a preset's.

    Raises:
        ConfigError: one does not resolve.
    """
    found: dict[str, Own] = {}
    for file in files:
        stem = Path(file).stem
        name = f"{stem} ({file})" if stem in presets.PRESETS else stem
        if name in found:
            raise ConfigError(
                f"--config {file}: expected each name once, got '{name}' twice: it names the row of the table"
            )
        found[name] = _own(file, read_mapping(file))
    return found


def _own(file: str, mapping: Mapping[str, Any]) -> Own:
    if "slime_ext" not in mapping:
        raise ConfigError(
            f"{file}: expected the key slime_ext, got {', '.join(map(str, mapping)) or 'nothing'}"
        )
    clip = {key: mapping[key] for key in ("eps_clip", "eps_clip_high") if mapping.get(key) is not None}
    try:
        check_flags(SimpleNamespace(**clip), ())
        correction = config.read_config(mapping["slime_ext"]).correction
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    # slime sets --eps-clip-high from its own --eps-clip before it reads the file
    return Own(
        file, correction, Bounds(clip.get("eps_clip", BOUNDS.low), clip.get("eps_clip_high", BOUNDS.high))
    )


def analyse(request: Request, jobs: Sequence[Job], done: Progress = lambda job: None) -> Document:
    """Reads the jobs (once, or twice for suggestions) and concludes.

    Args:
        jobs: of ``request.files``.
        done: called after each job of each pass.

    Raises:
        DataError: nothing could be read.
    """
    decoder(request.tokenizer)  # a wrong one is a mistake before the first file is read
    corrections = {name: p.correction for name, p in presets.PRESETS.items()}
    corrections |= {name: own.correction for name, own in request.configs.items()}
    bounds = {name: own.bounds for name, own in request.configs.items()}
    collectors: dict[str, Any] = {
        "diagnosis": Diagnosis(worsts=Worsts(request.tokenizer)),
        "whatif": WhatIf(corrections, bounds),
    }
    if request.rate is not None:
        collectors["ranking"] = Ranking(request.rate)
    result = _collect(request, jobs, collectors, done)
    if not result.rollouts:
        first = result.skipped[0] if result.skipped else f"{request.paths[0]}: no rollout"
        raise DataError(f"{first} (nothing else could be analysed)")
    ranking = None
    if request.rate is not None:
        again = _collect(request, jobs, {"ranking": result.collectors["ranking"].again()}, done)
        ranking = again.collectors["ranking"]
    return _document(request, result, ranking)


def _collect(request: Request, jobs: Sequence[Job], collectors: Mapping[str, Any], done: Progress) -> Result:
    wanted = Wanted.parse(request.rollouts)
    return collect(jobs, collectors, wanted=wanted, processes=request.jobs, done=done)


def _document(request: Request, result: Result, ranking: Ranking | None) -> Document:
    diagnosis: Diagnosis = result.collectors["diagnosis"]
    whatif: WhatIf = result.collectors["whatif"]
    findings, total, effects = diagnosis.findings(), diagnosis.numbers(), whatif.effects()
    files = {name: own.file for name, own in request.configs.items()}
    return Document(
        name=_name(request.paths),
        paths=request.paths,
        made_with=f"slime-ext {__version__}",
        skipped=tuple(Skipped(path=s.path, reason=s.reason) for s in result.skipped),
        notes=(
            *_left_out(request),
            *_first(result.notes),
            *diagnosis.notes(),
            *whatif.notes(),
            *(ranking.notes() if ranking else ()),
        ),
        total=total,
        findings=findings,
        distribution=diagnosis.sums.distribution(),
        curves=diagnosis.drawn(),
        timeline=diagnosis.moments(),
        worst=diagnosis.worst(),
        effects=effects,
        recommendation=recommend(effects, total, findings, files),
        suggestions=ranking.suggestions() if ranking else (),
    )


def _left_out(request: Request) -> tuple[str, ...]:
    count = evaluations(request.paths)
    return (f"{count} dumps of evaluations (eval_<number> in the name) are left out",) if count else ()


def _first(notes: list[str]) -> tuple[str, ...]:
    """A long run repeats itself."""
    more = len(notes) - MOST_NOTES
    return (*notes[:MOST_NOTES], *([f"and {more} more like these"] if more > 0 else []))


def _name(paths: Sequence[str]) -> str:
    """What the report calls the run: the last folder that says something."""
    path = Path(paths[0]).expanduser().absolute()
    inner = ("dumps", "rollout_data", "train_data", "dump_details")
    named = next((p for p in (path, *path.parents) if p.name not in inner), path)
    return named.name if len(paths) == 1 else f"{named.name} and {len(paths) - 1} more"
