"""What a detector is, and how findings write their figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from slime_ext.analysis.diagnosis import Diagnosis
from slime_ext.analysis.document import Severity

FEW = 0.75  # share of sum l^2 in 1% of the tokens above which these few make every mean


class Detected(NamedTuple):
    """What a detector says of a run in which it found its fault: see ``document.Finding``."""

    title: str
    evidence: str
    fix: str
    rollouts: tuple[int, ...] = ()
    ruled_out: str = ""  # instead of the detector's own


Needs = Callable[[Diagnosis], str]


@dataclass(frozen=True)
class Detector:
    """Looks for one fault.

    Args:
        name: of the fault.
        severity: of the finding.
        detect: returns what it found in a run, None for nothing.
        after: names of faults that look like this one: where one of them was found, this is not looked for.
        needs: returns what a run lacks for the detector to look, "" for nothing.
        threshold: what its statistic must exceed, and why that.
        ruled_out: the next explanation of what it finds, and what speaks against it.
    """

    name: str
    severity: Severity
    detect: Callable[[Diagnosis], Detected | None]
    after: frozenset[str]
    needs: Needs
    threshold: str
    ruled_out: str


def tokens(count: int) -> Needs:
    """Lets a detector look from this many response tokens on."""
    wanted = f"{count} response tokens with log-probs of both sides"
    return lambda d: "" if d.sums["finite"] >= count else wanted


def detector(
    severity: Severity,
    after: Iterable[Detector] = (),
    *,
    needs: Needs,
    threshold: str,
    ruled_out: str,
) -> Callable[..., Detector]:
    """Makes a detector of a function; its name is the fault's."""
    names = frozenset(other.name for other in after)
    return lambda detect: Detector(detect.__name__, severity, detect, names, needs, threshold, ruled_out)


def share(part: float, whole: float) -> str:
    """A share in per cent.

    >>> share(1, 8)
    '12.5%'
    """
    return f"{100 * part / whole:.3g}%" if whole else "0%"


def nats(value: float) -> str:
    """A log-ratio or a divergence.

    >>> nats(0.01234)
    '0.0123 nats'
    """
    return f"{value:.3g} nats"


def factor(value: float) -> str:
    """How many times as large.

    >>> factor(12.34)
    '12x'
    """
    return f"{value:.0f}x" if value >= 100 else f"{value:.2g}x"
