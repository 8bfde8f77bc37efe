"""Runs a script in the sandbox and reads its ``Launch``."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import pairwise

from slime_ext.errors import ConfigError, cut
from slime_ext.hosts.contract import flag_of
from slime_ext.hosts.flags import DASH, DECISIVE
from slime_ext.tools.launch.edits import edits
from slime_ext.tools.launch.launch import READ, SWITCHES, Launch, Unread, WrittenFlag
from slime_ext.tools.launch.sandbox import Sandbox
from slime_ext.tools.launch.starts import Started, started
from slime_ext.tools.launch.surroundings import CONFIG_FLAG, Request, Surroundings, unknown_here
from slime_ext.tools.launch.trace import UNKNOWN, Guess, Run, at, split

# The guesses in their order -> the note for the user if the earlier guesses led to no launch.
GUESSES = {
    Guess(): "",
    Guess(outcomes=0): "read as if every test of the machine succeeded",
    Guess(outcomes=1): "read as if every test of the machine failed",
    Guess(fails=True): "read as if every command with an unknown answer failed",
    Guess(
        fails=True, outcomes=0
    ): "read as if every command with an unknown answer failed, and every test of the machine succeeded",
    Guess(fails=True, outcomes=1): "read as if every command with an unknown answer and every test of the "
    "machine failed",
}
MOST_GUESSES = 300
# Python's white space, and the letters that look like nothing or like a space.
SPACE = r"[\s\u180e\u200b-\u200d\u2060\ufeff]"
# A flag and what follows it in one word: "--lr 1e-6", or " --lr" after a space that bash keeps.
JOINED = re.compile(rf"{SPACE}*(--[A-Za-z][\w-]*)({SPACE}).*|{SPACE}+(--[A-Za-z][\w-]*)", re.DOTALL)
# Two flags in one word: --use-tis--tis-clip
GLUED = re.compile(r"(--[A-Za-z][\w-]*?)(--[A-Za-z][\w-]*)")
# The sandbox at a limit of its own: resource limit exceeded: maximum loop iterations (5000)
OF_A_LIMIT = re.compile(r"resource limit exceeded: [\w \t():/-]*|execution \w+")
# An assignment of an array, as bash traces it: declare -a ARGS+=(--lr 1e-6)
ARRAY = re.compile(r"(?:\w+ (?:-\w+ )?)?(\w+)\+?=\((.*)\)", re.DOTALL)


@dataclass(frozen=True)
class ScriptRun:
    """The run of a script that reaches its launch; the first run if none does.

    Args:
        around: the surroundings that the script found.
        run: the trace of the run, and the programs that the script would start.
        started: the last launch of the run; None if it starts none.
        unknown: flag -> why it is unknown. A variable of the environment has a dollar before its name.
        others: why flags can be there that no run has; empty if none can.
        is_read_among_others: whether flags of ``READ`` can be among them.
        notes, edits: as in ``Launch``.
    """

    around: Surroundings
    run: Run
    started: Started | None = None
    unknown: Mapping[str, str] = field(default_factory=dict)
    others: str = ""
    is_read_among_others: bool = False
    notes: tuple[str, ...] = ()
    edits: tuple[str, ...] = ()

    def launch(self, path: str) -> Launch:
        """Returns the launch. Raises ValueError without a launch."""
        if self.started is None:
            raise ValueError("expected a launch, got none")
        around, started = self.around, self.started
        flags = [_quoted(flag, around) for flag in written(started.words, around, around.where)[0]]
        counting = {flag.name: flag for flag in flags}

        # Why a flag is unknown: runs differ, its value has an unread word, or it can be among the others.
        unknown = {name: why for name, why in self.unknown.items() if name.startswith("--")}
        for name, flag in counting.items():
            if _is_unread(flag):
                unknown.setdefault(name, f"{flag.where}: {flag} is known only where the script runs")
        if self.is_read_among_others:
            unknown |= dict.fromkeys(sorted(READ - counting.keys() - unknown.keys()), self.others)

        # Messages show a folder of a variable or of another file by the text that names it.
        inside = around.inside(started.folder)
        is_written = not around.has_seen or started.folder == around.folder or around.writes(inside)
        folder: str | None = Unread(around.quoted(inside)) if UNKNOWN.search(inside) else inside
        return Launch(
            path,
            started.program,
            flags=tuple(flags),
            environment={
                name: around.spelled(text)
                for name, text in started.environment.items()
                if f"${name}" not in self.unknown
            },
            unknown=unknown,
            others=self.others,
            edits=self.edits,
            folder=None if started.folder == around.folder else folder,
            folder_instead="" if is_written else "the folder that the script changes to",
            notes=(*self.notes, *_repeated(flags, unknown)),
            files={
                name: Unread(around.spelled(text)) if UNKNOWN.search(text) else text
                for name, text in started.files.items()
            },
            text=around.text,
            root=around.request.root,
            own_folder=around.request.own_folder,
        )


def _repeated(flags: Sequence[WrittenFlag], unknown: Mapping[str, str]) -> Iterator[str]:
    """Yields a note for each flag of ``READ`` that a launch sets to two values."""
    for name in sorted(READ - unknown.keys()):
        same = [flag for flag in flags if flag.name == name and not _is_unread(flag)]
        if other := next((flag for flag in same if flag.values != same[-1].values), None):
            yield f"{same[-1].where}: {same[-1]} counts, because it comes after {other} in {other.where}"


def _is_unread(flag: WrittenFlag) -> bool:
    return any(isinstance(word, Unread) for word in flag.values)


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
    return script_run.launch(request.path)


def followed(request: Request) -> ScriptRun:
    """Tries guesses about a script's machine until the script starts a launch, then compares other guesses.

    Raises:
        ConfigError: as ``script_text``.
    """
    around = Surroundings(request)
    sandbox = Sandbox(around, request.arguments)
    tried: list[Run] = []
    for guess in GUESSES:
        run = sandbox.run(guess, lambda run: bool(started(run)))
        tried.append(run)
        if launches := started(run):
            break
    else:
        return ScriptRun(around, tried[0])
    notes = (*around.notes, *_notes(around, tried[0], guess, launches))

    # A comparison can show files that change earlier runs, so it is repeated until it shows none.
    while True:
        reach = around.reach()
        runs: list[Run] = []
        unknown, others, is_read_among_others = _compared(sandbox, guess, runs)
        if around.reach() == reach:
            break
    run = sandbox.run(guess)
    start = (started(run) or launches)[-1]
    notes = (*notes, *_after_failure(sandbox, guess, run))

    # The commands that may change the file of --custom-config-path.
    changes: list[str] = []
    flags = (flag for flag in reversed(written(start.words, around, str)[0]) if flag.name == CONFIG_FLAG)
    if (flag := next(flags, None)) and flag.values and not isinstance(flag.values[0], Unread):
        path = at(start.folder, flag.values[0])
        changes = edits(around, runs, path, around.on_disk(path))
    return ScriptRun(around, run, start, unknown, others, is_read_among_others, notes, tuple(changes))


def _notes(around: Surroundings, first: Run, guess: Guess, launches: Sequence[Started]) -> Iterator[str]:
    """Yields what to know of the run that is read: the guess behind it, other launches, missing variables.

    Args:
        first: the run under the first guess.
        guess: the guess that reached the launches.
    """
    if note := GUESSES[guess]:
        if first.error and first.lines:  # the sandbox ends a run that waits for the machine
            here = f"{around.place_of(first.lines[-1])}: the script can stay in a loop here"
        else:
            end = around.end_of(first)
            place = around.place(end[0].path, end[1]) if end else around.named(around.path)
            here = f"{place}: the script can end here{around.how_it_ends(first)}"
        yield f"{here}, before a launch; {note}"
    read = launches[-1]
    if other := next((each for each in reversed(launches) if not each.is_same(read)), None):
        last, place = _place_of(read, around), _place_of(other, around)
        if place == last:
            yield f"{place}: the script starts several launches here; the last one is read"
        else:
            yield f"{last}: this launch is read; the script starts another launch at {place}"
    for name, (place, how) in around.needs.items():
        yield f"{place}: nothing here sets ${name}, and without it the script ends{how}"


def _place_of(start: Started, around: Surroundings) -> str:
    return around.place_of(start.line) if start.line else around.named(around.path)


def _after_failure(sandbox: Sandbox, guess: Guess, run: Run) -> Iterator[str]:
    """Yields a note for each place of a launch that the script starts only if another launch fails.

    Args:
        guess, run: the run that is read.
    """
    guess = guess._replace(breaks=True)
    if {*sandbox.once(guess).lines} <= {*run.lines}:
        return
    around = deepcopy(sandbox.around)  # what this run shows says nothing about the launch that is read
    try:
        launches = started(Sandbox(around, sandbox.arguments).run(guess))
    except ConfigError as error:
        yield f"{error}; the script reads this only if a launch fails"
        return
    others = [each for each in launches if not any(map(each.is_same, started(run)))]
    for place in dict.fromkeys(_place_of(each, around) for each in others):
        yield f"{place}: the script starts another launch here if one fails; it is not read"


def _compared(sandbox: Sandbox, reference: Guess, runs: list[Run]) -> tuple[dict[str, str], str, bool]:
    """Runs a script under each guess, and returns what differs, as in ``ScriptRun``.

    Args:
        runs: gets the runs that reach a launch.

    Returns:
        ``unknown``, ``others`` and ``is_read_among_others``.
    """
    around, unknown = sandbox.around, dict[str, str]()
    usual: dict[str, tuple[str, ...]] | None = None
    of_anything, of_model = list[str](), list[str]()  # why flags of any kind, or of a model, can be there
    seen = list[tuple[Sequence[str], Mapping[str, str]]]()
    for why, launch in _launches(sandbox, reference, runs):
        if launch is None:
            of_anything.append(why)
            break
        if (what := (launch.words, launch.environment)) in seen:
            continue
        seen.append(what)
        flags, gaps = written(launch.words, around, around.where)
        values = {flag.name: flag.values for flag in flags}
        values |= {f"${name}": (text,) for name, text in launch.environment.items()}
        if usual is None:
            usual = values
        differing = (name for name in (usual | values) if values.get(name) != usual.get(name))
        unknown = dict.fromkeys(differing, why) | unknown

        # A flag in a gap can be a second one of a name, so the names before the gap are unknown.
        places = {flag.name: i for i, flag in enumerate(flags, 1)}
        for count, is_of_model, text in gaps:
            (of_model if is_of_model else of_anything).append(text)
            before = (name for name, i in places.items() if i <= count and not (is_of_model and name in READ))
            unknown = dict.fromkeys(before, text) | unknown
    of_anything += around.unasked
    others = next(iter([*of_anything, *of_model]), "")
    return around.alternatives | unknown, others, bool(of_anything)


def _launches(sandbox: Sandbox, reference: Guess, runs: list[Run]) -> Iterator[tuple[str, Started | None]]:
    """Yields the launch under each guess, and why it is unknown whether the guess is right.

    A run can show more to ask. Under some guesses the script ends before a launch. After too many guesses,
    yields None and ends.
    """
    tried: set[Guess] = set()
    while left := next((pair for pair in _guesses(sandbox.around, reference) if pair[0] not in tried), None):
        guess, why = left
        if len(tried) >= MOST_GUESSES:
            here = sandbox.around.named(sandbox.around.path)
            yield f"{here}: more depends on the machine than the {MOST_GUESSES} guesses that were tried", None
            return
        tried.add(guess)
        run = sandbox.once(guess) if guess.is_wide else sandbox.run(guess)
        if launches := started(run):
            runs += [] if guess.is_wide else [run]
            yield why, launches[-1].narrow if guess.is_wide else launches[-1]


def _guesses(around: Surroundings, reference: Guess) -> Iterator[tuple[Guess, str]]:
    """Yields the guesses to compare, each with why its outcome is unknown. The first is the reference."""
    yield reference, ""
    bases = dict.fromkeys((reference, *(guess._replace(fails=reference.fails) for guess in GUESSES)))
    for base in bases:
        for key, (count, why) in around.asked().items():
            for outcome in range(count):
                yield base._replace(asked=key, outcome=outcome), why
        for command, why in around.waits.items():
            yield base._replace(asked=command), why
    for command, why in around.answers.items():
        yield reference._replace(asked=command), why
    here = around.named(around.path)
    for guess in GUESSES:
        yield guess, unknown_here(here, "what it asks the machine")
    for words in (0, 3):
        yield reference._replace(words=words), unknown_here(here, "what it asks the machine")
    yield reference._replace(is_wide=True), unknown_here(here, "a word that is cut out of unknown words")


def _quoted(flag: WrittenFlag, around: Surroundings) -> WrittenFlag:
    """Returns a flag that messages show without the words that come only from a variable or another file."""
    if not around.has_seen or not flag.values or around.writes(" ".join([flag.name, *flag.values])):
        return flag
    return replace(flag, instead=around.source_of(flag.name) or f"what {flag.where} says")


def written(
    words: Sequence[str], around: Surroundings, where: Callable[[str], str]
) -> tuple[list[WrittenFlag], list[tuple[int, bool, str]]]:
    """Splits words into flags with their places, and gaps in which unknown flags can be.

    An unknown word after a flag without a value is that flag's value. Anywhere else it can be any flags.

    Args:
        where: maps a flag or an unknown word to its ``file:line``.

    Returns:
        The flags; and for each gap the number of flags before it, whether only a model's arguments can be in
        it, and why it is unknown.
    """
    flags: list[WrittenFlag] = []
    gaps: list[tuple[int, bool, str]] = []
    for word in words:
        meant = around.meant(word)
        text = Unread(around.quoted(word)) if UNKNOWN.search(word) else word
        waits = bool(flags) and not flags[-1].values and flags[-1].name not in SWITCHES
        is_value = waits and not any(unknown.is_words for unknown in meant)
        can_be_flags = not all(unknown.is_word and not unknown.is_words for unknown in meant)
        if word.startswith("--") and len(word) > 2:
            name, has_value, value = text.partition("=")
            flags.append(WrittenFlag(name, (type(text)(value),) if has_value else (), where(name)))
        elif meant and can_be_flags and not is_value:
            why = unknown_here(meant[0].where or where(text), text)
            gaps.append((len(flags), all(unknown.is_of_model for unknown in meant), why))
        elif flags and (not meant or is_value):
            flags[-1] = replace(flags[-1], values=(*flags[-1].values, text))
    return flags, gaps


def _without_launch(path: str, around: Surroundings, run: Run) -> Launch:
    if run.error:
        limit = OF_A_LIMIT.match(run.error)
        got = f"none: {cut(limit[0])}" if limit else "an error in the sandbox"
        raise ConfigError(f"{path}: expected a script that ends, got {got}")
    for script in around.scripts.values():
        if match := script.open_array:
            raise ConfigError(
                f"{around.place(script.path, script.number(match.start(1)))}: expected ) at the end of the "
                f"array {cut(around.quoted(match[1]))}, got the end of the script: add it"
            )
    notes: tuple[str, ...] = ()
    if end := around.end_of(run):
        where = f"{around.place(end[0].path, end[1])}{around.how_it_ends(run)}"
        what = "pass what it asks for, as variables with --env NAME or as flags after --"
        notes = (f"it ends at {where}: {what}",)
    return Launch(path, notes=notes)


def _forbid_lost_arrays(around: Surroundings, run: Run) -> None:
    for line in run.lines:
        if line.words[:1] and line.words[0].startswith("--"):
            written = around.statement_of(line).split()
            command = cut(written[0] if written else around.quoted(line.words[0]))
            place = around.place(line.file, line.number)
            script = around.scripts.get(around.paths.get(line.file, line.file))
            before = script.text.split("\n")[: line.number - 1][-1:] if script else ["\\"]
            raise ConfigError(
                f"{place}: expected the launch to go on, got {command} as a new command: the line before it "
                f"{_why_it_ends(''.join(before))}"
            )


def _why_it_ends(line: str) -> str:
    """Returns what is wrong with the end of a line that the next line should continue."""
    if not line.strip():
        return "is empty: remove it"
    if re.search(r"(?:^|\s)#", line):
        return "ends in a comment, and no backslash continues it: move the comment out of the launch"
    if re.search(r"\\\s+$", line):
        return "has a space behind its backslash: remove the space"
    return "lacks the backslash at its end"


def _forbid_unused_arrays(script_run: ScriptRun) -> None:
    """Raises ConfigError if the launch lacks an array with flags that decide whether slime_ext runs."""
    around, decisive = script_run.around, {flag_of(name) for name in DECISIVE}
    for line in script_run.run.lines:
        if not (match := ARRAY.fullmatch(line.text)):
            continue
        name, words = match[1], split(match[2])
        acts = decisive & {word.partition("=")[0] for word in words}
        if acts and (got := _misused(name, words, acts, script_run)):
            name = around.quoted(name)
            right = f'"${{{name}[@]}}"'
            raise ConfigError(
                f"{around.path}: {name}: expected {right} in the launch, got {got}: its flags do not reach it"
            )


def _forbid_joined_words(around: Surroundings, words: Sequence[str]) -> None:
    """Raises ConfigError for a word that begins with a flag and holds more words, or has other dashes.

    A host's parser takes it as a value or as a flag that it does not know, and ignores it. Behind a flag that
    waits for its value such a word can be a text, unless it begins with a flag that is read here.
    """
    for before, word in pairwise(["", *words]):
        waits = before.startswith("--") and "=" not in before and before not in SWITCHES
        if (match := JOINED.fullmatch(word)) and (not waits or {match[1], match[3]} & READ):
            name, space = match[1] or match[3], match[2] or word[0]
            what = "remove the quotes around them"
            if space not in " \t\n":
                what = f"write a plain space for U+{ord(space):04X}"
            raise ConfigError(
                f"{around.where(name)}: expected {cut(around.quoted(name))} and what follows it as two "
                f"words, got one, which the host ignores: {what}"
            )
        name = word.partition("=")[0]
        if (right := "--" + DASH.sub("-", name).lstrip("-")) in READ and DASH.match(name) and name != right:
            got = f"{cut(around.quoted(name))}, which the host ignores"
            raise ConfigError(f"{around.where(name)}: expected {right}, got {got}: write two hyphens")
        if (match := GLUED.fullmatch(word.partition("=")[0])) and {match[1], match[2]} & READ:
            first, second = (cut(around.quoted(name)) for name in match.groups())
            raise ConfigError(
                f"{around.where(match[0])}: expected a space between {first} and {second}, got none: add it"
            )


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
    is_whole = re.search(rf"\$\{{{name}\[[@*]\]", text) or launched_flags.issuperset(flags)
    return first[0] if first and not is_whole else ""
