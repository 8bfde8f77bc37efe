"""The share of k3 that a finding says it explains, beside the share that was planted.

python -m benchmarks.faults explains [--only NAME] [--seed N] [--dumps DIR]

Each fault is read as it is, and beside a second cause: noise of a known size in the trainer's log-probs,
whose mean ratio is 1. What k3 the run has without the fault is known: that of the healthy run of its seed and
of the noise. The rest was planted.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.faults.figures import empty
from benchmarks.faults.judge import make
from benchmarks.faults.mechanisms import CASES, Runs
from slime_ext.tools.analysis.detectors.shared.explained import whole_run
from slime_ext.tools.analysis.findings import examine
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.pipeline import collect
from slime_ext.tools.analysis.readers.find import RolloutRanges, find
from slime_ext.tools.analysis.readers.flags import flags_of
from slime_ext.tools.analysis.readers.vocabulary import vocabulary_of
from slime_ext.tools.analysis.records import DumpedRollout

SEED = 14
UNTOUCHED = "flipped_sign"  # a fault of the advantages, which leaves the log-probs healthy
BESIDE = 0.02  # nats of k3 that the noise makes, at most as much as the fault
SURE = 2.0  # standard errors


@dataclass
class Noisy:
    """A collector that measures rollouts with noise in the trainer's log-probs.

    Args:
        size: standard deviation of the noise, nats.
    """

    diagnosis: Diagnosis
    size: float

    def add(self, rollout: DumpedRollout) -> None:
        """Measures a rollout, or several that are joined, one by one."""
        for one in rollout.rollouts:
            g = torch.Generator().manual_seed(one.rollout_id)
            noise = self.size * torch.randn(one.size, generator=g) - self.size**2 / 2
            self.diagnosis.add(replace(one, proximal=one.proximal + noise))


@dataclass(frozen=True)
class Row:
    """The finding that names a fault, and what was planted; ``explains`` is None if it says nothing."""

    name: str
    is_beside: bool
    planted: float
    finding: str
    explains: float | None
    error: float
    rest: str

    @property
    def off(self) -> float:
        return abs((self.explains or 0.0) - self.planted)


def diagnosed(folder: Path, size: float = 0.0) -> Diagnosis:
    """What ``slime-ext analyze`` measures of a folder, with noise of a size in the trainer's log-probs."""
    files = find((str(folder),), RolloutRanges.parse(None))
    collector = Noisy(empty(vocabulary_of((str(folder),), None)), size)
    d = collect(files.jobs, {"noisy": collector}).collectors["noisy"].diagnosis
    d.flags = flags_of((str(folder),))
    return d


def mean_k3(d: Diagnosis) -> float:
    tokens, k3 = whole_run(d)
    return k3 / max(tokens, 1.0)


def row_of(name: str, d: Diagnosis, left: float, *, is_beside: bool) -> Row | None:
    """What the finding that names the fault says; None if none does.

    Args:
        left: nats of k3 that the run has without the fault.
    """
    right = set(CASES[name].right)
    findings = [f for f in examine(d)[0] if right & {f.name, *f.or_else}]
    findings.sort(key=lambda f: (f.explains is None, f.rank))
    planted = max(1 - left / mean_k3(d), 0.0)
    if not findings:
        return Row(name, is_beside, planted, "", None, 0.0, "")
    f = findings[0]
    said = " or ".join((f.name, *f.or_else))
    is_healthy = "the rest is healthy" in f.evidence
    rest = "healthy" if is_healthy else "not known" if "xplains at least" in f.evidence else "not healthy"
    return Row(name, is_beside, planted, said, f.explains, f.explains_error or 0.0, rest)


def rows(names: Sequence[str], seed: int, dumps: Path | None) -> list[Row]:
    """The rows of the faults that move k3, each alone and beside noise."""
    runs, results = Runs(seed), []
    with tempfile.TemporaryDirectory(prefix="slime_ext_faults_") as folder:

        def of(name: str) -> Path:
            made = dumps / f"{name}_{seed}" if dumps else None
            return made if made and made.exists() else make(name, seed, runs, Path(folder) / name)

        usual = mean_k3(diagnosed(of(UNTOUCHED)))
        for name in names:
            alone = diagnosed(path := of(name))
            k3 = mean_k3(alone)
            if k3 < 2 * usual:
                continue
            results.append(row_of(name, alone, usual, is_beside=False))
            noise = min(BESIDE, k3)
            both = diagnosed(path, (2 * noise) ** 0.5)
            results.append(row_of(name, both, usual + noise, is_beside=True))
    return results


def explains(only: Sequence[str] | None, seed: int | None, dumps: Path | None) -> str:
    """The table of RESULTS.md."""
    names = [name for name in only or CASES if name in CASES]
    results = rows(names, SEED if seed is None else seed, dumps)
    lines = ["| fault | beside noise | planted | explains | rest | finding |", "|---|---|---:|---:|---|---|"]
    for row in results:
        said = "-" if row.explains is None else f"{row.explains:.0%} ± {row.error:.0%}"
        rest = "" if row.explains is None else row.rest
        beside = "yes" if row.is_beside else "no"
        named = row.finding or "*not named*"
        lines.append(f"| {row.name} | {beside} | {row.planted:.0%} | {said} | {rest} | {named} |")
    claims = [row for row in results if row.explains is not None]
    near = [row for row in claims if row.off <= SURE * row.error]
    below = [row for row in claims if row not in near and row.explains < row.planted]
    lines += [
        "",
        f"{len(claims)} of {len(results)} say a share. {len(near)} of these are within {SURE:g} of their "
        f"standard errors of what was planted, {len(below)} are further below, and "
        f"{len(claims) - len(near) - len(below)} further above. The mean distance is "
        f"{sum(row.off for row in claims) / max(len(claims), 1):.1%}.",
    ]
    return "\n".join(lines)
