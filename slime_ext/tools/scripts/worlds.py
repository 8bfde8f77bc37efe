"""What of a launch is the same whatever the cluster answers: the script runs once in each of several worlds.

First one in which every command succeeds; then, for each question that the script puts, one world per other
answer to it alone; then some in which all answers are drawn at random. A flag that differs between two worlds
is unknown, and the question whose answer changed it is the reason. A world without a launch says nothing.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from slime_ext.host.contract import flag_of
from slime_ext.host.flags import ARGUMENTS
from slime_ext.tools.scripts.launch import Gap, Launch, Unread, WrittenFlag
from slime_ext.tools.scripts.sandbox import Sandbox
from slime_ext.tools.scripts.starts import Started, started
from slime_ext.tools.scripts.trace import TOKEN, Answer, Run, World

FAILED, EMPTY, ZERO, MANY = Answer(1, ""), Answer(0, ""), Answer(0, "0"), Answer(0, "99")
MOST_WORLDS, MOST_CALLS, DRAWN, MOST_LITERALS = 200, 30_000, 8, 6
COMPARED = re.compile(r"(?:[!=]=?|=~|-eq|-ne|-lt|-le|-gt|-ge)\s+[\"']?([\w./+-]+)")
CASE = re.compile(r"^\s*\(?[\"']?([\w.*-]+)[\"']?(?:\s*\|[^)]*)?\)", re.MULTILINE)
UNSET = re.compile(r"\$\w+")  # as bash has it: nothing
SWITCHES = (*(flag_of(n) for n, a in ARGUMENTS.items() if a.kind.parse is None), "--colocate")
SEVERAL = "answers of the cluster"

Words = tuple[str, ...]


@dataclass(frozen=True)
class Reached:
    """A world whose run reaches a launch.

    Args:
        question: what it answers otherwise than the first one does.
    """

    question: str
    launch: Started

    @cached_property
    def last(self) -> dict[str, list[str]]:
        """The values that count, by flag."""
        found: dict[str, list[str]] = {}
        values: list[str] = []
        for word in self.launch.words:
            if word.startswith("--") and len(word) > 2:
                name, has_value, said = word.partition("=")
                found[name] = values = [said] if has_value else []
            else:
                values.append(word)
        return found


class Worlds:
    """All runs of one script.

    Args:
        sandbox: the script's.
    """

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox, self.around = sandbox, sandbox.around
        self.first = sandbox.run({})
        self.reached: list[Reached] = []
        self.runs = [self.first]
        self._add("", self.first)
        for question, world in self._others():
            self.runs.append(run := sandbox.run(world))
            self._add(question, run)

    def _add(self, question: str, run: Run) -> None:
        if found := started(run):
            self.reached.append(Reached(question, found[-1]))
            if len(found) > 1 and len(self.reached) == 1:
                other = f"the script makes another one at {found[-2].where}"
                self.around.notes.append(f"{found[-1].where}: the launch that is read; {other}")

    def _others(self) -> Iterator[tuple[str, World]]:
        """(the question that is answered otherwise, the world)."""
        asked = dict(self.first.asked)
        for question in self._questions(asked):
            for answer in self._answers(question):
                if self._is_too_much():
                    return
                yield question, {question: answer}
            asked |= self.runs[-1].asked
        for seed in range(DRAWN if asked else 0):
            draw = random.Random(seed)
            yield SEVERAL, {q: draw.choice([Answer(), *self._answers(q)]) for q in asked}

    def _is_too_much(self) -> bool:
        """Whether so many questions are left that not all of their answers are tried."""
        return len(self.runs) > MOST_WORLDS or sum(len(run.calls) for run in self.runs) > MOST_CALLS

    def _questions(self, asked: Mapping[str, None]) -> Iterator[str]:
        done: set[str] = set()
        while left := [q for q in (*asked, *self._open()) if q not in done]:
            done.add(left[0])
            yield left[0]

    def _open(self) -> list[str]:
        """Variables and files that only the cluster has."""
        return [
            text for text in self.around.texts if re.match(r"\$[A-Za-z_]|\$\(< ", text) and text != "$PATH"
        ]

    def _answers(self, question: str) -> list[Answer]:
        if question.startswith("[ -"):  # of a file: the first world has it absent where it is not here
            return [Answer(), Answer(1)]
        said = [FAILED] if not question.startswith("$") else []
        token = self.around.token(question if question.startswith("$") else f"$({question})")
        if re.search(r"\bcase\b", self.around.text) or any(token in run.trace for run in self.runs):
            said += [EMPTY, ZERO, MANY, *(Answer(0, text) for text in self._literals)]
        return said

    @cached_property
    def _literals(self) -> list[str]:
        text = self.around.text
        found = [*COMPARED.findall(text), *(word.replace("*", "") for word in CASE.findall(text))]
        return [word for word in dict.fromkeys(found) if word not in ("0", "")][:MOST_LITERALS]

    # what is common to them

    def launch(self, path: str) -> Launch:
        """The launch, of which what differs between worlds is unknown."""
        around, launch = self.around, self.reached[0].launch
        flags, gaps = self.flags()
        notes = tuple(around.notes) + tuple(
            f"{place}: ${name} is set by nothing here, and without it the script ends"
            for name, place in around.needs.items()
        )
        environment = {name: around.shown(said) for name, said in launch.environment.items()}
        folder = None if TOKEN.search(launch.folder) else launch.folder
        return Launch(path, launch.program, flags, environment, gaps, folder, notes)

    def commands(self) -> list[list[str]]:
        """The commands that the first world starts, a word unknown if another world lacks it."""
        others = [{word for call in run.calls for word in call.words} for run in self.runs[1:]]
        others = [words for words in others if len(words) > 1]
        sure = lambda word: not TOKEN.search(word) and all(word in words for words in others)  # noqa: E731
        shown = self.around.shown
        return [[w if sure(w) else Unread(shown(w)) for w in call.words] for call in self.first.calls]

    def flags(self) -> tuple[tuple[WrittenFlag, ...], tuple[Gap, ...]]:
        """Flags of the launch, and where others can stand."""
        base = self.reached[0]
        flags, gaps = self.written(base.launch.words)
        found: list[WrittenFlag] = []
        for flag in flags:
            other = self._differs(base, flag.name)
            if other is None or any(isinstance(value, Unread) for value in flag.values):
                found.append(flag)
            elif flag.name in other.last:
                found.append(
                    WrittenFlag(flag.name, (Unread(self._either(base, other, flag.name)),), flag.where)
                )
        names: dict[str, list[str]] = {}
        for name in dict.fromkeys(name for reached in self.reached for name in reached.last):
            other = self._differs(base, name)
            if other is not None and not (name in base.last and name in other.last):
                names.setdefault(other.question, []).append(name)
        script = self.around.path.rpartition("/")[2]
        return tuple(found), (
            *((Gap(len(found), "an answer among thousands", script),) if self._is_too_much() else ()),
            *(replace(gap, at=len([f for f in flags[: gap.at] if f in found])) for gap in gaps),
            *(Gap(len(found), q, self.place(q), frozenset(some)) for q, some in names.items()),
        )

    def _differs(self, base: Reached, name: str) -> Reached | None:
        """A world in which a flag is otherwise; one without it first."""
        others = [r for r in self.reached if r.last.get(name) != base.last.get(name)]
        return min(others, key=lambda r: (name in r.last, r.question == SEVERAL), default=None)

    def _either(self, base: Reached, other: Reached, name: str) -> str:
        said = [self.around.shown(" ".join(r.last[name])) or "nothing" for r in (base, other)]
        return f"{' or '.join(said)} ({other.question})"

    def place(self, question: str) -> str:
        """``file:line`` of the command that asks it first."""
        for run in self.runs:
            for line in run.lines:
                said = self.around.shown(" ".join(line.words))
                if said == question or (
                    question.startswith(("[", "$")) and question.strip("[ $]") in line.text
                ):
                    return line.place
        return self.around.path.rpartition("/")[2]

    def written(self, words: Words) -> tuple[list[WrittenFlag], list[Gap]]:
        """Words as flags with their places. An unknown word behind a flag without a value is its value;
        anywhere else it can be any flags."""
        flags: list[WrittenFlag] = []
        gaps: list[Gap] = []
        for word in words:
            text = Unread(self.around.shown(word)) if TOKEN.search(word) else word
            if word.startswith("--") and len(word) > 2:
                name, has_value, said = text.partition("=")
                flags.append(
                    WrittenFlag(name, (type(text)(said),) if has_value else (), self.around.where(name))
                )
            elif TOKEN.fullmatch(word) and not UNSET.fullmatch(text) and not self._waits(flags):
                gaps.append(Gap(len(flags), text, self.around.where(text)))
            elif flags:
                flags[-1] = WrittenFlag(flags[-1].name, (*flags[-1].values, text), flags[-1].where)
        return flags, gaps

    def _waits(self, flags: list[WrittenFlag]) -> bool:
        return bool(flags) and not flags[-1].values and flags[-1].name not in SWITCHES
