"""What a shell makes of a word: variables, commands' outputs, sums, quotes and braces put in, then split."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from slime_ext.errors import ConfigError
from slime_ext.tools.scripts import arithmetic
from slime_ext.tools.scripts.parameters import Parameters
from slime_ext.tools.scripts.pieces import Kind, Piece, touching
from slime_ext.tools.scripts.values import Unknown, Value, Words, glob_as_regex, known, value

if TYPE_CHECKING:
    from tree_sitter import Node

    from slime_ext.tools.scripts.shell import Shell

LONGEST = 1_000_000  # characters of a word
BLANKS = " \t\n"
BRACES = re.compile(r"^([^{}]*)\{([^{}]*,[^{}]*)\}(.*)$", re.DOTALL)
RANGE = re.compile(r"\{(-?\d+)\.\.(-?\d+)(?:\.\.(-?\d+))?\}")
ESCAPED = re.compile(r"\\(\n|.)", re.DOTALL)


class Expansion:
    """Expands the words of one file in the state of a shell."""

    def __init__(self, shell: Shell) -> None:
        self.shell = shell
        self.parameters = Parameters(self)
        self.makers: dict[str, Callable[[Node], Iterator[Piece]]] = {
            "raw_string": self._raw_string,
            "ansi_c_string": self._ansi_c_string,
            "string": self._string,
            "translated_string": self._translated_string,
            "process_substitution": self._process_substitution,
            "command_substitution": self._command_substitution,
            "arithmetic_expansion": self._arithmetic_expansion,
            "simple_expansion": self.parameters.simple,
            "expansion": self.parameters.braced,
        }

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
            return self._split(self.home(list(self.pieces(nodes[0]))))
        parts = [
            part for node in nodes for part in (node.children if node.type == "concatenation" else [node])
        ]
        pieces = self.span(parts, nodes[0].start_byte, nodes[-1].end_byte, Kind.WRITTEN)
        return self._split(self.home(list(pieces)))

    def text(self, node: Node | None) -> Value:
        """One word that is not split, as an assignment has it."""
        return () if node is None else self.joined(self.home(list(self.pieces(node))))

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

    def home(self, pieces: list[Piece]) -> list[Piece]:
        first = pieces[0] if pieces else None
        if first and first.kind is Kind.WRITTEN and isinstance(first.part, str):
            if (m := re.match(r"((?:[\w-]+=)?)~(?=/|$)", first.part)) and not m[1].startswith("--"):
                home = self.shell.variables.scalar("HOME")
                rest = first.part[m.end() :]
                return [
                    Piece(m[1], first.kind),
                    *(Piece(p, Kind.QUOTED) for p in home),
                    Piece(rest, first.kind),
                    *pieces[1:],
                ]
        return pieces

    def _split(self, pieces: Sequence[Piece]) -> Words:
        words: Words = []
        parts: list[str | Unknown] = []
        begun = is_quoted = False

        def close() -> None:
            nonlocal parts, begun, is_quoted
            if begun:
                # of a word of which something is quoted, what is unset leaves an empty one
                kept = (_one_word(part) if is_quoted and _is_unset(part) else part for part in parts)
                words.append(self.bounded(value(*kept)))
            parts, begun, is_quoted = [], False, False

        for piece in pieces:
            is_split = piece.kind is Kind.PUT_IN and isinstance(piece.part, str)
            fields = _fields(str(piece.part), self._separators()) if is_split else [_as_written(piece)]
            for i, part in enumerate(fields):
                if i:
                    close()
                parts.append(part)
                begun = begun or part != "" or piece.kind is Kind.QUOTED
            is_quoted = is_quoted or (piece.kind is Kind.QUOTED and not piece.ends)
            if piece.ends:
                close()
        close()
        return words

    def _separators(self) -> str:
        ifs = known(self.shell.variables.scalar("IFS")) if "IFS" in self.shell.state.variables else None
        return BLANKS if ifs is None else ifs

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
        make = self.makers.get(node.type)
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
                put_in = (
                    list(self.parameters.parameter(name, None, node)) if name else [Piece("$", Kind.QUOTED)]
                )
                yield from (
                    Piece(p.part, Kind.QUOTED if kind is Kind.QUOTED else p.kind, p.ends) for p in put_in
                )
                yield from self._written(self.shell.source(node)[len(name) :], kind)
                at = node.end_byte
                continue
            yield from self._written(between, kind)
            lead = self.shell.source(node)
            if kind is Kind.QUOTED and node.type in (
                "command_substitution",
                "arithmetic_expansion",
                "expansion",
                "simple_expansion",
            ):
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
        yield Piece(self.unknown(node), Kind.QUOTED)

    def unknown(self, node: Node, *, many: bool = False) -> Unknown:
        text = re.sub(r"\s+", " ", self.shell.source(node).strip())
        return Unknown(
            text, self.shell.place_of(node), many=many, flags=None if many else frozenset(), is_text=many
        )

    def _command_substitution(self, node: Node) -> Iterator[Piece]:
        if re.match(r"\s*\$\(\(", self.shell.source(node)) and self.shell.source(node).endswith("))"):
            yield from self._arithmetic_expansion(
                node
            )  # as bash reads it; the grammar here and there does not
            return
        found = self.shell.output_of(node)
        if any(isinstance(part, Unknown) for part in found) and not any(isinstance(p, str) for p in found):
            found = (self.unknown(node, many=True),)
        for part in found:
            yield Piece(part, Kind.PUT_IN)

    def _arithmetic_expansion(self, node: Node) -> Iterator[Piece]:
        text = self.shell.source(node).strip()
        begin = node.start_byte + self.shell.source(node).index("$") + (3 if text.startswith("$((") else 2)
        end = node.end_byte - (2 if text.startswith("$((") else 1)
        number = self.number(node.children, begin, end)
        yield Piece(self.unknown(node) if number is None else str(number), Kind.PUT_IN)

    def number(self, nodes: Sequence[Node], begin: int, end: int) -> int | None:
        """The value of an arithmetic text; None where it is unknown."""
        pieces = list(self.span(list(_outermost(nodes)), begin, end, Kind.QUOTED))
        text = known(value(*(piece.part for piece in pieces)))
        return None if text is None else self.computed(text)

    def computed(self, text: str) -> int | None:
        """The value of a text as a sum; None where a variable of it is unknown or bash refuses it."""
        state, unknown = self.shell.state, []

        def get(name: str) -> str:
            found = known(self.shell.variables.scalar(name))
            if found is None:
                unknown.append(name)
            return found or ""

        before = dict(state.variables)
        try:
            found = arithmetic.evaluated(
                text, get, lambda name, number: self.shell.variables.assign(name, value(number))
            )
        except (ArithmeticError, ValueError, IndexError):
            return None
        for name in {n for n in state.variables if state.variables[n] != before.get(n)} if unknown else ():
            self.shell.variables.assign(name, (Unknown(text.strip(), self.shell.place),))
        return None if unknown else found


def _as_written(piece: Piece) -> str | Unknown:
    """A piece's part. In quotes it is one word, unless it is a list's element; without them any number."""
    part = piece.part
    if not isinstance(part, Unknown) or piece.kind is Kind.WRITTEN:
        return part
    if piece.kind is Kind.QUOTED:
        return part if piece.ends else _one_word(part)
    is_any = part.many or part.unset
    return part if is_any else Unknown(part.text, part.where, many=True, flags=None, is_text=True)


def _one_word(part: Unknown) -> Unknown:
    return Unknown(part.text, part.where, unset=part.unset)


def _is_unset(part: str | Unknown) -> bool:
    return isinstance(part, Unknown) and part.unset


def _outermost(nodes: Sequence[Node]) -> Iterator[Node]:
    """The expansions below nodes, none of which lies in another."""
    for node in nodes:
        if node.type in (
            "simple_expansion",
            "expansion",
            "command_substitution",
            "arithmetic_expansion",
            "string",
        ):
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


def _alternatives(text: str) -> list[str]:
    match = BRACES.match(text)
    if match is None:
        return [text]
    return [
        found for option in match[2].split(",") for found in _alternatives(f"{match[1]}{option}{match[3]}")
    ]
