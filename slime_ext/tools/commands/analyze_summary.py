"""The analysis on a terminal: numbers, findings, recommendation, and what was left out."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from slime_ext.tools.analysis.document import Document, Numbers
from slime_ext.tools.analysis.texts import legible

if TYPE_CHECKING:  # it imports torch
    from slime_ext.tools.analysis.follow import News

COLOURS = {"error": "red", "warning": "yellow", "note": "cyan"}
MOST_SKIPPED = 5
ROWS: tuple[tuple[str, Callable[[Numbers], float | None]], ...] = (
    ("response tokens", lambda n: n.tokens),
    ("sequences", lambda n: n.sequences),
    ("mean |log-ratio|", lambda n: n.absolute),
    ("k1", lambda n: None if n.mean is None else -n.mean),
    ("k3", lambda n: n.k3),
    ("ratio, 1st percentile", lambda n: n.ratio_p01),
    ("ratio, 99th percentile", lambda n: n.ratio_p99),
    ("ESS, tokens", lambda n: n.ess_token),
    ("ESS, geometric means", lambda n: n.ess_geometric),
    ("ESS, sequences", lambda n: n.ess_sequence),
    ("perplexity, sampler", lambda n: n.perplexity_behavior),
    ("perplexity, trainer", lambda n: n.perplexity_proximal),
    ("reward", lambda n: n.reward),
    ("staleness", lambda n: n.staleness),
)


def summary(screen: Console, documents: Sequence[Document]) -> None:
    """Prints one run, or two side by side."""
    screen.print(_numbers(documents))
    for document in documents:
        if len(documents) > 1:
            screen.print(f"\n[bold]{escape(legible(document.name))}[/bold]")
        _findings(screen, document)
        _recommendation(screen, document)
        _not_looked(screen, document)
        _skipped(screen, document)


def show_news(screen: Console, news: News, *, as_json: bool) -> None:
    """Prints a line for each rollout that was read and for each finding that is new; those as JSON on stdout
    where a machine reads it."""
    for moment in news.moments:
        found = moment.numbers
        distance = "no log-probs to compare" if found.k3 is None else f"k3 {found.k3:.3g}"
        _say(screen, f"rollout {moment.rollout_id}: {found.tokens:,} tokens, {distance}", is_exact=True)
    for finding in news.alerts:
        at = news.moments[-1].rollout_id if news.moments else None
        if as_json:
            told = {"alert": finding.name, "severity": finding.severity, "rollout": at}
            print(json.dumps(told | {"title": finding.title}), flush=True)
        _say(
            screen, f"ALERT {finding.name} ({finding.severity}) rollout {at}: {finding.title}", is_exact=True
        )


def _numbers(documents: Sequence[Document]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for document in documents:
        table.add_column(escape(legible(document.name)), justify="right")
    table.add_row("rollouts", *(str(len(document.timeline)) for document in documents))
    for name, value in ROWS:
        values = [value(document.total) for document in documents]
        if any(v is not None for v in values):
            table.add_row(
                name, *("-" if v is None else f"{v:,}" if isinstance(v, int) else f"{v:.4g}" for v in values)
            )
    return table


def _say(screen: Console, text: str, *, is_exact: bool = False) -> None:
    """Prints a line. Words are wrapped on a terminal, but never a line that is to be pasted
    (``is_exact``)."""
    screen.print(legible(text), markup=False, soft_wrap=is_exact or not screen.is_terminal)


def _findings(screen: Console, document: Document) -> None:
    rows = document.detectors
    could = sum(row.state in ("found", "nothing") for row in rows)
    skipped = f"; {len(rows) - could} skipped (missing data, see --out)" if could < len(rows) else ""
    ran = f": {could} of {len(rows)} checks ran{skipped}" if rows else ""
    screen.print(f"\n{'faults' if document.findings else 'no fault'} found{ran}")
    for finding in document.findings:
        colour = COLOURS[finding.severity]
        screen.print(
            f"\n[{colour}]{finding.severity}[/{colour}] [bold]{finding.name}[/bold] {escape(finding.title)}",
            soft_wrap=not screen.is_terminal,
        )
        _say(screen, f"  {finding.evidence}")
        if finding.ruled_out:
            _say(screen, f"  ruled out: {finding.ruled_out}")
        _say(screen, f"  -> {finding.fix}")


def _recommendation(screen: Console, document: Document) -> None:
    found = document.recommendation
    if found is None:
        return
    kind = "recommended" if found.is_made else "no recommendation yet, keep measuring"
    screen.print(f"\n[bold]{kind}: {escape(found.name)}[/bold]")
    for reason in found.reasons:
        _say(screen, f"  {reason}")
    if found.flags:
        _say(screen, f"  {found.flags}", is_exact=True)
    for suggestion in document.suggestions:
        bounds = ", ".join(
            f"{k} {v!r}" for k, v in (("low", suggestion.low), ("high", suggestion.high)) if v is not None
        )
        _say(
            screen,
            f"  to reject {suggestion.wished:.3g} by {suggestion.name}: {bounds} ({suggestion.reached:.4g} "
            f"of {suggestion.units:,} {suggestion.unit}s)",
            is_exact=True,
        )


def _not_looked(screen: Console, document: Document) -> None:
    """The detectors that could not look; what each needs is on the page and in the JSON."""
    names = [row.name for row in document.detectors if row.state == "could not look"]
    if names:
        _say(screen, f"could not look for {', '.join(names)}: --out and --json say what each needs")


def _skipped(screen: Console, document: Document) -> None:
    for skipped in document.skipped[:MOST_SKIPPED]:
        _say(screen, f"skipped {skipped.path}: {skipped.reason}")
    if len(document.skipped) > MOST_SKIPPED:
        screen.print(f"and {len(document.skipped) - MOST_SKIPPED} more: see --json or --out")
    for note in document.notes[:MOST_SKIPPED]:
        _say(screen, f"note {note}")
