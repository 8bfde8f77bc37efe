"""Builds the surroundings of a script: files from this disk, and stand-ins for what the cluster has.

Each run shows what the script looks for: a sourced file, a folder, a variable, a command. If something is not
here, the next run gets a token or an empty folder in its place. A condition that depends on the machine
becomes a question (see ``questions``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any, NamedTuple

from slime_ext.errors import ConfigError, cut
from slime_ext.hosts.contract import flag_of
from slime_ext.tools.launch.questions import (
    COMMENT,
    FLAG,
    NOT_AT_FIRST,
    OF_ARRAY,
    ONCE,
    PIPED,
    SET,
    Script,
    closing,
)
from slime_ext.tools.launch.trace import (
    BEGIN,
    BETWEEN,
    COMPLAINT,
    END,
    PS4,
    SHELLS,
    TOKEN,
    TYPED,
    UNKNOWN,
    Call,
    Guess,
    Line,
    Run,
    at,
    name_of,
    program_of,
    script_of,
    traced,
)
from slime_ext.tools.launch.visible import Visible, names_of, script_text

# Words of bash, and programs of bashkit that only transform text or write to its in-memory disk.
BASH = frozenset(
    "if then elif else fi for do done while until case esac in function select time { } ! [ [[ test : . true "
    "false alias bg break builtin caller cd continue declare dirs disown echo enable eval exec exit export "
    "fg getopts let local logout mapfile popd printf pushd pwd read readarray readonly return set shift "
    "shopt source suspend times trap typeset unalias unset command basename dirname env nohup bash sh".split()
)
TEXT_TOOLS = frozenset(
    "awk bc cat comm cut egrep expr fgrep fold grep head join jq nl paste realpath rev sed seq sort tac tail "
    "tr uniq wc".split()
)
PWD = "$(pwd)"
PARENTS = 4  # folders above the unknown one in which a script begins, so that its ``cd ..`` has a place
OTHERS = {*SHELLS, *TEXT_TOOLS, ONCE, NOT_AT_FIRST, "type", "hash", "kill", "tee", "which"} - BASH
# Files and programs of the hosts that say a model's arguments, of which none is ours.
OF_A_MODEL = re.compile(r"(?:^|/)(?:model_args\w*\.py|scripts/models/[^/]+\.sh)$")
NO_SETTINGS = re.compile(  # /opt/conda/etc/profile.d/conda.sh, ~/.bashrc, venv/bin/activate
    r"/dev/null|(.*/)?(activate|conda\.sh|\.?bashrc|\.?(bash_)?profile|\.?zshrc|setvars\.sh|set_env\.sh)"
)
LOOKS = re.compile(
    r"(?:cd|pushd|source|\.|bash|sh|nohup|exec|env|timeout|'?\[\[?'?|test|\S*/\S*)(?:\s|$)"
)  # a command that looks for a file
WRAPPERS = ("nohup", "exec", "env", "timeout")  # bashkit itself runs the command in their arguments
TESTS = ("[", "[[", "test", "((", ":")
# A test of a file, as bash traces it: -f '/data/a b'
TEST_OF_FILE = re.compile(r"(?<!\S)-([bcdefghkLprsSuwxO]) +('[^']*'|[^\s'\])]+)")
# A test of a terminal, of two files or of a file without a name: -t 0, a -nt b, -d ''
OF_MACHINE = re.compile(r"(?<!\S)(?:-t\s+'?\d|-(?:nt|ot|ef)\s|-[bcdefghkLprsSuwxO]\s+'')")
# A part of a line that depends on a result: [ [[ (( case test for while until if elif && ||
DECIDES = re.compile(r"(?<!\S)(\[\[?|case|test|for|while|until|if|elif|\(\()(?!\S)|&&|\|\|")
NAMES = re.compile(  # $NAME, ${NAME}, or NAME
    r"\$([A-Za-z]\w*)|\$\{([A-Za-z]\w*)\}|(?<![\w$])([A-Za-z_]\w*)"
)
OF_BASH = re.compile(  # variables whose values differ between runs or machines
    r"\$\{(?:{0})(?:\[\d\])?\}|\$?\b(?:{0})\b(?:\[\d\])?|\$\$(?![\w({])|\$!".replace(
        "{0}",
        "S?RANDOM|SECONDS|UID|EUID|PPID|BASHPID|EPOCHSECONDS|EPOCHREALTIME|OSTYPE|HOSTTYPE|MACHTYPE|SHLVL|"
        "GROUPS|BASH_VERSION|BASH_VERSINFO",
    )
)
ALWAYS = ("PATH", "HOME", "HOSTNAME", "USER", "SHELL")  # bashkit would set these variables
HIDDEN = "…"
CONFIG_FLAG = flag_of("custom_config_path")
TOKENS = re.compile(f"(?:{BEGIN}\\d+{END})+")
# What a script prints before it ends: echo -e "set MODEL_DIR"
SAYS = re.compile(r"(?:echo|printf)\s+(?:-\w+\s+)*([\"'])(.*?)\1")
ALTERNATIVE = re.compile(r"\$\{(\w+):?\+([^}]*)\}")  # ${X:+--flag}
# A traced assignment of an unknown value: export X=<token>
UNKNOWN_VALUE = re.compile(rf"(?:\w+ )?(\w+)\+?=[^\n]*{UNKNOWN.pattern}")
OF_ITSELF = re.compile(r"(?<!\w)([A-Za-z_]\w*)=[\"']?\$\{?\1(?!\w)")  # X=${X:-1}
# An array that a command or a file fills: N=(a $(cmd)), mapfile -t N < FILE, read -ra N <<< "$(cmd)"
FILLED = re.compile(
    r"(?<![\w-])(?:(\w+)\+?=\([^()]*(?:\$\(|`)|(?:mapfile|readarray|read)\s(?:[^\n;|&<]*\s)?(\w+)\s*<(?:<<.*(?:\$\(|`)|[^<]))"
)
# bash sets no variable with an unknown name: export: `<token>': not a valid identifier, X<token>=1: ... found
OF_ANY_NAME = re.compile(
    rf"(?P<builtin>\w+): `(?P<word>[^=]*{UNKNOWN.pattern}.*)': not a valid identifier"
    rf"|(?P<assignment>\w*{UNKNOWN.pattern}[^\s=]*=\S*): command not found"
)
NO_SUM = re.compile(r"No such file|command not found|[Nn]ot a directory|Permission denied")
LOOP = re.compile(r"(?<![\w-])(?:for|select)\s+(?:\w+\s+in\s+)?$")
REFERENCE = re.compile(r"\$\{?[!#]?([A-Za-z_]\w*)")


# A glob pattern in a trace: dir/*.pt
GLOB = re.compile(rf"(?<![\w*?./=\[-])(?!-)[\w./\[\]{BEGIN}{END}-]*[*?][\w./*?\[\]{BEGIN}{END}-]*")
MOST_GLOBS = 20
MOST_TYPED, END_OF_TYPED = 100, f"{BEGIN}{BETWEEN}\n"  # lines that someone types, and the line after them
# select X in a b; do
SELECT = re.compile(r"(?<![\w$-])select[ \t]+(\w+)(?:[ \t]+in[ \t]+[^;\n]*)?[ \t]*(?:;|\n)\s*do(?!\w)")
# Under set -e, bashkit ends a script behind a branch of case that ends with false && true; bash goes on.
ESAC = re.compile(r"(?<![\w-])esac(?=[ \t]*(?:\n|;(?!;)|#|$))")
READS = re.compile(r"(?<![\w$-])(?:read|mapfile|readarray)(?=\s)")


class Unknown(NamedTuple):
    """The meaning of a token.

    Args:
        text: the part of the script that the token replaces.
        where: ``file:line``; if empty, messages search the files for ``text``.
        is_word: whether it stands for one word, because bash drops an unset variable.
        is_words: whether the token stands for several words instead of one value.
        is_of_model: whether its words can only be a model's arguments.
    """

    text: str
    where: str = ""
    is_word: bool = False
    is_words: bool = False
    is_of_model: bool = False


@dataclass(frozen=True)
class Request:
    """A request to read a script.

    Args:
        path: the path of the script.
        text: the text to read in place of the file's text.
        arguments: the arguments of the script, ``$@`` in bash.
        root: the checkout of slime or miles that contains the script, if any.
        own_folder: the folder with the script's files: that checkout, its repository, or its folder.
        here: the working directory of ``check``.
        checkout: the host's checkout; a sourced ``/…/slime/FILE`` that is not here is read there, and noted.
        variables: the variables of this process that the script may see.
        others: the names of the variables that it may not see; their values are unknown.
    """

    path: str
    text: str | None = None
    arguments: tuple[str, ...] = ()
    root: Path | None = None
    own_folder: Path = Path()
    here: Path = Path()
    checkout: Path | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    others: frozenset[str] = frozenset()

    @property
    def roots(self) -> tuple[Path, Path]:
        """The folders that the script may see and where relative paths are looked up."""
        return self.own_folder, self.here

    @property
    def start(self) -> Path:
        """The folder in which ``check`` assumes that the script starts."""
        return self.root or self.here


class Surroundings:
    """The files, variables and commands that one script finds."""

    def __init__(self, request: Request) -> None:
        path, self.request = request.path, request
        self.path = str(Path(path).absolute())
        self.visible = Visible([*request.roots, *filter(None, [request.checkout])])
        self.files = {path: script_text(path)}  # name in the trace -> text
        self.text_of_script = "\n".join([self.files[path], request.text or "", *request.arguments])
        self.paths = {self.path: self.path}  # name in the trace -> path
        self.scripts: dict[str, Script] = {}  # path -> the script as bash reads it
        self.reads_lines = False  # whether one of them reads what someone types
        self.placed: dict[str, str] = {}  # path -> content of everything else
        self.configs: set[str] = set()  # paths of --custom-config-path
        self.names: set[str] = set(OTHERS)  # names of commands that the sandbox answers
        self.tokens: dict[Unknown, int] = {}
        self.evaluated: dict[str, None] = {}  # unknown texts that were run, which can set any variable
        # Variable without which the script ends -> where it ends, and how.
        self.needs: dict[str, tuple[str, str]] = {}
        self.tests: set[str] = set()  # tested paths that are not here
        self.waits: dict[str, str] = {}  # command that decides what runs -> why that is unknown
        self.answers: dict[str, str] = {}  # any other command with an unknown answer -> why it is unknown
        self.alternatives: dict[str, str] = {}  # flag of ${X:+--flag} -> why it is unknown
        # Path that can be absent -> how many other outcomes it has, and why they are unknown.
        self.doubted: dict[str, tuple[int, str]] = {}
        self.unread: dict[str, str] = {}  # path of a file with unknown content -> the token for it
        self.matches: dict[str, tuple[str, str]] = {}  # path that matches a pattern -> another, and a place
        self.unasked: dict[str, None] = {}  # conditions that cannot be asked about, with their places
        self.notes: list[str] = []
        self._seen: set[Line] = set()
        self._places: dict[tuple[int, str], str] = {}  # what ``where`` has answered
        above = [PWD + "/.." * levels for levels in range(PARENTS, -1, -1)]
        self.folder = "".join(f"/{self.token(name)}" for name in above)
        folders = [self.folder, *map(str, Path(self.folder).parents)][: PARENTS + 1]
        self._above = {folder: PWD + "/.." * levels for levels, folder in enumerate(folders)}
        self.another, self.typed = self.token("", "", True), self.token("(what someone types)")
        self._add(self.path, self.files[path] if request.text is None else request.text)

    def size(self) -> int:
        """Returns a number that grows with everything that a run shows."""
        put = sum(len(script.questions) + len(script.put) for script in self.scripts.values())
        seen: tuple[Sized, ...] = (self.placed, self.scripts, self.files, self.names, self.needs)
        seen += (self.evaluated, self.unasked, self.doubted, self.unread, self.matches)
        return sum(map(len, seen)) + put + len(self.tests) + len(self.configs)

    def reach(self) -> int:
        """Returns a number that grows with what can change any run."""
        return len(self.files) + len(self.evaluated)

    def token(self, *unknown: Any) -> str:
        """Returns the token for something that only the cluster knows, with the arguments of ``Unknown``."""
        return f"{BEGIN}{self.tokens.setdefault(Unknown(*unknown), len(self.tokens))}{END}"

    def meant(self, word: str) -> list[Unknown]:
        """Returns the meanings of a word that consists of tokens. Any other word has none."""
        if not TOKENS.fullmatch(word):
            return []
        known, numbers = list(self.tokens), map(int, TOKEN.findall(word))
        return [known[number] for number in numbers if number < len(known)]

    @property
    def has_seen(self) -> bool:
        """Whether the script has seen a variable or another file."""
        return bool(self.request.variables) or len(self.files) > 1

    def writes(self, text: str) -> bool:
        """Whether the script itself writes each word of a text."""
        words = set(re.split(r"[\s\"'=(){};$]+", self.text_of_script))
        return all(word in words or (len(word) > 3 and word in self.text_of_script) for word in text.split())

    def quoted(self, text: str) -> str:
        """Returns a text for messages: words that the script does not write itself are hidden."""
        return self.spelled(text, self._written)

    def spelled(self, text: str, how: Callable[[str], str] = str) -> str:
        """Replaces the tokens of a text by what the script writes in their place.

        Args:
            how: maps the text between tokens to what is shown of it.
        """
        parts, last, known = [], 0, list(self.tokens)
        for match in TOKEN.finditer(text := self._with_pwd(text)):
            number = int(match[1])
            parts += [how(text[last : match.start()]), known[number].text if number < len(known) else HIDDEN]
            last = match.end()
        return UNKNOWN.sub(HIDDEN, "".join([*parts, how(text[last:])]))

    def _with_pwd(self, text: str) -> str:
        """Writes the folder in which the script begins, and those above it, as the script would."""
        for folder, written in self._above.items():
            text = text.replace(folder, written)
        return text

    def inside(self, path: str) -> str:
        """Returns a path relative to the folder in which the script begins; any other path as it is."""
        is_below = path.startswith(f"{Path(self.folder).parents[PARENTS - 1]}/")
        return os.path.relpath(path, self.folder) if is_below else path

    def _written(self, text: str) -> str:
        """Hides each word of a text that the script does not write, except its folder."""
        folder, written = f"{Path(self.path).parent}/", f"{self.text_of_script} {PWD}{'/..' * PARENTS}"
        parts = re.split(r"(\s+)", text)
        return "".join(
            part if part.isspace() or part.removeprefix(folder) in written else HIDDEN for part in parts
        )

    def of_file(self, path: str, text: str) -> str:
        """Returns a part of the script unchanged. For a part of another file, only names the file."""
        return text if path == self.path else f"a part of {self.named(path)}"

    def named(self, path: str) -> str:
        """Returns a file's name. Hides it if a word in it comes only from a variable or another file."""
        name = Path(path).name
        if path == self.path or name in self.text_of_script:
            return name
        files = (text for file, text in self.files.items() if self.paths.get(file) not in (path, self.path))
        others = [*self.request.variables.values(), *files]
        words = (word for text in others for word in re.split(r"[\s\"'=(){};$]+", text))
        return HIDDEN if any(word in name and word not in self.text_of_script for word in words) else name

    def place(self, path: str, number: int) -> str:
        """Returns ``file:line``."""
        return f"{self.named(path)}:{number}"

    def where(self, name: str) -> str:
        """Returns ``file:line`` of the last mention of a flag or an unknown word outside comments."""
        key = len(self.files), name
        if key not in self._places:
            name = name.partition(" (")[0].removeprefix("$(").removesuffix(")").lstrip("$")
            mention = re.compile(rf"(?<![\w-]){re.escape(name)}(?![\w-])")
            places = (
                self.place(path, numbers[-1])
                for path, text in self.files.items()
                if name in text
                if (
                    numbers := [
                        i
                        for i, line in enumerate(text.splitlines(), 1)
                        if mention.search(line.partition("#")[0])
                    ]
                )
            )
            self._places[key] = next(places, self.named(self.path))
        return self._places[key]

    def source_of(self, name: str) -> str:
        """Returns the value of a flag as the script itself writes it; empty if it does not."""
        value = re.compile(rf"(?<![\w-]){re.escape(name)}(?:=|\s+)(\"[^\"\n]*\"|'[^'\n]*'|[^\s\"')]+)")
        values = value.findall(COMMENT.sub(r"\1", self.text_of_script))
        return values[-1].strip("\"'") if values and not values[-1].startswith("-") else ""

    # variables

    @property
    def text(self) -> str:
        """Returns the text of all files, without comments."""
        return _without_comments(tuple(self.files.values()))

    def environment(self) -> dict[str, str]:
        """Returns the variables of the script.

        Variables that it may not see, or that it needs and nothing sets, are tokens.
        """
        others = {name for name in (*self._referenced(), *ALWAYS) if name in (*self.request.others, *ALWAYS)}
        variables = {name: self.token(f"${name}", "", True) for name in _unset_in(self.text)}
        if self.evaluated:
            why = f"({next(iter(self.evaluated))} is not here)"
            variables |= {name: self.token(f"${name} {why}") for name in self._referenced()}
        variables |= {name: self.token(f"${name}") for name in sorted(others)}
        variables |= {name: self.token(f"${name}") for name in self.needs}
        return variables | dict(self.request.variables) | {"PS4": PS4}

    def _referenced(self) -> Iterable[str]:
        return dict.fromkeys(REFERENCE.findall(self.text))

    # files

    def contents(self, guess: Guess) -> dict[str, str]:
        """Returns the files that the sandbox gets: path -> content."""
        scripts = {path: script.prepared(guess.outcome_of) for path, script in self.scripts.items()}
        unread = {
            path: "" if path == guess.asked else self.line_of(token, guess) * guess.words
            for path, token in self.unread.items()
        }
        files = {f"{self.folder}/.here": ""} | self.placed | unread | dict.fromkeys(self.matches, "")
        files |= scripts
        lines = guess if self.reads_lines else Guess()  # what nobody reads makes no other run
        typed = self.line_of(self.typed, lines) * MOST_TYPED + END_OF_TYPED
        files[TYPED] = "" if guess.asked == TYPED else typed
        if guess.asked in self.matches and guess.outcome:
            files[self.matches[guess.asked][0]] = ""
        elif guess.asked in self.doubted and (guess.outcome or guess.asked not in self.unread):
            files = {path: text for path, text in files.items() if path.removesuffix("/.here") != guess.asked}
        return files

    def line_of(self, token: str, guess: Guess) -> str:
        """Returns the line of words that replaces a token under a guess."""
        words = (token, self.another, self.another)[: guess.words]
        return " ".join(words) + "\n" if words else ""

    def is_above_matches(self, path: str) -> bool:
        """Whether a folder is there only because a file that matches a pattern is put into it."""
        return any(match.startswith(f"{path}/") for match in self.matches)

    def learn(self, run: Run) -> None:
        """Adds what a run missed, and what it asked the machine."""
        answered = {command.words for command in run.commands if program_of(command.words) is None}
        for path, (_, why) in self.matches.items():
            if name_of(path) in run.trace:  # else it is no pattern but a part of a word: [0]*1+[1]*46
                self.doubted.setdefault(path, (2, why))
        for line in run.lines:
            self._read(line)
            self._match(line, is_answered=tuple(line.words) in answered)
            if LOOKS.match(line.text) and line not in self._seen:
                self._seen.add(line)
                self._look(line, line.words or [""])
        for line in run.lines:
            self._ask(run, line)
        self._learn_commands(run)
        self._alternatives(run)
        for call in run.calls:
            if program_of(call.words) is not None:
                self._keep_config(call)
        self._learn_complaints(run)

    def _learn_complaints(self, run: Run) -> None:
        """Adds what error messages of bash say is missing or cannot be computed."""
        sums = set[tuple[str, int]]()  # places; a command that repeats words complains of their sums again
        for match in COMPLAINT.finditer(run.trace):
            place = self.paths.get(match[1], match[1]), int(match[2])
            if name := OF_ANY_NAME.match(match[3]):  # it can set any variable
                setter = self.quoted(name["assignment"] or f"{name['builtin']} {name['word']}")
                self.evaluated.setdefault(setter)
            elif UNKNOWN.search(match[3]) and not NO_SUM.search(match[3]) and place not in sums:
                sums.add(place)
                self._unknown_sum(*place)
            self._complaint(match[3], self.place(match[1], int(match[2])), run.trace[: match.start()])

    def learn_from_end(self, run: Run) -> None:
        """Adds the variables that a script asks for before it ends without a launch."""
        end, tests = self.end_of(run), [line for line in run.lines if {*line.words[:1]} & {*TESTS}]
        if run.error or not (end or tests):
            return
        # Where no command ends the script, any test can skip the launch: if [ "$RANK" = 0 ].
        ends = [end] if end else []
        places = [(self.scripts.get(self.paths.get(line.file, line.file)), line.number) for line in tests]
        ends += [(script, number) for script, number in (places[-1:] if end else places) if script]
        heads = [script.text[slice(*script.line(number))] for script, number in ends]
        sets = {match[1] for match in map(SET.match, map(str.strip, self.text.split("\n"))) if match}
        lines = [line for line in self.text.split("\n") if READS.search(line)]
        sets |= {"REPLY", *re.findall(r"\w+", " ".join(lines))} if lines else set()
        sets -= {match[1] for match in OF_ITSELF.finditer(self.text)}  # as in X=${X:-}
        for (script, number), head in zip(ends, heads, strict=True):
            script, number = end or (script, number)
            for name in REFERENCE.findall(head):
                if not (name in sets or name in self.request.variables or name.startswith("BASH")):
                    self.needs.setdefault(name, (self.place(script.path, number), self.how_it_ends(run)))

    def end_of(self, run: Run) -> tuple[Script, int] | None:
        """Returns the script and line with the ``exit`` or the failure that ended a run.

        Returns None if the sandbox ended the run, because then nothing in the script did.
        """
        if run.error or not run.lines:
            return None
        last = run.lines[-1]
        script = self.scripts.get(self.paths.get(last.file, last.file))
        fails = run.status != 0 and any(_is_errexit(line.words) for line in run.lines)
        ends = last.words[:1] == ["exit"] or fails
        return (script, last.number) if script and ends else None

    def how_it_ends(self, run: Run) -> str:
        """Returns what a script prints before it ends, or its failing command, as written."""
        lines = [line for line in run.lines if line.file == self.path]
        if self.end_of(run) is None or run.lines[-1] not in lines[-1:]:
            return ""
        if lines[-1].words[:1] != ["exit"]:
            return f", where {self.statement_of(lines[-1]) or 'a command'} fails under set -e"
        says = [*takewhile(lambda line: {*line.words[:1]} & {"echo", "printf"}, lines[-2::-1])]
        quoted = SAYS.match(self.statement_of(says[-1])) if says else None
        return f', saying "{cut(quoted[2])}"' if quoted else ""

    def statement_of(self, line: Line) -> str:
        """Returns a command's statement on one line, as written; empty for another file."""
        script = self.scripts[self.path]
        word = line.words[0] if line.words else ""
        return self.spelled(script.statement(line.number, word)) if line.file == self.path else ""

    def _look(self, line: Line, words: list[str]) -> None:
        name, last = words[0], words[-1]
        if name in ("source", ".") and words[1:]:
            self._source(line, words[1])
            self._doubt(at(line.folder, words[1]), line)
        elif name in ("cd", "pushd") and words[1:] and last[0:1] != "-":
            path = at(line.folder, last)
            self.placed.setdefault(f"{path}/.here", "")
            self._doubt(path, line)
        elif name in ("bash", "sh", *WRAPPERS):
            shell = next((i for i, word in enumerate(words) if name_of(word) in SHELLS), len(words))
            self._copied(line.folder, next((word for word in words[shell + 1 :] if word[:1] != "-"), ""))
        elif name in TESTS:
            for path in self._tested(line):
                self._test(path)
        elif "/" in name and "=" not in name:
            self.names.add(name)
            self._copied(line.folder, name)

    def _doubt(self, path: str, line: Line) -> None:
        """Asks about a path that can be absent, if the outcome of its line decides what runs."""
        script = self.scripts.get(self.paths.get(line.file, line.file))
        if script and DECIDES.search(script.text[slice(*script.line(line.number))]):
            text = self.statement_of(line) or self.quoted(line.text)
            self.doubted.setdefault(path, (1, unknown_here(self.place_of(line), text)))

    def _match(self, line: Line, *, is_answered: bool) -> None:
        """Adds a file for each glob pattern. If bash finds it, ``learn`` asks whether there are others."""
        if line.text.startswith(("[[", "((")):
            return
        for pattern in GLOB.findall(line.text):
            if UNKNOWN.search(Path(pattern).name) or len(self.matches) >= MOST_GLOBS or is_answered:
                continue
            star = self.token("*", "*")
            name = re.sub(r"\*+", star, pattern).replace("?", BEGIN)
            another = name.replace(star, star * 2) if star in name else name.replace(BEGIN, END)
            path, other = at(line.folder, name), at(line.folder, another)
            why = unknown_here(self.place_of(line), f"which files match {self.quoted(pattern)}")
            if path not in self.scripts:
                self.matches.setdefault(path, (other, why))
            # bash's trace shows what it puts in the place of a pattern, but not in F=(x/*.pt).
            if path in self.scripts or pattern in line.text.partition("=(")[2].rstrip(")").split():
                self.doubted.setdefault(path, (2, why))

    def _test(self, path: str) -> None:
        """Adds a path that a script tests and may see."""
        if path in self.placed or path in self.scripts or f"{path}/.here" in self.placed:
            return
        if self.visible.is_folder(path):
            self.placed[f"{path}/.here"] = ""
        elif self.visible.is_file(path):
            self._add_unread(path, path, can_be_absent=False)
        else:
            self.tests.add(path)

    def _add_unread(self, path: str, name: str, *, can_be_absent: bool) -> None:
        """Adds a file with unknown content, which can be empty."""
        self.placed.setdefault(path, "")
        self.unread.setdefault(path, self.token(f"$(< {self.quoted(name)})"))
        why = unknown_here(self.named(self.path), f"what {self.quoted(name)} says")
        self.doubted.setdefault(path, (1 + can_be_absent, why))

    def _keep_config(self, call: Call) -> None:
        """Adds the file of --custom-config-path, so that the next run shows whether the script changes it."""
        for word, after in pairwise([*call.words, ""]):
            name, has_value, value = word.partition("=")
            path = at(call.folder, value if has_value else after)
            if name == CONFIG_FLAG and path not in self.configs and path not in self.scripts:
                file = self.on_disk(path)
                aliases = {str(Path(path).with_name(name)) for name in (names_of(file) if file else ())}
                self.configs |= {path, *aliases}
                for alias in aliases:
                    self.placed.setdefault(alias, self.token(f"$(< {self.quoted(path)})"))

    def on_disk(self, path: str) -> Path | None:
        """Returns the visible file of this disk at a path of the sandbox."""
        inside = self.inside(path)
        file = Path(path if inside == path else self.request.start / inside)
        return file if self.visible.is_file(file) else None

    def is_read(self, path: str) -> bool:
        """Whether a path is a script that the sandbox has read."""
        return path in self.scripts or path in map(self.paths.get, self.files)

    def is_of_host(self, path: str) -> bool:
        """Whether a path is a program of the host, in its checkout or in the container."""
        parts = Path(path).parts
        at = next((i for i in range(len(parts), 0, -1) if parts[i - 1] in ("slime", "miles")), 0)
        checkout, file = self.request.checkout, self.on_disk(path)
        is_there = checkout is not None and file is not None and file.resolve().is_relative_to(checkout)
        is_tool = at > 0 and parts[at : at + 1] in (("tools",), ("slime",), ("miles",), ("utils",))
        return is_there or is_tool or is_of_model(path)

    def _read(self, line: Line) -> None:
        """Adds a script file that the trace names."""
        if line.file and line.file not in self.paths:
            path = at(line.folder, line.file)
            text = self.placed.pop(path, "")
            self.files[line.file], self.paths[line.file] = text, path
            self._add(path, text)

    def _add(self, path: str, text: str) -> None:
        script = self.scripts[path] = Script(path, self._for_bashkit(path, text))
        self.reads_lines |= READS.search(script.text) is not None
        words = re.split(r"[\s\"'$;|&()<>{}=`\\]+", COMMENT.sub("", text))
        names = {word for word in words if re.fullmatch(r"[A-Za-z_./][\w.+/-]*", word)}
        self.names |= names - BASH - {".."}

    def _for_bashkit(self, path: str, text: str) -> str:
        """Replaces what bashkit 0.20 reads differently from bash, or answers itself.

        bashkit joins the words of ``"${A[@]/x/y}"`` and keeps the words of an empty ``"${!array}"``, so both
        become tokens. It reads quotes in ``${X:-$(f "y")}`` as letters, so they are deleted. The number of an
        array's words is a token, too, if a command or a file fills the array.
        """
        names = (match[1] or match[2] for match in FILLED.finditer(COMMENT.sub(r"\1", text)))
        filled = "|".join(names) or "(?!)"
        text = re.sub(rf"\$\{{#(?:{filled})\[[@*]\]\}}", lambda match: self.token(match[0]), text)
        text = re.sub(r"%\([^()\n]*\)T", lambda match: self.token(match[0]), text)  # of printf: the time
        arrays = "|".join(re.findall(r"(?<!\w)(\w+)=[\"']?\w+\[@\]", text)) or "(?!)"
        unread = rf'"\$\{{\w+\[@\]/[^}}"]*\}}"|"\$\{{!(?:{arrays})\}}"'
        text = re.sub(unread, lambda match: self.token(self.of_file(path, match[0])), text)
        text = OF_BASH.sub(lambda match: self.token(match[0]), text)
        text = re.sub(r"(?<![\w-])(command -[vV]|type -[pPt]|compgen -G)(?=\s)", "which", text)
        text = traced(text)
        text = PIPED.sub(r"|\1command ", text)
        text = ESAC.sub("esac && :", text)
        loop = "while {}={}; read -r REPLY; do"
        text = SELECT.sub(lambda match: loop.format(match[1], self.token(f"${match[1]}")), text)
        text = re.sub(r"(?<!\S)\((\w+\+?=\([^()]*\))\)", r"( \1 )", text)  # it reads )) as the end of ((
        text = re.sub(r"(?<![\w-])set \+x(?!\w)|(?<!\w)PS4=", ": ", text)  # because they would end the trace
        for match in reversed(list(re.finditer(r"\$\{\w+:?[-=+]", text))):
            end = closing(text, match.start() + 1)
            default = text[match.end() : end]
            if "$(" in default and '"' in default:
                needs_quotes = re.search(r"['\\]|echo|printf", default)
                plain = self.token(self.of_file(path, default)) if needs_quotes else default.replace('"', "")
                text = text[: match.end()] + plain + text[end:]
        return text

    def _source(self, line: Line, name: str) -> None:
        """Adds a sourced file: from this disk, from the host's checkout, or as unknown variables."""
        path = at(line.folder, name)
        is_there = path in self.placed or path in self.scripts
        if path not in self.matches and (is_there or self._copied(line.folder, name)):
            return
        self.placed[path] = ""
        if NO_SETTINGS.fullmatch(name):
            return
        # The name as the script writes it in ``source NAME``.
        words, place = self.statement_of(line).split(), self.place(line.file, line.number)
        is_alone = len(words) == 2 and words[0] in ("source", ".")
        written = words[1].strip("\"'") if is_alone else self.quoted(name)
        if file := self._in_checkout(name):
            self.placed[path] = script_text(str(file))
            self.notes.append(f"{place}: {written} is not here; {file} is read instead")
            return
        # It can set each variable that is not set yet.
        why = f"source {written} is not here"
        if is_of_model(name):
            self.notes.append(f"{place}: {why}; it is read as a model's arguments alone")
        sets = []
        for variable in self._referenced():
            is_array = re.search(rf"\{{{variable}\[[@*]\]", self.text) is not None
            token = self.token(f"${variable} ({why})", "", False, is_array, is_of_model(name))
            sets.append(f": ${{{variable}={token}}}")
        self.placed[path] = "\n".join(sets)

    def _in_checkout(self, name: str) -> Path | None:
        """Returns the file of the host's checkout that matches a path in the script's container."""
        parts, checkout = Path(name).parts, self.request.checkout
        at = next((i for i in range(len(parts), 0, -1) if parts[i - 1] in ("slime", "miles")), 0)
        file = checkout.joinpath(*parts[at:]) if checkout and at else None
        return file if file is not None and self.visible.script(file) is not None else None

    def _copied(self, folder: str, name: str) -> bool:
        """Copies a visible script into the sandbox, and returns whether there is one.

        A path below or beside the folder in which the script begins is looked up in the roots.
        """
        path = at(folder, name)
        inside = self.inside(path)
        places = [Path(path)] if inside == path else [root / inside for root in self.request.roots]
        try:
            text = next((text for place in places if (text := self.visible.script(place)) is not None), None)
        except ConfigError:
            if self.named(path) != HIDDEN:
                raise
            raise ConfigError(
                f"{self.path}: expected a sourced file that is a shell script, got another file"
            ) from None
        if text is not None and path not in self.scripts:
            self.placed.setdefault(path, text)
        return text is not None

    def _tested(self, line: Line) -> Iterator[str]:
        """Yields the path of each test of a file in a command."""
        for _, name in TEST_OF_FILE.findall(line.text):
            if name.strip("'"):
                yield at(line.folder, name.strip("'"))

    # conditions that the machine decides

    def _ask(self, run: Run, line: Line) -> None:
        """Adds the questions of a line whose condition depends on the machine."""
        script, words = self.scripts.get(self.paths.get(line.file, line.file)), line.words
        if script is not None and words[:2] == [":", OF_ARRAY] and UNKNOWN.search(line.text):
            place = self.place_of(line)
            script.without_element(
                int(words[2]), lambda text: self.token(self.of_file(script.path, self.spelled(text)), place)
            )
            return
        first = words[0] if words else line.text.partition(" ")[0]
        command = " ".join(words)
        if command in run.unknown and command not in self.waits and self.another not in command:
            begin, end = script.line(line.number) if script else (0, 0)
            place, text = self.place_of(line), self.quoted(command)
            if script is None or DECIDES.search(script.text[begin:end]) or "!" in script.text[begin:end]:
                self.waits[command] = unknown_here(place, self.statement_of(line) or text)
            else:  # a function that ends with the command, or a test of $?, can decide as well
                self.answers.setdefault(command, unknown_here(place, text))
        is_unknown = UNKNOWN.search(line.text) or OF_MACHINE.search(line.text) or self._is_tested(run, line)
        if first not in TESTS or not is_unknown:
            return
        if script is not None and script.ask(line.number, first, words):
            return
        if first != ":":  # as in a text that a program passes to a shell
            self.unasked.setdefault(unknown_here(self.place_of(line), self.quoted(line.text)))

    def _learn_commands(self, run: Run) -> None:
        """Adds the scripts that commands get, and commands that the trace leaves out, as in < <(smi)."""
        for command in run.commands:
            if file := script_of(command.words):
                self._copied(command.folder, file[0])
        untraced = run.unknown.keys() - self.waits.keys() - self.answers.keys()
        for words in sorted(words for words in untraced if self.another not in words):
            text = self.quoted(words)
            self.answers[words] = unknown_here(self.where(text), text)

    def place_of(self, line: Line) -> str:
        """Returns ``file:line`` of a traced command; only the launch script's name if no file holds it."""
        script = self.scripts.get(self.paths.get(line.file, line.file))
        return self.place(script.path, line.number) if script else self.named(self.path)

    def _alternatives(self, run: Run) -> None:
        """Doubts the flags of ``${X:+--flag}`` if it is unknown whether X is empty."""
        variables = {name for name, text in self.environment().items() if UNKNOWN.search(text)}
        variables |= {match[1] for line in run.lines if (match := UNKNOWN_VALUE.match(line.text))}
        for script in self.scripts.values():
            for match in ALTERNATIVE.finditer(script.text):
                if match[1] in variables:
                    place = self.place(script.path, script.number(match.start()))
                    why = unknown_here(place, self.of_file(script.path, self.spelled(match[0])))
                    self.alternatives |= dict.fromkeys(FLAG.findall(match[2]), why)

    def _is_tested(self, run: Run, line: Line) -> bool:
        return any(path in self.tests and path not in run.made for path in self._tested(line))

    def _unknown_sum(self, path: str, number: int) -> None:
        """Replaces what bash cannot compute in a line, because a number is unknown."""
        script = self.scripts.get(path)
        if script is None or number > len(script.starts):
            return
        place = self.place(path, number)
        token = lambda text: self.token(self.of_file(path, self.spelled(text)), place)  # noqa: E731
        if not script.without_sum(number, token):
            self.unasked.setdefault(unknown_here(place, self.of_file(path, script.statement(number))))

    def asked(self) -> dict[str, tuple[int, str]]:
        """Returns the key of each question -> how many outcomes it has, and why they are unknown."""
        questions = {}
        for script in self.scripts.values():
            for begin, question in script.questions.items():
                text = script.text[begin : question.end]
                loop = LOOP.search(script.text[script.text.rfind("\n", 0, begin) + 1 : begin])
                text = self.of_file(script.path, self.spelled((loop[0] if loop else "") + text))
                why = unknown_here(self.place(script.path, script.number(begin)), " ".join(text.split()))
                questions[script.key(begin)] = (len(question.outcomes), why)
        if self.reads_lines:
            questions[TYPED] = (1, unknown_here(self.named(self.path), "what someone types"))
        return questions | self.doubted

    def _complaint(self, message: str, where: str, before: str) -> None:
        """Adds what an error message of bash says is missing.

        Args:
            before: the trace before the message.
        """
        if match := re.fullmatch(r"(\w+): unbound variable", message):
            self.needs.setdefault(match[1], (where, ""))
        elif (match := re.match(r"(\w+): ", message)) and re.search(rf"\$\{{{match[1]}:?\?", self.text):
            self.needs.setdefault(match[1], (where, ""))  # the message of ${X:?why}
        elif match := re.fullmatch(r"(.+?): command not found.*", message):
            self.names.add(match[1])
        elif match := re.fullmatch(r"([^:]+): No such file or directory", message):
            last = Run(trace=before).lines[-1:]
            words, folder = (last[0].words, last[0].folder) if last else ([], self.folder)
            if match[1] not in words and not self._copied(folder, match[1]):  # the path follows <
                self._add_unread(at(folder, match[1]), match[1], can_be_absent=True)


def unknown_here(place: str, text: str) -> str:
    """Returns why something is unknown that depends on a part of the script."""
    return f"{place}: {text} is known only where the script runs"


def is_of_model(path: str) -> bool:
    """Whether a file or a program of the hosts says a model's arguments."""
    return OF_A_MODEL.search(path) is not None


def _is_errexit(words: Sequence[str]) -> bool:
    return words[:1] == ["set"] and any(re.match(r"-\w*e|errexit", word) for word in words[1:])


@cache  # this and the next, because every run of a script asks for the same text
def _without_comments(texts: tuple[str, ...]) -> str:
    return COMMENT.sub(r"\1", "\n".join(texts))


@cache
def _unset_in(text: str) -> tuple[str, ...]:
    """Returns the variables that a text expects from its machine, because nothing sets them.

    A variable stays unset, as in bash, if it has a default (``${X:-1}``), or if a test or a loop's head
    names it.
    """
    plain: dict[str, bool] = {}
    for line in text.split("\n"):
        decides = DECIDES.search(line) is not None
        for match in NAMES.finditer(line):
            name = match[1] or match[2] or match[3]
            plain[name] = plain.get(name, True) and not decides and match[3] is None
    return tuple(name for name, is_plain in plain.items() if is_plain)
