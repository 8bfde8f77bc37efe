"""Finds the files of a run, and groups them by rollout."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from slime_ext.errors import DataError
from slime_ext.tools.analysis.texts import counted

KINDS = ("rollout_data", "train_data")
DUMPS = ("", "dump", "dumps")  # folders of a path in which KINDS may be; slime-ext train writes to dump
TORCH, ARCHIVE, JSONL = ".pt", ".straw.json", ".jsonl"
ENDINGS = (TORCH, ARCHIVE, JSONL)
RANGE = re.compile(r"(\d{0,18})-(\d{0,18})|(\d{1,18})")
# Levels below a folder without dumps in which dumps are searched; folders that the message names.
LEVELS, MOST_NAMED = 3, 3
QUOTED = 60  # characters of a mistake that a message shows
NUMBER = re.compile(r"\d+")
RANKED = re.compile(r"\d+[_-](?:rank[_-]?)?\d+$")
# slime replaces the number in --save-debug-rollout-data by "eval_5" for an evaluation, on which nothing
# trains.
EVALUATION = re.compile(r"(^|[^a-z])eval_\d")


@dataclass(frozen=True)
class RolloutRanges:
    """Ranges of rollout numbers, both ends included. No range means all numbers."""

    ranges: tuple[tuple[int, float], ...] = ()

    @classmethod
    def parse(cls, text: str | None) -> RolloutRanges:
        """Parses ranges such as ``100-200``, ``7`` or ``0,5,10-``.

        Raises:
            DataError: the text is not a list of ranges.

        >>> RolloutRanges.parse("0,5,10-").ranges
        ((0, 0), (5, 5), (10, inf))
        """
        parts = [] if text is None else text.replace(" ", "").split(",")
        return cls(tuple(_range(part, text or "") for part in parts))

    def __contains__(self, rollout_id: int | None) -> bool:
        """Returns whether a rollout is wanted; with an unknown number it is, until its content is read."""
        if rollout_id is None or not self.ranges:
            return True
        return any(low <= rollout_id <= high for low, high in self.ranges)


EVERY_ROLLOUT = RolloutRanges()


def _range(part: str, text: str) -> tuple[int, float]:
    match = RANGE.fullmatch(part)
    if not match or part in ("", "-"):
        raise DataError(
            f"--rollouts: expected numbers and ranges such as 100-200 or 0,5,10-, got '{text[:QUOTED]}'"
        )
    low, high, single = match.groups()
    if single is not None:
        return int(single), int(single)
    if high and int(low or 0) > int(high):
        raise DataError(f"--rollouts: expected ranges low-high, got '{part}': write {high}-{low}")
    return int(low or 0), int(high) if high else float("inf")


@dataclass(frozen=True)
class Job:
    """The files of one rollout, or one JSONL file.

    Args:
        size: of the files, bytes.
        wanted: the rollouts to read from the files.
    """

    paths: tuple[Path, ...]
    rollout_id: int | None
    size: int
    wanted: RolloutRanges = EVERY_ROLLOUT

    @property
    def is_jsonl(self) -> bool:
        return self.paths[0].suffix == JSONL

    def __str__(self) -> str:
        """Writes the paths, with their common folder once."""
        if len(self.paths) == 1:
            return str(self.paths[0])
        root = _root(self.paths[0])
        names = [str(p.relative_to(root) if p.is_relative_to(root) else p) for p in self.paths]
        return f"{root}/{{{','.join(names)}}}"


class NoDumps(DataError):
    """The paths hold no dump to read. A running job may still write one."""


@dataclass(frozen=True)
class DumpFiles:
    """The jobs of the wanted rollouts, ordered by number, and the number of evaluation dumps left out."""

    jobs: tuple[Job, ...]
    evaluations: int


def find(paths: Iterable[str | Path], wanted: RolloutRanges = EVERY_ROLLOUT) -> DumpFiles:
    """Returns the files to read.

    Raises:
        NoDumps: a path does not exist or holds no dump.
        DataError: the paths belong to two runs.
    """
    files = list(dumps_of(paths).values())
    dumps = [file for file in files if not EVALUATION.search(file.name)]
    if files and not dumps:
        raise NoDumps(
            f"{files[0]}: expected dumps of training, got {counted(len(files), 'evaluation dump')}: name "
            "training dumps"
        )
    runs = {_root(file).resolve(): _root(file) for file in dumps}
    if len(runs) > 1:
        raise DataError(
            f"{', '.join(map(str, runs.values()))}: expected dumps of one run, got {len(runs)} folders: type "
            "--against before the second run"
        )
    jobs = _jobs(dumps, wanted)
    chosen = [job for job in jobs if job.rollout_id in wanted]
    if jobs and not chosen:
        known = [job.rollout_id for job in jobs if job.rollout_id is not None]
        raise none_of(known)
    return DumpFiles(tuple(chosen), len(files) - len(dumps))


def none_of(known: Sequence[int]) -> NoDumps:
    """Returns the error for --rollouts that names none of the known rollouts."""
    return NoDumps(
        f"--rollouts: expected some of {min(known)}-{max(known)}, got none: type numbers in that range"
    )


def dumps_of(paths: Iterable[str | Path]) -> dict[Path, Path]:
    """Returns all dumps of the paths, also those of evaluations: path without links -> path.

    Raises:
        NoDumps: a path does not exist or holds no dump.
        DataError: a path is invalid.
    """
    return {file.resolve(): file for path in paths for file in _files(str(path))}


def _jobs(files: Sequence[Path], wanted: RolloutRanges) -> list[Job]:
    """Returns one job per rollout, ordered by number. Each JSONL file is a separate job."""
    together: dict[tuple[int, str], list[Path]] = {}
    for path, number in _numbers(files).items():
        is_dump = path.suffix != JSONL
        key = (-1 if number is None or not is_dump else number, "" if is_dump else str(path))
        together.setdefault(key, []).append(path)
    return [
        Job(
            tuple(sorted(paths, key=_rank)),
            None if number < 0 else number,
            sum(path.stat().st_size for path in paths),
            wanted,
        )
        for (number, _), paths in sorted(together.items())
    ]


def _numbers(files: Iterable[Path]) -> dict[Path, int | None]:
    """Returns the rollout number of each file; None if its name has none.

    Among names that differ only in numbers, it is the first number that differs, so ``qwen3-8b-0`` and
    ``qwen3-8b-1`` are two rollouts. In a single name it is the last number. The rank in ``5_0`` never counts.
    """
    alike: dict[tuple[Path, str], list[Path]] = {}
    for path in files:
        alike.setdefault((path.parent, NUMBER.sub("#", path.stem)), []).append(path)
    number_of: dict[Path, int | None] = {}
    for paths in alike.values():
        rows = [NUMBER.findall(path.stem) for path in paths]
        last = len(rows[0]) - (2 if RANKED.search(paths[0].stem) else 1)
        at = next((i for i in range(last) if len({row[i] for row in rows}) > 1), last)
        number_of |= {path: int(row[at]) if row else None for path, row in zip(paths, rows, strict=True)}
    return number_of


def _files(argument: str) -> list[Path]:
    try:
        path = Path(argument).expanduser()
        files = _of_path(path)
        is_there = path.exists() or bool(set(argument) & set("*?["))
    except (OSError, RuntimeError, ValueError) as error:  # an invalid pattern, too long, or no permission
        raise DataError(f"{argument}: expected a folder, a file or a pattern, got {error}") from None
    if files:
        return files
    if not is_there:
        raise NoDumps(f"{argument}: expected a folder, a file or a pattern, got nothing of that name")
    folders: set[Path] = set()  # of runs, at most LEVELS below the path
    for pattern in ("*/" * level + kind for level in range(1, LEVELS + 1) for kind in KINDS):
        with suppress(OSError, ValueError):  # no permission, or no valid path
            folders |= {folder.parent for folder in path.glob(pattern)}
    below = sorted(folders)
    named = " or ".join(map(str, below[:MOST_NAMED])) + (" or another" if len(below) > MOST_NAMED else "")
    advice = f"{named}, which hold dumps" if below else "the folder of --dump-details"
    raise NoDumps(
        f"{argument}: expected rollout_data/*.pt, train_data/*.pt, *.straw.json or *.jsonl, got no such "
        f"file: give {advice}"
    )


def _of_path(path: Path) -> list[Path]:
    """Returns the dumps of a file, a folder or a pattern.

    The dumps of a folder are in rollout_data and train_data, of it or of its dump folder. If it has neither,
    they are in the folder itself.
    """
    if path.is_file():
        return [path]
    matches = [path] if path.is_dir() else sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
    dumps: list[Path] = []
    for match in matches:
        if not match.is_dir():
            dumps += filter(_is_dump, [match])
            continue
        kinds = [match / inner / kind for inner in DUMPS for kind in KINDS if (match / inner / kind).is_dir()]
        dumps += [file for folder in kinds or [match] for file in sorted(folder.iterdir()) if _is_dump(file)]
    return dumps


def _is_dump(path: Path) -> bool:
    return path.name.endswith(ENDINGS) and not path.name.startswith(".") and path.is_file()


def _root(path: Path) -> Path:
    return path.parent.parent if path.parent.name in KINDS else path.parent


def _rank(path: Path) -> tuple[str, list[int]]:
    """Returns a sort key: rollout dumps first, then train dumps by rank."""
    return path.parent.name, [int(n) for n in NUMBER.findall(path.stem)]
