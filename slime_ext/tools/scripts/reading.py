"""What a script starts, and with which words: known ones, and ones that depend on its machine."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from slime_ext.host.contract import flag_of
from slime_ext.host.flags import ARGUMENTS
from slime_ext.tools.scripts.launch import Gap, Launch, Unread, WrittenFlag
from slime_ext.tools.scripts.sandbox import Sandbox
from slime_ext.tools.scripts.starts import Started, started
from slime_ext.tools.scripts.trace import UNKNOWN, Guess, Run, narrowed

UNSET = re.compile(r"\$\w+")  # a variable that nothing sets: as bash has it, nothing
GUESSES = {  # in their order; what a reader is told where an earlier one led to no launch
    Guess(): "",
    Guess(is_there=True): "read as if each file that it tests were there",
    Guess(fails=True): "read as if each command failed whose answer is not known here",
    Guess(fails=True, is_there=True): "read as if each such command failed, and each file were there",
}
SWITCHES = (*(flag_of(n) for n, a in ARGUMENTS.items() if a.kind.parse is None), "--colocate")


class Reading:
    """One script, run until it makes a launch.

    Args:
        sandbox: the script's.
    """

    def __init__(self, sandbox: Sandbox) -> None:
        self.around = sandbox.around
        self.started: Started | None = None
        self.unsure: frozenset[str] = frozenset()
        runs = ((guess, sandbox.run(guess, lambda run: bool(started(run)))) for guess in GUESSES)
        guess, self.run = first = next(runs)
        while not started(self.run):
            if (other := next(runs, None)) is None:
                guess, self.run = first
                return
            guess, self.run = other
        self._note(first[1], guess)
        self.started = started(self.run)[-1]
        again = started(sandbox.once(guess._replace(is_wide=True)))
        same = self._values(self.started.words)
        wide = self._values(tuple(map(narrowed, again[-1].words)) if again else ())
        self.unsure = frozenset(name for name, said in same.items() if wide.get(name) != said)

    def _note(self, first: Run, guess: Guess) -> None:
        """Notes which launch is read, and by which guess it is reached."""
        *others, last = started(self.run)
        if note := GUESSES[guess]:
            end = self.around.end_of(first)
            place = f"{Path(end[0].path).name}:{end[1]}" if end else Path(self.around.path).name
            self.around.notes.append(f"{place}: the script can end here, without a launch; {note}")
        if others:
            where = f"the script makes another one at {others[-1].where}"
            self.around.notes.append(f"{last.where}: the launch that is read; {where}")

    def launch(self, path: str) -> Launch:
        """The launch, with a gap for what depends on the machine.

        Raises:
            ValueError: there is none.
        """
        if self.started is None:
            raise ValueError("expected a launch, got none")
        around, found = self.around, self.started
        flags, gaps = self.written(found.words)
        notes = tuple(around.notes) + tuple(
            f"{place}: ${name} is set by nothing here, and without it the script ends"
            for name, place in around.needs.items()
        )
        environment = {name: around.shown(said) for name, said in found.environment.items()}
        folder = None if UNKNOWN.search(found.folder) else found.folder
        gaps += [replace(gap, at=len(flags)) for gap in around.gaps]
        if self.unsure:
            gaps.append(Gap(len(flags), "a word made of unknown ones", Path(around.path).name, self.unsure))
        files = {
            name: Unread(around.shown(said)) if UNKNOWN.search(said) else said
            for name, said in found.files.items()
        }
        return Launch(path, found.program, tuple(flags), environment, tuple(gaps), folder, notes, files)

    def _values(self, words: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
        """The values that count, by flag."""
        return {flag.name: flag.values for flag in self.written(words, lambda name: "")[0]}

    def commands(self) -> list[list[str]]:
        """The commands that the script starts."""
        shown = self.around.shown
        return [[Unread(shown(w)) if UNKNOWN.search(w) else w for w in call.words] for call in self.run.calls]

    def written(
        self, words: tuple[str, ...], where: Callable[[str], str] | None = None
    ) -> tuple[list[WrittenFlag], list[Gap]]:
        """Words as flags with their places. An unknown word behind a flag without a value is its value;
        anywhere else it can be any flags."""
        flags: list[WrittenFlag] = []
        gaps: list[Gap] = []
        where = where or self.around.where
        for word in words:
            text = Unread(self.around.shown(word)) if UNKNOWN.search(word) else word
            if word.startswith("--") and len(word) > 2:
                name, has_value, said = text.partition("=")
                flags.append(WrittenFlag(name, (type(text)(said),) if has_value else (), where(name)))
            elif gap := self._gap(len(flags), word, where, waits=_waits(flags)):
                gaps.append(gap)
            elif flags:
                flags[-1] = replace(flags[-1], values=(*flags[-1].values, text))
        return flags, gaps

    def _gap(self, at: int, word: str, where: Callable[[str], str], *, waits: bool) -> Gap | None:
        """What a word can stand for that is not known; None where it is the value of a flag, or nothing.

        Args:
            waits: whether the flag before it has no value yet.
        """
        meant = self.around.meant(word)
        is_value = waits and not any(unknown.is_words for unknown in meant)
        if not meant or is_value or all(UNSET.fullmatch(unknown.text) for unknown in meant):
            return None
        text, names = self.around.shown(word), [unknown.names for unknown in meant]
        known = frozenset[str]().union(*(some for some in names if some is not None))
        return Gap(at, text, meant[0].where or where(text), None if None in names else known)


def _waits(flags: list[WrittenFlag]) -> bool:
    return bool(flags) and not flags[-1].values and flags[-1].name not in SWITCHES
