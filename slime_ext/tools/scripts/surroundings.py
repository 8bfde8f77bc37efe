"""What a script finds around it: its own files from this disk, stand-ins for what only the cluster has.

Each run shows what the script looks for (a sourced file, a folder, a variable, a command); what is not here
is put there for the next run, as a token or as an empty folder. Behind a part of the script that runs, or
not, as the machine decides, tokens are put into it (see ``doubts``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, takewhile
from pathlib import Path
from typing import Any, NamedTuple

from slime_ext.errors import ConfigError, cut
from slime_ext.tools.scripts import doubts
from slime_ext.tools.scripts.blocks import Block
from slime_ext.tools.scripts.doubts import COMMENT, FLAG, PROGRAM, Script
from slime_ext.tools.scripts.launch import Gap
from slime_ext.tools.scripts.trace import (
    BEGIN,
    COMPLAINT,
    END,
    PS4,
    SHELLS,
    TOKEN,
    UNKNOWN,
    Guess,
    Line,
    Run,
)
from slime_ext.tools.scripts.visible import Visible, script_text

# bash's own words, and programs of bashkit that only turn text into text or write to its memory
OWN = frozenset(
    "if then elif else fi for do done while until case esac in function select time { } ! [ [[ test : . true "
    "false alias bg break builtin caller cd continue declare dirs disown echo enable eval exec exit export "
    "fg getopts let local logout mapfile popd printf pushd pwd read readarray readonly return set shift "
    "shopt source suspend times trap typeset ulimit umask unalias unset wait basename dirname env nohup "
    "bash sh mkdir touch".split()
)
TEXT_TOOLS = frozenset(
    "awk bc cat comm cut egrep expr fgrep fold grep head join jq nl paste realpath rev sed seq sort tac tail "
    "tr uniq wc".split()
)
PWD = "$(pwd)"
OTHERS = {*SHELLS, *TEXT_TOOLS, "command", "type", "hash", "kill", "tee", "which"} - OWN
NO_SETTINGS = re.compile(
    r"/dev/null|(.*/)?(activate|conda\.sh|\.?bashrc|\.?(bash_)?profile|\.?zshrc|setvars\.sh|set_env\.sh)"
)
LOOKS = re.compile(r"(?:cd|source|\.|bash|sh|'?\[\[?'?|test|\S*/\S*)(?:\s|$)")  # what looks for a file
TESTS = ("[", "[[", "test", "((", ":")
TEST_OF_FILE = re.compile(r"(?<!\S)-([bcdefghkLprsSuwxO]) +('[^']*'|[^\s'\])]+)")
DECIDES = re.compile(r"(?<!\S)(\[\[?|case|test|for|while|until|if|elif|\(\()(?!\S)|&&|\|\|")
NAMES = re.compile(r"\$([A-Za-z]\w*)|\$\{([A-Za-z]\w*)\}|(?<![\w$])([A-Za-z_]\w*)")
OF_BASH = re.compile(  # what bash answers otherwise in each run, or on each machine
    r"\$\{(?:{0})\}|\$?\b(?:{0})\b|\$\$(?![\w({])".replace(
        "{0}",
        "S?RANDOM|SECONDS|UID|EUID|PPID|BASHPID|EPOCHSECONDS|EPOCHREALTIME|OSTYPE|HOSTTYPE|MACHTYPE",
    )
)
ALWAYS = ("PATH", "HOME", "HOSTNAME", "USER", "SHELL")  # which bashkit would set
HIDDEN = "…"
TOKENS = re.compile(f"(?:{BEGIN}\\d+{END})+")
SAYS = re.compile(r"(?:echo|printf)\s+(?:-\w+\s+)*([\"'])(.*?)\1")
ALTERNATIVE = re.compile(r"\$\{(\w+):?\+([^}]*)\}")
UNKNOWN_VALUE = re.compile(rf"(?:\w+ )?(\w+)\+?=[^\n]*{UNKNOWN.pattern}")
REFERENCE = re.compile(r"\$\{?[!#]?([A-Za-z_]\w*)")


class Unknown(NamedTuple):
    """What a token stands for.

    Args:
        text: as the script writes it.
        where: ``file:line``; empty where the text is looked for.
        names: flags that it can be; None where it can be any.
        is_words: whether it stands for words among others, and not for one value.
    """

    text: str
    where: str = ""
    names: frozenset[str] | None = None
    is_words: bool = False

    @property
    def can_be_flags(self) -> bool:
        """Whether it can stand for words; a variable that nothing sets is nothing, as bash has it."""
        return self.is_words or self.names != frozenset()


@dataclass(frozen=True)
class Request:
    """What is to be read.

    Args:
        path: the script's.
        text: the script, if it is not what the file says.
        given: flags of the script's own, which a shell would have as ``$@``.
        roots: folders that the script may see, in which relative paths are looked for.
        checkout: the host's; a sourced ``/…/slime/FILE`` that is not here is read from it, with a note.
        variables: those of this process that the script may see.
        others: the names of those that it may not: what they hold is not known.
        is_bare: whether it sees nothing but itself, whatever is there.
    """

    path: str
    text: str | None = None
    given: tuple[str, ...] = ()
    roots: tuple[Path, ...] = ()
    checkout: Path | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    others: frozenset[str] = frozenset()
    is_bare: bool = False

    @property
    def bare(self) -> Request:
        """The same script where it sees nothing but itself."""
        others = self.others | self.variables.keys()
        return replace(self, roots=(), checkout=None, variables={}, others=others, is_bare=True)


class Surroundings:
    """Files, variables and commands of one script."""

    def __init__(self, request: Request) -> None:
        path, self.request = request.path, request
        self.path = str(Path(path).absolute())
        self.visible = Visible([*request.roots, *filter(None, [request.checkout])])
        self.files = {path: script_text(path)}  # by the name that messages use
        self.own_text = "\n".join([self.files[path], request.text or "", *request.given])
        self.paths = {self.path: self.path}  # name in the trace -> path
        self.scripts: dict[str, Script] = {}  # path -> what bash reads
        self.placed: dict[str, str] = {}  # path -> content, of all else
        self.names: set[str] = set(OTHERS)  # of commands
        self.tokens: dict[Unknown, int] = {}
        self.evaluated: dict[str, None] = {}  # unknown texts that were run: they can set any variable
        self.needs: dict[
            str, tuple[str, str]
        ] = {}  # variables without which the script ends -> where, and how
        self.tests: dict[str, str] = {}  # paths that are tested, and are not here -> the test's letter
        self.gaps: dict[Gap, None] = {}  # whatever stands at the launch
        self.notes: list[str] = []
        self._seen: set[Line] = set()
        self.folder = "/" + self.token(PWD)
        self._add(self.path, self.files[path] if request.text is None else request.text)

    def size(self) -> int:
        """Grows with everything that a run has shown."""
        put = sum(len(script.doubted) + len(script.put) for script in self.scripts.values())
        shown = (self.placed, self.scripts, self.files, self.names, self.needs, self.evaluated)
        put += len(self.tests) + len(self.gaps)
        return sum(map(len, shown)) + put

    def token(self, *unknown: Any) -> str:
        """A word that stands for what only the cluster knows; the arguments are those of ``Unknown``."""
        return f"{BEGIN}{self.tokens.setdefault(Unknown(*unknown), len(self.tokens))}{END}"

    def meant(self, word: str) -> list[Unknown]:
        """What a word stands for that is made of tokens alone; nothing for another."""
        known = list(self.tokens)
        numbers = [int(number) for number in TOKEN.findall(word)] if TOKENS.fullmatch(word) else []
        return [known[number] for number in numbers if number < len(known)]

    @property
    def has_seen(self) -> bool:
        """Whether it has seen more than the script itself."""
        return bool(self.request.variables) or len(self.files) > 1

    def shown(self, text: str) -> str:
        """A text as a message has it: without words that the script does not write itself."""
        return self.spelled(text, self._written)

    def spelled(self, text: str, how: Callable[[str], str] = str) -> str:
        """A text with its tokens as the script writes them.

        Args:
            how: what is made of the text between them.
        """
        parts, last, known = [], 0, list(self.tokens)
        for match in TOKEN.finditer(text := text.replace(self.folder, PWD)):
            number = int(match[1])
            parts += [how(text[last : match.start()]), known[number].text if number < len(known) else HIDDEN]
            last = match.end()
        return UNKNOWN.sub(HIDDEN, "".join([*parts, how(text[last:])]))

    def _written(self, text: str) -> str:
        """The words of a text that the script itself writes, or its folder's name."""
        folder, own = f"{Path(self.path).parent}/", f"{self.own_text} {PWD}"
        parts = re.split(r"(\s+)", text)
        return "".join(
            part if part.isspace() or part.removeprefix(folder) in own else HIDDEN for part in parts
        )

    def _of_file(self, path: str, text: str) -> str:
        """A part of a file: itself if the file is the script."""
        return text if path == self.path else f"a part of {self.named(path)}"

    def named(self, path: str) -> str:
        """A file's name, if it has nothing of a variable or another file that the script does not write."""
        name = Path(path).name
        if path == self.path or name in self.own_text:
            return name
        files = (text for file, text in self.files.items() if self.paths.get(file) not in (path, self.path))
        others = [*self.request.variables.values(), *files]
        words = (word for text in others for word in re.split(r"[\s\"'=(){};$]+", text))
        return HIDDEN if any(word in name and word not in self.own_text for word in words) else name

    def place(self, path: str, number: int) -> str:
        """``file:line``."""
        return f"{self.named(path)}:{number}"

    def where(self, name: str) -> str:
        """``file:line`` of the last mention of a flag or an unknown word outside comments."""
        name = name.partition(" (")[0].removeprefix("$(").removesuffix(")").lstrip("$")
        mention = re.compile(rf"(?<![\w-]){re.escape(name)}(?![\w-])")
        for path, text in self.files.items():
            lines = enumerate(text.splitlines(), 1)
            if found := [i for i, line in lines if mention.search(line.partition("#")[0])]:
                return self.place(path, found[-1])
        return self.named(self.path)

    # variables

    @property
    def text(self) -> str:
        """All files, without comments."""
        return COMMENT.sub(r"\1", "\n".join(self.files.values()))

    def environment(self) -> dict[str, str]:
        """The variables that the script may see, and tokens for those that it may not, and for those that it
        needs and nothing sets."""
        others = {name for name in (*self._referenced(), *ALWAYS) if name in (*self.request.others, *ALWAYS)}
        found = {name: self.token(f"${name}", "", frozenset()) for name in self._unset()}
        if self.evaluated:
            why = f"({next(iter(self.evaluated))} is not here)"
            found |= {name: self.token(f"${name} {why}") for name in self._referenced()}
        found |= {name: self.token(f"${name}") for name in sorted(others)}
        found |= {name: self.token(f"${name}") for name in self.needs}
        return found | dict(self.request.variables) | {"PS4": PS4}

    def _referenced(self) -> Iterable[str]:
        return dict.fromkeys(REFERENCE.findall(self.text))

    def _unset(self) -> list[str]:
        """Variables that nothing sets, so that the script expects them from its machine.

        One with a default (``${X:-1}``), in a test or at the head of a loop is as bash has it: unset.
        """
        plain: dict[str, bool] = {}
        for line in self.text.split("\n"):
            decides = DECIDES.search(line) is not None
            for match in NAMES.finditer(line):
                name = match[1] or match[2] or match[3]
                plain[name] = plain.get(name, True) and not decides and match[3] is None
        return [name for name, is_plain in plain.items() if is_plain]

    # files

    def contents(self, guess: Guess | None = None) -> dict[str, str]:
        """What is put there: path -> content."""
        found = {f"{self.folder}/.here": ""}
        for path, letter in self.tests.items() if guess and guess.is_there else ():
            content = "" if letter == "d" else self.token(f"$(< {self.shown(path)})")
            found[f"{path}/.here" if letter == "d" else path] = content
        return found | self.placed | {path: script.prepared for path, script in self.scripts.items()}

    def learn(self, run: Run) -> None:
        """Puts there what a run looked for in vain, and tokens behind what the machine decided in it."""
        for line in run.lines:
            self._read(line)
            if LOOKS.match(line.text) and line not in self._seen:
                self._seen.add(line)
                self._look(line, line.words or [""])
        for line in run.lines:
            self._decided(run, line)
        self._alternatives(run)
        for match in COMPLAINT.finditer(run.trace):
            path, number = self.paths.get(match[1], match[1]), int(match[2])
            if UNKNOWN.search(match[3]):
                self._unknown_sum(path, number)
            self._complaint(match[3], self.place(match[1], number), run.trace[: match.start()])

    def learn_from_end(self, run: Run) -> None:
        """Variables that a script asks for before it ends without a launch."""
        if not (end := self.end_of(run)):
            return
        script, number = end
        heads = [script.head(block) for block in script.around(number)]
        if (statement := script.statement(number)) is not None:
            heads.append(script.text[statement.begin : statement.end])
        if test := next((line for line in reversed(run.lines) if {*line.words[:1]} & {*TESTS}), None):
            script = self.scripts.get(self.paths.get(test.file, test.file), script)
            heads += [script.head(block) for block in script.around(test.number)]
        for name in (name for head in heads for name in REFERENCE.findall(head)):
            is_set = any(e.name == name and not e.adds for e in doubts.assignments(self.text))
            if not (is_set or name in self.request.variables or name.startswith("BASH")):
                self.needs.setdefault(name, (self.place(end[0].path, number), self.how_it_ends(run)))

    def end_of(self, run: Run) -> tuple[Script, int] | None:
        """The script and the line that ended a run: ``exit``, or a command that failed under ``set -e``."""
        if not run.lines:
            return None
        last = run.lines[-1]
        script = self.scripts.get(self.paths.get(last.file, last.file))
        fails = run.status != 0 and any(_is_errexit(line.words) for line in run.lines)
        ends = last.words[:1] == ["exit"] or fails
        return (script, last.number) if script and ends else None

    def how_it_ends(self, run: Run) -> str:
        """What the script says before it ends a run, or which command fails; as it writes them."""
        lines = [line for line in run.lines if line.file == self.path]
        if self.end_of(run) is None or run.lines[-1] not in lines[-1:]:
            return ""
        if lines[-1].words[:1] != ["exit"]:
            return f", where {self.statement_of(lines[-1]) or 'a command'} fails under set -e"
        says = [*takewhile(lambda line: {*line.words[:1]} & {"echo", "printf"}, lines[-2::-1])]
        quoted = SAYS.match(self.statement_of(says[-1])) if says else None
        return f', saying "{cut(quoted[2])}"' if quoted else ""

    def statement_of(self, line: Line) -> str:
        """The statement of a command, in one line as the script writes it; empty of another file's."""
        if line.file != self.path:
            return ""
        script = self.scripts[self.path]
        found = script.statement(line.number, line.words[0] if line.words else "")
        return " ".join(script.text[found.begin : found.end].split()) if found else ""

    def _look(self, line: Line, words: list[str]) -> None:
        name, last = words[0], words[-1]
        if name in ("source", ".") and words[1:]:
            self._source(line, words[1])
        elif name == "cd" and words[1:] and last[0:1] != "-":
            self.placed.setdefault(f"{at(line.folder, last)}/.here", "")
        elif name in ("bash", "sh"):
            self._copied(line.folder, next((word for word in words[1:] if word[:1] != "-"), ""))
        elif name in TESTS:
            for letter, path in self._tested(line):
                self._test(letter, path)
        elif "/" in name and "=" not in name:
            self.names.add(name)
            self._copied(line.folder, name)

    def _test(self, letter: str, path: str) -> None:
        """Puts there what a script tests and may see."""
        if path in self.placed or path in self.scripts or f"{path}/.here" in self.placed:
            return
        if self.visible.is_folder(path):
            self.placed[f"{path}/.here"] = ""
        elif self.visible.is_file(path):
            self.placed[path] = self.token(f"$(< {self.shown(path)})")
        else:
            self.tests.setdefault(path, letter)

    def _read(self, line: Line) -> None:
        """Learns from a file that the trace names."""
        if line.file and line.file not in self.paths:
            path = at(line.folder, line.file)
            text = self.placed.pop(path, "")
            self.files[line.file], self.paths[line.file] = text, path
            self._add(path, text)

    def _add(self, path: str, text: str) -> None:
        self.scripts[path] = Script(path, self._for_bashkit(path, text))
        words = re.split(r"[\s\"'$;|&()<>{}=`\\]+", COMMENT.sub("", text))
        names = {word for word in words if re.fullmatch(r"[A-Za-z_./][\w.+/-]*", word)}
        self.names |= names - OWN - {".."}

    def _for_bashkit(self, path: str, text: str) -> str:
        """A script without what bashkit 0.20 reads otherwise than bash, or answers itself.

        It joins the words of ``"${A[@]/x/y}"`` and keeps those of an empty ``"${!array}"``: they become
        tokens. Quotes in ``${X:-$(f "y")}`` are letters to it: they go.
        """
        arrays = "|".join(re.findall(r"(?<!\w)(\w+)=[\"']?\w+\[@\]", text)) or "(?!)"
        unread = rf'"\$\{{\w+\[@\]/[^}}"]*\}}"|"\$\{{!(?:{arrays})\}}"'
        text = re.sub(unread, lambda match: self.token(self._of_file(path, match[0])), text)
        text = OF_BASH.sub(lambda match: self.token(match[0]), text)
        text = re.sub(r"(?<![\w-])(command -[vV]|type -[pPt])(?=\s)", "which", text)
        text = re.sub(r"(?<![\w-])set \+x(?!\w)|(?<!\w)PS4=", ": ", text)  # what ends the trace
        for match in reversed(list(re.finditer(r"\$\{\w+:?[-=+]", text))):
            end = _closing(text, match.start() + 1)
            said = text[match.end() : end]
            if "$(" in said and '"' in said:
                needs_them = re.search(r"['\\]|echo|printf", said)
                plain = self.token(self._of_file(path, said)) if needs_them else said.replace('"', "")
                text = text[: match.end()] + plain + text[end:]
        return text

    def _source(self, line: Line, name: str) -> None:
        path = at(line.folder, name)
        if path in self.placed or path in self.scripts or self._copied(line.folder, name):
            return
        self.placed[path] = ""
        if NO_SETTINGS.fullmatch(name):
            return
        if found := self._in_checkout(name):
            self.placed[path] = script_text(str(found))
            said = self._said(line, name)
            place = self.place(line.file, line.number)
            self.notes.append(f"{place}: {said} is not here; {found} is read in its place")
            return
        why = f"source {self._said(line, name)}{'' if self.request.is_bare else ' is not here'}"
        self.placed[path] = "\n".join(self._sets_anything(why))

    def _said(self, line: Line, name: str) -> str:
        """The name of a file as the script writes it in ``source NAME``."""
        script = self.scripts.get(self.paths.get(line.file, line.file))
        statement = script.statement(line.number) if script and script.path == self.path else None
        words = script.text[statement.begin : statement.end].split() if script and statement else []
        is_alone = len(words) == 2 and words[0] in ("source", ".")
        return words[1].strip("\"'") if is_alone else self.shown(name)

    def _sets_anything(self, why: str) -> Iterator[str]:
        """Commands that set what nothing has set before."""
        for name in self._referenced():
            is_array = re.search(rf"\{{{name}\[[@*]\]", self.text) is not None
            yield f": ${{{name}={self.token(f'${name} ({why})', '', None, is_array)}}}"

    def _in_checkout(self, name: str) -> Path | None:
        """A script of the host's checkout in place of one that the script has in its container."""
        parts, checkout = Path(name).parts, self.request.checkout
        at = next((i for i in range(len(parts), 0, -1) if parts[i - 1] in ("slime", "miles")), 0)
        found = checkout.joinpath(*parts[at:]) if checkout and at else None
        return found if found is not None and self.visible.script(found) is not None else None

    def _copied(self, folder: str, name: str) -> bool:
        """Whether a file is a script that may be seen; named from the folder in which the script begins it
        lies in one of the roots."""
        path = at(folder, name)
        inside = path.removeprefix(self.folder + "/")
        places = [Path(path)] if inside == path else [root / inside for root in self.request.roots]
        try:
            text = next((text for place in places if (text := self.visible.script(place)) is not None), None)
        except ConfigError:
            if self.named(path) != HIDDEN:
                raise
            raise ConfigError(f"{self.path}: expected a sourced file that is a script, got another") from None
        if text is not None and path not in self.scripts:
            self.placed.setdefault(path, text)
        return text is not None

    def _tested(self, line: Line) -> Iterator[tuple[str, str]]:
        """Letter and path of the tests of files in a command."""
        for letter, name in TEST_OF_FILE.findall(line.text):
            if name.strip("'"):
                yield letter, at(line.folder, name.strip("'"))

    # what the machine decides

    def _decided(self, run: Run, line: Line) -> None:
        """Doubts the parts over which a command decides whose answer is not known."""
        script, words = self.scripts.get(self.paths.get(line.file, line.file)), line.words
        first = words[0] if words else line.text.partition(" ")[0]
        tests = first in TESTS and (UNKNOWN.search(line.text) or self._is_tested(run, line))
        if not tests and " ".join(words) not in run.unknown:
            return
        if script is not None:
            for block in script.decided(line.number, first):
                self._doubt(script, block)
            place = self.place(script.path, line.number)
            self._put_in_place(script, script.in_documents(line.number), place)
        elif tests and first != ":":  # in a text that a program passes to a shell
            self.gaps.setdefault(Gap(0, self.shown(line.text), self.named(self.path)))

    def _alternatives(self, run: Run) -> None:
        """Doubts the flags of ``${X:+--flag}`` where it is not known whether X is empty."""
        variables = {name for name, text in self.environment().items() if UNKNOWN.search(text)}
        variables |= {match[1] for line in run.lines if (match := UNKNOWN_VALUE.match(line.text))}
        for script in self.scripts.values():
            for match in ALTERNATIVE.finditer(script.text):
                if match[1] in variables and (flags := frozenset(FLAG.findall(match[2]))):
                    place = self.place(script.path, script.number(match.start()))
                    text = self._of_file(script.path, self.spelled(match[0]))
                    self.gaps.setdefault(Gap(0, text, place, flags))

    def _is_tested(self, run: Run, line: Line) -> bool:
        return any(path in self.tests and path not in run.made for _, path in self._tested(line))

    def _unknown_sum(self, path: str, number: int) -> None:
        """Puts tokens in place of the sums of a line in which bash finds one of them, or doubts its
        statement."""
        script = self.scripts.get(path)
        if script is None or number > len(script.starts):
            return
        place = self.place(path, number)
        if not self._put_in_place(script, script.sums(number), place):
            for block in [*script.decided(number, "(("), *filter(None, [script.statement(number)])]:
                self._doubt(script, block)

    def _put_in_place(self, script: Script, spans: Iterable[tuple[int, int]], place: str) -> bool:
        token = lambda text: self.token(self._of_file(script.path, self.spelled(text)), place)  # noqa: E731
        return script.put_in_place(spans, token)

    def _doubt(self, script: Script, block: Block) -> None:
        """Puts tokens behind a part that runs, or not, as the machine decides."""
        if block.begin in script.doubted:
            return
        script.doubted.add(block.begin)
        script.end_loop(block)
        head = self._of_file(script.path, self.spelled(script.head(block)))
        place = self.place(script.path, script.begins(block))
        bodies = {name: text for each in self.scripts.values() for name, text in each.bodies.items()}
        text = doubts.part(script.text[block.begin : block.end], bodies)
        launches = len(PROGRAM.findall(text))
        if launches == 1 and not PROGRAM.search(doubts.part(script.text[block.end :], {})):
            return  # without it nothing would be launched
        if launches:
            self.gaps[Gap(0, head, place, frozenset(FLAG.findall(text)))] = None
        sets = sorted(doubts.assignments(text), key=lambda each: each.name)
        all_of_it = [each for other in self.scripts.values() for each in doubts.assignments(other.text)]
        for own in (list(group) for _, group in groupby(sets, key=lambda each: each.name)):
            if any(map(doubts.is_added, own)):
                token = self.token(head, place, doubts.names_of(own, all_of_it, text), True)
            else:
                token = self.token(f"${own[0].name} ({head})", place, doubts.names_of(own, all_of_it, text))
            script.put_behind(block, doubts.put_behind(own, token))
        for name in doubts.SOURCES.findall(text):
            if not NO_SETTINGS.fullmatch(name.strip("\"'")):
                script.put_behind(block, "; ".join(self._sets_anything(f"{head} at {place}")))

    def _complaint(self, said: str, where: str, before: str) -> None:
        if match := re.fullmatch(r"(\w+): unbound variable", said):
            self.needs.setdefault(match[1], (where, ""))
        elif (match := re.match(r"(\w+): ", said)) and re.search(rf"\$\{{{match[1]}:?\?", self.text):
            self.needs.setdefault(match[1], (where, ""))  # of ${X:?why}
        elif match := re.fullmatch(r"(.+?): command not found.*", said):
            self.names.add(match[1])
        elif match := re.fullmatch(r"([^:]+): No such file or directory", said):
            last = Run(trace=before).lines[-1:]
            words, folder = (last[0].words, last[0].folder) if last else ([], self.folder)
            if match[1] not in words and not self._copied(folder, match[1]):  # it stands behind <
                self.placed.setdefault(at(folder, match[1]), self.token(f"$(< {self.shown(match[1])})"))


def _is_errexit(words: Sequence[str]) -> bool:
    return words[:1] == ["set"] and any(re.match(r"-\w*e|errexit", word) for word in words[1:])


def at(folder: str, name: str) -> str:
    """A path that is named from a folder."""
    return os.path.normpath(Path(folder, name))


def _closing(text: str, begin: int) -> int:
    """The brace that closes the one at ``begin``."""
    depth = 0
    for i in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return i
    return len(text)
