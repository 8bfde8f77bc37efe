"""What a shell makes of a word: variables, commands' outputs, sums, quotes and braces put in, then split."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from slime_ext.errors import ConfigError
from slime_ext.scripts import arithmetic
from slime_ext.scripts.state import Array
from slime_ext.scripts.values import Unknown, Value, Words, glob_as_regex, is_many, known, shown, value

if TYPE_CHECKING:
    from tree_sitter import Node

    from slime_ext.scripts.shell import Shell

LONGEST = 1_000_000  # characters of a word
BLANKS = " \t\n"
LIST = ("@", "*")
OWN = ("$", "!", "-", "_", "RANDOM", "SECONDS", "HOSTNAME", "UID", "EUID", "PPID", "BASHPID", "LINENO", "EPOCHSECONDS")
BRACES = re.compile(r"^([^{}]*)\{([^{}]*,[^{}]*)\}(.*)$", re.DOTALL)
RANGE = re.compile(r"\{(-?\d+)\.\.(-?\d+)(?:\.\.(-?\d+))?\}")
ESCAPED = re.compile(r"\\(\n|.)", re.DOTALL)
UPPER = {"^^": str.upper, ",,": str.lower, "^": lambda s: s[:1].upper() + s[1:], ",": lambda s: s[:1].lower() + s[1:]}


class RefusedError(Exception):
    """An expansion that bash refuses, without which it does not start the command."""


class Kind(Enum):
    """How a piece came into a word: written there, written in quotes, put in."""

    WRITTEN = 0
    QUOTED = 1
    PUT_IN = 2


@dataclass(frozen=True)
class Piece:
    """A part of a word before it is split; ``ends`` says that a new word begins behind it."""

    part: str | Unknown
    kind: Kind
    ends: bool = False


class Expansion:
    """Expands the words of one file in the state of a shell."""

    def __init__(self, shell: Shell) -> None:
        self.shell = shell

    # words

    def words(self, nodes: Sequence[Node]) -> Words:
        """The words that a command gets."""
        return [word for group in touching(nodes) for word in self.fields(group)]

    def fields(self, nodes: Sequence[Node]) -> Words:
        """The words that one word becomes: none, one, or several.

        Args:
            nodes: those that the word consists of.
        """
        text = self.shell.text[nodes[0].start_byte : nodes[-1].end_byte].decode()
        if nodes[0].type in ("word", "concatenation", "brace_expression") and (several := self._braces(text)):
            return several
        if len(nodes) == 1:
            return self._split(self._home(list(self.pieces(nodes[0]))))
        parts = [part for node in nodes for part in (node.children if node.type == "concatenation" else [node])]
        pieces = self.span(parts, nodes[0].start_byte, nodes[-1].end_byte, Kind.WRITTEN)
        return self._split(self._home(list(pieces)))

    def text(self, node: Node | None) -> Value:
        """One word that is not split, as an assignment has it."""
        return () if node is None else self.joined(self._home(list(self.pieces(node))))

    def joined(self, pieces: Sequence[Piece]) -> Value:
        """Pieces as one value, a space where words end."""
        parts: list[str | Unknown] = []
        for i, piece in enumerate(pieces):
            parts.append(piece.part)
            if piece.ends and i + 1 < len(pieces):
                parts.append(" ")
        return self.bounded(value(*parts))

    def bounded(self, found: Value) -> Value:
        """The value. Raises ConfigError where it is longer than any that a launch has."""
        if sum(len(part) for part in found if isinstance(part, str)) > LONGEST:
            raise ConfigError(
                f"{self.shell.place}: expected words of at most {LONGEST} characters, got more: "
                "does a variable grow in itself?"
            )
        return found

    def pattern(self, nodes: Sequence[Node], begin: int, end: int) -> str | None:
        """A pattern as a regular expression; what is quoted stands for itself. None where it is unknown."""
        found = []
        for piece in self.span(nodes, begin, end, Kind.WRITTEN):
            text = known(value(piece.part))
            if text is None:
                return None
            found.append(re.escape(text) if piece.kind is Kind.QUOTED else glob_as_regex(text))
        return "".join(found)

    def _home(self, pieces: list[Piece]) -> list[Piece]:
        first = pieces[0] if pieces else None
        if first and first.kind is Kind.WRITTEN and isinstance(first.part, str):
            if (m := re.match(r"((?:[\w-]+=)?)~(?=/|$)", first.part)) and not m[1].startswith("--"):
                home = self.shell.scalar("HOME")
                rest = first.part[m.end() :]
                return [Piece(m[1], first.kind), *(Piece(p, Kind.QUOTED) for p in home), Piece(rest, first.kind), *pieces[1:]]
        return pieces

    def _split(self, pieces: Sequence[Piece]) -> Words:
        words: Words = []
        parts: list[str | Unknown] = []
        begun = False
        ifs = known(self.shell.scalar("IFS")) if "IFS" in self.shell.state.variables else BLANKS
        for piece in pieces:
            if piece.kind is Kind.PUT_IN and isinstance(piece.part, str):
                fields = _fields(piece.part, BLANKS if ifs is None else ifs)
                for i, text in enumerate(fields):
                    if i and begun:
                        words.append(value(*parts))
                        parts, begun = [], False
                    if text:
                        parts.append(text)
                        begun = True
            else:
                parts.append(_one_word(piece))
                begun = begun or piece.part != "" or piece.kind is Kind.QUOTED
            if piece.ends and begun:
                words.append(value(*parts))
                parts, begun = [], False
        return [self.bounded(word) for word in ([*words, value(*parts)] if begun else words)]

    def _braces(self, text: str) -> Words:
        if "{" not in text:
            return []
        if match := re.fullmatch(rf"([^${{}}'\"`\\]*){RANGE.pattern}([^${{}}'\"`\\]*)", text):
            low, high, step = int(match[2]), int(match[3]), abs(int(match[4] or 1)) or 1
            if abs(high - low) > 10_000:
                return [(Unknown(text, self.shell.place, many=True),)]
            numbers = range(low, high + 1, step) if low <= high else range(low, high - 1, -step)
            return [value(f"{match[1]}{n}{match[5]}") for n in numbers]
        if re.search(r"[$'\"`\\]", text):
            bare = re.sub(r"\$\{[^}]*\}|'[^']*'|\"[^\"]*\"", "", text)
            return [(Unknown(text, self.shell.place, many=True, flags=None),)] if BRACES.match(bare) else []
        return [value(word) for word in _alternatives(text)] if BRACES.match(text) else []

    # pieces

    def pieces(self, node: Node) -> Iterator[Piece]:
        """The pieces of a node."""
        make = getattr(self, f"_{node.type}", None)
        if make:
            yield from make(node)
        elif node.type in ("number", "word", "regex", "extglob_pattern", "variable_name", "test_operator"):
            if node.named_child_count:
                yield from self.span(node.children, node.start_byte, node.end_byte, Kind.WRITTEN)
            else:
                yield from self._literal(self.shell.source(node))
        elif node.named_child_count:
            yield from self.span(node.children, node.start_byte, node.end_byte, Kind.WRITTEN)
        else:
            yield Piece(self.shell.source(node), Kind.WRITTEN)

    def span(self, nodes: Sequence[Node], begin: int, end: int, kind: Kind) -> Iterator[Piece]:
        """The pieces of a stretch of text in which some nodes lie."""
        at = begin
        for node in nodes:
            if not node.is_named or node.start_byte < at or node.end_byte > end:
                continue
            between = self.shell.text[at : node.start_byte].decode()
            if between.endswith("$") and node.type in ("word", "variable_name", "string_content", "number"):
                # which the grammar has not put together: ``/$NAME.yaml``
                match = re.match(r"\w+", self.shell.source(node))
                yield from self._written(between[:-1], kind)
                name = match[0] if match and not match[0][0].isdigit() else (match[0][:1] if match else "")
                put_in = list(self._parameter(name, None, node)) if name else [Piece("$", Kind.QUOTED)]
                yield from (Piece(p.part, Kind.QUOTED if kind is Kind.QUOTED else p.kind, p.ends) for p in put_in)
                yield from self._written(self.shell.source(node)[len(name) :], kind)
                at = node.end_byte
                continue
            yield from self._written(between, kind)
            lead = self.shell.source(node)
            if kind is Kind.QUOTED and node.type in ("command_substitution", "arithmetic_expansion", "expansion", "simple_expansion"):
                yield from self._written(lead[: len(lead) - len(lead.lstrip())], kind)
            if kind is Kind.QUOTED:
                yield from self._in_quotes(node)
            else:
                yield from self.pieces(node)
            at = node.end_byte
        yield from self._written(self.shell.text[at:end].decode(), kind)

    def _written(self, text: str, kind: Kind) -> Iterator[Piece]:
        if not text:
            return
        if kind is Kind.QUOTED:
            yield Piece(re.sub(r"\\([$`\"\\\n])", lambda m: "" if m[1] == "\n" else m[1], text), kind)
        else:
            yield from self._literal(text)

    def _in_quotes(self, node: Node) -> Iterator[Piece]:
        if node.type in ("string_content", "heredoc_content"):
            yield from self._written(self.shell.source(node), Kind.QUOTED)
            return
        for piece in self.pieces(node):
            yield Piece(piece.part, Kind.QUOTED, piece.ends)

    def _literal(self, text: str) -> Iterator[Piece]:
        at = 0
        for match in ESCAPED.finditer(text):
            if match.start() > at:
                yield Piece(text[at : match.start()], Kind.WRITTEN)
            if match[1] != "\n":
                yield Piece(match[1], Kind.QUOTED)
            at = match.end()
        if text[at:]:
            yield Piece(text[at:], Kind.WRITTEN)

    def _raw_string(self, node: Node) -> Iterator[Piece]:
        yield Piece(self.shell.source(node)[1:-1], Kind.QUOTED)

    def _ansi_c_string(self, node: Node) -> Iterator[Piece]:
        text = self.shell.source(node)[2:-1]
        yield Piece(codecs.decode(text.encode("latin-1", "backslashreplace"), "unicode_escape"), Kind.QUOTED)

    def _string(self, node: Node) -> Iterator[Piece]:
        begin = node.start_byte + self.shell.source(node).index('"') + 1
        found = list(self.span(node.children, begin, node.end_byte - 1, Kind.QUOTED))
        if found or not node.named_children:  # "${A[@]}" of no elements is no word
            yield Piece("", Kind.QUOTED)
        yield from found

    def _translated_string(self, node: Node) -> Iterator[Piece]:
        for child in node.named_children:
            yield from self.pieces(child)

    def _process_substitution(self, node: Node) -> Iterator[Piece]:
        yield Piece(self._unknown(node), Kind.QUOTED)

    def _unknown(self, node: Node, *, many: bool = False) -> Unknown:
        text = re.sub(r"\s+", " ", self.shell.source(node).strip())
        return Unknown(text, self.shell.place_of(node), many=many, flags=None if many else frozenset(), is_text=many)

    def _command_substitution(self, node: Node) -> Iterator[Piece]:
        if re.match(r"\s*\$\(\(", self.shell.source(node)) and self.shell.source(node).endswith("))"):
            yield from self._arithmetic_expansion(node)  # as bash reads it; the grammar here and there does not
            return
        found = self.shell.output_of(node)
        if any(isinstance(part, Unknown) for part in found) and not any(isinstance(p, str) for p in found):
            found = (self._unknown(node, many=True),)
        for part in found:
            yield Piece(part, Kind.PUT_IN)

    def _arithmetic_expansion(self, node: Node) -> Iterator[Piece]:
        text = self.shell.source(node).strip()
        begin = node.start_byte + self.shell.source(node).index("$") + (3 if text.startswith("$((") else 2)
        end = node.end_byte - (2 if text.startswith("$((") else 1)
        number = self.number(node.children, begin, end)
        yield Piece(self._unknown(node) if number is None else str(number), Kind.PUT_IN)

    def number(self, nodes: Sequence[Node], begin: int, end: int) -> int | None:
        """The value of an arithmetic text; None where it is unknown."""
        pieces = list(self.span(list(_outermost(nodes)), begin, end, Kind.QUOTED))
        text = known(value(*(piece.part for piece in pieces)))
        return None if text is None else self.computed(text)

    def computed(self, text: str) -> int | None:
        """The value of a text as a sum; None where a variable of it is unknown or bash refuses it."""
        state, unknown = self.shell.state, []

        def get(name: str) -> str:
            found = known(self.shell.scalar(name))
            if found is None:
                unknown.append(name)
            return found or ""

        before = dict(state.variables)
        try:
            found = arithmetic.evaluated(text, get, lambda name, number: self.shell.assign(name, value(number)))
        except (ArithmeticError, ValueError, IndexError):
            return None
        for name in {n for n in state.variables if state.variables[n] != before.get(n)} if unknown else ():
            self.shell.assign(name, (Unknown(text.strip(), self.shell.place),))
        return None if unknown else found

    # parameters

    def _simple_expansion(self, node: Node) -> Iterator[Piece]:
        name = self.shell.source(node).strip()[1:]
        yield from self._parameter(name, None, node)

    def _parameter(self, name: str, index: str | None, node: Node) -> Iterator[Piece]:
        words, is_list = self.looked_up(name, index, node)
        for i, word in enumerate(words):
            ends = is_list == "@" and i + 1 < len(words)
            yield from (Piece(part, Kind.PUT_IN) for part in word[:-1])
            yield Piece(word[-1] if word else "", Kind.PUT_IN, ends or (is_list == "@" and i + 1 == len(words) and bool(word) and isinstance(word[-1], Unknown)))
            if is_list == "*" and i + 1 < len(words):
                yield Piece(self._star(), Kind.PUT_IN)

    def _star(self) -> str:
        if "IFS" not in self.shell.state.variables:
            return " "
        return (known(self.shell.scalar("IFS")) or "")[:1]

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
            return [(Unknown("$?", self.shell.place),) if state.status is None else value(str(state.status))], ""
        if index in LIST:
            return self.shell.array_words(name), index
        return [self.shell.scalar(name) if index is None else self.shell.element(name, index)], ""

    def _positional(self, number: int) -> Value:
        if number == 0:
            return self.shell.zero
        words = self.shell.state.positional
        if any(map(is_many, words[:number])):
            return (Unknown(f"${number}", self.shell.place),)
        return words[number - 1] if number <= len(words) else self.shell.nothing(str(number))

    def _expansion(self, node: Node) -> Iterator[Piece]:
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
            yield from self._parameter(name, index, node)
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
        found = self.text(node)
        text = known(found)
        return shown(found) if text is None else text

    def _prefixed(self, prefix: str, name: str, index: str | None, node: Node, rest: Sequence[Node]) -> Iterator[Piece]:
        if prefix == "#":
            words, is_list = self.looked_up(name, index, node)
            if is_list:
                exact = not any(map(is_many, words))
                yield Piece(str(len(words)) if exact else self._unknown(node), Kind.PUT_IN)
                return
            text = known(words[0])
            yield Piece(self._unknown(node) if text is None else str(len(text)), Kind.PUT_IN)
        elif index in LIST and not rest:
            held = self.shell.held(name)
            exact = isinstance(held, Array) and held.is_exact
            for key in held.elements if exact else ():  # type: ignore[union-attr]
                yield Piece(str(key), Kind.PUT_IN, ends=True)
            if held is not None and not exact:
                yield Piece(self._unknown(node, many=True), Kind.PUT_IN)
        else:
            aim = known(self.shell.scalar(name) if index is None else self.shell.element(name, index))
            if aim == "":
                raise RefusedError
            match = re.fullmatch(r"(\w+)(?:\[(.*)\])?", aim or "")
            if match is None or rest:
                yield Piece(self._unknown(node, many=True), Kind.PUT_IN)
            else:
                yield from self._parameter(match[1], match[2], node)

    def _operated(self, name: str, index: str | None, sign: str, node: Node, children: Sequence[Node]) -> Iterator[Piece]:
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
                part = self._unknown(node)
            yield Piece(part, Kind.PUT_IN, ends=is_list == "@" and i + 1 < len(words))

    def _default(self, name: str, index: str | None, sign: str, node: Node, rest: tuple) -> Iterator[Piece]:
        ends, self.shell.state.stops_at_unset = self.shell.state.stops_at_unset, False
        words, is_list = self.looked_up(name, index, node)
        self.shell.state.stops_at_unset = ends
        is_unset = not words or all(_is_unset(word) for word in words)
        whole = [known(word) for word in words]
        is_empty: bool | None = is_unset or (sign[0] == ":" and (whole == [""] or not words))
        if None in whole and not any(isinstance(part, str) for word in words for part in word):
            is_empty = None
        if is_empty is None:
            yield Piece(self._unknown(node, many=True), Kind.PUT_IN)
        elif sign[-1] == "+":
            if not is_empty:
                yield from self._put_in(rest)
        elif not is_empty:
            yield from self._parameter(name, index, node)
        elif sign[-1] == "?":
            self.shell.needs.setdefault(name, self.shell.place)
            yield Piece(Unknown(f"${name}", self.shell.place, many=True, flags=None, is_text=True), Kind.PUT_IN)
        else:
            found = list(self._put_in(rest))
            if sign[-1] == "=":
                self.shell.assign(name, self.joined(found))
            yield from found

    def _put_in(self, rest: tuple) -> Iterator[Piece]:
        """The word behind ``:-`` or ``:+``, which is split like a variable."""
        for piece in self._home(list(self.span(*rest, Kind.WRITTEN))):
            yield Piece(piece.part, Kind.PUT_IN if piece.kind is Kind.WRITTEN else piece.kind, piece.ends)

    def _slice(self, words: Words, is_list: str, node: Node, rest: tuple) -> Iterator[Piece]:
        nodes, begin, end = rest
        colon = next((n.start_byte for n in nodes if not n.is_named and n.type == ":"), end)
        first = self.number(nodes, begin, colon)
        last = self.number(nodes, colon + 1, end) if colon < end else None
        unknown = first is None or (colon < end and last is None)
        if is_list:
            if unknown or any(map(is_many, words)):
                yield Piece(self._unknown(node, many=True), Kind.PUT_IN)
                return
            is_positional = self.shell.source(node).startswith(("${@", "${*"))
            whole = [value(self.shell.script), *words] if is_positional else words
            held = self.shell.held(self._subject(node.children[1])[0])
            if isinstance(held, Array) and not is_positional and first >= 0:
                whole, first = [word for key, word in held.elements.items() if int(key) >= first], 0
            found = _sliced(whole, first, last)
            for i, word in enumerate(found):
                yield from (Piece(part, Kind.PUT_IN) for part in word[:-1])
                yield Piece(word[-1] if word else "", Kind.PUT_IN, ends=i + 1 < len(found))
            return
        text = known(words[0])
        yield Piece(self._unknown(node) if text is None or unknown else _sliced(text, first, last), Kind.PUT_IN)

    def _change(self, sign: str, nodes: Sequence[Node], begin: int, end: int):  # noqa: ANN202
        """What a sign such as ``%%`` or ``//`` does to a text; None where that is unknown."""
        if sign in UPPER and end <= begin:
            return UPPER[sign]
        if sign.startswith("/"):
            return self._replacement(sign, nodes, begin, end)
        pattern = self.pattern(nodes, begin, end)
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

    def _replacement(self, sign: str, nodes: Sequence[Node], begin: int, end: int):  # noqa: ANN202
        slash = next((n for n in nodes if not n.is_named and n.type == "/"), None)
        middle = slash.start_byte if slash else end
        pattern = self.pattern(nodes, begin, middle)
        new = known(self.joined(list(self.span(nodes, slash.end_byte, end, Kind.WRITTEN)))) if slash else ""
        if pattern is None or new is None:
            return None
        if pattern == "":
            return lambda text: text
        anchored = {"/#": f"\\A(?:{pattern})", "/%": f"(?:{pattern})\\Z"}.get(sign, pattern)
        compiled = re.compile(anchored, re.DOTALL)
        return lambda text: compiled.sub(lambda _: new, text, count=0 if sign == "//" else 1)


