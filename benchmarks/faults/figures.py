"""What the detectors read of each dump of the real set: thresholds are checked without making dumps.

python -m benchmarks.faults figures --out DIR   # of the zips in DIR -> figures.json.gz here
python -m benchmarks.faults table               # what is named, of figures.json.gz
"""

from __future__ import annotations

import gzip
import json
import math
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from benchmarks.faults.cases import ALSO, HEALTHY
from benchmarks.faults.real import BOTH, MORE
from slime_ext.errors import DataError
from slime_ext.tools.analysis.detectors.advantages import OnePrompt
from slime_ext.tools.analysis.detectors.duplicate_samples import Fingerprints, Prints
from slime_ext.tools.analysis.detectors.equal_reference import Unmoved
from slime_ext.tools.analysis.detectors.length_explosion import Cut
from slime_ext.tools.analysis.detectors.outside_vocabulary import Beyond
from slime_ext.tools.analysis.detectors.shared.cached import CachedRollout
from slime_ext.tools.analysis.detectors.shared.identities import RatioSums
from slime_ext.tools.analysis.detectors.shared.kinds import GroupSizes
from slime_ext.tools.analysis.detectors.stale_prefix import CachedBins
from slime_ext.tools.analysis.document import Moment, Numbers
from slime_ext.tools.analysis.findings import examine, measures
from slime_ext.tools.analysis.measures.by_sample import Part
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.layer_outputs import LayerDistance, layer_distances
from slime_ext.tools.analysis.measures.measure import Measure
from slime_ext.tools.analysis.measures.rollouts import RolloutSummary
from slime_ext.tools.analysis.measures.versions import VersionSums
from slime_ext.tools.analysis.pipeline import collect
from slime_ext.tools.analysis.readers.find import RolloutRanges, find
from slime_ext.tools.analysis.readers.loss_calls import LossCall, first_calls
from slime_ext.tools.analysis.readers.vocabulary import vocabulary_of
from slime_ext.tools.analysis.records import DumpedRollout
from slime_ext.tools.analysis.tables import Additive
from slime_ext.tools.collection import paused

FILE = Path(__file__).with_name("figures.json.gz")
ROWS = {
    "BySample.parts": Part,
    "Sizes.groups": GroupSizes,
    "Diagnosis.versions": VersionSums,
    "Diagnosis.rollouts": RolloutSummary,
    "Diagnosis.calls": LossCall,
    "Diagnosis.layers": LayerDistance,
    "Cuts.rollouts": Cut,
    "Reference.rollouts": Unmoved,
    "Ratios.parts": RatioSums,
    "OneReward.prompts": OnePrompt,
    "CachedShares.rollouts": CachedRollout,
    "CachedSizes.rollouts": CachedBins,
    "Contexts.rows": lambda *sides: tuple(map(tuple, sides)),
}
PRINTS = (torch.zeros(0, dtype=torch.int64),) * 2 + (torch.zeros(0),)  # the columns of Prints
NO_NUMBERS = Numbers(tokens=0, sequences=0, nonfinite=0)
DIGITS = 6
SMALL = 64  # numbers of a table that are kept as they are
MERGES = (Additive.merge, Diagnosis.merge)  # field by field
# Runs that were planted for a symptom -> what their mechanism is, which detectors name since they read it: a
# penalty, and log-probs that come three tokens late.
CALLED = {"position_drift": "penalties", "unexplained": "permuted_log_probs"}
UNREAD = ("Diagnosis.worsts", "Histogram.pieces")  # by no detector
WINDOWS = (3, 5, 10)  # rollouts
RIGHT = (
    "faults that are named",
    "healthy runs without a finding",
    "stretches of healthy runs without a finding",
    "stretches of old weights without an error",
)
# Runs of which every window counts as a run, and whose figures are kept by rollout.
OLD = ("stale_weights", "interval", "held")


