"""What a part of a script can change that runs, or not, as the machine decides: variables and flags.

The sandbox runs one way. Behind such a part each variable that it sets gets a token in addition, a word that
stands for what is not known, so that whatever the variable flows into is not known either.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from slime_ext.tools.scripts import blocks
from slime_ext.tools.scripts.blocks import Block
from slime_ext.tools.scripts.trace import PROGRAMS

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
    """One that a text makes.

    Args:
        operator: = or +=.
        value: as it is written; an array's with its parentheses.
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
        """Whether what the variable was before stays a part of it."""
        return self.operator == "+=" or re.search(rf"\$\{{?{self.name}(?!\w)", self.value) is not None

    @property
    def is_open(self) -> bool:
        """Whether it can add words that it does not write: one that begins with $ and is no flag's value."""
        words = [word.lstrip("\"'") for word in self.value.strip("()").split()]
        pairs = zip(["", *words], words, strict=False)
        own = tuple(f"${opener}{self.name}{end}" for opener, end in (("", ""), ("{", "}"), ("{", "-")))
        return any(
            word.startswith(("$", "`")) and not before.startswith("-") and not word.startswith(own)
            for before, word in pairs
        )


def assignments(text: str) -> Iterator[Assignment]:
    """Those that a text makes by = and +=, ``read`` and ``mapfile``."""
    for name, index, operator, value in ASSIGNED.findall(text):
        yield Assignment(name, operator, value, bool(index))
    for command, options, names in READ.findall(text):
        is_array = command != "read" or re.search(r"-\w*a", options)
        yield from (Assignment(name, "=", "($)" if is_array else "$") for name in names.split())


@dataclass
class Script:
    """A script's text, and what is put into it.

    Args:
        text: as bash gets it, but for what is put into it.
        put: span -> words in its place.
        doubted: beginnings of blocks behind which tokens were put already.
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
        """The text with what was put into it."""
        parts, last = [], 0
        for begin, end in sorted(self.put):
            parts += [self.text[last:begin], self.put[begin, end]]
            last = max(last, end)
        return "".join([*parts, self.text[last:]])

    def put_behind(self, block: Block, words: str) -> None:
        """Puts commands behind a block's statement."""
        at = block.end, block.end
        self.put[at] = f"{self.put.get(at, '')}; {words}"

    def end_loop(self, block: Block) -> None:
        """Ends a loop that waits for the machine before it begins."""
        for word, last in (("until", ":; "), ("while", "false; ")):
            if self.text.startswith(word, block.begin) and block.heads:
                self.put[block.heads[0][1], block.heads[0][1]] = last

    def put_in_place(self, spans: Iterable[tuple[int, int]], token: Callable[[str], str]) -> bool:
        """Puts tokens in place of parts; whether there are any that had none yet.

        Args:
            token: of a part's text.
        """
        new = {span: token(self.text[slice(*span)]) for span in spans if span not in self.put}
        self.put |= new
        return bool(new)

    def sums(self, number: int) -> list[tuple[int, int]]:
        """The spans of the sums that begin in a line."""
        begin, end = self.starts[number - 1], (*self.starts, len(self.text))[number]
        return [match.span() for match in SUM.finditer(self.text) if begin <= match.start() < end]

    def in_documents(self, number: int) -> list[tuple[int, int]]:
        """The spans of the conditions in a here-document, a line of which is this one."""
        found = self.blocks.in_documents
        return [(i, j) for i, j, begin in found if self.number(begin) <= number <= self.number(j)]

    def number(self, offset: int) -> int:
        """The line of an offset, from 1."""
        return bisect.bisect_right(self.starts, offset)

    def begins(self, block: Block) -> int:
        """The line of a block's first condition."""
        begin = block.heads[0][0] if block.heads else block.begin
        return self.number(begin + len(self.text[begin:]) - len(self.text[begin:].lstrip()))

    def head(self, block: Block) -> str:
        """What a block's first condition says, in one line."""
        begin, end = block.heads[0] if block.heads else (block.begin, block.end)
        loop = self.text[block.begin : begin] if self.text.startswith("for", block.begin) else ""
        return " ".join((loop + self.text[begin:end]).split()).rstrip("; ")

    def decided(self, number: int, word: str) -> Iterator[Block]:
        """The blocks over which a command decides that ran in a line.

        Args:
            word: its first one, ":" for what a ``case`` or a ``for`` looks at.
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
        """The innermost statement that a line is a part of.

        Args:
            word: with which it begins, if one does.
        """
        parts = [s for s in self.blocks.statements if self.number(s.begin) <= number <= self.number(s.end)]
        found = [part for part in parts if self.text.startswith(word, part.begin)]
        return min(found or parts, key=lambda part: part.end - part.begin, default=None)

    def around(self, number: int) -> Iterator[Block]:
        """The blocks that a line is a part of."""
        return (b for b in self.blocks.found if self.number(b.begin) <= number <= self.number(b.end))

    @property
    def bodies(self) -> dict[str, str]:
        """The texts of its functions."""
        return {name: self.text[begin:end] for name, (begin, end) in self.blocks.bodies.items()}


def part(text: str, bodies: Mapping[str, str]) -> str:
    """What a text runs: itself, and the bodies of the functions that it calls, without comments."""
    parts, waiting = [text], [text]
    left = dict(bodies)
    while waiting:
        text = waiting.pop()
        called = [name for name in left if re.search(rf"(?<![\w$-]){re.escape(name)}(?![\w-])", text)]
        waiting += [left.pop(name) for name in called]
        parts += waiting[len(waiting) - len(called) :]
    return COMMENT.sub(r"\1", "\n".join(parts))


def names_of(own: Sequence[Assignment], all_of_it: Iterable[Assignment], text: str) -> frozenset[str] | None:
    """The flags that a variable can have because a part runs or does not; None where it can be any.

    Args:
        own: the part's assignments to the variable.
        all_of_it: those of all scripts, to any variable.
        text: the part's.
    """
    filled = sum(each.name == own[0].name and each.is_filled for each in all_of_it)
    replaces = any(not each.adds for each in own) and filled > sum(each.is_filled for each in own)
    return None if replaces or any(each.is_open for each in own) else frozenset(FLAG.findall(text))


def is_added(assignment: Assignment) -> bool:
    """Whether it adds words to what its variable holds."""
    return assignment.is_array or assignment.is_element or assignment.adds


def put_behind(own: Sequence[Assignment], token: str) -> str:
    """The command that adds a token to the variable that these assignments set."""
    name = own[0].name
    if any(each.is_array or each.is_element for each in own):
        return f"{name}+=({token})"
    return f'{name}="${{{name}-}} {token}"' if any(each.adds for each in own) else f"{name}={token}"
