"""Finds the variables and flags that an uncertain part of a script can change.

A part is uncertain if the machine decides whether it runs. The sandbox takes only one of the two ways. After
such a part, a token is added to each variable that the part
sets. A token is a word that stands for something unknown, so everything that the variable flows into becomes
unknown, too.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from slime_ext.tools.launch import blocks
from slime_ext.tools.launch.blocks import Block
from slime_ext.tools.launch.trace import PROGRAMS

COMMENT = re.compile(r"(^|\s)#.*", re.MULTILINE)
FLAG = re.compile(r"(?<![\w-])--[A-Za-z][\w-]*")
ASSIGNED = re.compile(
    r"(?:^|(?<=[\s;({&|]))([A-Za-z_]\w*)(\[[^]\n]*\])?(\+?=)"
    r"(\((?:[^()\"']|\"[^\"]*\"|'[^']*')*\)|\"[^\"]*\"|'[^']*'|[^\s;)]*)",
    re.MULTILINE,
)
READ = re.compile(r"(?<![\w-])(read|mapfile|readarray)((?:\s+-\w+)*)((?:\s+[A-Za-z_]\w*)+)")
SUM = re.compile(r"\$\(\((?:[^()]|\([^()]*\))*\)\)")
SOURCES = re.compile(r"(?:^|[\s;&|(])(?:source|\.|eval)[ \t]+(\S+)", re.MULTILINE)
PROGRAM = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, PROGRAMS))})(?!\w)")


@dataclass(frozen=True)
class Assignment:
    """An assignment to a shell variable.

    Args:
        operator: = or +=.
        value: the value as it is written, with the parentheses of an array.
        is_element: whether it sets one element of an array.
    """

    name: str
    operator: str
    value: str
    is_element: bool = False

    @property
    def is_array(self) -> bool:
        return self.value.startswith("(")

    @property
    def is_filled(self) -> bool:
        return bool(self.value.strip("()\"' "))

    @property
    def adds(self) -> bool:
        """Whether the variable keeps its previous value as a part of the new one."""
        return self.operator == "+=" or re.search(rf"\$\{{?{self.name}(?!\w)", self.value) is not None

    @property
    def is_open(self) -> bool:
        """Whether it can add unknown words.

        That is so if a word begins with $ and is no flag's value.
        """
        words = [word.lstrip("\"'") for word in self.value.strip("()").split()]
        pairs = zip(["", *words], words, strict=False)
        itself = tuple(f"${opener}{self.name}{end}" for opener, end in (("", ""), ("{", "}"), ("{", "-")))
        return any(
            word.startswith(("$", "`")) and not before.startswith("-") and not word.startswith(itself)
            for before, word in pairs
        )


def assignments(text: str) -> Iterator[Assignment]:
    """Yields the assignments that a text makes by =, +=, ``read``, ``mapfile`` and ``readarray``."""
    for name, index, operator, value in ASSIGNED.findall(text):
        yield Assignment(name, operator, value, bool(index))
    for command, options, names in READ.findall(text):
        is_array = command != "read" or re.search(r"-\w*a", options)
        yield from (Assignment(name, "=", "($)" if is_array else "$") for name in names.split())


@dataclass
class Script:
    """A script's text, and the words that are inserted into it.

    Args:
        text: the text that bash gets, without the insertions.
        put: span of the text -> the words that replace it.
        doubted: the offsets of blocks that already have tokens after them.
    """

    path: str
    text: str
    put: dict[tuple[int, int], str] = field(default_factory=dict)
    doubted: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.blocks = blocks.read(self.text)
        self.starts = [0, *(match.end() for match in re.finditer("\n", self.text))]
        for offset, words in self.blocks.probes.items():
            self.put[offset, offset] = f"$(: {' '.join(words.split())})"

    @property
    def prepared(self) -> str:
        """Returns the text with all insertions."""
        parts, last = [], 0
        for begin, end in sorted(self.put):
            parts += [self.text[last:begin], self.put[begin, end]]
            last = max(last, end)
        return "".join([*parts, self.text[last:]])

    def put_behind(self, block: Block, words: str) -> None:
        """Inserts commands after a block's statement."""
        at = block.end, block.end
        self.put[at] = f"{self.put.get(at, '')}; {words}"

    def end_loop(self, block: Block) -> None:
        """Ends a loop before its first pass, because it waits for the machine."""
        for word, last in (("until", ":; "), ("while", "false; ")):
            if self.text.startswith(word, block.begin) and block.heads:
                self.put[block.heads[0][1], block.heads[0][1]] = last

    def put_in_place(self, spans: Iterable[tuple[int, int]], token: Callable[[str], str]) -> bool:
        """Replaces parts by tokens, and returns whether any part was not replaced before.

        Args:
            spans: the spans of the parts.
            token: maps a part's text to its token.
        """
        new = {span: token(self.text[slice(*span)]) for span in spans if span not in self.put}
        self.put |= new
        return bool(new)

    def sums(self, number: int) -> list[tuple[int, int]]:
        """Returns the spans of the sums ``$((...))`` that begin in a line."""
        begin, end = self.starts[number - 1], (*self.starts, len(self.text))[number]
        return [match.span() for match in SUM.finditer(self.text) if begin <= match.start() < end]

    def in_documents(self, number: int) -> list[tuple[int, int]]:
        """Returns the spans of the conditions in the here-document that a line belongs to."""
        conditions = self.blocks.in_documents
        return [(i, j) for i, j, begin in conditions if self.number(begin) <= number <= self.number(j)]

    def number(self, offset: int) -> int:
        """Returns the line of an offset, counted from 1."""
        return bisect.bisect_right(self.starts, offset)

    def begins(self, block: Block) -> int:
        """Returns the line of a block's first condition."""
        begin = block.heads[0][0] if block.heads else block.begin
        return self.number(begin + len(self.text[begin:]) - len(self.text[begin:].lstrip()))

    def head(self, block: Block) -> str:
        """Returns a block's first condition on one line."""
        begin, end = block.heads[0] if block.heads else (block.begin, block.end)
        loop = self.text[block.begin : begin] if self.text.startswith("for", block.begin) else ""
        return " ".join((loop + self.text[begin:end]).split()).rstrip("; ")

    def decided(self, number: int, word: str) -> Iterator[Block]:
        """Yields the blocks that depend on a command that ran in a line.

        Args:
            number: the line.
            word: the first word of the command; ":" for the words of a ``case`` or a ``for``.
        """
        for block in self.blocks.found:
            for begin, end in block.heads:
                if self.number(begin) <= number <= self.number(end) and self._has(begin, end, word):
                    yield block
                    break

    def _has(self, begin: int, end: int, word: str) -> bool:
        if word == ":":
            return any(begin <= offset <= end for offset in self.blocks.probes)
        head = self.text[begin:end]
        return word in head or "$" in head

    def statement(self, number: int, word: str = "") -> Block | None:
        """Returns the innermost statement that contains a line.

        Args:
            number: the line.
            word: the first word of the statement, if a statement there begins with it.
        """
        parts = [s for s in self.blocks.statements if self.number(s.begin) <= number <= self.number(s.end)]
        matching = [part for part in parts if self.text.startswith(word, part.begin)]
        return min(matching or parts, key=lambda part: part.end - part.begin, default=None)

    def around(self, number: int) -> Iterator[Block]:
        """Yields the blocks that contain a line."""
        return (b for b in self.blocks.found if self.number(b.begin) <= number <= self.number(b.end))

    @property
    def bodies(self) -> dict[str, str]:
        """Returns function -> text of its body."""
        return {name: self.text[begin:end] for name, (begin, end) in self.blocks.bodies.items()}


