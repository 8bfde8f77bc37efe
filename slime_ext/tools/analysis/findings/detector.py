"""What a detector needs and returns, and the words of the fault that it looks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import yaml
from jinja2 import Environment, StrictUndefined

from slime_ext.tools.analysis.document import Finding
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

TEMPLATES = ("title", "evidence", "fix", "ruled_out")
FEW = 0.75  # share of sum l^2 in 1% of the tokens above which these few make every mean
# What a detector found: the figures that its fault's texts name; ``rollouts``, ids of those that show it; a
# ``severity`` if it is not the fault's; and ``or_else``, the faults that the dump cannot tell from this one,
# with ``untold``, what would tell them apart.
Figures = Mapping[str, Any]


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


@dataclass(frozen=True)
class Fault:
    """A row of faults.yaml: the finding with templates for texts, and the findings that go before it."""

    template: Finding
    after: frozenset[str]

    def finding(self, figures: Figures) -> Finding:
        """What is said of a run in which the fault was found."""
        said = {key: TEXTS.from_string(getattr(self.template, key)).render(figures) for key in TEMPLATES}
        kept = {
            "rollouts": figures.get("rollouts", ()),
            "severity": figures.get("severity", self.template.severity),
        }
        found = self.template.model_copy(update=said | kept)
        others = tuple(figures.get("or_else", ()))
        return _open(found, others, figures["untold"]) if others else found


def _open(finding: Finding, others: tuple[str, ...], untold: str) -> Finding:
    """A finding of one of several causes: no error, since another of them may be none."""
    names = " or ".join(others)
    return finding.model_copy(
        update={
            "severity": "warning",
            "or_else": others,
            "title": f"Either {finding.name} or {names}: {finding.title}",
            "ruled_out": f"Not {names}, which looks the same here. The dump does not tell {untold}.",
        }
    )


def faults() -> dict[str, Fault]:
    """The rows of faults.yaml by their name."""
    read = yaml.safe_load(files(__package__).joinpath("faults.yaml").read_text("utf-8"))
    groups, rows = read["groups"], read["faults"]
    groups["all above"] = list(rows)[: list(rows).index("unexplained")]
    found = {}
    for name, row in rows.items():
        after = frozenset(one for other in row.pop("after", ()) for one in groups.get(other, [other]))
        found[name] = Fault(Finding(name=name, **row), after)
    return found


def share(part: float, whole: float) -> str:
    """A share in per cent.

    >>> share(1, 8)
    '12.5%'
    """
    return f"{100 * part / whole:.3g}%" if whole else "0%"


def nats(value: float | None) -> str:
    """A log-ratio or a divergence.

    >>> nats(0.01234)
    '0.0123 nats'
    """
    return "unknown" if value is None else f"{value:.3g} nats"


def factor(value: float) -> str:
    """How many times as large.

    >>> factor(12.34)
    '12x'
    """
    return f"{value:.0f}x" if value >= 100 else f"{value:.2g}x"


TEXTS = Environment(undefined=StrictUndefined)
TEXTS.filters |= {"share": share, "nats": nats, "factor": factor}
