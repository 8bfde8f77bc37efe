"""Shell scripts as a shell reads them, as far as they can be read without running them.

Such scripts end every Python process of the machine before they start their own, so none of it is executed:
assignments, arrays and simple conditions are followed as a shell would; what only a shell can know (the
output of a command) stays as it is written.
"""

from __future__ import annotations

import ast
import operator
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

REFERENCE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?[-=]([^{}]*))?\})")
KEPT = re.compile(r"\$\{(\w+):?=([^{}]*)\}")  # a default that stays
UNKNOWN = re.compile(r"[$`]")  # what only a shell knows
COMMENT = re.compile(r"""(\\.|'[^']*'|"(?:\\.|[^"\\])*")|(?:^|(?<=\s))#.*""")
ARRAY = re.compile(r"^(\w+)\+?=\(")
EXPANDED = re.compile(r"\$\{(\w+)\[[@*]\]")
ASSIGNED = re.compile(r"^(\w+)(\+?)=(?!\()(.*)$", re.DOTALL)
ARITHMETIC = re.compile(r"\$\(\(([^()$]+(?:\([^()$]*\)[^()$]*)*)\)\)")
OUTPUT = re.compile(r"\$\((?:[^()\"']|\([^()\"']*\))*\)")  # of a command, or a sum: one word
DIRNAME = re.compile(r"""\$\(\s*dirname\s+(?:--\s+)?"?\$\{?(?:BASH_SOURCE(?:\[0\])?|0)\}?"?\s*\)""")
FOLDER = re.compile(
    r"""\$\(\s*cd\s+(?:--\s+)?"?([^"$()&;]+?)"?\s*(?:&?>\s*/dev/null\s*(?:2>&1)?)?\s*&&\s*pwd[^)]*\)"""
)
BEFORE_ASSIGNMENT = ("export", "readonly", "local", "declare", "then", "do", "else", "{")
SAYS = ("echo", "printf")  # what a script only says
ELSEWHERE = set(";|&>")  # what may send it elsewhere
BLANK = "\x1f"  # a space in a command's output
QUOTED = 100  # lines that one quote may span
DEEPEST = 8  # defaults in defaults
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


@dataclass
class Shell:
    """What a shell would hold while it reads a script."""

    scalars: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, list[str]] = field(default_factory=dict)
    array: str | None = None  # the one whose brackets are still open
    taken: list[bool | None] = field(default_factory=list)  # of each open ``if``, None: only a shell knows

    def value(self, text: str) -> str:
        """Text with the variables that are known put in."""

        def known(match: re.Match[str]) -> str:
            name, default = match[1] or match[2], match[3]
            found = self.scalars.get(name) or os.environ.get(name)
            if not found and KEPT.fullmatch(match[0]):
                self.scalars[name] = default
            return found or (match[0] if default is None else default)

        for _ in range(DEEPEST):  # the innermost first
            text = REFERENCE.sub(known, text)
        return ARITHMETIC.sub(self._number, text)

    def _number(self, match: re.Match[str]) -> str:
        text = re.sub(r"[A-Za-z_]\w*", lambda name: self.value(f"${{{name[0]}}}"), match[1])
        try:
            return str(_number_of(ast.parse(text.strip(), mode="eval").body))
        except (ArithmeticError, AttributeError, KeyError, SyntaxError, TypeError, ValueError):
            return match[0]

    def words(self, words: Sequence[str]) -> Iterator[str]:
        """Words with arrays and variables put in; a variable that holds flags is several words."""
        for word in words:
            if match := EXPANDED.search(word):
                yield from self.arrays.get(match[1], [])
                continue
            found = self.value(word)
            split = found != word and found.startswith("--") and word.startswith("$")
            yield from shlex.split(found) if split else [found]

    def assign(self, words: Sequence[str]) -> None:
        """Follows what a line assigns."""
        leading = True
        for word in words:
            if KEPT.search(word):
                self.value(word)
            if self.array is None and (match := ARRAY.match(word)):
                self.array = match[1]
                if "+=" not in match[0]:
                    self.arrays[self.array] = []
                word = word[match.end() :]
            if self.array is not None:
                self._append(word)
            elif leading and (assigned := ASSIGNED.match(word)):
                before = self.scalars.get(assigned[1], "") if assigned[2] else ""
                self.scalars[assigned[1]] = before + self.value(assigned[3].rstrip(";"))
            else:
                leading = leading and word.rstrip(";") in BEFORE_ASSIGNMENT

    def _append(self, word: str) -> None:
        """A word inside the brackets of the array that is open."""
        closed = word.count(")") > word.count("(")
        inner = word.rstrip(";").removesuffix(")") if closed else word
        self.arrays.setdefault(self.array, []).extend(self.words([inner]) if inner else [])
        self.array = None if closed else self.array

    def skips(self, words: Sequence[str]) -> bool:
        """Whether a line lies in a branch that is not taken; follows if, else and fi."""
        first = words[0].rstrip(";") if words else ""
        if first == "if":
            self.taken.append(self._holds(words[1:]))
        elif first in ("else", "elif") and self.taken:
            self.taken[-1] = self.taken[-1] is False
        elif first == "fi" and self.taken:
            self.taken.pop()
        return False in self.taken

    def _holds(self, words: Sequence[str]) -> bool | None:
        """Whether a test such as ``[ -n "$X" ]`` holds, None where only a shell can know."""
        test = [self.value(word) for word in words]
        end = next((test.index(end) for end in ("];", "]];", "]", "]]") if end in test), 0)
        test = ["" if REFERENCE.fullmatch(word) else word for word in test[1:end]]
        if any(UNKNOWN.search(word) for word in test):
            return None
        if len(test) == 2 and test[0] in ("-z", "-n"):
            return (test[1] == "") == (test[0] == "-z")
        if len(test) == 3 and test[1] in ("=", "==", "!=", "-eq", "-ne"):
            return (test[0] == test[2]) == (test[1] in ("=", "==", "-eq"))
        return None