def part(text: str, bodies: Mapping[str, str]) -> str:
    """Returns a text and the bodies of the functions that it calls, without comments."""
    parts, waiting = [text], [text]
    left = dict(bodies)
    while waiting:
        text = waiting.pop()
        called = [name for name in left if re.search(rf"(?<![\w$-]){re.escape(name)}(?![\w-])", text)]
        waiting += [left.pop(name) for name in called]
        parts += waiting[len(waiting) - len(called) :]
    return COMMENT.sub(r"\1", "\n".join(parts))


def names_of(own: Sequence[Assignment], all_of_it: Iterable[Assignment], text: str) -> frozenset[str] | None:
    """Returns the flags that a variable may hold, depending on whether a part runs. None means any flag.

    Args:
        own: the part's assignments to the variable.
        all_of_it: the assignments in all scripts, to any variable.
        text: the text of the part.
    """
    filled = sum(each.name == own[0].name and each.is_filled for each in all_of_it)
    replaces = any(not each.adds for each in own) and filled > sum(each.is_filled for each in own)
    return None if replaces or any(each.is_open for each in own) else frozenset(FLAG.findall(text))


def is_added(assignment: Assignment) -> bool:
    """Whether the assignment makes or extends a list of words."""
    return assignment.is_array or assignment.is_element or assignment.adds


def put_behind(own: Sequence[Assignment], token: str) -> str:
    """Returns the command that puts a token into the variable that these assignments set."""
    name = own[0].name
    if any(each.is_array or each.is_element for each in own):
        return f"{name}+=({token})"
    return f'{name}="${{{name}-}} {token}"' if any(each.adds for each in own) else f"{name}={token}"
