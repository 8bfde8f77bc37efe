"""Hides a value in messages, and shows where it comes from.

``check`` reads strangers' scripts in CI, so its output must not show what a file or a variable of the machine
holds. Our rules and corrections must still compute with the value: they are made for trainers, too, and
know nothing of scripts.
"""

from __future__ import annotations

import operator
from typing import Any

BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
UNARY = ("neg", "abs")


def veiled(value: Any, veil: str) -> Any:
    """Returns a text or a number that messages show as ``veil``. Returns any other value unchanged.

    ``format`` and ``repr`` give the veil, and so does a number that is computed from it. ``str`` of a text is
    the text itself, because paths need it. The result has the attribute ``veil``.

    >>> cap = veiled(3.0, "$CAP")
    >>> cap > 2, f"{cap:g} {cap!r} {1 + cap}", float(cap)
    (True, '$CAP $CAP $CAP', 3.0)
    """
    plain = type(value)
    if plain not in (str, int, float) or not veil:
        return value
    members: dict[str, Any] = {"veil": veil, "__format__": lambda *_: veil, "__repr__": lambda *_: veil}
    for name in BINARY if plain is not str else ():
        apply = getattr(operator, name)
        members[f"__{name}__"] = lambda self, other, apply=apply: veiled(apply(plain(self), other), veil)
        members[f"__r{name}__"] = lambda self, other, apply=apply: veiled(apply(other, plain(self)), veil)
    for name in UNARY if plain is not str else ():
        apply = getattr(operator, name)
        members[f"__{name}__"] = lambda self, apply=apply: veiled(apply(plain(self)), veil)
    return type("Veiled", (plain,), members)(value)
