"""Which files belong together: those of one rollout, by folder and by the number in their name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from slime_ext.errors import DataError

KINDS = ("rollout_data", "train_data")
DUMPS = ("", "dump", "dumps")  # the folder that holds them: itself, or one in a folder of slime-ext train
TORCH, ARCHIVE, JSONL = ".pt", ".straw.json", ".jsonl"
ENDINGS = (TORCH, ARCHIVE, JSONL)
RANGE = re.compile(r"(\d{0,18})-(\d{0,18})|(\d{1,18})")
LEVELS, MOST_NAMED = 3, 3  # below a folder without dumps, where some are looked for; folders that are named
SHOWN = 60  # characters of a mistake
NUMBER = re.compile(r"\d+")
RANKED = re.compile(r"\d+[_-](?:rank[_-]?)?\d+$")
# slime writes "eval_5" where --save-debug-rollout-data has the rollout's number; nothing trains on those.
EVALUATION = re.compile(r"(^|[^a-z])eval_\d")


@dataclass(frozen=True)
class RolloutRanges:
    """Ranges of rollout numbers, both ends included; without any range, all numbers."""

    ranges: tuple[tuple[int, float], ...] = ()

    @classmethod
    def parse(cls, text: str | None) -> RolloutRanges:
        """Ranges from text such as ``100-200``, ``7``, ``0,5,10-``.

        Raises:
            DataError: it is something else.

        >>> RolloutRanges.parse("0,5,10-").ranges
        ((0, 0), (5, 5), (10, inf))
        """
        parts = [] if text is None else text.replace(" ", "").split(",")
        return cls(tuple(_range(part, text or "") for part in parts))

    def __contains__(self, rollout_id: int | None) -> bool:
        """Whether a rollout is wanted; one of unknown number is, until its content tells the number."""
        if rollout_id is None or not self.ranges:
            return True
        return any(low <= rollout_id <= high for low, high in self.ranges)


EVERY_ROLLOUT = RolloutRanges()


def _range(part: str, text: str) -> tuple[int, float]:
    found = RANGE.fullmatch(part)
    if not found or part in ("", "-"):
        raise DataError(
            f"--rollouts: expected numbers and ranges such as 100-200 or 0,5,10-, got '{text[:SHOWN]}'"
        )
    low, high, single = found.groups()
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
        wanted: which of the rollouts that the files hold.
    """

    paths: tuple[Path, ...]
    rollout_id: int | None
    size: int
    wanted: RolloutRanges = EVERY_ROLLOUT

    @property
    def is_jsonl(self) -> bool:
        return self.paths[0].suffix == JSONL

    def __str__(self) -> str:
        """The paths, with their common folder written once."""
        if len(self.paths) == 1:
            return str(self.paths[0])
        root = _root(self.paths[0])
        names = [str(p.relative_to(root) if p.is_relative_to(root) else p) for p in self.paths]
        return f"{root}/{{{','.join(names)}}}"


@dataclass(frozen=True)
class DumpFiles:
    """The jobs of the wanted rollouts, ordered by rollout number, and how many evaluation dumps were left
    out."""

    jobs: tuple[Job, ...]
    evaluations: int


def find(paths: Iterable[str | Path], wanted: RolloutRanges = EVERY_ROLLOUT) -> DumpFiles:
    """The files to read.

    Raises:
        DataError: a path does not exist or holds no dump, or they are of two runs.
    """
    files = list({file.resolve(): file for given in paths for file in _files(str(given))}.values())
    dumps = [file for file in files if not EVALUATION.search(file.name)]
    if files and not dumps:
        raise DataError(f"{files[0]}: expected dumps of training, got {len(files)} of evaluations alone")
    runs = {_root(file).resolve(): _root(file) for file in dumps}
    if len(runs) > 1:
        raise DataError(
            f"{', '.join(map(str, runs.values()))}: expected dumps of one run, got {len(runs)} folders: give "
            "--against for a second run"
        )
    jobs = _jobs(dumps, wanted)
    chosen = [job for job in jobs if job.rollout_id in wanted]
    if jobs and not chosen:
        known = [job.rollout_id for job in jobs if job.rollout_id is not None]
        raise DataError(f"--rollouts: expected some of {min(known)}-{max(known)}, got none of them")
    return DumpFiles(tuple(chosen), len(files) - len(dumps))


def _jobs(files: Sequence[Path], wanted: RolloutRanges) -> list[Job]:
    """One job per rollout, ordered by number; a JSONL file is a job of its own."""
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
    """The number of each file's rollout; None where its name has none.

    Among names that differ in numbers only, it is the first number that differs, so that ``qwen3-8b-0`` and
    ``qwen3-8b-1`` are two rollouts; in a single name the last one. The rank in ``5_0`` never counts.
    """
    alike: dict[tuple[Path, str], list[Path]] = {}
    for path in files:
        alike.setdefault((path.parent, NUMBER.sub("#", path.stem)), []).append(path)
    found: dict[Path, int | None] = {}
    for paths in alike.values():
        rows = [NUMBER.findall(path.stem) for path in paths]
        last = len(rows[0]) - (2 if RANKED.search(paths[0].stem) else 1)
        at = next((i for i in range(last) if len({row[i] for row in rows}) > 1), last)
        found |= {path: int(row[at]) if row else None for path, row in zip(paths, rows, strict=True)}
    return found


def _files(given: str) -> list[Path]:
    try:
        path = Path(given).expanduser()
        found = _of_path(path)
        is_there = path.exists() or bool(set(given) & set("*?["))
    except (OSError, RuntimeError, ValueError) as error:  # no pattern, too long, not allowed
        raise DataError(f"{given}: expected a folder, a file or a pattern, got {error}") from None
    if found:
        return found
    if not is_there:
        raise DataError(f"{given}: expected a folder, a file or a pattern, got nothing of that name")
    below = _holding(path)
    named = " or ".join(map(str, below[:MOST_NAMED])) + (" or another" if len(below) > MOST_NAMED else "")
    advice = f"{named}, which hold dumps" if below else "the folder of --dump-details"
    raise DataError(
        f"{given}: expected rollout_data/*.pt, train_data/*.pt, *.straw.json or *.jsonl, got no such file: "
        f"give {advice}"
    )


def _of_path(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    matches = [path] if path.is_dir() else sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
    found = (_of_folder(match) if match.is_dir() else filter(_is_dump, [match]) for match in matches)
    return [file for files in found for file in files]


def _holding(folder: Path) -> list[Path]:
    """The folders of runs below one, at most three levels deep."""
    found: set[Path] = set()
    for pattern in ("*/" * level + kind for level in range(1, LEVELS + 1) for kind in KINDS):
        with suppress(OSError, ValueError):  # not allowed, no path
            found |= {path.parent for path in folder.glob(pattern)}
    return sorted(found)


def _of_folder(path: Path) -> list[Path]:
    """The dumps in the rollout_data and train_data of a folder, or of the dump in a run's folder; in the
    folder itself if there are neither."""
    kinds = [path / inner / kind for inner in DUMPS for kind in KINDS if (path / inner / kind).is_dir()]
    return [file for folder in kinds or [path] for file in sorted(folder.iterdir()) if _is_dump(file)]


def _is_dump(path: Path) -> bool:
    return path.name.endswith(ENDINGS) and not path.name.startswith(".") and path.is_file()


def _root(path: Path) -> Path:
    return path.parent.parent if path.parent.name in KINDS else path.parent


def _rank(path: Path) -> tuple[str, list[int]]:
    """A sort key: rollout dumps first, then train dumps by rank."""
    return path.parent.name, [int(n) for n in NUMBER.findall(path.stem)]
