"""Prints an analysis: what was left out, findings, the recommendation and numbers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from slime_ext.tools.analysis.document import MEASURES, UNCORRECTED, Document, PartOfRun
from slime_ext.tools.analysis.headline import checks
from slime_ext.tools.analysis.texts import counted, legible
from slime_ext.tools.commands.output import PlainConsole

if TYPE_CHECKING:  # because it imports torch
    from slime_ext.tools.analysis.follow import News

COLOURS = {"error": "red", "warning": "yellow", "note": "cyan"}
MOST_SKIPPED, MOST_PARTS = 5, 8


def summary(screen: PlainConsole, documents: Sequence[Document]) -> None:
    """Prints one run, or two.

    First come each run's headline, findings, recommendation and notes, then all numbers side by side. What
    l is, the healthy ranges and the checks that could not run are in the files of --out and --json.
    """
    for document in documents:
        total = document.total
        screen.print(f"[bold]{escape(legible(document.name))}[/bold]")
        sizes = (
            (len(document.timeline), "rollout"),
            (total.sequences, "sequence"),
            (total.tokens, "response token"),
        )
        _say(screen, ", ".join(counted(*size) for size in sizes))
        _skipped(screen, document)
        if document.headline:
            screen.print(f"[bold]{escape(document.headline)}[/bold]", soft_wrap=not screen.wraps)
        _exact(screen, document)
        _findings(screen, document)
        _recommendation(screen, document)
        for note in document.notes[:MOST_SKIPPED]:
            _say(screen, f"note {note}")
        screen.print()
    screen.print(_numbers(documents))


def show_news(screen: PlainConsole, news: News, *, as_json: bool) -> None:
    """Prints a line for each new rollout and for each new finding.

    Args:
        as_json: whether each finding is also printed on stdout, as one JSON object.
    """
    for moment in news.moments:
        numbers = moment.numbers
        distance = "no log-probs to compare" if numbers.k3 is None else f"k3 {numbers.k3:.3g}"
        _say(
            screen,
            f"rollout {moment.rollout_id}: {counted(numbers.tokens, 'token')}, {distance}",
            is_exact=True,
        )
    for finding in news.alerts:
        at = news.moments[-1].rollout_id if news.moments else None
        alert = {"alert": finding.name, "severity": finding.severity, "rollout": at, "title": finding.title}
        if as_json:
            print(json.dumps(alert), flush=True)
        _say(screen, "ALERT {alert} ({severity}) rollout {rollout}: {title}".format(**alert), is_exact=True)


def _numbers(documents: Sequence[Document]) -> Table:
    from slime_ext.tools.analysis.page.numbers import tiles  # imports torch

    table = Table(box=None, pad_edge=False, show_header=len(documents) > 1)
    table.add_column("")
    for document in documents:
        table.add_column(escape(legible(document.name)), justify="right")
        table.add_column("")
    for tile in tiles([document.total for document in documents]):
        verdicts = {"bad": f"[red]outside[/red] ({tile.range})"}
        cells = [cell for text, verdict in tile.runs for cell in (text, verdicts.get(verdict, ""))]
        table.add_row(tile.name, *cells)
    return table


def _say(screen: PlainConsole, text: str, *, is_exact: bool = False) -> None:
    """Prints a line. A console of known width wraps it, unless a user may paste it (``is_exact``)."""
    screen.print(legible(text), markup=False, soft_wrap=is_exact or not screen.wraps)


def _exact(screen: PlainConsole, document: Document) -> None:
    """Prints the result of ``--expect exact``.

    These are the first token that differs, and how many tokens differ by rollout and position.
    """
    exact = document.exact
    if exact is None:
        return
    tokens = counted(exact.tokens, "response token")
    if not exact.differing:
        what = f"both log-probs of {tokens} are equal, bit for bit" if exact.tokens else "no token to compare"
        what += "" if document.is_whole else ", but not everything could be read"
        _say(screen, f"{'exact' if exact.tokens and document.is_whole else 'not exact'}: {what}\n")
        return
    share = f"{exact.differing:,} of {tokens} differ ({100 * exact.differing / exact.tokens:.3g}%)"
    by = f", by at most {exact.largest:.3g} nats" if exact.largest else ""  # equal values can be no log-probs
    _say(screen, f"not exact: {share}{by}")
    if at := exact.first:
        where = f"rollout {at.rollout_id}, sample {at.position}, token {at.token}"
        values = f"sampler {at.sampler}, trainer {at.trainer}"
        bits = f"{counted(at.bits, 'bit')} of 32 differ" if at.bits else "neither is a log-prob"
        _say(screen, f"  first: {where}: {values}; {bits}", is_exact=True)
    for name, parts in (("rollout", exact.by_rollout), ("position", exact.by_position)):
        _say(screen, f"  by {name}: {_shares(parts)}")
    _say(screen, f"  {exact.precision}\n" if exact.precision else "")


def _shares(parts: Sequence[PartOfRun]) -> str:
    """Returns how many tokens differ in each part that has any, the largest share first."""
    some = sorted((p for p in parts if p.differing), key=lambda p: -p.differing / p.tokens)
    texts = [f"{p.label}: {p.differing:,} of {p.tokens:,}" for p in some[:MOST_PARTS]]
    more, rest = len(some) - len(texts), len(parts) - len(some)
    texts += [f"{more} more differ"] * bool(more) + [f"{rest} exact"] * bool(rest)
    return "; ".join(texts)


def _findings(screen: PlainConsole, document: Document) -> None:
    """Prints each finding, without the title and the number of checks that the headline already says."""
    rows = document.detectors
    if rows and any(finding.is_fault for finding in document.findings):
        _say(screen, checks(rows))
    for finding in document.findings:
        colour = COLOURS[finding.severity]
        title = "" if finding.title in document.headline else f" {escape(finding.title)}"
        screen.print(
            f"\n[{colour}]{finding.severity}[/{colour}] [bold]{finding.name}[/bold]{title}",
            soft_wrap=not screen.wraps,
        )
        _say(screen, f"  {finding.evidence}")
        if finding.ruled_out:
            _say(screen, f"  ruled out: {finding.ruled_out}")
        _say(screen, f"  -> {finding.fix}")


def _recommendation(screen: PlainConsole, document: Document) -> None:
    recommendation = document.recommendation
    if recommendation is None:
        return
    if recommendation.is_made and recommendation.name == UNCORRECTED:
        said = "no correction recommended"
    elif recommendation.is_made:
        said = f"compare runs with {escape(recommendation.name)} to runs without"
    else:
        until = "yet" if recommendation.flags else "before the faults are fixed"
        said = f"no recommendation {until}"
    screen.print(f"\n[bold]{said}[/bold]")
    for reason in recommendation.reasons:
        _say(screen, f"  {reason}")
    if recommendation.flags:
        if recommendation.name == UNCORRECTED:
            _say(screen, f"  {MEASURES}:")
        _say(screen, f"  {recommendation.flags}", is_exact=True)
    for suggestion in document.suggestions:
        bounds = ", ".join(
            f"{k} {v!r}" for k, v in (("low", suggestion.low), ("high", suggestion.high)) if v is not None
        )
        reached = f"{suggestion.reached:.4g} of {counted(suggestion.units, suggestion.unit)}"
        said = f"  to reject {suggestion.wished:.3g} by {suggestion.name}: {bounds} ({reached})"
        _say(screen, said, is_exact=True)


def _skipped(screen: PlainConsole, document: Document) -> None:
    if document.unread:
        _say(screen, f"could not be read: {document.unread}; everything below leaves it out")
    for skipped in document.skipped[:MOST_SKIPPED]:
        _say(screen, f"  {skipped.path}: {skipped.reason}")
    if len(document.skipped) > MOST_SKIPPED:
        screen.print(f"  and {len(document.skipped) - MOST_SKIPPED} more: see --json or --out")
