"""What a script starts, and with which words: known ones, and ones that depend on its machine."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from slime_ext.errors import ConfigError, cut
from slime_ext.host.contract import flag_of
from slime_ext.host.flags import ARGUMENTS, DECISIVE
from slime_ext.tools.scripts.launch import Gap, Launch, Unread, WrittenFlag
from slime_ext.tools.scripts.sandbox import Sandbox
from slime_ext.tools.scripts.starts import Started, started
from slime_ext.tools.scripts.surroundings import Request, Surroundings
from slime_ext.tools.scripts.trace import UNKNOWN, Guess, Run, narrowed

GUESSES = {  # in their order; what a reader is told where an earlier one led to no launch
    Guess(): "",
    Guess(is_there=True): "read as if each file that it tests were there",
    Guess(fails=True): "read as if each command failed whose answer is not known here",
    Guess(fails=True, is_there=True): "read as if each such command failed, and each file were there",
}
SWITCHES = (*(flag_of(n) for n, a in ARGUMENTS.items() if a.kind.parse is None), "--colocate")


OF_A_LIMIT = re.compile(r"resource limit exceeded: [\w \t():/-]*|execution \w+")
ARRAY = re.compile(r"(?:\w+ (?:-\w+ )?)?(\w+)\+?=\((.*)\)", re.DOTALL)  # as bash traces one that is set


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
            place = self.around.place(end[0].path, end[1]) if end else self.around.named(self.around.path)
            how = self.around.how_it_ends(first)
            self.around.notes.append(f"{place}: the script can end here{how}, without a launch; {note}")
        if others:
            places = [
                self.around.place(s.line.file, s.line.number) if s.line else "" for s in (last, others[-1])
            ]
            where = f"the script makes another one at {places[1]}"
            self.around.notes.append(f"{places[0]}: the launch that is read; {where}")

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
            f"{place}: ${name} is set by nothing here, and without it the script ends{how}"
            for name, (place, how) in around.needs.items()
        )
        environment = {name: around.spelled(said) for name, said in found.environment.items()}
        folder = None if UNKNOWN.search(found.folder) else found.folder
        gaps += [replace(gap, at=len(flags)) for gap in around.gaps]
        if self.unsure:
            gaps.append(
                Gap(len(flags), "a word made of unknown ones", around.named(around.path), self.unsure)
            )
        files = {
            name: Unread(around.spelled(said)) if UNKNOWN.search(said) else said
            for name, said in found.files.items()
        }
        launch = Launch(path, found.program, tuple(flags), environment, tuple(gaps), folder, notes, files)
        return replace(launch, text=around.text)

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
        if not meant or is_value or not any(unknown.can_be_flags for unknown in meant):
            return None
        text, names = self.around.shown(word), [unknown.names for unknown in meant]
        known = frozenset[str]().union(*(some for some in names if some is not None))
        return Gap(at, text, meant[0].where or where(text), None if None in names else known)


def _waits(flags: list[WrittenFlag]) -> bool:
    return bool(flags) and not flags[-1].values and flags[-1].name not in SWITCHES


def followed(request: Request) -> Reading:
    """Runs a script until it makes a launch.

    Raises:
        ConfigError: the script cannot be read, or has line ends that bash takes for a part of a word.
    """
    return Reading(Sandbox(Surroundings(request), request.given))


def launch_of(request: Request) -> Launch:
    """The launch that a script makes; one without a program or flags where it makes none.

    Raises:
        ConfigError: the script cannot be read, ends its launch too early, or gives its flags to nothing.
    """
    reading = followed(request)
    if reading.started is None:
        return _without_launch(request.path, reading)
    _forbid_lost_arrays(reading)
    _forbid_unused_arrays(reading)
    launch = reading.launch(request.path)
    return _veiled(launch, _bare(request)) if reading.around.has_seen else launch


def _bare(request: Request) -> Launch:
    """The launch of a script that sees no other file and no variable."""
    try:
        reading = followed(request.bare)
    except ConfigError:
        return Launch(request.path)
    return reading.launch(request.path) if reading.started else Launch(request.path)


def _veiled(launch: Launch, bare: Launch) -> Launch:
    """A launch whose flags say what messages may show of them: words that are the same without any other file
    or variable are the script's own."""
    left = {name: [flag for flag in bare.flags if flag.name == name] for name in {f.name for f in bare.flags}}
    flags = []
    for flag in launch.flags:
        same = left[flag.name].pop(0) if left.get(flag.name) else None
        if same is None or same.values != flag.values or any(isinstance(v, Unread) for v in same.values):
            shown = " ".join(same.values) if same else ""
            flag = replace(flag, instead=shown or f"what {flag.where} says") if flag.values else flag
        flags.append(flag)
    veiled = {name for name, text in launch.files.items() if bare.files.get(name) != text}
    veiled |= {launch.folder} - {bare.folder, None}
    return replace(launch, flags=tuple(flags), veiled=frozenset(veiled))


