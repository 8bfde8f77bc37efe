"""Parameter expansion: ``$X``, ``${X:-default}``, ``${A[@]/x/y}`` and the rest."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from slime_ext.tools.scripts.pieces import Kind, Piece, RefusedError, is_unset
from slime_ext.tools.scripts.state import Array
from slime_ext.tools.scripts.values import Unknown, Value, Words, is_many, known, shown, value

if TYPE_CHECKING:
    from tree_sitter import Node

    from slime_ext.tools.scripts.expansion import Expansion

LIST = ("@", "*")
OWN = (
    "$",
    "!",
    "-",
    "_",
    "RANDOM",
    "SECONDS",
    "HOSTNAME",
    "UID",
    "EUID",
    "PPID",
    "BASHPID",
    "LINENO",
    "EPOCHSECONDS",
)
UPPER = {
    "^^": str.upper,
    ",,": str.lower,
    "^": lambda s: s[:1].upper() + s[1:],
    ",": lambda s: s[:1].lower() + s[1:],
}


class Parameters:
    """Expands the parameters of a word."""

    def __init__(self, expand: Expansion) -> None:
        self.expand, self.shell = expand, expand.shell

    def simple(self, node: Node) -> Iterator[Piece]:
        name = self.shell.source(node).strip()[1:]
        yield from self.parameter(name, None, node)

    def parameter(self, name: str, index: str | None, node: Node) -> Iterator[Piece]:
        words, is_list = self.looked_up(name, index, node)
        for i, word in enumerate(words):
            ends = is_list == "@" and i + 1 < len(words)
            yield from (Piece(part, Kind.PUT_IN) for part in word[:-1])
            yield Piece(
                word[-1] if word else "",
                Kind.PUT_IN,
                ends
                or (is_list == "@" and i + 1 == len(words) and bool(word) and isinstance(word[-1], Unknown)),
            )
            if is_list == "*" and i + 1 < len(words):
                yield Piece(self._star(), Kind.PUT_IN)

    def _star(self) -> str:
        if "IFS" not in self.shell.state.variables:
            return " "
        return (known(self.shell.variables.scalar("IFS")) or "")[:1]

    def looked_up(self, name: str, index: str | None, node: Node) -> tuple[Words, str]:
        """The words of a parameter, and ``@`` or ``*`` where it is a list."""
        state = self.shell.state
        if name in LIST:
            return list(state.positional), name
        if name.isdigit():
            return [self._positional(int(name))], ""
        if name in OWN:
            return [(Unknown(f"${name}", self.shell.place),)], ""
        if name == "#":
            exact = not any(map(is_many, state.positional))
            return [value(str(len(state.positional))) if exact else (Unknown("$#", self.shell.place),)], ""
        if name == "?":
            return [
                (Unknown("$?", self.shell.place),) if state.status is None else value(str(state.status))
            ], ""
        if index in LIST:
            return self.shell.variables.array_words(name), index
        return [
            self.shell.variables.scalar(name) if index is None else self.shell.variables.element(name, index)
        ], ""

    def _positional(self, number: int) -> Value:
        if number == 0:
            return self.shell.zero
        words = self.shell.state.positional
        if any(map(is_many, words[:number])):
            return (Unknown(f"${number}", self.shell.place),)
        return words[number - 1] if number <= len(words) else self.shell.variables.nothing(str(number))

    def braced(self, node: Node) -> Iterator[Piece]:
        children = [child for child in node.children if child.type not in ("${", "}")]
        source = self.shell.source(node)
        if not children:
            yield Piece(Unknown(source, self.shell.place), Kind.PUT_IN)
            return
        prefix = ""
        if not children[0].is_named and self.shell.source(children[0]) in ("!", "#") and len(children) > 1:
            prefix = self.shell.source(children.pop(0))
        subject = children.pop(0)
        name, index = self._subject(subject)
        if prefix:
            yield from self._prefixed(prefix, name, index, node, children)
            return
        if not children:
            yield from self.parameter(name, index, node)
            return
        sign = self.shell.source(children[0])
        yield from self._operated(name, index, sign, node, children)

    def _subject(self, node: Node) -> tuple[str, str | None]:
        if node.type != "subscript":
            return self.shell.source(node).strip(), None
        inner = node.child_by_field_name("index")
        return self.shell.source(node.child_by_field_name("name")), self.subscript(inner)

    def subscript(self, node: Node | None) -> str:
        """An index as text: ``@``, a key, or the text of a sum."""
        found = self.expand.text(node)
        text = known(found)
        return shown(found) if text is None else text

    def _prefixed(
        self, prefix: str, name: str, index: str | None, node: Node, rest: Sequence[Node]
    ) -> Iterator[Piece]:
        if prefix == "#":
            words, is_list = self.looked_up(name, index, node)
            if is_list:
                exact = not any(map(is_many, words))
                yield Piece(str(len(words)) if exact else self.expand.unknown(node), Kind.PUT_IN)
                return
            text = known(words[0])
            yield Piece(self.expand.unknown(node) if text is None else str(len(text)), Kind.PUT_IN)
        elif index in LIST and not rest:
            held = self.shell.variables.held(name)
            exact = isinstance(held, Array) and held.is_exact
            for key in held.elements if exact else ():  # type: ignore[union-attr]
                yield Piece(str(key), Kind.PUT_IN, ends=True)
            if held is not None and not exact:
                yield Piece(self.expand.unknown(node, many=True), Kind.PUT_IN)
        else:
            aim = known(
                self.shell.variables.scalar(name)
                if index is None
                else self.shell.variables.element(name, index)
            )
            if aim == "":
                raise RefusedError
            match = re.fullmatch(r"(\w+)(?:\[(.*)\])?", aim or "")
            if match is None or rest:
                yield Piece(self.expand.unknown(node, many=True), Kind.PUT_IN)
            else:
                yield from self.parameter(match[1], match[2], node)

    def _operated(
        self, name: str, index: str | None, sign: str, node: Node, children: Sequence[Node]
    ) -> Iterator[Piece]:
        begin, end = children[0].end_byte, node.end_byte - 1
        rest = children[1:]
        if sign in (":-", "-", ":=", "=", ":+", "+", ":?", "?"):
            yield from self._default(name, index, sign, node, (rest, begin, end))
            return
        words, is_list = self.looked_up(name, index, node)
        if sign == ":":
            yield from self._slice(words, is_list, node, (rest, begin, end))
            return
        change = self._change(sign, rest, begin, end)
        for i, word in enumerate(words):
            text = known(word)
            if not (text is None or change is None):
                part: str | Unknown = change(text)
            elif is_many(word):
                part = Unknown(shown(word), self.shell.place, many=True, flags=None)
            else:
                part = self.expand.unknown(node)
            yield Piece(part, Kind.PUT_IN, ends=is_list == "@" and i + 1 < len(words))

    def _default(self, name: str, index: str | None, sign: str, node: Node, rest: tuple) -> Iterator[Piece]:
        ends, self.shell.state.stops_at_unset = self.shell.state.stops_at_unset, False
        words, _ = self.looked_up(name, index, node)
        self.shell.state.stops_at_unset = ends
        has_none = not words or all(is_unset(word) for word in words)
        whole = [known(word) for word in words]
        is_empty: bool | None = has_none or (sign[0] == ":" and (whole == [""] or not words))
        if None in whole and not any(isinstance(part, str) for word in words for part in word):
            is_empty = None
        if is_empty is None:
            yield Piece(self.expand.unknown(node, many=True), Kind.PUT_IN)
        elif sign[-1] == "+":
            if not is_empty:
                yield from self._put_in(rest)
        elif not is_empty:
            yield from self.parameter(name, index, node)
        elif sign[-1] == "?":
            self.shell.needs.setdefault(name, self.shell.place)
            yield Piece(
                Unknown(f"${name}", self.shell.place, many=True, flags=None, is_text=True), Kind.PUT_IN
            )
        else:
            found = list(self._put_in(rest))
            if sign[-1] == "=":
                self.shell.variables.assign(name, self.expand.joined(found))
            yield from found

    def _put_in(self, rest: tuple) -> Iterator[Piece]:
        """The word behind ``:-`` or ``:+``, which is split like a variable."""
        for piece in self.expand.home(list(self.expand.span(*rest, Kind.WRITTEN))):
            yield Piece(piece.part, Kind.PUT_IN if piece.kind is Kind.WRITTEN else piece.kind, piece.ends)

    def _slice(self, words: Words, is_list: str, node: Node, rest: tuple) -> Iterator[Piece]:
        nodes, begin, end = rest
        colon = next((n.start_byte for n in nodes if not n.is_named and n.type == ":"), end)
        first = self.expand.number(nodes, begin, colon)
        last = self.expand.number(nodes, colon + 1, end) if colon < end else None
        unknown = first is None or (colon < end and last is None)
        if is_list:
            if unknown or any(map(is_many, words)):
                yield Piece(self.expand.unknown(node, many=True), Kind.PUT_IN)
                return
            is_positional = self.shell.source(node).startswith(("${@", "${*"))
            whole = [value(self.shell.script), *words] if is_positional else words
            held = self.shell.variables.held(self._subject(node.children[1])[0])
            if isinstance(held, Array) and not is_positional and first >= 0:
                whole, first = [word for key, word in held.elements.items() if int(key) >= first], 0
            found = _sliced(whole, first, last)
            for i, word in enumerate(found):
                yield from (Piece(part, Kind.PUT_IN) for part in word[:-1])
                yield Piece(word[-1] if word else "", Kind.PUT_IN, ends=i + 1 < len(found))
            return
        text = known(words[0])
        yield Piece(
            self.expand.unknown(node) if text is None or unknown else _sliced(text, first, last), Kind.PUT_IN
        )

    def _change(self, sign: str, nodes: Sequence[Node], begin: int, end: int):
        """What a sign such as ``%%`` or ``//`` does to a text; None where that is unknown."""
        if sign in UPPER and end <= begin:
            return UPPER[sign]
        if sign.startswith("/"):
            return self._replacement(sign, nodes, begin, end)
        pattern = self.expand.pattern(nodes, begin, end)
        if pattern is None or sign not in ("#", "##", "%", "%%"):
            return None
        compiled = re.compile(f"(?:{pattern})", re.DOTALL)

        def removed(text: str) -> str:
            sizes = range(len(text) + 1) if len(sign) == 1 else range(len(text), -1, -1)
            for size in sizes:
                part = text[:size] if sign[0] == "#" else text[len(text) - size :]
                if compiled.fullmatch(part):
                    return text[size:] if sign[0] == "#" else text[: len(text) - size]
            return text

        return removed

    def _replacement(self, sign: str, nodes: Sequence[Node], begin: int, end: int):
        slash = next((n for n in nodes if not n.is_named and n.type == "/"), None)
        middle = slash.start_byte if slash else end
        pattern = self.expand.pattern(nodes, begin, middle)
        new = (
            known(self.expand.joined(list(self.expand.span(nodes, slash.end_byte, end, Kind.WRITTEN))))
            if slash
            else ""
        )
        if pattern is None or new is None:
            return None
        if pattern == "":
            return lambda text: text
        anchored = {"/#": f"\\A(?:{pattern})", "/%": f"(?:{pattern})\\Z"}.get(sign, pattern)
        compiled = re.compile(anchored, re.DOTALL)
        return lambda text: compiled.sub(lambda _: new, text, count=0 if sign == "//" else 1)


def _sliced(whole, first: int, last: int | None):
    begin = first if first >= 0 else max(len(whole) + first, 0) if len(whole) + first >= 0 else len(whole)
    end = len(whole) if last is None else begin + last if last >= 0 else len(whole) + last
    return whole[begin : max(end, begin)]
