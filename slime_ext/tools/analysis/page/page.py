"""Renders documents as HTML.

Jinja escapes all text from a dump, and the page's security policy forbids scripts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import DictLoader, Environment, StrictUndefined
from markupsafe import Markup

from slime_ext.tools.analysis.document import MEASURES, Document, Effect
from slime_ext.tools.analysis.findings.recommend import cost
from slime_ext.tools.analysis.headline import checks
from slime_ext.tools.analysis.page.numbers import (
    NONE,
    depth,
    listed,
    number,
    percent,
    ratio,
    sentence,
    tiles,
    whole,
)
from slime_ext.tools.analysis.page.pictures import pictures
from slime_ext.tools.analysis.texts import counted, legible
from slime_ext.tools.folders import write_file

UNFOLDED = 5  # corrections that the page does not fold
STATES = ("found", "nothing", "left to another", "excluded", "could not look")
MOST_NAMED = 300  # characters of the list of rejected sequences; JSON has the whole list
TEMPLATE, STYLE = "page.html.j2", "style.css"


def write_report(document: Document, path: str | Path, against: Document | None = None) -> Path:
    """Writes the page of one document, or of two side by side. Returns its path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, render(document, against))
    return path


def render(document: Document, against: Document | None = None) -> str:
    """Returns the HTML of the page."""
    documents = [replace(d, name=legible(d.name)) for d in (document, against) if d is not None]
    return (
        _environment()
        .get_template(TEMPLATE)
        .render(
            style=Markup(_text(STYLE)),
            documents=documents,
            both=against is not None,
            tiles=tiles([d.total for d in documents]),
            looked=[looked(d) for d in documents],
            unfolded=UNFOLDED,
            measures=MEASURES,
            pictures=pictures(documents),
            columns=COLUMNS,
            rows=rows(documents),
            notes=list(dict.fromkeys(n for d in documents for n in d.notes)),
            **{
                k: [(d.name, one) for d in documents for one in getattr(d, k)]
                for k in ("suggestions", "worst", "skipped")
            },
        )
    )


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=DictLoader({TEMPLATE: _text(TEMPLATE)}),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: legible(value) if type(value) is str else value,
    )
    environment.filters |= {
        f.__name__: f for f in (number, percent, ratio, whole, counted, listed, sentence, depth)
    }
    return environment


def _text(name: str) -> str:
    return files("slime_ext.tools.analysis.page").joinpath(name).read_text(encoding="utf-8")


def looked(document: Document) -> dict[str, Any]:
    """Returns what the detectors did with a run.

    The result has their rows, a sentence, and whether at least half of them could run (``most``).
    """
    rows = sorted(document.detectors, key=lambda row: STATES.index(row.state))
    could = sum(row.state in ("found", "nothing") for row in rows)
    return {"rows": rows, "most": 2 * could >= len(rows), "said": checks(rows)}


@dataclass(frozen=True)
class Column:
    """A column of the what-if table: its text, and the share that its bar shows."""

    name: str
    text: Callable[[Effect], str]
    share: Callable[[Effect], float | None] = lambda effect: None

    def width(self, effect: Effect) -> str:
        """Returns the width of the bar in per cent."""
        return f"{100 * min(max(self.share(effect) or 0, 0), 1):.1f}"


def _column(name: str, share: Callable[[Effect], float | None]) -> Column:
    return Column(name, lambda effect: percent(share(effect)), share)


def _weights(effect: Effect) -> str:
    quantiles = effect.weight_quantiles
    return " / ".join(number(quantiles[key]) for key in ("p01", "p50", "p99")) if quantiles else NONE


def _gradient(effect: Effect) -> str:
    centered = "" if effect.centering is None else f", centering {number(effect.centering)}"
    return f"{number(effect.gradient_scale)}{centered}"


COLUMNS = (
    _column("sequences kept", lambda e: _share(e.kept_sequences, e.sequences)),
    _column("tokens kept", lambda e: _share(e.kept_tokens, e.tokens)),
    _column("A > 0 kept", lambda e: e.kept_positive),
    _column("A < 0 kept", lambda e: e.kept_negative),
    _column("clipped", lambda e: _share(e.clipped_tokens, e.tokens)),
    Column("weights", _weights),
    _column("ESS", lambda e: e.ess),
    Column("gradient", _gradient),
)


def rows(documents: Sequence[Document]) -> list[dict[str, Any]]:
    """Returns the rows of the what-if table, one for each correction of any document.

    The recommended correction comes first, then corrections that cost little, candidates before others.
    """
    recommended = [d.recommendation for d in documents if d.recommendation]
    chosen = {recommendation.name for recommendation in recommended}
    tried = [candidate.name for recommendation in recommended for candidate in recommendation.candidates]
    by_name: dict[str, dict[int, Effect]] = {}
    for run, document in enumerate(documents):
        for effect in document.effects:
            by_name.setdefault(effect.name, {})[run] = effect

    def suits(name: str) -> tuple[bool, bool, int]:
        costs = any(effect.unavailable or cost(effect) for effect in by_name[name].values())
        return name not in chosen, costs, tried.index(name) if name in tried else len(tried)

    return [_row(name, by_name[name], name in chosen) for name in sorted(by_name, key=suits)]


def _row(name: str, effects: dict[int, Effect], chosen: bool) -> dict[str, Any]:
    known = {run: effect for run, effect in effects.items() if not effect.unavailable}
    first = next(iter((known or effects).values()))
    rejected = "; ".join(f"rollout {rollout}: {where}" for rollout, where in first.rejected.items())
    if len(rejected) > MOST_NAMED:
        rejected = f"{rejected[:MOST_NAMED].rpartition(',')[0]} … (all of them in --json)"
    return {
        "name": name,
        "formula": first.formula,
        "target": first.numerator == "target",
        "chosen": chosen,
        "effects": known,  # index of the run -> effect
        "unavailable": None if known else first.unavailable,
        "rejected_count": first.sequences - first.kept_sequences,
        "rejected": rejected,
    }


def _share(part: int, of: int) -> float | None:
    return part / of if of else None
