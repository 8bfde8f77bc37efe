"""Figures as findings write them."""

from __future__ import annotations


def share(part: float, whole: float) -> str:
    """A share in per cent.

    >>> share(1, 8)
    '12.5%'
    """
    return f"{100 * part / whole:.3g}%" if whole else "0%"


def nats(value: float) -> str:
    """A log-ratio or a divergence.

    >>> nats(0.01234)
    '0.0123 nats'
    """
    return f"{value:.3g} nats"


def factor(value: float) -> str:
    """How many times as large.

    >>> factor(12.34)
    '12x'
    """
    return f"{value:.2g}x"