def _number_of(node: ast.expr) -> int:
    """The value of whole numbers with + - * / % and brackets; raises for anything else."""
    if isinstance(node, ast.BinOp):
        return OPERATORS[type(node.op)](_number_of(node.left), _number_of(node.right))
    return -_number_of(node.operand) if isinstance(node, ast.UnaryOp) else int(node.value)


def followed(path: str, text: str) -> tuple[Shell, list[str]]:
    """What a shell would hold at the end of a script whose every branch is taken, and all of its words,
    variables that are known put in and array brackets left out."""
    shell, commands = Shell(), list(commands_of(text, path))
    for words in commands:
        shell.assign(words)
    bare = [ARRAY.sub("", word).lstrip("(").rstrip(");") for words in commands for word in words]
    return shell, [
        found for word in bare for found in ([word] if EXPANDED.search(word) else shell.words([word]))
    ]


def _own_folder(text: str, path: str) -> str:
    """A script's text with its own folder wherever it asks for it, the way slime's scripts do."""
    text = DIRNAME.sub(str(Path(path).resolve().parent), text)
    return FOLDER.sub(lambda match: str(Path(match[1]).resolve()), text)


def lines_of(text: str) -> list[str]:
    """Lines with those that go on joined, without comments."""
    joined = text.replace("\\\n", " ").splitlines()
    return [COMMENT.sub(lambda match: match[1] or "", line) for line in joined]


def commands_of(text: str, path: str) -> Iterator[list[str]]:
    """Shell words of each line of a script; a quote is read to its end, a line with one that has no end is
    left out."""
    lines, begin = lines_of(_own_folder(text, path)), 0
    while begin < len(lines):
        begin, words = begin + 1, []
        for stop in range(begin, min(begin + QUOTED, len(lines) + 1)):
            quoted = OUTPUT.sub(lambda m: m[0].replace(" ", BLANK), "\n".join(lines[begin - 1 : stop]))
            try:
                words = [word.replace(BLANK, " ") for word in shlex.split(quoted)]
            except ValueError:
                continue
            begin = stop
            break
        if words and not (words[0] in SAYS and not ELSEWHERE & set("".join(words))):
            yield words