@dataclass
class ByRollout:
    """A collector of what is measured of each rollout."""

    vocabulary: int | None
    rollouts: dict[int, Diagnosis] = field(default_factory=dict)

    def add(self, rollout: DumpedRollout) -> None:
        """Measures a rollout, or each of several that are joined."""
        for one in rollout.rollouts:
            self.rollouts.setdefault(one.rollout_id, empty(self.vocabulary)).add(one)


def empty(vocabulary: int | None) -> Diagnosis:
    """Of no rollout."""
    return Diagnosis(measures=measures(vocabulary))


def joined(parts: Sequence[Diagnosis]) -> Diagnosis:
    """The diagnosis of several rollouts as one; the parts stay as they are, and may have tables as read."""
    whole = _sum([replace(part, calls=(), layers=()) for part in parts])
    whole.calls, whole.layers = parts[0].calls, parts[0].layers
    whole.rollouts.sort(key=lambda summary: summary[:2])
    whole.timeline.sort(key=lambda moment: moment.rollout_id)
    return whole


def _sum(values: Sequence[Any]) -> Any:
    """What one gets that all values are merged into, in one pass over the numbers that are not 0."""
    first = values[0]
    if isinstance(first, Tensor | Sparse):
        return _sum_of_tables(values)
    if isinstance(first, dict) and not isinstance(first, Counter):
        return {key: _sum([value[key] for value in values]) for key in first}
    if isinstance(first, Counter) or getattr(type(first), "merge", Additive.merge) not in MERGES:
        whole = type(first)()
        for value in values:
            (whole.update if isinstance(first, Counter) else whole.merge)(value)
        return whole
    if not hasattr(first, "merge"):
        return sum(values[1:], first)
    whole, columns = copy(first), list(map(vars, values))
    vars(whole).update({f.name: _sum([column[f.name] for column in columns]) for f in fields(first)})
    return whole


def _sum_of_tables(tables: Sequence[Tensor | Sparse]) -> Tensor:
    longest = max((table.shape for table in tables), key=lambda shape: shape[0])
    out = numpy.zeros(longest)
    for table in tables:
        if isinstance(table, Tensor):
            out[: len(table)] += table.numpy()
        else:
            out.reshape(-1)[table.at] += table.values
    return torch.from_numpy(out)


def diagnosed(folder: Path) -> list[Diagnosis]:
    """What ``slime-ext analyze`` measures of each rollout in a folder."""
    files = find((str(folder),), RolloutRanges.parse(None))
    result = collect(files.jobs, {"all": ByRollout(vocabulary_of((str(folder),), None))})
    parts = [part for _, part in sorted(result.collectors["all"].rollouts.items())]
    parts[0].layers, parts[0].calls = layer_distances(folder), first_calls(folder)
    parts[0].unread = len(result.skipped)
    return parts


def runs(out: Path) -> Iterator[tuple[str, Path]]:
    """Name and unpacked folder of each run, one after the other."""
    for path in sorted(out.glob("*.zip")):
        with tempfile.TemporaryDirectory(prefix="slime_ext_faults_") as folder:
            zipfile.ZipFile(path).extractall(folder)
            yield path.stem, Path(folder)


def windows(parts: Sequence[Diagnosis]) -> Iterator[tuple[str, Diagnosis]]:
    """Every stretch of so many rollouts of a run."""
    for size in WINDOWS:
        for begin in range(len(parts) - size + 1):
            yield f"{begin}-{begin + size - 1}", joined(parts[begin : begin + size])


