"""Defines a detector: its texts, what it needs of a dump, and its ``look`` function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from slime_ext.tools.analysis.detectors.shared.explained import Explained
from slime_ext.tools.analysis.document import Finding, Severity
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

if TYPE_CHECKING:
    from jinja2 import Environment, Template

SURE = 3.0  # standard errors by which the figure of an error exceeds its limit
FEW = 0.75  # share of sum l^2 in 1% of the tokens above which these few determine every mean
ANY_CAUSE = "any cause"  # the group of all detectors that explain a distance
TEMPLATES = ("title", "evidence", "fix", "ruled_out")
# The result of a detector: the figures that its texts name. Optional keys: ``rollouts``, the ids of those
# that show the fault; ``severity``, if it is not the detector's; ``or_else``, the findings that the dump
# cannot tell from this one, with ``untold``, what keeps it open; ``explains``, an ``Explained``; ``margin``,
# the ``Margin`` of an error whose figure has a standard error; ``is_proven``, if values that agree elsewhere
# show the cause, so that no larger share rules it out.
Figures = Mapping[str, Any]
Look = Callable[[Diagnosis], Figures | None]


class Untold(NamedTuple):
    """What a dump does not tell, so that several causes remain, and the step that would tell it.

    Both are clauses: "which layer differs first" and "record layer outputs of both sides".
    """

    what: str
    step: str


class Margin(NamedTuple):
    """The figure that decides a finding, its standard error, and the limit that it must exceed."""

    value: float
    error: float
    limit: float

    @property
    def is_sure(self) -> bool:
        """Whether the figure is beyond its limit by SURE standard errors."""
        return self.value - SURE * self.error >= self.limit

    def __str__(self) -> str:
        return (
            f"{self.value:.3g} ± {self.error:.1g} is within {SURE:g} standard errors of the limit "
            f"{self.limit:.3g}, so this is a warning."
        )


class Lacks(Exception):
    """The dump lacks what a detector needs; the message says what."""


def need(is_there: object, what: str) -> None:
    """Stops a detector that lacks what it needs.

    Raises:
        Lacks: ``is_there`` is false.
    """
    if not is_there:
        raise Lacks(what)


def need_tokens(d: Diagnosis, count: int) -> None:
    """Stops a detector, as ``need`` does, if fewer response tokens have both log-probs."""
    need(d.sums.finite >= count, f"{count} response tokens with log-probs of both sides")


@dataclass(frozen=True, kw_only=True)
class Detector:
    """One detector: the ``DETECTOR`` of a module of ``detectors/``, whose name is that of the finding.

    The module's function ``look(diagnosis)`` returns figures, or None if nothing is wrong.

    Args:
        severity: of the finding.
        what: what happened, in a few words, for the list of all findings.
        remedy: what to do if it is this cause, as a short clause, beside those of other causes that remain.
        title, evidence, fix, ruled_out: Jinja templates over the figures. They say what was seen, the figures
            that show it, what to do, and the next likely explanation with the evidence against it. If
            ``or_else`` is defined, a title says only what was measured.
        threshold: what the figures had to exceed.
        asks: what it needs of a dump besides log-probs of both sides.
        says: "cause", or "symptom" if the causes remain open.
        group: a name that several detectors share, so that others can be ``after`` all of them.
        after: findings and groups that look like this finding. If the dump has one of them, they suppress it.
        explains: whether it explains a distance between the policies.
        side: the side of the split by ``record_of`` on which the cause lives. "honest" causes leave the
            recorded log-probs those of the distribution that was sampled, "altered" ones do not. Where both
            can be, the module says why.
    """

    severity: Severity
    what: str
    title: str
    evidence: str
    threshold: str
    ruled_out: str
    fix: str
    asks: str = ""
    remedy: str = ""
    says: Literal["cause", "symptom"] = "cause"
    group: str = ""
    after: tuple[str, ...] = ()
    explains: bool = True
    side: Literal["honest", "altered", "either"] = "either"

    def finding(self, name: str, figures: Figures, remedies: Mapping[str, str]) -> Finding:
        """Returns the finding, with the figures filled into its texts.

        Args:
            remedies: name of a finding -> its remedy.
        """
        rendered = {key: _line(_template(getattr(self, key)).render(figures)) for key in TEMPLATES}
        finding = Finding(
            name=name,
            severity=figures.get("severity", self.severity),
            says=self.says,
            threshold=_line(self.threshold),
            rollouts=figures.get("rollouts", ()),
            **rendered,
        )
        margin = figures.get("margin")
        if margin and finding.severity == "error" and not margin.is_sure:
            finding = replace(finding, severity="warning", evidence=f"{finding.evidence} {margin}")
        others = tuple(figures.get("or_else", ()))
        if explains := figures.get("explains"):
            finding = _explaining(finding, explains, is_open=bool(others))
        if not others:
            return finding
        return _open(finding, others, figures["untold"], remedies, is_cause=self.says == "cause")


def _explaining(finding: Finding, explains: Explained, *, is_open: bool) -> Finding:
    """Returns the finding with the share of k3 that it explains.

    Unless the rest is healthy, an error becomes a warning, and its cause becomes what was seen.

    Args:
        is_open: whether other causes remain, each of which may explain the share.
    """
    text = str(explains)
    if is_open:
        text = text.replace("This explains", "Whichever it is explains")
    changes = {"evidence": f"{finding.evidence} {text}", "explains": explains.share}
    changes["explains_error"] = explains.error
    if finding.severity == "error" and not explains.is_cause:
        changes |= {"severity": "warning", "says": "symptom"}
    return replace(finding, **changes)


@cache
def _template(text: str) -> Template:
    """Compiles a text of a detector once, because that takes longer than to look for the finding."""
    return _environment().from_string(_line(text))


def _line(text: str) -> str:
    """Returns a text as one line, without the indentation of its module."""
    return " ".join(text.split())


def _open(
    finding: Finding,
    others: tuple[str, ...],
    untold: tuple[Untold, ...],
    remedies: Mapping[str, str],
    *,
    is_cause: bool,
) -> Finding:
    """Returns the finding with the other causes that remain, at most a warning.

    Its fix says how to tell the causes apart, and what to do about each.

    Args:
        is_cause: whether the finding is one of the causes; a symptom is not.
    """
    names = " or ".join(others)
    changes = {"severity": "warning" if finding.severity == "error" else finding.severity, "or_else": others}
    steps = "; ".join(one.step for one in untold)
    causes = (finding.name, *others)
    if is_cause:
        questions = ", nor ".join(one.what for one in untold)
        changes["title"] = f"Either {' or '.join(causes)}: {finding.title}"
        changes["ruled_out"] = (
            f"Nothing yet, because {names} would look the same here. The dump does not tell {questions}."
        )
        advice = f"To tell which: {steps}."
    else:
        causes = others
        changes["ruled_out"] = f"Nothing yet: {names} may be the cause."
        advice = f"{finding.fix} To tell the cause: {steps}."
    remedied = "; ".join(f"if it is {name}, {' '.join(remedies[name].split())}" for name in causes)
    changes["fix"] = f"{advice} {remedied[0].upper()}{remedied[1:]}."
    return replace(finding, **changes)


def share(part: float, whole: float) -> str:
    """Returns a share in per cent as text.

    >>> share(1, 8)
    '12.5%'
    """
    return f"{100 * part / whole:.3g}%" if whole else "0%"


def nats(value: float | None) -> str:
    """Returns a log-ratio or a divergence as text.

    >>> nats(0.01234), nats(1.0)
    ('0.0123 nats', '1 nat')
    """
    if value is None:
        return "unknown"
    text = f"{value:.3g}"
    return f"{text} nat{'' if text == '1' else 's'}"


def factor(value: float) -> str:
    """Returns a ratio as text: how many times as large.

    >>> factor(12.34)
    '12x'
    """
    return f"{value:.0f}x" if value >= 100 else f"{value:.2g}x"


@cache
def _environment() -> Environment:
    """Returns what compiles the texts of a finding. A run without one does not import Jinja."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(undefined=StrictUndefined)
    environment.filters |= {"share": share, "nats": nats, "factor": factor}
    return environment
