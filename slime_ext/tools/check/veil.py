"""Hides values in messages. A veiled value computes as usual, but messages show where it comes from.

``check`` reads strangers' scripts in CI, so its output must not show what a file or a variable of the machine
holds. ``str`` of a veiled text is the text itself, because paths need it; ``format`` and ``repr`` give the
veil.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")


class Veiled:
    """The base of veiled values.

    Args:
        veil: the text that messages show: where the value comes from, as a script writes it.
    """

    veil: str

    def __format__(self, spec: str) -> str:
        return self.veil

    def __repr__(self) -> str:
        return self.veil


class VeiledText(Veiled, str):
    """A veiled text."""


class VeiledInteger(Veiled, int):
    """A veiled integer."""


class VeiledNumber(Veiled, float):
    """A veiled float."""


KINDS: dict[type, Any] = {str: VeiledText, int: VeiledInteger, float: VeiledNumber}


def veiled(value: Any, veil: str) -> Any:
    """Returns a text or a number that messages show as ``veil``. Returns any other value unchanged.

    >>> cap = veiled(3.0, "$CAP")
    >>> cap > 2, f"{cap:g} {cap!r} {1 + cap}", float(cap)
    (True, '$CAP $CAP $CAP', 3.0)
    """
    kind = KINDS.get(type(value))
    if kind is None or not veil:
        return value
    hidden = kind(value)
    hidden.veil = veil
    return hidden


def _computed(name: str) -> Callable[..., Any]:
    """Returns an operator whose result is veiled, because it is computed from a veiled number."""

    def operator(self: Any, *others: Any) -> Any:
        plain = int if isinstance(self, int) else float
        result = getattr(plain, name)(self, *others)
        if result is NotImplemented:  # an int with a float
            result = getattr(float, name)(float(self), *others)
        return veiled(result, self.veil)

    return operator


for _kind in (VeiledInteger, VeiledNumber):
    for _name in (f"__{side}{operator}__" for operator in OPERATORS for side in ("", "r")):
        setattr(_kind, _name, _computed(_name))
    for _name in ("__neg__", "__abs__"):
        setattr(_kind, _name, _computed(_name))
