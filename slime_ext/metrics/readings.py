"""From the totals of a step to its metrics by name."""

from __future__ import annotations

from collections.abc import Iterator

from slime_ext.correction import Correction
from slime_ext.metrics.layout import Layout
from slime_ext.metrics.names import CURVE_METRICS, METRICS, PREFIX, STALENESS
from slime_ext.metrics.totals import Totals


def known_names(correction: Correction) -> list[str]:
    """The names, without ``off_policy/``, of every metric of one number that a correction can have."""
    sums = dict.fromkeys((name for name, _ in Layout.of(correction).flags), 0.0)
    of_steps = [name for name, _ in _steps(Totals({**sums, "response": 0.0}, {}, {}, [], {}))]
    return [*(metric.name for metric in METRICS + STALENESS), *of_steps]


def scalars(totals: Totals) -> dict[str, float]:
    """Every metric of one number, by its full name."""
    known = METRICS + STALENESS if totals["aged"] else METRICS
    found = {metric.name: metric.value(totals) for metric in known}
    return {f"{PREFIX}{name}": value for name, value in {**found, **dict(_steps(totals))}.items()}


def curves(totals: Totals) -> dict[str, float]:
    """Every bin of every curve that holds tokens, by its full name."""
    return {
        f"{PREFIX}{curve}/{label}/{metric.name}": value
        for curve, rows in totals.curves.items()
        for label, row in rows.items()
        if row["counted"]
        for metric, value in zip(CURVE_METRICS, _of_bin(row, totals), strict=True)
    }


def _of_bin(row: dict[str, float], totals: Totals) -> Iterator[float]:
    n = row["counted"]
    yield n / totals["counted"]
    yield row["k3"] / n
    yield 1 + row["excess"] / n
    yield row["weight"] / n
    yield row["kept"] / n


def _steps(totals: Totals) -> Iterator[tuple[str, float]]:
    for name in totals.sums:
        if name.startswith("steps/"):
            share = totals.mean(name, "response")
            kept = name.removesuffix("lost_fraction") + "kept_fraction"
            yield (
                (kept, 1 - share if totals["response"] else 0.0)
                if name.endswith("/lost_fraction")
                else (name, share)
            )
