"""Numbers as the page writes them."""

from __future__ import annotations

import math
from collections.abc import Iterable

NONE = "–"


def number(value: float | None) -> str:
    """A number with three significant digits.

    >>> number(0.00012345), number(1234.5), number(None)
    ('0.000123', '1234', '–')
    """
    if value is None:
        return NONE
    if 1000 <= abs(value) < 1e7:
        return f"{value:.0f}"
    return f"{value:.3g}"


def ratio(value: float | None) -> str:
    """As ``number``, but near 1 with two digits of the distance from it.

    >>> ratio(1.00000123), ratio(0.9987), ratio(2.0), ratio(None)
    ('1.0000012', '0.9987', '2', '–')
    """
    if value is None or value == 1 or not 0.5 < value < 2:
        return number(value)
    return f"{value:.{max(2, 1 - math.floor(math.log10(abs(value - 1))))}f}"


def percent(value: float | None) -> str:
    """A share in per cent; only 1 is written as 100%, only 0 as 0%.

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
    """An integer with thin spaces between thousands.

    >>> whole(1234567)
    '1\u202f234\u202f567'
    """
    return f"{value:,}".replace(",", "\u202f")


def listed(values: Iterable[int], most: int = 12) -> str:
    """The first values, and how many more there are.

    >>> listed(range(3)), listed(range(20), 2)
    ('0, 1, 2', '0, 1 and 18 more')
    """
    found = list(values)
    text = ", ".join(str(v) for v in found[:most])
    return text if len(found) <= most else f"{text} and {len(found) - most} more"


def sentence(text: str) -> str:
    """A text with a capital letter and a full stop.

    >>> sentence("mend this first")
    'Mend this first.'
    """
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


def depth(log_ratio: float) -> str:
    """How strongly a token is coloured, from 0 to 0.6, at which its text is still readable."""
    size = abs(log_ratio)
    return f"{0.6 * size / (size + 0.5):.2f}"
