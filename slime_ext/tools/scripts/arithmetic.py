"""Whole numbers as bash computes them between (( and )), assignments included."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable

TOKEN = re.compile(
    r"\s*(0[xX][0-9a-fA-F]+|\d+|[A-Za-z_]\w*|\*\*|<<=|>>=|\+\+|--|[-+*/%&|^<>=!]=|<<|>>|&&|\|\||\S)"
)
ASSIGNING = ("=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<=", ">>=")
LARGEST_POWER = 64
DEEPEST = 50  # names of names


def _quotient(a: int, b: int) -> int:
    return -(-a // b) if (a < 0) != (b < 0) else a // b


BINARY: dict[str, tuple[int, Callable[[int, int], int]]] = {  # precedence and meaning
    "||": (1, lambda a, b: int(bool(a or b))),
    "&&": (2, lambda a, b: int(bool(a and b))),
    "|": (3, operator.or_),
    "^": (4, operator.xor),
    "&": (5, operator.and_),
    "==": (6, lambda a, b: int(a == b)),
    "!=": (6, lambda a, b: int(a != b)),
    "<": (7, lambda a, b: int(a < b)),
    ">": (7, lambda a, b: int(a > b)),
    "<=": (7, lambda a, b: int(a <= b)),
    ">=": (7, lambda a, b: int(a >= b)),
    "<<": (8, lambda a, b: a << (b & 63)),
    ">>": (8, lambda a, b: a >> (b & 63)),
    "+": (9, operator.add),
    "-": (9, operator.sub),
    "*": (10, operator.mul),
    "/": (10, _quotient),
    "%": (10, lambda a, b: a - b * _quotient(a, b)),
    "**": (11, lambda a, b: _power(a, b)),
}


def _power(a: int, b: int) -> int:
    if not 0 <= b <= LARGEST_POWER:
        raise ArithmeticError("power")
    return a**b


def evaluated(text: str, get: Callable[[str], str], put: Callable[[str, str], None], depth: int = 0) -> int:
    """The value of an expression.

    Args:
        get: a variable's text, empty where it is unset.
        put: assigns one.

    Raises:
        ArithmeticError, ValueError: bash refuses it, or it is too deep.
    """
    if depth > DEEPEST:
        raise ArithmeticError("names of names")
    return _Parser(text, get, put, depth).whole()


class _Parser:
    def __init__(
        self, text: str, get: Callable[[str], str], put: Callable[[str, str], None], depth: int
    ) -> None:
        self.tokens, self.at, self.depth = [m[1] for m in TOKEN.finditer(text)], 0, depth
        self.get, self.put = get, put

    def whole(self) -> int:
        found = self._sequence() if self.tokens else 0
        if self.at < len(self.tokens):
            raise ValueError(self.tokens[self.at])
        return found

    def _peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def _take(self, *wanted: str) -> bool:
        found = self._peek() in wanted and bool(self._peek())
        self.at += found
        return found

    def _sequence(self) -> int:
        found = self._assignment()
        while self._take(","):
            found = self._assignment()
        return found

    def _assignment(self) -> int:
        name, sign = self._peek(), self.tokens[self.at + 1] if self.at + 1 < len(self.tokens) else ""
        if not (re.fullmatch(r"[A-Za-z_]\w*", name) and sign in ASSIGNING):
            return self._choice()
        self.at += 2
        found = self._assignment()
        if sign != "=":
            found = _wrapped(BINARY[sign[:-1]][1](self._of_name(name), found))
        self.put(name, str(found))
        return found

    def _choice(self) -> int:
        held = self._binary(1)
        if not self._take("?"):
            return held
        yes = self._assignment()
        if not self._take(":"):
            raise ValueError("?")
        no = self._assignment()
        return yes if held else no

    def _binary(self, least: int) -> int:
        found = self._unary()
        while self._peek() in BINARY and BINARY[self._peek()][0] >= least:
            sign = self._peek()
            self.at += 1
            rank, compute = BINARY[sign]
            found = _wrapped(compute(found, self._binary(rank if sign == "**" else rank + 1)))
        return found

    def _unary(self) -> int:
        token, self.at = self._peek(), self.at + 1
        if token in ("++", "--"):
            name, self.at = self._peek(), self.at + 1
            return self._stepped(name, token)
        if token in ("-", "+", "!", "~"):
            found = self._unary()
            return {"-": -found, "+": found, "!": int(not found), "~": ~found}[token]
        if token == "(":
            found = self._sequence()
            if not self._take(")"):
                raise ValueError("(")
            return found
        if re.fullmatch(r"[A-Za-z_]\w*", token):
            found = self._of_name(token)
            if self._peek() in ("++", "--"):
                self._stepped(token, self._peek())
                self.at += 1
            return found
        return _number(token)

    def _stepped(self, name: str, sign: str) -> int:
        found = self._of_name(name) + (1 if sign == "++" else -1)
        self.put(name, str(found))
        return found

    def _of_name(self, name: str) -> int:
        return evaluated(self.get(name), self.get, self.put, self.depth + 1)


def _number(token: str) -> int:
    if re.fullmatch(r"0\d+", token):
        return int(token, 8)
    return int(token, 16) if token[:2].lower() == "0x" else int(token)


def _wrapped(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63
