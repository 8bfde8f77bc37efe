"""Which flags of a launch are the same whatever the cluster answers: the script runs once per answer.

In the first world every command succeeds. Each other world changes the answer to one question: a command that
fails or prints something else, a file that exists or not. A flag that differs from the first world is
unknown, and that question is the reason. A world without a launch says nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property

from slime_ext.host.contract import flag_of
from slime_ext.host.flags import ARGUMENTS
from slime_ext.tools.scripts.launch import Gap, Launch, Unread, WrittenFlag
from slime_ext.tools.scripts.sandbox import Sandbox
from slime_ext.tools.scripts.starts import Started, started
from slime_ext.tools.scripts.trace import TOKEN, Answer

OUTPUTS = ("", "0", "99")
MOST_QUESTIONS, MOST_LITERALS = 100, 6
COMPARED = re.compile(r"(?:[!=]=?|=~|-eq|-ne|-lt|-le|-gt|-ge)\s+[\"']?([\w./+-]+)")
CASE = re.compile(r"^\s*\(?[\"']?([\w.*-]+)[\"']?(?:\s*\|[^)]*)?\)", re.MULTILINE)
OF_MACHINE = re.compile(r"\$[A-Za-z_]|\$\(< ")  # variables and files that only the cluster has
UNSET = re.compile(r"\$\w+")  # as bash has it: nothing
SWITCHES = (*(flag_of(n) for n, a in ARGUMENTS.items() if a.kind.parse is None), "--colocate")


class Worlds:
    """All runs of one script.

    Args:
        sandbox: the script's.
    """

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox, self.around = sandbox, sandbox.around
        self.first = sandbox.run({})
        launches = started(self.first)
        if len(launches) > 1:
            where = f"the script makes another one at {launches[-2].where}"
            self.around.notes.append(f"{launches[-1].where}: the launch that is read; {where}")
        self.questions = self._questions()
        self.runs = [("", self.first)]
        for question in self.questions if len(self.questions) <= MOST_QUESTIONS else ():
            self.runs += [(question, sandbox.run({question: said})) for said in self._answers(question)]
        self.reached = [(why, found[-1]) for why, run in self.runs if (found := started(run))]

    def _questions(self) -> list[str]:
        of_machine = (text for text in self.around.texts if OF_MACHINE.match(text) and text != "$PATH")
        return [*dict.fromkeys([*self.first.asked, *of_machine])]

    def _answers(self, question: str) -> Iterator[Answer]:
        if question.startswith("[ -"):  # about a file: the first world has it absent where it is not here
            yield from (Answer(), Answer(1))
            return
        is_text = question.startswith("$")
        if not is_text:
            yield Answer(1, "")
        token = self.around.token(question if is_text else f"$({question})")
        if self._has_case or token in self.first.trace:
            yield from (Answer(0, text) for text in (*OUTPUTS, *self._literals))

    @cached_property
    def _has_case(self) -> bool:  # bash traces no pattern of a ``case``
        return re.search(r"\bcase\b", self.around.text) is not None

    @cached_property
    def _literals(self) -> list[str]:
        text = self.around.text
        found = [*COMPARED.findall(text), *(word.replace("*", "") for word in CASE.findall(text))]
        return [word for word in dict.fromkeys(found) if word not in OUTPUTS][:MOST_LITERALS]

    def launch(self, path: str) -> Launch:
        """The launch of the first world that makes one, with a gap for what differs in another."""
        around, base = self.around, self.reached[0][1]
        flags, gaps = self.written(base.words)
        notes = tuple(around.notes) + tuple(
            f"{place}: ${name} is set by nothing here, and without it the script ends"
            for name, place in around.needs.items()
        )
        environment = {name: around.shown(said) for name, said in base.environment.items()}
        folder = None if TOKEN.search(base.folder) else base.folder
        gaps += self._gaps(base, len(flags))
        files = {name: self._text(name, said) for name, said in base.files.items()}
        return Launch(path, base.program, tuple(flags), environment, tuple(gaps), folder, notes, files)

    def _text(self, name: str, said: str) -> str:
        """The text of a file that the script writes, unknown where another answer changes it."""
        is_sure = not TOKEN.search(said) and all(found.files.get(name) == said for _, found in self.reached)
        return said if is_sure else Unread(self.around.shown(said))

    def _gaps(self, base: Started, end: int) -> Iterator[Gap]:
        """Behind the launch's flags: those that another answer changes, by question."""
        script = self.around.path.rpartition("/")[2]
        if len(self.questions) > MOST_QUESTIONS:
            yield Gap(end, "an answer among thousands", script)
        wanted, names = self._values(base), dict[str, set[str]]()
        for question, launch in self.reached[1:]:
            found = self._values(launch)
            changed = {name for name in wanted | found if wanted.get(name) != found.get(name)}
            names.setdefault(question, set()).update(changed)
        for question, some in names.items():
            if some:
                yield Gap(end, self.around.shown(question), self._place(question), frozenset(some))

    def _values(self, launch: Started) -> dict[str, tuple[str, ...]]:
        """The values that count, by flag."""
        return {flag.name: flag.values for flag in self.written(launch.words, lambda name: "")[0]}

    def commands(self) -> list[list[str]]:
        """The commands that the first world starts, a word unknown if another world lacks it."""
        others = [{word for call in run.calls for word in call.words} for _, run in self.runs[1:]]
        others = [words for words in others if len(words) > 1]
        sure = lambda word: not TOKEN.search(word) and all(word in words for words in others)  # noqa: E731
        shown = self.around.shown
        return [[w if sure(w) else Unread(shown(w)) for w in call.words] for call in self.first.calls]

    def _place(self, question: str) -> str:
        """``file:line`` of the command that asks it first."""
        if question in self.around.tests:
            return self.around.tests[question]
        for line in (line for _, run in self.runs for line in run.lines):
            is_asked = self.around.shown(" ".join(line.words)) == question
            if is_asked or (question.startswith("$") and question[1:] in line.text):
                return line.place
        return self.around.path.rpartition("/")[2]

    def written(
        self, words: tuple[str, ...], where: Callable[[str], str] | None = None
    ) -> tuple[list[WrittenFlag], list[Gap]]:
        """Words as flags with their places. An unknown word behind a flag without a value is its value;
        anywhere else it can be any flags."""
        flags: list[WrittenFlag] = []
        gaps: list[Gap] = []
        where = where or self.around.where
        for word in words:
            text = Unread(self.around.shown(word)) if TOKEN.search(word) else word
            if word.startswith("--") and len(word) > 2:
                name, has_value, said = text.partition("=")
                flags.append(WrittenFlag(name, (type(text)(said),) if has_value else (), where(name)))
            elif TOKEN.fullmatch(word) and not UNSET.fullmatch(text) and not self._waits(flags):
                gaps.append(Gap(len(flags), text, where(text)))
            elif flags:
                flags[-1] = replace(flags[-1], values=(*flags[-1].values, text))
        return flags, gaps

    def _waits(self, flags: list[WrittenFlag]) -> bool:
        return bool(flags) and not flags[-1].values and flags[-1].name not in SWITCHES