def frozen(value: Any) -> Any:
    """As JSON: tables as what is not 0 in them."""
    if isinstance(value, Tensor):
        flat = value.flatten()
        at = flat.nonzero()[:, 0]
        return {"size": list(value.shape), "at": at.tolist(), "is": [_short(x) for x in flat[at].tolist()]}
    if isinstance(value, dict):
        return {key: frozen(one) for key, one in value.items()}
    if isinstance(value, Moment):
        return value.rollout_id  # detectors count them
    if isinstance(value, Measure):
        return {"version": value.version, **{f.name: frozen(getattr(value, f.name)) for f in fields(value)}}
    if is_dataclass(value):
        names = (f.name for f in fields(value) if f"{type(value).__name__}.{f.name}" not in UNREAD)
        return {name: frozen(getattr(value, name)) for name in names}
    if isinstance(value, list | tuple):
        return [frozen(one) for one in value]
    return _short(value)


def _short(value: Any) -> Any:
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


@dataclass(frozen=True)
class Sparse:
    """A table as read: a run's are a hundred times as large as what is in them.

    Args:
        at: where its numbers are not 0; ``values``: what they are.
    """

    shape: tuple[int, ...]
    at: numpy.ndarray
    values: numpy.ndarray


def thawed(into: Any, value: Any, name: str = "") -> Any:
    """Fills a frozen object into a copy of an empty one; large tables stay ``Sparse`` until ``joined``."""
    if name in ROWS or name in ("Diagnosis.timeline", "Fingerprints.prints"):
        return type(into)(_row(name, row) for row in value)
    if name == "Diagnosis.measures":
        return {kind: _measure(kind, measure, value.get(kind)) for kind, measure in into.items()}
    if isinstance(into, Tensor):
        return _table(into, value) if math.prod(value["size"]) <= SMALL else _sparse(value)
    if isinstance(into, Counter):
        return Counter(value)
    if isinstance(into, dict):
        return {key: thawed(one, value[key]) for key, one in into.items()}
    if is_dataclass(into):
        kind, whole = type(into).__name__, copy(into)
        vars(whole).update({key: thawed(getattr(into, key), value[key], f"{kind}.{key}") for key in value})
        return whole
    return value


def _measure(kind: str, into: Measure, value: dict[str, Any] | None) -> Measure:
    """Fills a measure. It stays empty if the figures are older than its detector, which then finds nothing.

    Raises:
        DataError: the sums are those of another version of the measure.
    """
    if value is None:
        return into
    if value["version"] != into.version:
        raise DataError(
            f"{FILE.name}: expected {kind} of version {into.version}, got version {value['version']}: type "
            "python -m benchmarks.faults real --out DIR, then python -m benchmarks.faults figures --out DIR"
        )
    return thawed(into, {key: one for key, one in value.items() if key != "version"})


def _row(name: str, value: Any) -> Any:
    if name == "Diagnosis.timeline":
        return Moment(rollout_id=value, numbers=NO_NUMBERS)
    if name == "Fingerprints.prints":
        return Prints(value[0], *map(_table, PRINTS, value[1:]))
    return ROWS[name](*value)


def _table(into: Tensor, value: dict) -> Tensor:
    flat = numpy.zeros(math.prod(value["size"]), dtype=into.numpy().dtype)
    flat[numpy.array(value["at"], dtype=numpy.int64)] = value["is"]
    return torch.from_numpy(flat.reshape(value["size"]))


def _sparse(value: dict) -> Sparse:
    at, values = numpy.array(value["at"], dtype=numpy.int64), numpy.array(value["is"], dtype=numpy.float64)
    return Sparse(tuple(value["size"]), at, values)


def planted(run: str) -> tuple[str, int]:
    """The fault that was planted in a run ("" for none), and its seed."""
    name, seed = run.rsplit("_", 1)
    if name.startswith(HEALTHY):
        return "", int(seed)
    return MORE[name][0] if name in MORE else name, int(seed)


