"""Writes numbers for the page and the terminal, with the range in which each is healthy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from slime_ext.core.metrics.names import HEALTHY
from slime_ext.tools.analysis.document import Numbers

NONE = "–"


def number(value: float | None) -> str:
    """Writes a number with three significant digits.

    >>> number(0.00012345), number(1234.5), number(None)
    ('0.000123', '1234', '–')
    """
    if value is None:
        return NONE
    if 1000 <= abs(value) < 1e7:
        return f"{value:.0f}"
    return f"{value:.3g}"


def ratio(value: float | None) -> str:
    """Writes a ratio as ``number`` does, but near 1 with two digits of its distance from 1.

    >>> ratio(1.00000123), ratio(0.9987), ratio(2.0), ratio(None)
    ('1.0000012', '0.9987', '2', '–')
    """
    if value is None or value == 1 or not 0.5 < value < 2:
        return number(value)
    return f"{value:.{max(2, 1 - math.floor(math.log10(abs(value - 1))))}f}"


def percent(value: float | None) -> str:
    """Writes a share in per cent. Only 1 becomes 100%, and only 0 becomes 0%.

    >>> percent(0.99999), percent(1.0), percent(0.00004), percent(0.0), percent(0.1234)
    ('>99.99%', '100%', '<0.01%', '0%', '12.3%')
    """
    if value is None:
        return NONE
    if value in (0, 1):
        return f"{value:.0%}"
    if 0 < value < 1e-4:
        return "<0.01%"
    if 0.9999 < value < 1:
        return ">99.99%"
    digits = 1 if 0.1 <= value < 0.99 else 2
    return f"{value:.{digits}%}"


def whole(value: int) -> str:
    """Writes an integer with thin spaces between thousands.

    >>> whole(1234567)
    '1\u202f234\u202f567'
    """
    return f"{value:,}".replace(",", "\u202f")


def listed(values: Iterable[int], most: int = 12) -> str:
    """Writes the first values, and how many more there are.

    >>> listed(range(3)), listed(range(20), 2)
    ('0, 1, 2', '0, 1 and 18 more')
    """
    numbers = list(values)
    text = ", ".join(str(v) for v in numbers[:most])
    return text if len(numbers) <= most else f"{text} and {len(numbers) - most} more"


def sentence(text: str) -> str:
    """Adds a capital letter and a full stop to a text. Names such as k3 and token_tis stay as they are.

    >>> sentence("fix this first"), sentence("k3 is 0.06 nats.")
    ('Fix this first.', 'k3 is 0.06 nats.')
    """
    is_name = any(c.isdigit() or c == "_" for c in text.partition(" ")[0])
    return f"{text[:1] if is_name else text[:1].upper()}{text[1:].rstrip('.')}."


def depth(log_ratio: float) -> str:
    """Returns how strongly a token is coloured, from 0 to 0.6, so that its text stays readable."""
    size = abs(log_ratio)
    return f"{0.6 * size / (size + 0.5):.2f}"


@dataclass(frozen=True)
class Tile:
    """A number of a run, as the page shows it.

    Args:
        fields: names of the fields of ``Numbers`` that it shows.
        healthy: field -> lowest and highest healthy value.
        joins: returns the text of the values.
        least: the smallest possible value of the quantity; its estimate can be smaller.
        unless: a field of ``Numbers`` that another tile shows in its place, if it has a value.
    """

    name: str
    fields: tuple[str, ...]
    healthy: Mapping[str, tuple[float | None, float | None]] = field(default_factory=dict)
    joins: Callable[..., str] = number
    least: float | None = None
    unless: str = ""

    @property
    def range(self) -> str:
        """The healthy range as text, such as: above 0.5, below 2."""
        bounds = [pair for healthy in self.healthy.values() for pair in zip(WORDS, healthy, strict=True)]
        return ", ".join(
            f"{word} {bound:g}" if bound else "none" for word, bound in bounds if bound is not None
        )

    def of(self, numbers: Numbers) -> tuple[str, str]:
        """Returns the text, and ``good``, ``bad`` or "" for a number without a range."""
        values = {name: getattr(numbers, name) for name in self.fields}
        if None in values.values() or (self.unless and getattr(numbers, self.unless) is not None):
            return NONE, ""
        is_good = all(
            (low is None or values[name] >= low) and (high is None or values[name] <= high)
            for name, (low, high) in self.healthy.items()
        )
        text = self.joins(*values.values())
        # Such an estimate says nothing about the quantity.
        if self.least is not None and min(values.values()) < self.least:
            return NONE, ""
        return text, ("good" if is_good else "bad") if self.healthy else ""


WORDS = ("above", "below")


def _tile(name: str, field: str, metric: str = "", joins: Callable[[float], str] = number) -> Tile:
    return Tile(name, (field,), {field: HEALTHY[metric]} if metric else {}, joins)


TILES = (
    _tile("k3, nats per token", "k3", "k3_kl"),
    _tile("KL of recorded heads, nats per token", "kl", "k3_kl"),
    _tile("probability beyond these heads", "tail", joins=percent),
    _tile("mean l, nats per token", "mean"),
    _tile("mean |l|, nats per token", "absolute"),
    Tile(
        "ratio, 1st to 99th percentile",
        ("ratio_p01", "ratio_p99"),
        {name: HEALTHY[name] for name in ("ratio_p01", "ratio_p99")},
        lambda low, high: f"{ratio(low)} to {ratio(high)}",
    ),
    _tile("ESS of tokens", "ess_token", "ess_ratio", percent),
    _tile("ESS of geometric means", "ess_geometric", joins=percent),
    _tile("ESS of whole sequences", "ess_sequence", "ess_sequence", percent),
    *(
        Tile(f"χ², {unit}", (name,), {name: HEALTHY[name]}, least=0.0)
        for unit, name in (("token", "chi2_token"), ("sequence", "chi2_sequence"))
    ),
    _tile("perplexity, sampler", "perplexity_behavior"),
    _tile("perplexity, trainer", "perplexity_proximal"),
    _tile("mean reward", "reward"),
    _tile("mean response, tokens", "response_length"),
    _tile("mean age, weight versions", "staleness"),
    Tile(
        "mean age of the weights, rollouts",
        ("least_staleness",),
        unless="most_staleness",
        joins=lambda least: f"at least {number(least)}",
    ),
    Tile(
        "mean age of the weights, rollouts",
        ("least_staleness", "most_staleness"),
        joins=lambda least, most: f"{number(least)} to {number(most)}",
    ),
    Tile("tokens with NaN, infinity or -9999", ("nonfinite",), {"nonfinite": (None, 0)}, whole),
)


class TileOfRuns(NamedTuple):
    """A tile with its text and verdict in each run."""

    name: str
    range: str
    runs: list[tuple[str, str]]


def tiles(totals: Sequence[Numbers]) -> list[TileOfRuns]:
    """Returns the tiles of all numbers that some run has."""
    rows = [TileOfRuns(tile.name, tile.range, [tile.of(numbers) for numbers in totals]) for tile in TILES]
    return [row for row in rows if any(text != NONE for text, _ in row.runs)]
