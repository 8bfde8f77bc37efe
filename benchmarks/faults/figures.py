"""What the detectors read of each dump of the real set, as JSON: so thresholds are checked without making dumps.

    python -m benchmarks.faults figures --out DIR     # of the zips in DIR -> benchmarks/faults/figures.json.gz
"""

from __future__ import annotations

import gzip
import json
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slime_ext.tools.analysis.measures.detector_statistics import DetectorStatistics, RolloutSummary
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.layer_outputs import LayerDistance, layer_distances
from slime_ext.tools.analysis.measures.versions import VersionSums
from slime_ext.tools.analysis.pipeline import collect
from slime_ext.tools.analysis.readers.find import RolloutRanges, find
from slime_ext.tools.analysis.readers.loss_calls import LossCall, first_calls
from slime_ext.tools.analysis.readers.vocabulary import vocabulary_of

FILE = Path(__file__).with_name("figures.json.gz")
ROWS = {"versions": VersionSums, "rollouts": RolloutSummary, "calls": LossCall, "layers": LayerDistance}
DIGITS = 6
UNREAD = ("worsts", "timeline")  # by no detector


def diagnosed(folder: Path, rollouts: str | None = None) -> Diagnosis:
    """What ``slime-ext analyze`` measures of a folder's dumps."""
    found = find((str(folder),), RolloutRanges.parse(rollouts))
    empty = Diagnosis(statistics=DetectorStatistics(vocabulary=vocabulary_of((str(folder),), None)))
    result = collect(found.jobs, {"diagnosis": empty})
    diagnosis = result.collectors["diagnosis"]
    diagnosis.layers, diagnosis.calls = layer_distances(folder), first_calls(folder)
    diagnosis.unread = len(result.skipped)
    return diagnosis


def runs(out: Path) -> Iterator[tuple[str, Path]]:
    """Name and unpacked folder of each run, one after the other."""
    for path in sorted(out.glob("*.zip")):
        with tempfile.TemporaryDirectory(prefix="slime_ext_faults_") as folder:
            zipfile.ZipFile(path).extractall(folder)
            yield path.stem, Path(folder)


def frozen(value: Any) -> Any:
    """As JSON: tables as what is not 0 in them."""
    if isinstance(value, Tensor):
        flat = value.flatten()
        at = flat.nonzero()[:, 0]
        return {"size": list(value.shape), "at": at.tolist(), "is": [_short(x) for x in flat[at].tolist()]}
    if isinstance(value, dict):
        return {key: frozen(one) for key, one in value.items()}
    if is_dataclass(value):
        return {f.name: frozen(getattr(value, f.name)) for f in fields(value) if f.name not in UNREAD}
    if isinstance(value, list | tuple):
        return [frozen(one) for one in value]
    return _short(value)


def _short(value: Any) -> Any:
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def thawed(empty: Any, value: Any, name: str = "") -> Any:
    """The object that was frozen, filled into an empty one of its kind."""
    if name in ROWS:
        return type(empty)(ROWS[name](*row) for row in value)
    if name == "prints":
        return [(rollout, thawed(torch.zeros(0, dtype=torch.int64), one)) for rollout, one in value]
    if isinstance(empty, Tensor):
        flat = torch.zeros(value["size"], dtype=empty.dtype).flatten()
        flat[torch.tensor(value["at"], dtype=torch.int64)] = torch.tensor(value["is"], dtype=empty.dtype)
        return flat.view(value["size"])
    if isinstance(empty, Counter):
        return Counter(value)
    if isinstance(empty, dict):
        return {key: thawed(one, value[key]) for key, one in empty.items()}
    if is_dataclass(empty):
        for key in value:
            setattr(empty, key, thawed(getattr(empty, key), value[key], key))
        return empty
    return value


def kept(name: str, diagnosis: Diagnosis) -> dict:
    """A run's figures."""
    return {"run": name, "vocabulary": diagnosis.statistics.ids, "figures": frozen(diagnosis)}


def read(path: Path = FILE) -> dict[str, Diagnosis]:
    """Run -> what was measured of it."""
    found = {}
    with gzip.open(path, "rt") as file:
        for row in map(json.loads, file):
            empty = Diagnosis(statistics=DetectorStatistics(vocabulary=row["vocabulary"]))
            found[row["run"]] = thawed(empty, row["figures"])
    return found


def write(rows: Iterable[dict], path: Path = FILE) -> None:
    """Writes rows of ``kept``, one a line."""
    with gzip.GzipFile(path, "wb", mtime=0) as file:
        file.write("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows).encode())
