"""``[ … ]``, ``test`` and ``[[ … ]]``: whether they hold; None where that is unknown."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime_ext.tools.scripts.flow import Flow
from slime_ext.tools.scripts.values import Unknown, Value, known, value

if TYPE_CHECKING:
    from tree_sitter import Node

    from slime_ext.tools.scripts.shell import Shell

NUMBERS = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-gt": operator.gt,
    "-ge": operator.ge,
    "-lt": operator.lt,
    "-le": operator.le,
}
TEXTS = {"=": operator.eq, "==": operator.eq, "!=": operator.ne, "<": operator.lt, ">": operator.gt}
FILES = "bcdefghkLNOprsStuwxG"
NOT_A_TEST = 2  # status of one that bash cannot read


@dataclass(frozen=True)
class Term:
    """A word of a test.

    Args:
        pattern: the regular expression that it is on the right of == between [[ and ]].
    """

    value: Value
    is_operator: bool = False
    pattern: str | None = None


@dataclass
class Asked:
    """What a test asks of the shell: of a file, of a variable, of an arithmetic text."""

    file: Callable[[str, str], bool | None]
    is_set: Callable[[str], bool | None]
    number: Callable[[str], int]


class Condition:
    """Goes through the words of one test."""

    def __init__(self, terms: list[Term], asked: Asked, *, double: bool) -> None:
        self.terms, self.asked, self.double, self.at = terms, asked, double, 0

    def holds(self) -> bool | None:
        """Whether it does. Raises ValueError for one that bash cannot read."""
        if not self.terms:
            return False
        found = self._any()
        if self.at < len(self.terms):
            raise ValueError("a word too many")
        return found

    def _operator(self, ahead: int = 0) -> str:
        at = self.at + ahead
        return (known(self.terms[at].value) or "") if at < len(self.terms) else ""

    def _any(self) -> bool | None:
        found = self._every()
        while self._operator() in ("||", "-o"):
            self.at += 1
            found = _either(found, self._every())
        return found

    def _every(self) -> bool | None:
        found = self._one()
        while self._operator() in ("&&", "-a"):
            self.at += 1
            other = self._one()
            found = _negated(_either(_negated(found), _negated(other)))
        return found

    def _one(self) -> bool | None:
        left = len(self.terms) - self.at
        if left >= 3 and self._is_binary(self._operator(1)):
            return self._binary()
        if self._operator() == "!" and left > 1:
            self.at += 1
            return _negated(self._one())
        if self._operator() == "(" and left > 2:
            self.at += 1
            found = self._any()
            self.at += 1
            return found
        if left >= 2 and re.fullmatch(rf"-[{FILES}znv]", self._operator()):
            return self._unary()
        return self._is_filled(self._next())

    def _is_binary(self, sign: str) -> bool:
        return (
            sign in NUMBERS
            or sign in TEXTS
            or (sign == "=~" and self.double)
            or sign in ("-nt", "-ot", "-ef")
        )

    def _next(self) -> Value:
        if self.at >= len(self.terms):
            raise ValueError("a word too few")
        self.at += 1
        return self.terms[self.at - 1].value

    def _is_filled(self, word: Value) -> bool | None:
        text = known(word)
        if text is None:
            return True if any(isinstance(part, str) for part in word) else None
        return text != ""

    def _unary(self) -> bool | None:
        sign, word = known(self._next()) or "", self._next()
        if sign in ("-z", "-n"):
            filled = self._is_filled(word)
            return filled if sign == "-n" else _negated(filled)
        text = known(word)
        if text is None:
            return None
        return self.asked.is_set(text) if sign == "-v" else self.asked.file(sign, text)

    def _binary(self) -> bool | None:
        left, sign, right = known(self._next()), known(self._next()) or "", self.terms[self.at]
        self.at += 1
        text = known(right.value)
        if sign in ("-nt", "-ot", "-ef") or left is None or text is None:
            return None
        if sign in NUMBERS:
            read = self.asked.number if self.double else _whole
            return NUMBERS[sign](read(left), read(text))
        if self.double and sign == "=~":
            return re.search(right.pattern or text, left) is not None
        if self.double and right.pattern is not None and sign in ("=", "==", "!="):
            return (re.fullmatch(right.pattern, left, re.DOTALL) is not None) == (sign != "!=")
        return TEXTS[sign](left, text)


def _whole(text: str) -> int:
    if not re.fullmatch(r"\s*[-+]?\d+\s*", text):
        raise ValueError(text)
    return int(text)


def _negated(held: bool | None) -> bool | None:
    return None if held is None else not held


def _either(one: bool | None, other: bool | None) -> bool | None:
    if one or other:
        return True
    return None if one is None or other is None else False


def words_as_terms(words: list[Value]) -> list[Term]:
    """Words of ``test``; one that can be any number of words is left as one."""
    return [Term(word) for word in words if not _is_nothing(word)]


def _is_nothing(word: Value) -> bool:
    return bool(word) and all(isinstance(p, Unknown) and p.unset and p.many for p in word)


class _UnknownNumberError(Exception):
    """A sum of which a part is unknown."""


class Tests:
    """Follows the tests of a shell."""

    def __init__(self, shell: Shell) -> None:
        self.shell = shell

    def follow(self, node: Node) -> Flow:
        opening = self.shell.source(node.children[0])
        if opening == "((":
            found = self.shell.expand.number(node.children, node.start_byte + 2, node.end_byte - 2)
            self.shell.state.status = None if found is None else int(found == 0)
            return Flow.NEXT
        double = opening == "[["
        self.judge([t for child in node.children[1:-1] for t in self._terms(child, double)], double=double)
        return Flow.NEXT

    def _terms(self, node: Node, double: bool) -> Iterator[Term]:
        if node.type in (
            "binary_expression",
            "unary_expression",
            "parenthesized_expression",
            "negated_expression",
            "list",
        ):
            for child in node.children:
                yield from self._terms(child, double)
        elif not node.is_named or node.type == "test_operator":
            yield Term(value(self.shell.source(node)), is_operator=True)
        elif double:
            is_regex = node.prev_sibling is not None and node.prev_sibling.type == "=~"
            pattern = (
                self.shell.expand.pattern([node], node.start_byte, node.end_byte) if not is_regex else None
            )
            yield Term(self.shell.expand.text(node), pattern=pattern)
        else:
            yield from (Term(word) for word in self.shell.expand.fields([node]))

    def judge(self, terms: Sequence[Term], *, double: bool = False) -> None:
        """Sets the status to what a test says."""
        kept = [
            t
            for t in terms
            if double or not (t.value and all(isinstance(p, Unknown) and p.unset and p.many for p in t.value))
        ]
        asked = Asked(self.file_is, lambda name: self.shell.variables.held(name) is not None, self._number)
        try:
            held = Condition(list(kept), asked, double=double).holds()
        except _UnknownNumberError:
            held = None
        except ValueError:
            self.shell.state.status = 2
            return
        self.shell.state.status = None if held is None else int(not held)

    def _number(self, text: str) -> int:
        found = self.shell.expand.computed(text)
        if found is None:
            raise _UnknownNumberError
        return found

    def file_is(self, sign: str, name: str) -> bool | None:
        """Whether a test of a file holds: of what lies here beside the script, else it is unknown."""
        path = self.shell.path_of(value(name))
        near = self.shell.folders[0] if self.shell.folders else None
        if not name:
            return False
        if path is None or not path.exists() or near is None or not path.resolve().is_relative_to(near):
            return None
        return {"f": path.is_file, "d": path.is_dir, "e": path.exists, "r": path.exists}.get(
            sign[1], lambda: None
        )()
