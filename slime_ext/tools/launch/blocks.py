"""Finds the parts of a shell script that depend on a condition, with their conditions.

The sandbox takes only one way through a script. If a condition depends on the machine, these parts show what
the other way would do. A part is an ``if``, a ``case``, a loop, or a list with ``&&`` or ``||``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

WORD = re.compile(r"[^\s'\"\\$`|&;()<>]+")
KEYWORDS = frozenset("if then elif else fi case esac for select while until do done { } ! time in".split())
CLOSES = {"if": "fi", "case": "esac", "for": "done", "select": "done", "while": "done", "until": "done"}
CONDITION = re.compile(r"&&|\|\||(?<![\w-])(?:if|case|while|until)(?![\w-])")
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*(?:\[[^]]*\])?\+?=")
OF_A_FUNCTION = re.compile(r"\(\s*\)")
NAME = re.compile(r"\s*([\w:.+-]+)")
END_OF_TEST = re.compile(r"(?<!\S)\]\](?=[\s;&|)]|$)")
IN = re.compile(r"\s*in(?=\s)")
FOR_IN = re.compile(r"\s*\w+\s+in(?=\s)")
SUBSTITUTIONS = ("$(", "${", "`")
ALL = (*SUBSTITUTIONS, "'", '"', "$'", "(")
PARTS = {  # opener of a part of a word -> its closer, and the openers of parts inside it
    '"': ('"', SUBSTITUTIONS),
    '$"': ('"', SUBSTITUTIONS),
    "$'": ("'", ()),
    "`": ("`", ()),
    "$(": (")", ALL),
    "<(": (")", ALL),
    ">(": (")", ALL),
    "${": ("}", ALL[:-1]),
}
HEREDOC = re.compile(r"<<(-?)[ \t]*(?:'([^'\n]*)'|\"([^\"\n]*)\"|\\?([^\s;|&<>()'\"]+))")


@dataclass
class Block:
    """A part of a script that depends on a condition, as offsets in the text.

    Args:
        begin: the offset of its first letter.
        end: the offset after its statement, where another statement can be inserted.
        heads: the spans of its conditions.
    """

    begin: int
    end: int = -1
    heads: list[tuple[int, int]] = field(default_factory=list)


@dataclass
class _Level:
    """An open compound command, or the script itself, with its open statement.

    Args:
        closer: the word that ends the command.
        block: the block of the command, if it depends on a condition.
        head: the offset of its open condition; -1 if no condition is open.
        statement: the offset of its open statement; -1 between two statements.
        last_operator: the offset of the last && or || of that statement; -1 if it has none.
        is_conditional: whether a command substitution of that statement contains a condition.
        inner: the blocks that end with that statement.
        is_pattern: whether a pattern of ``case`` follows.
        name: the name of the function whose body the command is; empty if it is none.
        begin: the offset of the command.
    """

    closer: str
    block: Block | None = None
    head: int = -1
    statement: int = -1
    last_operator: int = -1
    is_conditional: bool = False
    inner: list[Block] = field(default_factory=list)
    is_pattern: bool = False
    name: str = ""
    begin: int = 0


@dataclass
class Blocks:
    """The result of ``read``.

    Args:
        found: the blocks in the order of their ends, so an inner block comes before an outer one.
        statements: all statements outside conditions, in the same order.
        bodies: function -> span of its body.
        in_documents: for each command substitution with a condition in a here-document, its span and the
            offset of the line that opens the document.
        probes: offset after the words of a ``case`` or a ``for`` -> those words, which bash does not trace.
        open_array: the offset of an array's parenthesis that nothing closes; -1 without one.
    """

    found: list[Block] = field(default_factory=list)
    statements: list[Block] = field(default_factory=list)
    bodies: dict[str, tuple[int, int]] = field(default_factory=dict)
    in_documents: list[tuple[int, int, int]] = field(default_factory=list)
    probes: dict[int, str] = field(default_factory=dict)
    open_array: int = -1


def read(text: str) -> Blocks:
    """Returns the blocks of a script that bash can read.

    >>> text = "if a; then b; fi; c && d || e"
    >>> [(text[b.begin:b.end], [text[i:j].strip() for i, j in b.heads]) for b in read(text).found]
    [('if a; then b; fi', ['a;']), ('c && d || e', ['c && d'])]
    """
    return _Reader(text).read()


def after(text: str, at: int) -> int:
    """Returns the offset after the quoted or substituted part at ``at``. Returns ``at`` if none begins there.

    >>> after('"a $(b ")" c) d" e', 0)
    16
    """
    two = text[at : at + 2]
    opener = two if two in PARTS else two[:1]
    if opener == "\\":
        return at + 2
    if opener == "'":
        return _behind(text, "'", at + 1)
    return _within(text, at + len(opener), *PARTS[opener]) if opener in PARTS else at


def _behind(text: str, letter: str, at: int) -> int:
    found = text.find(letter, at)
    return len(text) if found < 0 else found + 1


def _within(text: str, at: int, closer: str, openers: Sequence[str]) -> int:
    """Returns the offset after the next ``closer`` that is not inside a nested part.

    Args:
        openers: the openers of nested parts.
    """
    while at < len(text):
        letter = text[at]
        if letter == closer:
            return at + 1
        if letter == "\\":
            at += 2
        elif letter == "(" and "(" in openers:
            at = _within(text, at + 1, ")", openers)
        elif letter in openers or text[at : at + 2] in openers:
            at = max(after(text, at), at + 1)
        else:
            at += 1
    return len(text)


class _Reader:
    """Reads a script once, statement by statement."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0
        self.result = Blocks()
        self.levels = [_Level("")]
        self.is_command = True  # whether the next word is a command or a keyword
        self.continues = False  # whether the last word was &&, || or |, so that the statement goes on
        self.heredocs: list[tuple[str, bool]] = []
        self.function = self.last_word = ""
        self.comment = -1  # offset of the comment of this line; -1 without one
        self.tokens = {
            **dict.fromkeys(" \t\r<>", self._blank),
            "\n": self._newline,
            "#": self._hash,
            ";": self._separator,
            "|": self._pipe,
            "&": self._ampersand,
            "(": self._parenthesis,
            ")": self._closed_parenthesis,
        }

    @property
    def level(self) -> _Level:
        return self.levels[-1]

    def read(self) -> Blocks:
        while self.at < len(self.text):
            self._token()
        while len(self.levels) > 1:
            self._close(len(self.text))
        self._end(len(self.text) if self.comment < 0 else self.comment)
        return self.result

    def _token(self) -> None:
        two = self.text[self.at : self.at + 2]
        if two in ("&&", "||"):
            self.level.last_operator = self.at
            self._operator(2)
        elif self.text.startswith("<<<", self.at):
            self.at += 3
        elif two == "<<":
            self._heredoc()
        elif two == "\\\n":
            self.at += 2
        elif two in ("<(", ">("):
            self._word()
        else:
            self.tokens.get(two[0], self._word)()

    def _blank(self) -> None:  # also < and >, because a word follows them
        self.at += 1

    def _hash(self) -> None:
        if self.at == 0 or self.text[self.at - 1] in " \t\n;|&()":
            self.comment = self.at
            self.at = len(self.text) if (end := self.text.find("\n", self.at)) < 0 else end
        else:
            self._word()

    def _pipe(self) -> None:
        self._operator(2 if self.text.startswith("|&", self.at) else 1)

    def _ampersand(self) -> None:
        if self.text.startswith("&>", self.at) or self.text[self.at - 1] in "<>":  # a redirection
            self.at += 1
        else:
            self._end(-1)
            self._next_command(1)

    def _next_command(self, length: int) -> None:
        self.at += length
        self.is_command, self.continues = True, False

    def _operator(self, length: int) -> None:
        self.at += length
        self.is_command = self.continues = True
        if self.level.is_pattern:  # a | b) in a case
            self.continues = False

    def _newline(self) -> None:
        if not self.continues:
            self._end(self.at if self.comment < 0 else self.comment)
            self.is_command = True
        self.comment = -1
        line_begin = self.text.rfind("\n", 0, self.at) + 1
        self.at += 1
        for word, strips in self.heredocs:
            begin = self.at
            while self.at < len(self.text):
                end = self.text.find("\n", self.at)
                end = len(self.text) if end < 0 else end
                line, self.at = self.text[self.at : end], end + 1
                if (line.lstrip("\t") if strips else line) == word:
                    break
            spans = _substitutions(self.text[begin : self.at])
            conditional = [(i, j) for i, j in spans if CONDITION.search(self.text, begin + i, begin + j)]
            self.result.in_documents += [(begin + i, begin + j, line_begin) for i, j in conditional]
        self.heredocs = []

    def _separator(self) -> None:
        self._end(self.at)
        length = next((n for n in (3, 2) if self.text[self.at : self.at + n] in (";;&", ";;", ";&")), 1)
        self._next_command(length)
        if length > 1:
            self.level.is_pattern = True

    def _parenthesis(self) -> None:
        if self.level.is_pattern:  # the optional ( of a pattern (a|b)
            self.at += 1
        elif self.text.startswith("((", self.at):  # arithmetic
            self._begin(self.at)
            self.at = _within(self.text, self.at + 1, ")", ALL)
            self.is_command = self.continues = False
        elif self.is_command:
            self._begin(self.at)
            self.levels.append(_Level(")", begin=self.at))
            self._next_command(1)
        elif match := OF_A_FUNCTION.match(self.text, self.at):
            self.function = self.last_word
            self._next_command(match.end() - self.at)
        else:
            self.at += 1

    def _array(self, at: int) -> int:
        """Returns the offset after an array's words, which can contain comments."""
        begin, at = at, at + 1
        while at < len(self.text) and self.text[at] != ")":
            if self.text[at] == "#" and self.text[at - 1] in " \t\n(":
                at = _behind(self.text, "\n", at)
            else:
                at = max(after(self.text, at), at + 1)
        if at >= len(self.text):
            self.result.open_array = begin
        return at + 1

    def _closed_parenthesis(self) -> None:
        if self.level.is_pattern:
            self.level.is_pattern = False
            self._next_command(1)
        else:
            if self.level.closer == ")":
                self._close(self.at)
            self.at += 1
            self.is_command = self.continues = False

    def _heredoc(self) -> None:
        match = HEREDOC.match(self.text, self.at)
        if match:
            word = next(part for part in match.groups()[1:] if part is not None)
            self.heredocs.append((word, match[1] == "-"))
        self.at = match.end() if match else self.at + 2

    def _word(self) -> None:
        begin = self.at
        self.at = max(self._behind_word(begin), begin + 1)
        word = self.last_word = self.text[begin : self.at]
        if self.level.is_pattern:
            if word == "esac":
                self._close_with(begin, "esac")
        elif self.is_command and word in KEYWORDS:
            self._keyword(word, begin)
        else:
            self._begin(begin)
            self.level.is_conditional |= any(CONDITION.search(word, *span) for span in _substitutions(word))
            self.continues = False
            self._behind_first_word(word)

    def _behind_word(self, at: int) -> int:
        while at < len(self.text):
            match = WORD.match(self.text, at)
            behind = match.end() if match else after(self.text, at)
            if behind == at and self.text[at] == "$":  # the $ of a variable
                behind = at + 2 if self.text[at + 1 : at + 2] == "#" else at + 1
            if behind == at:
                break
            at = behind
        return at

    def _behind_first_word(self, word: str) -> None:
        """Reads what belongs to a word that is no keyword.

        That is the words of an array or of ``[[``, or the name after ``function``.
        """
        is_assignment = ASSIGNMENT.match(word) is not None
        if is_assignment and word.endswith("=") and self.text.startswith("(", self.at):
            self.at = self._array(self.at)
        if self.is_command and word == "[[":
            closed = END_OF_TEST.search(self.text, self.at)
            self.at = closed.end() if closed else len(self.text)
        if self.is_command and word == "function" and (name := NAME.match(self.text, self.at)):
            self.function, self.at = name[1], name.end()
        else:
            self.is_command = self.is_command and is_assignment

    def _keyword(self, word: str, begin: int) -> None:
        if word in CLOSES:
            self._begin(begin)
            self.levels.append(_Level(CLOSES[word], Block(begin), self.at, begin=begin))
            self._next_command(0)
            if word in ("for", "select", "case"):
                self._words_of(word)
        elif word == "{":
            self._begin(begin)
            self.levels.append(_Level("}", name=self.function, begin=begin))
            self.function = ""
            self._next_command(0)
        elif word in ("then", "do", "elif", "else"):
            self._end(begin)
            if word in ("then", "do") and self.level.block and self.level.head >= 0:
                self.level.block.heads.append((self.level.head, begin))
            self.level.head = self.at if word == "elif" else -1
            self._next_command(0)
        elif word in ("fi", "done", "esac", "}"):
            self._close_with(begin, word)
        elif word == "in":
            self.is_command = False
        else:  # ! and time
            self._begin(begin)
            self.continues = False

    def _words_of(self, word: str) -> None:
        """Reads ``case WORD in`` or ``for NAME in WORDS`` up to the list of commands."""
        if word == "case":
            self._word_of_case()
        elif match := FOR_IN.match(self.text, self.at):
            begin = self.at = match.end()
            while self.at < len(self.text) and self.text[self.at] not in ";\n":
                self.at = max(after(self.text, self.at), self.at + 1)
            words = self.text[begin : self.at].rstrip()
            if words:
                self.result.probes[begin + len(words)] = words.strip()
        else:  # for ((...)), or for x; do
            self.is_command = False

    def _word_of_case(self) -> None:
        while self.text[self.at : self.at + 1].isspace():
            self.at += 1
        begin = self.at
        self.at = self._behind_word(begin)
        self.result.probes[self.at] = self.text[begin : self.at]
        if self.level.block:
            self.level.block.heads.append((begin, self.at))
        match = IN.match(self.text, self.at)
        self.at = match.end() if match else self.at
        self.level.head, self.level.is_pattern = -1, True

    def _begin(self, at: int) -> None:
        if self.level.statement < 0:
            self.level.statement = at

    def _end(self, at: int) -> None:
        """Ends the open statement.

        A statement that runs in the background ends at -1. It has no block, because nothing waits for it. A
        statement of a condition has no block either, because a command after it would become the condition.
        """
        level = self.level
        if level.statement >= 0 and at >= 0 and level.head < 0:
            for block in level.inner:
                block.end = at
            statement = Block(level.statement, at)
            if level.last_operator >= 0:
                statement.heads.append((level.statement, level.last_operator))
            elif level.is_conditional:
                statement.heads.append((level.statement, at))
            self.result.found += level.inner + ([statement] if statement.heads else [])
            self.result.statements.append(statement)
        level.statement, level.last_operator, level.is_conditional, level.inner = -1, -1, False, []

    def _close_with(self, begin: int, word: str) -> None:
        self._end(begin)
        if self.level.closer == word:
            self._close(begin)
        self.is_command = self.continues = False

    def _close(self, at: int) -> None:
        """Closes the innermost compound command. Its block ends with the enclosing statement."""
        self._end(at)
        level = self.levels.pop()
        if level.block is not None:
            self.level.inner.append(level.block)
        if level.name:
            self.result.bodies[level.name] = (level.begin, at)


def _substitutions(text: str) -> Iterator[tuple[int, int]]:
    """Yields the spans of a text's command substitutions, with the double quotes around them."""
    at = 0
    while at < len(text):
        behind = after(text, at)
        part = text[at:behind]
        if part[:1] == "`" or part[:2] == "$(" or (part[:1] == '"' and ("$(" in part or "`" in part)):
            yield at, behind
        at = max(behind, at + 1)