def is_named(run: str, diagnosis: Diagnosis) -> bool:
    """Whether the planted fault is named, alone or as one of those that the dump cannot tell apart; or, in a
    healthy run, nothing but notes."""
    name, _ = planted(run)
    said = examine(diagnosis)[0]
    findings = [f for f in said if f.is_fault]
    if not name:
        return not findings
    if name in CALLED and any(CALLED[name] in (f.name, *f.or_else) for f in said):
        return {f.name for f in findings} <= {name, CALLED[name]}
    also = {name, *ALSO.get(name, ()), *BOTH.get(run.rsplit("_", 1)[0], ())}
    return any(name in (f.name, *f.or_else) for f in said) and also >= {
        f.name for f in findings if not f.or_else
    }


def has_error(diagnosis: Diagnosis) -> bool:
    """Whether an error is found."""
    return any(f.severity == "error" for f in examine(diagnosis)[0])


def write(out: Path, path: Path = FILE) -> Path:
    """Writes the figures of the zips in a folder, one run a line, beside those of other runs that the file
    has; returns where."""
    rows = {row["run"]: row for row in _rows(path)} if path.exists() else {}
    for run, folder in runs(out):
        parts = _small(diagnosed(folder))
        name = run.rsplit("_", 1)[0]
        if not name.startswith(HEALTHY) and name not in OLD:
            parts = [joined(parts)]
        rows[run] = {"run": run, "vocabulary": parts[0].of(Beyond).size, "parts": frozen(parts)}
    with gzip.GzipFile(path, "wb", mtime=0) as file:
        for _, row in sorted(rows.items()):
            file.write((json.dumps(row, separators=(",", ":")) + "\n").encode())
    return path


def _small(parts: list[Diagnosis]) -> list[Diagnosis]:
    """The same with fingerprints of few digits, equal where they were."""
    prints = [one for part in parts for one in part.of(Fingerprints).prints]
    for name in ("samples", "prompts"):
        every = torch.cat([getattr(one, name) for one in prints]).unique()
        prints = [one._replace(**{name: torch.searchsorted(every, getattr(one, name))}) for one in prints]
    for part in parts:
        own = part.of(Fingerprints)
        own.prints, prints = prints[: len(own.prints)], prints[len(own.prints) :]
    return parts


def _rows(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") as file:
        return list(map(json.loads, file))


def read(path: Path = FILE) -> dict[str, list[Diagnosis]]:
    """Run -> what was measured of it: one for the run, or one for each rollout."""
    with paused():  # hundreds of thousands of objects, which all stay
        rows = _rows(path)
        return {
            row["run"]: [thawed(_template(row["vocabulary"]), part) for part in row["parts"]] for row in rows
        }


@cache
def _template(vocabulary: int | None) -> Diagnosis:
    """An empty diagnosis of which ``thawed`` makes others."""
    return empty(vocabulary)


def table() -> str:
    """The table of RESULTS.md: by seed, how many are right."""
    right: dict[str, dict[int, list[bool]]] = {row: {} for row in RIGHT}
    wrong = []
    for run, parts in read().items():
        (name, seed), whole = planted(run), joined(parts)
        is_right = is_named(run, whole)
        kind = RIGHT[0] if name else RIGHT[1]
        right[kind].setdefault(seed, []).append(is_right)
        if not is_right:
            said = " or ".join(f.name for f in examine(whole)[0]) or "nothing"
            wrong.append(f"{run}: {said}")
        if not name or run.rsplit("_", 1)[0] in OLD:
            for at, stretch in windows(parts):
                is_right = is_named(run, stretch) if not name else not has_error(stretch)
                right[RIGHT[3] if name else RIGHT[2]].setdefault(seed, []).append(is_right)
                wrong += [] if is_right else [f"{run}, rollouts {at}"]
    seeds = sorted(right[RIGHT[0]])
    rows = [f"| | {' | '.join(f'seed {seed}' for seed in seeds)} |", f"|---|{'---:|' * len(seeds)}"]
    for kind, by_seed in right.items():
        counts = (f"{sum(by_seed[seed])} of {len(by_seed[seed])}" for seed in seeds)
        rows.append(f"| {kind} | {' | '.join(counts)} |")
    return "\n".join([*rows, *wrong])
