"""What a detector is: the words of its finding, what it asks of a dump, and the function that looks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from jinja2 import Environment, StrictUndefined

from slime_ext.tools.analysis.document import Finding, Severity
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

FEW = 0.75  # share of sum l^2 in 1% of the tokens above which these few make every mean
ANY_CAUSE = "any cause"  # of a distance: the group of all detectors that name one
TEMPLATES = ("title", "evidence", "fix", "ruled_out")
# What a detector found: the figures that its texts name; ``rollouts``, ids of those that show it; a
# ``severity`` if it is not the detector's; and ``or_else``, the findings that the dump cannot tell from this
# one, with ``untold``, what would tell them apart.
Figures = Mapping[str, Any]
Look = Callable[[Diagnosis], Figures | None]


class Lacks(Exception):
    """What a run lacks for a detector to look."""


def need(is_there: object, what: str) -> None:
    """Lets a detector look on.

    Raises:
        Lacks: what it needs is not there.
    """
    if not is_there:
        raise Lacks(what)


def need_tokens(d: Diagnosis, count: int) -> None:
    """As ``need``, with this many response tokens."""
    need(d.sums["finite"] >= count, f"{count} response tokens with log-probs of both sides")


@dataclass(frozen=True, kw_only=True)
class Detector:
    """One detector, the ``DETECTOR`` of a module of ``detectors/`` beside the function ``look(diagnosis)``,
    which returns figures or None. The module's name is that of the finding.

    Args:
        severity: of the finding.
        what: what happened, in a few words, for a list of all findings.
        title, evidence, fix, ruled_out: Jinja templates over the figures; what was seen, the figures behind
            it, what to do, and the next explanation with what speaks against it.
        threshold: what the figures had to exceed, and why that.
        asks: what it asks of a dump beside log-probs of both sides.
        says: whether it names a cause, or a symptom of which the causes remain open.
        group: a name for several that others may be ``after``.
        after: findings and groups that look like this one: where one of them was found, this is left to it.
        explains: whether it explains a distance between the policies.
    """

    severity: Severity
    what: str
    title: str
    evidence: str
    threshold: str
    ruled_out: str
    fix: str
    asks: str = ""
    says: Literal["cause", "symptom"] = "cause"
    group: str = ""
    after: tuple[str, ...] = ()
    explains: bool = True

    def finding(self, name: str, figures: Figures) -> Finding:
        """What is said of a run in which it was found."""
        texts = {key: TEXTS.from_string(_line(getattr(self, key))) for key in TEMPLATES}
        said = {key: _line(text.render(figures)) for key, text in texts.items()}
        found = Finding(
            name=name,
            severity=figures.get("severity", self.severity),
            says=self.says,
            threshold=_line(self.threshold),
            rollouts=figures.get("rollouts", ()),
            **said,
        )
        others = tuple(figures.get("or_else", ()))
        return _open(found, others, figures["untold"]) if others else found


def _line(text: str) -> str:
    """A text without the line ends and the indents of its module."""
    return " ".join(text.split())


def _open(finding: Finding, others: tuple[str, ...], untold: str) -> Finding:
    """A finding of one of several causes: no error, since another of them may be none."""
    names = " or ".join(others)
    said = {"severity": "warning" if finding.severity == "error" else finding.severity, "or_else": others}
    if finding.says == "cause":
        said["title"] = f"Either {finding.name} or {names}: {finding.title}"
        said["ruled_out"] = f"Not {names}, which looks the same here. The dump does not tell {untold}."
    else:
        said["ruled_out"] = f"What remains: {names}. What decides: {untold}."
    return finding.model_copy(update=said)


def share(part: float, whole: float) -> str:
    """A share in per cent.

    >>> share(1, 8)
    '12.5%'
    """
    return f"{100 * part / whole:.3g}%" if whole else "0%"


def nats(value: float | None) -> str:
    """A log-ratio or a divergence.

    >>> nats(0.01234), nats(1.0)
    ('0.0123 nats', '1 nat')
    """
    if value is None:
        return "unknown"
    text = f"{value:.3g}"
    return f"{text} nat{'' if text == '1' else 's'}"


def factor(value: float) -> str:
    """How many times as large.

    >>> factor(12.34)
    '12x'
    """
    return f"{value:.0f}x" if value >= 100 else f"{value:.2g}x"


TEXTS = Environment(undefined=StrictUndefined)
TEXTS.filters |= {"share": share, "nats": nats, "factor": factor}
