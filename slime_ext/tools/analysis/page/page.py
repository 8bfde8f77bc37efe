"""Documents -> HTML. Jinja escapes whatever came out of a dump, and the page's own policy forbids scripts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import DictLoader, Environment, StrictUndefined
from markupsafe import Markup

from slime_ext.tools.analysis.document import Document, Effect, Numbers
from slime_ext.tools.analysis.page.numbers import NONE, depth, listed, number, percent, ratio, sentence, whole
from slime_ext.tools.analysis.page.pictures import pictures
from slime_ext.tools.analysis.recommend import cost
from slime_ext.tools.analysis.texts import legible
from slime_ext.tools.folders import write_file

SHOWN = 5  # corrections that are not folded
STATES = ("found", "nothing", "left to another", "could not look")
MOST_NAMED = 300  # characters of rejected sequences on the page; JSON has all
TEMPLATE, STYLE = "page.html.j2", "style.css"


def write_report(document: Document, path: str | Path, against: Document | None = None) -> Path:
    """Writes the page of one document, or of two side by side, and returns its path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, render(document, against))
    return path


def render(document: Document, against: Document | None = None) -> str:
    """The HTML of the page."""
    documents = [d.model_copy(update={"name": legible(d.name)}) for d in (document, against) if d is not None]
    about = {
        "style": Markup(_text(STYLE)),
        "documents": documents,
        "both": against is not None,
        "tiles": tiles([d.total for d in documents]),
        "looked": [looked(d) for d in documents],
        "shown": SHOWN,
        "pictures": pictures(documents),
        "columns": COLUMNS,
        "rows": rows(documents),
        "notes": list(dict.fromkeys(n for d in documents for n in d.notes)),
    }
    listed = {key: _all(documents, key) for key in ("suggestions", "worst", "skipped")}
    return _environment().get_template(TEMPLATE).render(about | listed)


def _all(documents: Sequence[Document], key: str) -> list[tuple[str, Any]]:
    """What stands under a key in any of the documents, with the run's name."""
    return [(d.name, one) for d in documents for one in getattr(d, key)]


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=DictLoader({TEMPLATE: _text(TEMPLATE)}),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: legible(value) if type(value) is str else value,
    )
    # ``markup`` is for our own pictures alone: their text went through ElementTree, which escapes it.
    environment.filters |= {f.__name__: f for f in (number, percent, ratio, whole, listed, sentence, depth)}
    environment.filters["markup"] = Markup
    return environment


def _text(name: str) -> str:
    return files("slime_ext.tools.analysis.page").joinpath(name).read_text(encoding="utf-8")


@dataclass(frozen=True)
class Tile:
    """A number: how it is written, and where docs/metrics.md calls it healthy."""

    name: str
    say: Callable[[Numbers], str]
    range: str = ""
    is_healthy: Callable[[Numbers], bool] | None = None

    def of(self, numbers: Numbers) -> tuple[str, str]:
        """The text, and ``good``, ``bad`` or "" for a number without a range."""
        text = self.say(numbers)
        if text == NONE or self.is_healthy is None:
            return text, ""
        return text, "good" if self.is_healthy(numbers) else "bad"


TILES = (
    Tile("k3, nats per token", lambda n: number(n.k3), "below 1e-3", lambda n: n.k3 < 1e-3),
    Tile("mean l, nats per token", lambda n: number(n.mean)),
    Tile("mean |l|, nats per token", lambda n: number(n.absolute)),
    Tile(
        "ratio, 1st to 99th percentile",
        lambda n: NONE if n.ratio_p01 is None else f"{ratio(n.ratio_p01)} to {ratio(n.ratio_p99)}",
        "above 0.5, below 2",
        lambda n: n.ratio_p01 > 0.5 and n.ratio_p99 < 2,
    ),
    Tile("ESS of tokens", lambda n: percent(n.ess_token), "above 0.9", lambda n: n.ess_token > 0.9),
    Tile("ESS of geometric means", lambda n: percent(n.ess_geometric)),
    Tile(
        "ESS of whole sequences",
        lambda n: percent(n.ess_sequence),
        "above 0.1",
        lambda n: n.ess_sequence > 0.1,
    ),
    Tile("χ², token", lambda n: number(n.chi2_token), "below 0.1", lambda n: n.chi2_token < 0.1),
    Tile("χ², sequence", lambda n: number(n.chi2_sequence), "below 10", lambda n: n.chi2_sequence < 10),
    Tile("perplexity, sampler", lambda n: number(n.perplexity_behavior)),
    Tile("perplexity, trainer", lambda n: number(n.perplexity_proximal)),
    Tile("mean reward", lambda n: number(n.reward)),
    Tile("mean response, tokens", lambda n: number(n.response_length)),
    Tile("mean age, weight versions", lambda n: number(n.staleness)),
    Tile("tokens without a log-prob", lambda n: whole(n.nonfinite), "none", lambda n: n.nonfinite == 0),
)


