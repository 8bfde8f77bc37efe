"""From numbers to places on a picture: linear, logarithmic and two-sided logarithmic axes, round ticks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["linear", "log", "symlog"]
MANY = 7  # ticks on an axis
WIDE = 50.0  # largest over smallest number from which an axis is logarithmic


@dataclass(frozen=True)
class Scale:
    """Maps low..high to start..stop.

    Args:
        knee: of a ``symlog`` axis, the distance from 0 up to which it is about linear.
        many: ticks that there is room for.
    """

    low: float
    high: float
    start: float
    stop: float
    kind: Kind = "linear"
    knee: float = 1.0
    many: int = MANY

    def __call__(self, value: float) -> float:
        """The place of a number; outside the axis it lies on the edge."""
        low, high, at = (self._bent(v) for v in (self.low, self.high, value))
        share = (at - low) / (high - low) if high > low else 0.5
        return round(self.start + min(max(share, 0), 1) * (self.stop - self.start), 2)

    def ticks(self) -> list[float]:
        """Round numbers on the axis, few enough to read."""
        if self.kind == "linear":
            return round_numbers(self.low, self.high, self.many)
        exponents = range(
            math.floor(_log10(self.knee if self.kind == "symlog" else self.low)),
            math.ceil(_log10(max(abs(self.low), abs(self.high)))) + 1,
        )
        signs = (1,) if self.kind == "log" else (-1, 1)
        powers = sorted([s * 10.0**e for s in signs for e in exponents] + ([0.0] if len(signs) > 1 else []))
        air = 1e-3 * max(abs(self.low), abs(self.high)) if self.low < 0 else 1e-3 * self.low
        inside = [p for p in powers if self.low - air <= p <= self.high * 1.001]
        return _thinned(inside, self.many)

    def _bent(self, value: float) -> float:
        if self.kind == "log":
            return _log10(value)
        if self.kind == "symlog":
            return math.copysign(math.log10(1 + abs(value) / self.knee), value)
        return value


def round_numbers(low: float, high: float, many: int = MANY) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten from low to high.

    >>> round_numbers(0, 0.9)
    [0.0, 0.2, 0.4, 0.6, 0.8]
    """
    if not high > low:
        return [low]
    rough = (high - low) / (many - 1)
    power = 10.0 ** math.floor(_log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def around(values: Iterable[float], *include: float) -> tuple[float, float]:
    """The range of some numbers and of those that must be on the axis, with a little air; 0 to 1 for none."""
    known = [v for v in (*values, *include) if math.isfinite(v)]
    if not known:
        return 0.0, 1.0
    low, high = min(known), max(known)
    air = 0.06 * (high - low) or 0.5 * abs(high) or 1.0
    return (low if low in include else low - air), (high if high in include else high + air)


def reach(xs: list[float], kind: Kind) -> tuple[float, float]:
    """The range of an axis that runs over places: probabilities end at 1, counts begin where they begin."""
    low, high = min(xs), max(xs)
    if kind == "log":
        return low / 1.3, min(high * 1.3, 1.0) if high <= 1 else high * 1.3
    air = 0.04 * (high - low) or 0.5
    return low - (0 if kind == "symlog" else air), high + air


def is_wide(values: Iterable[float]) -> bool:
    """Whether positive numbers differ so much that a linear axis would hide the small ones."""
    known = [v for v in values if v > 0]
    return bool(known) and max(known) > WIDE * min(known)


def say(value: float) -> str:
    """A number as a tick's label.

    >>> [say(v) for v in (0.0, 0.001, 0.00001, 1500, 2e6)]
    ['0', '0.001', '1e-5', '1500', '2e6']
    """
    if value == 0:
        return "0"
    text = f"{value:.4g}" if 1e-3 <= abs(value) < 1e5 else f"{value:.3g}"
    if "e" not in text and not 1e-3 <= abs(value) < 1e5:
        text = f"{value:.2e}"
    mantissa, _, exponent = text.partition("e")
    if not exponent:
        return text
    short = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
    return f"{short}e{int(exponent)}"


def _log10(value: float) -> float:
    return math.log10(max(value, 1e-300))


def _thinned(values: list[float], many: int) -> list[float]:
    """Every n-th, 0 among them where it is there."""
    every = max(1, -(-len(values) // many))
    at = values.index(0.0) if 0.0 in values else 0
    return [v for i, v in enumerate(values) if (i - at) % every == 0]