def _without_launch(path: str, reading: Reading) -> Launch:
    if reading.run.error:
        limit = OF_A_LIMIT.match(reading.run.error)
        got = f"none: {cut(limit[0])}" if limit else "an error in the sandbox"
        raise ConfigError(f"{path}: expected a script that ends, got {got}")
    notes: tuple[str, ...] = ()
    if end := reading.around.end_of(reading.run):
        where = f"{reading.around.place(end[0].path, end[1])}{reading.around.how_it_ends(reading.run)}"
        what = "give it what it asks for, as variables with --env, or as flags behind --"
        notes = (f"it ends at {where}: {what}",)
    return Launch(path, notes=notes)


def _array(text: str) -> tuple[str, list[str]]:
    """The array that a traced command sets, and the words that it gives to it."""
    match = ARRAY.fullmatch(text)
    try:
        return (match[1], shlex.split(match[2])) if match else ("", [])
    except ValueError:
        return "", []


def _forbid_lost_arrays(reading: Reading) -> None:
    for line in reading.run.lines:
        if line.words[:1] and line.words[0].startswith("--"):
            written = reading.around.statement_of(line).split()
            shown = cut(written[0] if written else reading.around.shown(line.words[0]))
            place = reading.around.place(line.file, line.number)
            raise ConfigError(
                f"{place}: expected the launch to go on, got {shown} as a new command: the line before it "
                "lacks the backslash at its end"
            )


def _forbid_unused_arrays(reading: Reading) -> None:
    """Raises ConfigError for an array whose flags decide whether ours runs, and never reach the launch."""
    decisive = {flag_of(name) for name in DECISIVE}
    for line in reading.run.lines:
        name, words = _array(line.text)
        acts = decisive & {word.partition("=")[0] for word in words}
        if acts and (got := _misused(name, words, acts, reading)):
            name = reading.around.shown(name)
            right = f'"${{{name}[@]}}"'
            raise ConfigError(
                f"{reading.around.path}: {name}: expected {right} in the launch, got {got}: its flags do not "
                "reach it"
            )


def _misused(name: str, words: Sequence[str], flags: Collection[str], reading: Reading) -> str:
    """How a script names an array in place of ``"${NAME[@]}"``: not at all (``none``), without the dollar,
    which leaves the name itself, as ``"${NAME[*]}"``, which is one word, or as ``$NAME``, which is the first
    word; empty where it does right."""
    text, launched = reading.around.text, reading.started.words if reading.started else ()
    left = re.compile(rf"\{{?{name}(\[[@*]\])?\}}?")
    if word := next((word for word in launched if left.fullmatch(word)), ""):
        return word
    if len(words) > 1 and " ".join(words) in launched:
        return f'"${{{name}[*]}}"'
    if not re.search(rf"(?<!\w){name}(?!\w|\+?=)", text):
        return "none"
    first = re.search(rf"\${name}(?!\w)(\[[@*]\])?|\$\{{{name}\}}", text)
    given = {word.partition("=")[0] for word in launched}
    is_whole = re.search(rf"\$\{{{name}\[[@*]\]", text) or flags <= given
    return first[0] if first and not is_whole else ""