def _one_word(piece: Piece) -> str | Unknown:
    """A piece's part. In quotes it is one word, unless it is an element of a list; without them any number."""
    part = piece.part
    if isinstance(part, Unknown) and piece.kind is Kind.PUT_IN and not (part.many or part.unset):
        return Unknown(part.text, part.where, many=True, flags=None, is_text=True)
    if isinstance(part, Unknown) and part.many and piece.kind is Kind.QUOTED and not piece.ends:
        return Unknown(part.text, part.where, unset=part.unset)
    return part


def touching(nodes: Sequence[Node]) -> Iterator[list[Node]]:
    """Nodes in groups that no blank parts, each of which is one word."""
    group: list[Node] = []
    for node in nodes:
        if group and node.start_byte > group[-1].end_byte:
            yield group
            group = []
        group.append(node)
    if group:
        yield group


def _is_unset(word: Value) -> bool:
    return bool(word) and all(isinstance(part, Unknown) and part.unset for part in word)


def _outermost(nodes: Sequence[Node]) -> Iterator[Node]:
    """The expansions below nodes, none of which lies in another."""
    for node in nodes:
        if node.type in ("simple_expansion", "expansion", "command_substitution", "arithmetic_expansion", "string"):
            yield node
        else:
            yield from _outermost(node.children)


def _fields(text: str, ifs: str) -> list[str]:
    """A text cut at IFS. An empty first or last field says that the text begins or ends with a blank."""
    if not ifs:
        return [text]
    blanks = re.escape("".join(c for c in ifs if c in BLANKS))
    others = re.escape("".join(c for c in ifs if c not in BLANKS))
    if not others:
        return re.split(f"[{blanks}]+", text)
    around = f"[{blanks}]*" if blanks else ""
    return re.split(f"{around}[{others}]{around}" + (f"|[{blanks}]+" if blanks else ""), text)


def _sliced(whole, first: int, last: int | None):  # noqa: ANN001, ANN202
    begin = first if first >= 0 else max(len(whole) + first, 0) if len(whole) + first >= 0 else len(whole)
    end = len(whole) if last is None else begin + last if last >= 0 else len(whole) + last
    return whole[begin : max(end, begin)]


def _alternatives(text: str) -> list[str]:
    match = BRACES.match(text)
    if match is None:
        return [text]
    return [found for option in match[2].split(",") for found in _alternatives(f"{match[1]}{option}{match[3]}")]
