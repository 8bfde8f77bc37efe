"""Finds the conditions of a script whose outcome only its machine knows, and puts an outcome in their place.

A run of the script shows which conditions depend on the machine. Then the script runs once with each outcome
of each of them: the text of the condition is replaced by ``true``, ``false``, or another outcome. What
differs between those runs is unknown. So only bash's interpreter has to know where a part of a script ends.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from bashkit import Bash

COMMENT = re.compile(r"(^|\s)#.*", re.MULTILINE)
FLAG = re.compile(r"(?<![\w-])--[A-Za-z][\w-]*")
SUM = re.compile(r"\$\(\((?:[^()]|\([^()]*\))*\)\)")
OF_ARRAY = "slime_ext_of_array"  # marks the word that shows the subscript of an array
ELEMENT = re.compile(r"\$\{!?(\w+)\[([^][@*'\n]*\$[^][@*'\n]*)\]")  # ${A[$K]}
# The begin of a statement that sets an element: A[$K]=
SETS_ELEMENT = re.compile(r"(?<![\w${])(\w+)\[([^][@*'\n]*\$[^][@*'\n]*)\]\+?=(?![=(~])")
ONCE, NOT_AT_FIRST = "slime_ext_once", "slime_ext_not_at_first"  # commands that the sandbox answers
# First word of a traced test -> how the test is written.
TESTS = {
    "[[": re.compile(r"\[\[\s.*?\s\]\]", re.DOTALL),  # [[ -f x && $A == b ]]
    "[": re.compile(r"(?<![\[\w$])\[\s.*?\s\](?=[\s;&|)]|$)", re.DOTALL),  # [ "$N" -gt 0 ]
    "test": re.compile(  # test "$(id -u)" = 0
        r"(?<![\w-])test\s+(?:\"(?:\\.|[^\"\\])*\"|'[^']*'|\$\((?:[^()]|\([^()]*\))*\)|[^;&|\n)\"'])+"
    ),
    "((": re.compile(r"(?<![$(\w])\(\(.*?\)\)", re.DOTALL),  # (( N > 8 ))
}
# A pipe into a command that bashkit starts before the pipe has a text: cat f | grep x. Behind ``command`` it
# starts in its turn.
PIPED = re.compile(r"(?<!\|)(?:(?<=\s)\|(?=\s)|\|(?=\w+[ \t]+-))(\s*)(?=(?:cat|grep|tr)(?![\w-]))")
UNPIPED = re.compile(r"\|(\s*)command (?=(?:cat|grep|tr)(?![\w-]))")
CASE = re.compile(r"(?<![\w$-])case[ \t]+(\S.*?)[ \t]+in(?=\s)")  # case $(hostname) in
LIST = re.compile(  # for h in $(cat hosts); do
    r"(?<![\w$-])(?:for|select)[ \t]+\w+[ \t]+in[ \t]+(\S[^;\n]*?)[ \t]*(?=;|$)", re.M
)
COUNTED = re.compile(r"(?<![\w-])for[ \t]*\(\(([^;]*;)([^;]*);(.*?)\)\)")  # for ((i = 0; i < N; i++))
# The words before the test of a loop: while !
BEFORE_LOOP = re.compile(r"(?<![\w-])(while|until)((?:\s+!)*)\s*$")
# The first pattern of a part of ``case``: ( a* | "b c" )
PATTERN = re.compile(r"\s*\(?\s*((?:[^()\s;#\\\"']|\\.|\"[^\"]*\"|'[^']*'|(?<!^)[ \t])+?)\s*\)")
ASSIGNS = re.compile(r"([A-Za-z_]\w*)\s*(?:(?:[-+*/%&|^]|<<|>>)?=(?!=)|\+\+|--)")  # K = N + 1, K++
LET = re.compile(r"(?<![\w-])let\s+[^;&|\n]+|" + TESTS["(("].pattern, re.DOTALL)
# The begin of a statement that sets a variable: export -x N+=
SET = re.compile(r"^(?:(?:export|declare|local|readonly|typeset)\s+(?:-\w+\s+)*)?([A-Za-z_]\w*)\+?=")
# A part of a statement that can hold separators: "a; b", 'a; b', $(a; b), [[ a && b ]], ((a && b)), \;
PART = re.compile(
    r"\"(?:\\.|[^\"\\])*\"|'[^']*'|\$\((?:[^()]|\([^()]*\))*\)|\[\[\s.*?\s\]\]|\(\(.*?\)\)|\\.", re.DOTALL
)
# What ends a statement: && || ; | & a new line, a comment, then, do, else, if, while, { or }
SEPARATOR = re.compile(
    r"&&|\|\||[;|&\n]|(?<=\s)#[^\n]*|(?<![\w-])(?:then|do|else|if|elif|while|until)(?=\s)|(?<!\S)[{}](?=\s|$)"
)
# An array whose parenthesis nothing closes, up to the end of the text: ARGS=(--lr 1e-6 "a b"
# Only one alternative matches at each place, or its time would double with each comment.
OPEN_ARRAY = re.compile(
    r"(?:^|(?<=[\s;]))(\w+)\+?=\("
    r"(?:\"(?:\\.|[^\"\\])*\"|'[^']*'|\$\([^()]*\)|(?<=\s)#[^\n]*$|(?<!\s)#|[^()\"'#])*\Z",
    re.MULTILINE,
)
MOST_PATTERNS = 12


class Question(NamedTuple):
    """A condition whose outcome only the machine knows.

    Args:
        begin, end: the span of the text that the outcome replaces.
        outcomes: the texts of the outcomes; those of a test are ``true`` and ``false``.
        usual: the outcome if nothing asks for another; None keeps the script's text.
    """

    begin: int
    end: int
    outcomes: tuple[str, ...]
    usual: int | None = None


@dataclass
class Script:
    """A script's text, and what replaces parts of it.

    Args:
        text: the text that bash gets, without the replacements.
        put: span of the text -> the words that replace it.
        questions: the offset of each question -> the question.
    """

    path: str
    text: str
    put: dict[tuple[int, int], str] = field(default_factory=dict)
    questions: dict[int, Question] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.elements = set[int]()  # offsets of the elements of arrays that are replaced
        self.starts = [0, *(match.end() for match in re.finditer("\n", self.text))]
        for words in (CASE, LIST):  # bash's trace leaves out these words, so a command with them is inserted
            for match in words.finditer(self.text):
                written = re.sub(r"\s#.*", "", match[1])
                is_of_bash = not self._is_quoted(match.start()) and _is_readable(f": {written}")
                if is_of_bash and not written.endswith("\\"):
                    end = match.start(1) + len(written)
                    self.put[end, end] = f"$(: {written})"
        for words in (ELEMENT, SETS_ELEMENT):  # nor does it have a subscript
            for match in words.finditer(self.text):
                subscript = f"$(: {OF_ARRAY} {match.start()} {match[2]})"
                if not self._is_literal(match.start()) and _is_readable(f": {subscript}"):
                    place = match.start() if words is ELEMENT else match.end()
                    self.put[place, place] = subscript

    def _is_quoted(self, offset: int) -> bool:
        """Whether an offset is in a comment, or in a quotation that begins in its line."""
        before = self.text[self.text.rfind("\n", 0, offset) + 1 : offset]
        plain = re.sub(r"\\.|\"(?:\\.|[^\"\\])*\"|'[^']*'", "", before)
        return re.search(r"[\"']|(?:^|\s)#", plain) is not None

    def _is_literal(self, offset: int) -> bool:
        """Whether an offset is in a comment, or in single quotes that begin in its line."""
        before = self.text[self.text.rfind("\n", 0, offset) + 1 : offset]
        plain = re.sub(r"\\.|\"(?:\\.|[^\"\\])*\"|'[^']*'", "", before)
        return re.search(r"^[^\"]*'|(?:^|\s)#", plain) is not None

    def prepared(self, outcome: Callable[[str, Question], int | None]) -> str:
        """Returns the text with all replacements.

        Args:
            outcome: maps a question's key and the question to the outcome's position; None keeps the text.
        """
        put = dict(self.put)
        for begin, question in self.questions.items():
            which = outcome(self.key(begin), question)
            if which is not None:
                put[begin, question.end] = question.outcomes[min(which, len(question.outcomes) - 1)]
        parts, last = [], 0
        for begin, end in sorted(put):
            if begin >= last:
                parts += [self.text[last:begin], put[begin, end]]
                last = end
        return "".join([*parts, self.text[last:]])

    def key(self, begin: int) -> str:
        """Returns the key of the question at an offset."""
        return f"{self.path}\0{begin}"

    def number(self, offset: int) -> int:
        """Returns the line of an offset, counted from 1."""
        return bisect.bisect_right(self.starts, offset)

    def line(self, number: int) -> tuple[int, int]:
        """Returns the span of a line, with the lines that it continues and those that continue it."""
        lines = self.text.split("\n")
        first = last = min(number, len(lines)) - 1
        goes_on = re.compile(r"(?:\\|&&|\|\|?|\(\(|\[\[)\s*$")
        while first > 0 and goes_on.search(lines[first - 1]):
            first -= 1
        while last + 1 < len(lines) and goes_on.search(lines[last]):
            last += 1
        return self.starts[first], self.starts[last] + len(lines[last])

    def statement(self, number: int, word: str = "") -> str:
        """Returns the statement of a line that begins with a word, on one line as written; else the first."""
        begin, end = self.line(number)
        text, parts, last, at = UNPIPED.sub(r"|\1", self.text[begin:end]), list[str](), 0, 0
        while at < len(text):
            if part := PART.match(text, at):
                at = part.end()
            elif separator := SEPARATOR.match(text, at):
                parts.append(text[last:at])
                last = at = separator.end()
            else:
                at += 1
        whole = [
            _without_subshell(" ".join(part.split())) if word[:1] not in "([" else " ".join(part.split())
            for part in (*parts, text[last:])
        ]
        whole = [part.replace("\\ ", "") for part in whole if part]
        return next((part for part in whole if word and part.startswith(word)), whole[0] if whole else "")

    def ask(self, number: int, first: str, words: Sequence[str]) -> list[Question]:
        """Adds the questions of a test in a line, and returns them.

        Args:
            first: the first word of the traced test; ``:`` for the words of a ``case`` or of a list.
            words: the test's words, expanded. They tell two tests in one line apart.
        """
        begin, end = self.line(number)
        if first == ":":
            questions = [*self._of_case(begin, end), *self._of_list(begin, end)]
        else:
            operators = [word for word in words[1:] if re.fullmatch(r"-[a-z]{1,2}|[=!]=?|=~|&&|\|\|", word)]
            spans = self._of_kind(first, begin, end)
            if not spans:  # bashkit gives { [[ -n $X ]]; } the line before it
                spans = self._of_kind(first, end, self.line(number + 1)[1])
            alike = [s for s in spans if all(word in self.text[slice(*s)] for word in operators)]
            questions = [self._of_test(*span) for span in alike or spans]
        # A condition with another in it, as [ "$([ -f x ] && echo y)" = y ], has no text that is found here.
        questions = [each for each in questions if _is_readable(self._answered(each))]
        for question in questions:
            self.questions.setdefault(question.begin, question)
        return questions

    def _of_kind(self, first: str, begin: int, end: int) -> list[tuple[int, int]]:
        """Returns the spans of the tests of one kind that begin in a part of the text."""
        return [match.span() for match in TESTS[first].finditer(self.text, begin) if match.start() < end]

    def _answered(self, question: Question) -> str:
        """Returns the text with an outcome of a question in its place."""
        return self.text[: question.begin] + question.outcomes[0] + self.text[question.end :]

    def without_element(self, at: int, token: Callable[[str], str]) -> None:
        """Replaces an element of an array by a token, because its subscript is unknown.

        If a statement sets such an element, it can be any, so all words of the array are replaced.

        Args:
            at: the offset of the element.
            token: maps a part's text to the token for it.
        """
        places = [at]
        if self.text[at] != "$":
            name = re.match(r"\w+", self.text[at:])
            uses = rf"\$\{{[!#]?{name[0] if name else ''}(?:\[|\}})"
            places = [match.start() for match in re.finditer(uses, self.text)]
        for begin in (place for place in places if not self._is_literal(place)):
            end = closing(self.text, begin + 1) + 1
            self.put.setdefault((begin, end), token(self.text[begin:end]))
            self.elements |= {at, begin}

    def _of_test(self, begin: int, end: int) -> Question:
        """Returns the question of a test. A loop that waits for the machine ends before or after one pass."""
        loop = BEFORE_LOOP.search(self.text, self.line(self.number(begin))[0], begin)
        if not loop:
            return Question(begin, end, ("true", "false"))
        ends_by_failure = (loop[1] == "while") != (loop[2].count("!") % 2 == 1)
        key = self.key(begin).partition("\0")[2]
        outcomes = ("false", f"{ONCE} {key}") if ends_by_failure else ("true", f"{NOT_AT_FIRST} {key}")
        return Question(begin, end, outcomes, usual=0)

    def _of_case(self, begin: int, end: int) -> Iterator[Question]:
        """Yields the questions of ``case`` words; the outcomes match one pattern each."""
        for match in CASE.finditer(self.text, begin, end + 1):
            body = re.split(r"(?<![\w-])esac(?![\w-])", self.text[match.end() :], maxsplit=1)[0]
            parts = (PATTERN.match(part) for part in re.split(r";;&?|;&", body))
            patterns = [each.strip() for part in parts if part for each in part[1].split("|")]
            certain = [each for each in patterns[:MOST_PATTERNS] if each.strip("*")]  # * matches any word
            if certain:
                yield Question(*match.span(1), tuple(dict.fromkeys(f'"{_matching(p)}"' for p in certain)))

    def _of_list(self, begin: int, end: int) -> Iterator[Question]:
        """Yields the questions of lists, which can be empty."""
        for match in LIST.finditer(self.text, begin, end + 1):
            without_comment = re.sub(r"\s#.*", "", match[1])
            yield Question(match.start(1), match.start(1) + len(without_comment), ("",))

    def without_sum(self, number: int, token: Callable[[str], str]) -> bool:
        """Replaces what bash cannot compute with an unknown number, and returns whether it finds anything.

        Args:
            token: maps a part's text to the token for its result.
        """
        begin, end = self.line(number)
        return (
            self._without_sums(begin, end, token)
            or any(begin <= at < end for at in (*self.questions, *self.elements))
            or self._without_count(begin, end)
            or self._without_let(begin, end, token)
            or self._without_assignment(begin, end, token)
        )

    def _without_sums(self, begin: int, end: int, token: Callable[[str], str]) -> bool:
        sums = [match for match in SUM.finditer(self.text, begin, end) if match.span() not in self.put]
        for match in sums:
            unknown = token(match[0])
            for span, text in self.put.items():  # a command that repeats words repeats their sums
                self.put[span] = text.replace(match[0], unknown)
            self.put[match.span()] = unknown
        return bool(sums)

    def _without_count(self, begin: int, end: int) -> bool:
        """Lets a loop over a number, ``for ((i = 0; i < N; i++))``, run not at all or once."""
        if counted := COUNTED.search(self.text, begin, end):
            count = "((slime_ext_i = 0; slime_ext_i < {}; slime_ext_i++))"
            outcomes = (count.format(0), count.format(1))
            at = self.text.index("((", counted.start())
            self.questions[at] = Question(at, counted.end(), outcomes, usual=0)
        return counted is not None

    def _without_let(self, begin: int, end: int, token: Callable[[str], str]) -> bool:
        for match in LET.finditer(self.text, begin, end):
            if match.span() in self.put:
                continue
            if names := ASSIGNS.findall(match[0]):
                unknown = token(match[0])
                self.put[match.span()] = "{ " + "".join(f"{name}={unknown}; " for name in names) + "}"
            else:
                question = self._of_test(*match.span())
                self.questions.setdefault(question.begin, question)
            return True
        return False

    def _without_assignment(self, begin: int, end: int, token: Callable[[str], str]) -> bool:
        """Replaces a line that only sets a variable, as ``declare -i Q=N+1``."""
        statement = self.text[begin:end].strip()
        is_alone = re.search(r"[;&|]", PART.sub("", statement)) is None
        if is_alone and (assigned := SET.match(statement)) and (begin, end) not in self.put:
            self.put[begin, end] = f"{assigned[1]}={token(statement)}"
            return True
        return (begin, end) in self.put

    @property
    def open_array(self) -> re.Match[str] | None:
        """The array whose parenthesis nothing closes: a match whose first group is its name."""
        return OPEN_ARRAY.search(self.text)


def _without_subshell(text: str) -> str:
    """Returns a statement without the parentheses of the subshell around it.

    >>> [_without_subshell(text) for text in ("(cd a", "N=$(cd a)", "exit)")]
    ['cd a', 'N=$(cd a)', 'exit']
    """
    text = text.lstrip("( ")
    while text.endswith(")") and text.count(")") > text.count("("):
        text = text[:-1].rstrip()
    return text


def closing(text: str, begin: int) -> int:
    """Returns the offset of the brace that closes the brace at ``begin``."""
    depth = 0
    for i in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return i
    return len(text)


@cache  # a new one takes half a millisecond
def _parser() -> Bash:
    from bashkit import Bash

    return Bash()


@cache
def _is_readable(text: str) -> bool:
    """Whether bash reads a text, unlike ``: range(3):``, which is Python in a heredoc.

    >>> [_is_readable(text) for text in (": 1 $(f a)", ": range(3):", r": \\$(f a)", ': "a')]
    [True, False, False, False]
    """
    from bashkit import BashError

    try:
        _parser().analyze(text)
    except BashError:
        return False
    return True


def _matching(pattern: str) -> str:
    """Returns a word that matches a pattern of ``case``.

    >>> [_matching(text) for text in ("a*", "[Ii]x?", "'b c'", "''")]
    ['a', 'Ixx', 'b c', '']
    """
    text = re.sub(r"\[(?!\^|!)(.)[^]]*\]", r"\1", pattern.strip().strip("\"'"))
    return text.replace("*", "").replace("?", "x").replace('"', "")