def tiles(totals: Sequence[Numbers]) -> list[dict[str, Any]]:
    """Each number with its text and verdict in each run, without numbers that no run has."""
    found = [{"name": t.name, "range": t.range, "runs": [t.of(n) for n in totals]} for t in TILES]
    return [tile for tile in found if any(text != NONE for text, _ in tile["runs"])]


def looked(document: Document) -> dict[str, Any]:
    """What the detectors did with a run: a sentence, whether at least half of them could look, the rows."""
    rows = sorted(document.detectors, key=lambda row: STATES.index(row.state))
    could = sum(row.state in ("found", "nothing") for row in rows)
    said = f"{could} of {len(rows)} checks ran"
    return {"rows": rows, "most": 2 * could >= len(rows), "said": said}


@dataclass(frozen=True)
class Column:
    """A column of the what-if table: what it says of a correction, and the share that its bar shows."""

    name: str
    text: Callable[[Effect], str]
    share: Callable[[Effect], float | None] = lambda effect: None

    def width(self, effect: Effect) -> str:
        """Per cent of the bar."""
        return f"{100 * min(max(self.share(effect) or 0, 0), 1):.1f}"


def _column(name: str, share: Callable[[Effect], float | None]) -> Column:
    return Column(name, lambda effect: percent(share(effect)), share)


def _weights(effect: Effect) -> str:
    found = effect.weight_quantiles
    return " / ".join(number(found[key]) for key in ("p01", "p50", "p99")) if found else NONE


COLUMNS = (
    _column("sequences kept", lambda e: _share(e.kept_sequences, e.sequences)),
    _column("tokens kept", lambda e: _share(e.kept_tokens, e.tokens)),
    _column("A > 0 kept", lambda e: e.kept_positive),
    _column("A < 0 kept", lambda e: e.kept_negative),
    _column("clipped", lambda e: _share(e.clipped_tokens, e.tokens)),
    Column("weights", _weights),
    _column("ESS", lambda e: e.ess),
    Column("gradient", lambda e: number(e.gradient_scale)),
)


def rows(documents: Sequence[Document]) -> list[dict[str, Any]]:
    """The rows of the what-if table: one per correction of any document, the recommended one first, then the
    candidates of the situation, then what costs little."""
    chosen = {d.recommendation.name for d in documents if d.recommendation}
    by_name: dict[str, dict[int, Effect]] = {}
    for run, document in enumerate(documents):
        for effect in document.effects:
            by_name.setdefault(effect.name, {})[run] = effect
    tried = [c.name for d in documents if d.recommendation for c in d.recommendation.candidates]

    def suits(item: tuple[str, dict[int, Effect]]) -> tuple:
        name, effects = item
        costs = any(effect.unavailable or cost(effect) for effect in effects.values())
        return name not in chosen, costs, tried.index(name) if name in tried else len(tried)

    ordered = sorted(by_name.items(), key=suits)
    return [_row(name, effects, name in chosen) for name, effects in ordered]


def _row(name: str, effects: dict[int, Effect], chosen: bool) -> dict[str, Any]:
    known = {run: effect for run, effect in effects.items() if not effect.unavailable}
    first = next(iter((known or effects).values()))
    return {
        "name": name,
        "formula": first.formula,
        "target": first.numerator == "target",
        "chosen": chosen,
        "effects": known,  # number of the run -> effect
        "unavailable": None if known else first.unavailable,
        "rejected_count": first.sequences - first.kept_sequences,
        "rejected": _named(f"rollout {rollout}: {where}" for rollout, where in first.rejected.items()),
    }


def _named(parts: Iterable[str]) -> str:
    text = "; ".join(parts)
    if len(text) <= MOST_NAMED:
        return text
    return f"{text[:MOST_NAMED].rpartition(',')[0]} … (all of them in --json)"


def _share(part: int, of: int) -> float | None:
    return part / of if of else None
