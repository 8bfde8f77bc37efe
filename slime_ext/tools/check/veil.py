"""Values that work as they are, and that messages show as something else: where they come from.

``check`` reads strangers' scripts in CI, and nothing that a file or a variable of the machine holds may stand
in its output. ``str`` of such a text is the text itself, for paths; every format and repr is its veil.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")


class Veiled:
    """What messages show of a value.

    Args:
        veil: where it comes from, as a script writes it.
    """

    veil: str

    def __format__(self, spec: str) -> str:
        return self.veil

    def __repr__(self) -> str:
        return self.veil


class VeiledText(Veiled, str):
    """Text from a file or a variable."""


class VeiledInteger(Veiled, int):
    """A whole number from a file or a variable."""


class VeiledNumber(Veiled, float):
    """A number from a file or a variable."""


KINDS: dict[type, Any] = {str: VeiledText, int: VeiledInteger, float: VeiledNumber}


def veiled(value: Any, veil: str) -> Any:
    """A text or a number that messages show as something else; anything else as it is.

    >>> cap = veiled(3.0, "$CAP")
    >>> cap > 2, f"{cap:g} {cap!r} {1 + cap}", float(cap)
    (True, '$CAP $CAP $CAP', 3.0)
    """
    kind = KINDS.get(type(value))
    if kind is None or not veil:
        return value
    found = kind(value)
    found.veil = veil
    return found


def _computed(name: str) -> Callable[..., Any]:
    """The operator of a number: what is computed from a veiled one is veiled."""

    def operator(self: Any, *others: Any) -> Any:
        plain = int if isinstance(self, int) else float
        found = getattr(plain, name)(self, *others)
        if found is NotImplemented:  # of an int and a float
            found = getattr(float, name)(float(self), *others)
        return veiled(found, self.veil)

    return operator


for _kind in (VeiledInteger, VeiledNumber):
    for _name in (f"__{side}{operator}__" for operator in OPERATORS for side in ("", "r")):
        setattr(_kind, _name, _computed(_name))
    for _name in ("__neg__", "__abs__"):
        setattr(_kind, _name, _computed(_name))
