"""Runs a script in the sandbox and reads its ``Launch``."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from slime_ext.errors import ConfigError, cut
from slime_ext.hosts.contract import flag_of
from slime_ext.hosts.flags import ARGUMENTS, DECISIVE, DERIVED
from slime_ext.tools.launch.launch import Gap, Launch, Unread, WrittenFlag
from slime_ext.tools.launch.sandbox import Sandbox
from slime_ext.tools.launch.starts import Started, started
from slime_ext.tools.launch.surroundings import Request, Surroundings
from slime_ext.tools.launch.trace import TOKEN, UNKNOWN, Guess, Run, narrowed

# The guesses in their order -> the note for the user if the earlier guesses led to no launch.
GUESSES = {
    Guess(): "",
    Guess(is_there=True): "read as if every file that it tests existed",
    Guess(fails=True): "read as if every command with an unknown answer failed",
    Guess(
        fails=True, is_there=True
    ): "read as if every command with an unknown answer failed and every file existed",
}
SWITCHES = (*(flag_of(n) for n, a in ARGUMENTS.items() if a.kind.parse is None), "--colocate")
READ = {flag_of(name) for name, argument in ARGUMENTS.items() if argument.kind is not DERIVED}
READ |= {argument.switched_off_by for argument in ARGUMENTS.values() if argument.switched_off_by}
KNOWN = READ | {*SWITCHES}
# Python's white space, and the letters that look like nothing or like a space.
SPACE = r"[\s\u180e\u200b-\u200d\u2060\ufeff]"
JOINED = re.compile(rf"{SPACE}*(--[A-Za-z][\w-]*)({SPACE}).*|{SPACE}+(--[A-Za-z][\w-]*)", re.DOTALL)
GLUED = re.compile(r"(--[A-Za-z][\w-]*?)(--[A-Za-z][\w-]*)")
OF_A_LIMIT = re.compile(r"resource limit exceeded: [\w \t():/-]*|execution \w+")
ARRAY = re.compile(
    r"(?:\w+ (?:-\w+ )?)?(\w+)\+?=\((.*)\)", re.DOTALL
)  # an assignment of an array, as bash traces it


@dataclass(frozen=True)
class ScriptRun:
    """The run of a script that reaches its launch; the first run if none does.

    Args:
        around: the surroundings that the script found.
        run: the trace of the run, and the programs that the script would start.
        started: the last launch of the run; None if it starts none.
        unsure: flags whose values the script cuts out of unknown words.
    """

    around: Surroundings
    run: Run
    started: Started | None = None
    unsure: frozenset[str] = frozenset()

    def launch(self, path: str) -> Launch:
        """Returns the launch, with gaps for what the machine decides. Raises ValueError without a launch."""
        if self.started is None:
            raise ValueError("expected a launch, got none")
        around, started = self.around, self.started
        flags, gaps = written(started.words, around, around.where)
        notes = tuple(around.notes) + tuple(
            f"{place}: nothing here sets ${name}, and without it the script ends{how}"
            for name, (place, how) in around.needs.items()
        )
        gaps += [replace(gap, at=len(flags)) for gap in around.gaps]
        if self.unsure:
            here = around.named(around.path)
            gaps.append(Gap(len(flags), "a word that is cut out of unknown words", here, self.unsure))
        return Launch(
            path,
            started.program,
            flags=tuple(flags),
            environment={name: around.spelled(said) for name, said in started.environment.items()},
            gaps=tuple(gaps),
            folder=_folder(started.folder, around),
            notes=notes,
            files={
                name: Unread(around.spelled(said)) if UNKNOWN.search(said) else said
                for name, said in started.files.items()
            },
            text=around.text,
        )

    def commands(self) -> list[list[str]]:
        """Returns the words of each command that the script starts."""
        shown = self.around.shown
        return [[Unread(shown(w)) if UNKNOWN.search(w) else w for w in call.words] for call in self.run.calls]


def _folder(folder: str, around: Surroundings) -> str | None:
    """Returns the folder of a ``Launch``."""
    if folder == around.folder:
        return None
    inside = around.inside(folder)
    return Unread(around.shown(inside)) if UNKNOWN.search(inside) else inside


def launch_of(request: Request) -> Launch:
    """Returns the launch of a script. The launch has no program and no flags if the script starts none.

    Raises:
        ConfigError: the script cannot be read, ends its launch too early, or does not pass its flags on.
    """
    script_run = followed(request)
    if script_run.started is None:
        return _without_launch(request.path, script_run.around, script_run.run)
    _forbid_lost_arrays(script_run.around, script_run.run)
    _forbid_unused_arrays(script_run)
    _forbid_joined_words(script_run.around, script_run.started.words)
    launch = script_run.launch(request.path)
    return _veiled(launch, _bare(request)) if script_run.around.has_seen else launch


def followed(request: Request) -> ScriptRun:
    """Tries guesses about a script's machine until the script starts a launch.

    Raises:
        ConfigError: as ``script_text``.
    """
    around = Surroundings(request)
    sandbox = Sandbox(around, request.given)
    first: Run | None = None
    for guess in GUESSES:
        run = sandbox.run(guess, lambda run: bool(started(run)))
        first = first or run
        if launches := started(run):
            break
    else:
        return ScriptRun(around, first)
    _note_guess(around, first, guess)
    _note_other_launches(around, launches)
    wide = started(sandbox.once(guess._replace(is_wide=True)))
    narrow = _values(launches[-1].words, around)
    again = _values(tuple(map(narrowed, wide[-1].words)) if wide else (), around)
    unsure = frozenset(name for name, values in narrow.items() if again.get(name) != values)
    return ScriptRun(around, run, launches[-1], unsure)


def _note_guess(around: Surroundings, first: Run, guess: Guess) -> None:
    """Notes the guess that reached the launch, unless it was the first guess."""
    if note := GUESSES[guess]:
        end = around.end_of(first)
        place = around.place(end[0].path, end[1]) if end else around.named(around.path)
        how = around.how_it_ends(first)
        around.notes.append(f"{place}: the script can end here{how}, before a launch; {note}")


def _note_other_launches(around: Surroundings, launches: Sequence[Started]) -> None:
    """Notes which of several launches is read."""
    if launches[1:]:
        last, other = (
            around.place(each.line.file, each.line.number) if each.line else "" for each in launches[:-3:-1]
        )
        around.notes.append(f"{last}: this launch is read; the script starts another launch at {other}")


def _values(words: Sequence[str], around: Surroundings) -> dict[str, tuple[str, ...]]:
    """Returns flag -> the values that count, which are the last ones."""
    return {flag.name: flag.values for flag in written(words, around, lambda name: "")[0]}


def written(
    words: Sequence[str], around: Surroundings, where: Callable[[str], str]
) -> tuple[list[WrittenFlag], list[Gap]]:
    """Splits words into flags with their places, and gaps.

    An unknown word after a flag without a value is that flag's value. Anywhere else it can be any flags.

    Args:
        where: maps a flag or an unknown word to its ``file:line``.
    """
    flags: list[WrittenFlag] = []
    gaps: list[Gap] = []
    for word in words:
        text = Unread(around.shown(word)) if UNKNOWN.search(word) else word
        waits = bool(flags) and not flags[-1].values and flags[-1].name not in SWITCHES
        if word.startswith("--") and len(word) > 2:
            name, has_value, said = text.partition("=")
            flags.append(WrittenFlag(name, (type(text)(said),) if has_value else (), where(name)))
        elif gap := _gap(len(flags), word, around, where, waits=waits):
            gaps.append(gap)
        elif flags:
            flags[-1] = replace(flags[-1], values=(*flags[-1].values, text))
    return flags, gaps


def _gap(at: int, word: str, around: Surroundings, where: Callable[[str], str], *, waits: bool) -> Gap | None:
    """Returns the gap that an unknown word leaves. None if the word is known, empty, or the value of a flag.

    Args:
        waits: whether the flag before the word has no value yet.
    """
    meant = around.meant(word)
    is_value = waits and not any(unknown.is_words for unknown in meant)
    if not meant or is_value or not any(unknown.can_be_flags for unknown in meant):
        return None
    text, names = around.shown(word), [unknown.names for unknown in meant]
    known = frozenset[str]().union(*(some for some in names if some is not None))
    return Gap(at, text, meant[0].where or where(text), None if None in names else known)


def _bare(request: Request) -> Launch:
    """Returns the launch of a script that sees no other file and no variable."""
    try:
        script_run = followed(request.bare)
    except ConfigError:
        return Launch(request.path)
    return script_run.launch(request.path) if script_run.started else Launch(request.path)


def _veiled(launch: Launch, bare: Launch) -> Launch:
    """Marks the flags and files of a launch that messages must not show.

    A flag whose words stay the same in ``bare`` is written in the script itself, so messages may show it.
    """
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


def _without_launch(path: str, around: Surroundings, run: Run) -> Launch:
    if run.error:
        limit = OF_A_LIMIT.match(run.error)
        got = f"none: {cut(limit[0])}" if limit else "an error in the sandbox"
        raise ConfigError(f"{path}: expected a script that ends, got {got}")
    for script in around.scripts.values():
        if (at := script.blocks.open_array) >= 0:
            name = re.split(r"\W+", script.text[:at].rstrip("+="))[-1]
            raise ConfigError(
                f"{around.place(script.path, script.number(at))}: expected ) at the end of the array "
                f"{cut(around.shown(name))}, got the end of the script: add it"
            )
    notes: tuple[str, ...] = ()
    if end := around.end_of(run):
        where = f"{around.place(end[0].path, end[1])}{around.how_it_ends(run)}"
        what = "pass what it asks for, as variables with --env NAME or as flags after --"
        notes = (f"it ends at {where}: {what}",)
    return Launch(path, notes=notes)


def _array(text: str) -> tuple[str, list[str]]:
    """Returns the name and words of the array that a command sets. Both are empty for other commands."""
    match = ARRAY.fullmatch(text)
    try:
        return (match[1], shlex.split(match[2])) if match else ("", [])
    except ValueError:
        return "", []


def _forbid_lost_arrays(around: Surroundings, run: Run) -> None:
    for line in run.lines:
        if line.words[:1] and line.words[0].startswith("--"):
            written = around.statement_of(line).split()
            shown = cut(written[0] if written else around.shown(line.words[0]))
            place = around.place(line.file, line.number)
            raise ConfigError(
                f"{place}: expected the launch to go on, got {shown} as a new command: the line before it "
                "lacks the backslash at its end"
            )


def _forbid_unused_arrays(script_run: ScriptRun) -> None:
    """Raises ConfigError if the launch lacks an array with flags that decide whether slime_ext runs."""
    around, decisive = script_run.around, {flag_of(name) for name in DECISIVE}
    for line in script_run.run.lines:
        name, words = _array(line.text)
        acts = decisive & {word.partition("=")[0] for word in words}
        if acts and (got := _misused(name, words, acts, script_run)):
            name = around.shown(name)
            right = f'"${{{name}[@]}}"'
            raise ConfigError(
                f"{around.path}: {name}: expected {right} in the launch, got {got}: its flags do not reach it"
            )


def _forbid_joined_words(around: Surroundings, words: Sequence[str]) -> None:
    """Raises ConfigError for a word that begins with a flag and holds more words.

    A host's parser takes it as a value or as a flag that it does not know, and ignores it. Behind a flag that
    waits for its value such a word can be a text, unless it begins with a flag that is read here.
    """
    for before, word in pairwise(["", *words]):
        waits = before.startswith("--") and "=" not in before and before not in SWITCHES
        text = _without_added(word, around)
        if (match := JOINED.fullmatch(text)) and (not waits or {match[1], match[3]} & KNOWN):
            name, space = match[1] or match[3], match[2] or text[0]
            what = "remove the quotes around them"
            if space not in " \t\n":
                what = f"write a plain space for U+{ord(space):04X}"
            raise ConfigError(
                f"{around.where(name)}: expected {cut(around.shown(name))} and what follows it as two words, "
                f"got one, which the host ignores: {what}"
            )
        if (match := GLUED.fullmatch(text.partition("=")[0])) and {match[1], match[2]} & KNOWN:
            first, second = (cut(around.shown(name)) for name in match.groups())
            raise ConfigError(
                f"{around.where(match[0])}: expected a space between {first} and {second}, got none: add it"
            )


def _without_added(word: str, around: Surroundings) -> str:
    """Returns a word without the tokens that ``doubts`` adds to a text, with a space before each."""

    def kept(match: re.Match[str]) -> str:
        return "" if any(unknown.is_words for unknown in around.meant(match[1])) else match[0]

    return re.sub(rf" ({TOKEN.pattern})", kept, word)


def _misused(name: str, words: Sequence[str], flags: Collection[str], script_run: ScriptRun) -> str:
    """Returns how a script names an array instead of ``"${NAME[@]}"``; empty if it is correct.

    ``NAME`` without the dollar is only a word. ``"${NAME[*]}"`` is all words as one, ``$NAME`` is the first
    word alone. ``none`` means that nothing names the array.
    """
    text, launched = script_run.around.text, script_run.started.words if script_run.started else ()
    left = re.compile(rf"\{{?{name}(\[[@*]\])?\}}?")
    if word := next((word for word in launched if left.fullmatch(word)), ""):
        return word
    if len(words) > 1 and " ".join(words) in launched:
        return f'"${{{name}[*]}}"'
    if not re.search(rf"(?<!\w){name}(?!\w|\+?=)", text):
        return "none"
    first = re.search(rf"\${name}(?!\w)(\[[@*]\])?|\$\{{{name}\}}", text)
    launched_flags = {word.partition("=")[0] for word in launched}
    is_whole = re.search(rf"\$\{{{name}\[[@*]\]", text) or flags <= launched_flags
    return first[0] if first and not is_whole else ""
