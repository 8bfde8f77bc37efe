"""Runs a launch script in a sandbox (bashkit: bash's language in process, writes stay in memory, no program ever
starts) and notes each program that it would start.

What only the cluster knows is answered by a *world*: a choice of one answer for each question that a script puts
to its machine. Where a world makes no choice, a command succeeds and says a ``Token``: a word that no script
contains, so that whatever it flows into can be told from what the script itself says.
"""

from __future__ import annotations

import os
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from slime_ext.config.files import text_of
from slime_ext.errors import ConfigError, cut

if TYPE_CHECKING:
    from bashkit import Bash, BuiltinContext, BuiltinResult

LIMIT_S, MOST_COMMANDS, MOST_LOOPS = 5.0, 20_000, 5_000
BEGIN, END, BETWEEN = "\ue000", "\ue001", "\ue002"
TOKEN = re.compile(f"{BEGIN}(\\d+){END}")
MOST_TOKENS = 80
TRACED = re.compile(f"^\\++([^{BETWEEN}\n]*){BETWEEN}(\\d+){BETWEEN}([^{BETWEEN}\n]*){BETWEEN}", re.MULTILINE)
COMPLAINT = re.compile(r"^\S+: line \d+: ", re.MULTILINE)  # of bash
PS4 = f"+${{BASH_SOURCE}}{BETWEEN}${{LINENO}}{BETWEEN}${{PWD}}{BETWEEN}"
# bash's own words, and programs of bashkit that only turn text into text or write to its memory
OWN = frozenset(
    "if then elif else fi for do done while until case esac in function select time { } ! [ [[ test : . true "
    "false alias bg break builtin caller cd continue declare dirs disown echo enable eval exec exit export fg "
    "getopts let local logout mapfile popd printf pushd pwd read readarray readonly return set shift shopt "
    "source suspend times trap typeset ulimit umask unalias unset wait basename dirname seq env nohup bash sh "
    "mkdir touch".split()
)
TEXT_TOOLS = frozenset(
    "awk bc cat comm cut egrep expr fgrep fold grep head join jq nl paste realpath rev sed sort tac tail tr uniq "
    "wc".split()
)
PROGRAMS = ("train.py", "train_async.py")
# What only names train.py, to look at it or to end it.
NO_LAUNCH = frozenset(
    "pkill pgrep kill grep egrep rg cat less more head tail sed awk ls find cp mv rm ln chmod tee diff wc stat "
    "which type command hash file git vim nano scp rsync wget curl".split()
)
SHELLS = ("bash", "sh", "zsh", "dash", "ksh")
ASKED_TOO_OFTEN = 20  # a loop that waits for a command's other answer gets it then
NO_SETTINGS = re.compile(
    r"(^|/)(activate|conda\.sh|\.?bashrc|\.?profile|\.?bash_profile|\.?zshrc|setvars\.sh|set_env\.sh)$"
)
LOOKS = re.compile(r"(?:cd|source|\.|bash|sh|'?\[\[?'?|test|\S*/\S*)(?:\s|$)")  # what looks for a file
TEST_OF_FILE = re.compile(r"(?<!\S)-([bcdefghkLprsSuwxO]) +('[^']*'|[^\s'\])]+)")


class Answer(NamedTuple):
    """What a world answers: a command's status and output (a variable's or a file's content)."""

    status: int = 0
    output: str | None = None  # None: a token


World = Mapping[str, Answer]


class Call(NamedTuple):
    """A program that the script starts."""

    words: tuple[str, ...]
    environment: Mapping[str, str]
    folder: str


class Line(NamedTuple):
    """A command of bash's trace, its words expanded."""

    file: str
    number: int
    folder: str
    text: str

    @property
    def place(self) -> str:
        """``file:line``."""
        return f"{Path(self.file).name}:{self.number}"

    @property
    def words(self) -> list[str]:
        """The command's words; none where the trace quotes what a shell's grammar does not split."""
        try:
            return shlex.split(self.text)
        except ValueError:
            return []


@dataclass
class Run:
    """What happened in one world."""

    calls: list[Call] = field(default_factory=list)
    asked: dict[str, None] = field(default_factory=dict)  # questions to the machine, in their order
    counts: Counter[str] = field(default_factory=Counter)
    trace: str = ""
    error: str = ""

    @cached_property
    def lines(self) -> list[Line]:
        """The trace, of a run that has ended."""
        found = list(TRACED.finditer(self.trace))
        ends = [match.start() for match in found[1:]] + [len(self.trace)]
        return [
            Line(m[1], int(m[2]), m[3], COMPLAINT.split(self.trace[m.end() : end])[0].rstrip("\n"))
            for m, end in zip(found, ends, strict=False)
        ]


class Sandbox:
    """One script, to be run in several worlds.

    Args:
        path: the script's.
        given: its own flags.
        text: the script's, where it is not the file's.
        roots: folders that relative paths are looked for in.
        checkout: the host's; a sourced ``/…/slime/FILE`` that is not here is taken from it, with a note.
    """

    def __init__(
        self,
        path: str,
        given: Sequence[str] = (),
        text: str | None = None,
        roots: Sequence[Path] = (),
        checkout: Path | None = None,
    ) -> None:
        self.path, self.given, self.roots, self.checkout = str(Path(path).absolute()), given, roots, checkout
        self.files = {path: text_of(path)}  # as they are named in messages
        self.placed: dict[str, str] = {} if text is None else {self.path: text}
        self.names: set[str] = set(SHELLS) - OWN | {"command", "type", "hash", "kill", "tee"} | TEXT_TOOLS
        self.texts: list[str] = []  # of tokens, by number
        self.unread: dict[str, None] = {}  # what was run that is not here: it can have set any variable
        self.needs: dict[str, str] = {}  # variables without which bash ends the script -> where
        self.notes: list[str] = []
        self.tests: dict[str, None] = {}  # of files
        self.seen: set[Line] = set()
        self.folder = "/" + self.token("$(pwd)")
        self._learn(self.path, self.files[path] if text is None else text)

    # tokens

    def token(self, text: str) -> str:
        """A word that stands for what only the cluster knows."""
        if text not in self.texts:
            self.texts.append(text)
        return f"{BEGIN}{min(self.texts.index(text), MOST_TOKENS - 1)}{END}"

    def shown(self, text: str) -> str:
        """A text with its tokens as the script writes them."""
        while match := TOKEN.search(text):
            begin = match.start() - (int(match[1]) == 0 and text[match.start() - 1 : match.start()] == "/")
            text = text[:begin] + self.texts[int(match[1])] + text[match.end() :]
        return text

    # running

    def run(self, world: World) -> Run:
        """Runs the script until all that it looks for, and that can be put there, is there."""
        while True:
            before = self._size()
            run = self._once(world)
            self._place(run)
            if self._size() == before:
                return run

    def _size(self) -> int:
        return sum(map(len, (self.placed, self.names, self.needs, self.files, self.unread)))

    def _once(self, world: World) -> Run:
        run = Run()
        shell = self._shell(run, world)
        for _, path, answer in _tests(world):
            if answer.status and shell.fs().exists(path):
                shell.fs().remove(path, recursive=True)
        result = shell.execute_sync(shlex.join(["bash", "-x", self.path, *self.given]))
        run.trace, run.error = run.trace + result.stderr, result.error or ""
        return run

    def arrays(self) -> dict[str, list[str]]:
        """What the script leaves in its arrays."""
        shell = self._shell(Run(), {})
        shell.execute_sync(shlex.join([".", self.path, *self.given]))
        return {name: [held[i] for i in sorted(held)] for name, held in shell.shell_state().arrays.items()}

    def _shell(self, run: Run, world: World, folder: str = "", environment: Mapping[str, str] = {}) -> Bash:
        from bashkit import Bash

        answer = lambda context: self._answer(run, world, context)  # noqa: E731
        names = [*self.names, *(f"{BEGIN}{i}{END}" for i in range(MOST_TOKENS))]
        there = [(sign, path) for sign, path, answer in _tests(world) if not answer.status]
        files = {f"{path}/.here" if sign == "-d" else path: "" for sign, path in there}
        said = lambda match: world.get(self.shown(match[0]), Answer(0, match[0])).output or ""  # noqa: E731
        files |= {name: TOKEN.sub(said, text) for name, text in self.placed.items()}
        return Bash(
            cwd=folder or self.folder,
            env=dict(environment) or self._environment(world),
            files={f"{self.folder}/.here": "", **files},
            mounts=[{"host_path": "/"}],
            allowed_mount_paths=["/"],
            custom_builtins=dict.fromkeys(names, answer),
            timeout_seconds=LIMIT_S,
            max_commands=MOST_COMMANDS,
            max_loop_iterations=MOST_LOOPS,
        )

    def _environment(self, world: World) -> dict[str, str]:
        found = {k: v for k, v in os.environ.items() if k not in ("PWD", "OLDPWD", "BASH_ENV", "ENV")}
        found |= {"PATH": self.token("$PATH"), "PS4": PS4}
        said = dict.fromkeys(("HOSTNAME", *self._unset()), "")
        if self.unread:
            why = f"{next(iter(self.unread))} is not here"
            said |= dict.fromkeys(self._referenced(), f" ({why})")
        for name in said.keys() | self.needs.keys():
            if name not in os.environ:
                question = f"${name}{said.get(name, '')}"
                answer = world.get(question, Answer()).output
                found[name] = self.token(question) if answer is None else answer
        return found

    def _answer(self, run: Run, world: World, context: BuiltinContext) -> BuiltinResult:
        from bashkit import BuiltinResult

        words = (context.name, *context.argv)
        own = {k: v for k, v in context.env.items() if k not in ("PS4", "PWD", "OLDPWD", "SHLVL", "_")}
        if TOKEN.fullmatch(context.name):
            self.unread.setdefault(f"eval {self.shown(context.name)}", None)
        if context.name in TEXT_TOOLS and (said := self._native(run, world, context)) is not None:
            return said
        if context.name == "tee":
            return BuiltinResult(stdout=context.stdin or "")
        run.calls.append(Call(words, own, context.cwd))
        if inner := shell_text(words):
            return self._inner(run, world, inner, context)
        if program_of(words) is not None:
            return BuiltinResult()
        question = self.shown(" ".join(words))
        run.asked.setdefault(question)
        run.counts[question] += 1
        status, output = world.get(question, Answer())
        if run.counts[question] > ASKED_TOO_OFTEN:
            status, output = int(not status), "99"
        return BuiltinResult(
            stdout=self.token(f"$({question})") + "\n" if output is None else output, exit_code=status
        )

    def _native(self, run: Run, world: World, context: BuiltinContext) -> BuiltinResult | None:
        """What a tool says of a text that is all known."""
        from bashkit import BuiltinResult

        if TOKEN.search("".join([context.stdin or "", *context.argv])) or not (context.argv or context.stdin):
            return None
        given = f"/{BETWEEN}in"
        command = f"builtin {shlex.join([context.name, *context.argv])}"
        command = command.removeprefix("builtin ") + f" < {given}"

        def work() -> Any:
            from bashkit import Bash

            files = {**self.placed, f"{self.folder}/.here": "", given: context.stdin or ""}
            mounts = [{"host_path": "/"}]
            return Bash(
                cwd=context.cwd,
                files=files,
                mounts=mounts,
                allowed_mount_paths=["/"],
                timeout_seconds=LIMIT_S,
            ).execute_sync(command)

        found = _elsewhere(work)
        if found.stderr or found.error or TOKEN.search(found.stdout):
            return None
        return BuiltinResult(stdout=found.stdout, exit_code=found.exit_code)

    def _inner(
        self, run: Run, world: World, inner: tuple[str, list[str]], context: BuiltinContext
    ) -> BuiltinResult:
        """Follows a text that a program gives to a shell."""
        from bashkit import BuiltinResult

        text, given = inner
        if TOKEN.fullmatch(text):
            self.unread.setdefault(self.shown(text), None)
        shell = self._shell(run, world, context.cwd, context.env)
        command = shlex.join(["bash", "-xc", text, *(given or ["bash"])])
        found = _elsewhere(lambda: shell.execute_sync(command))
        run.trace += found.stderr
        return BuiltinResult(stdout=found.stdout, exit_code=found.exit_code)

    # what the script looks for

    def _place(self, run: Run) -> None:
        """Puts there what the run looked for in vain."""
        for line in run.lines:
            self._read(line)
            if not LOOKS.match(line.text) or line in self.seen:
                continue
            self.seen.add(line)
            words = line.words
            if words[:1] == ["cd"] and len(words) > 1 and not words[-1].startswith("-"):
                folder = os.path.normpath(os.path.join(line.folder, words[-1]))
                if not Path(folder).is_dir():
                    self.placed.setdefault(f"{folder}/.here", "")
            elif words and words[0] in ("source", ".") and len(words) > 1:
                self._source(line, words[1])
            elif words and words[0] in ("bash", "sh") and (name := script_of(words)):
                self._copied(line.folder, name)
            elif words and "/" in words[0] and "=" not in words[0]:
                self.names.add(words[0])
            elif words and words[0] in ("[", "test", "[["):
                self._test(line)
        run.asked |= self.tests
        self._errors(run)

    def _read(self, line: Line) -> None:
        """Learns the names that a file of the trace uses."""
        if not line.file or line.file == self.path or line.file in self.files:
            return
        path = os.path.normpath(os.path.join(line.folder, line.file))
        text = self.placed.get(path)
        if text is None and Path(path).is_file():
            text = text_of(path)
        if text is not None:
            self.files[line.file] = text
            self._learn(path, text)

    def _learn(self, path: str, text: str) -> None:
        forbid_carriage_returns(path, text)
        if (other := self._for_bashkit(text)) != text:
            self.placed[path] = other
        words = re.split(r"[\s\"'$;|&()<>{}=`\\]+", re.sub(r"(?m)(^|\s)#.*", "", text))
        self.names |= (
            {word for word in words if re.fullmatch(r"[A-Za-z_./][\w.+/-]*", word)} - OWN - {".", ".."}
        )

    def _for_bashkit(self, text: str) -> str:
        """A script without what bashkit 0.20 reads otherwise than bash: it joins the words of ``"${A[@]/x/y}"`` and
        keeps those of an empty ``"${!array}"``, which become unknown, and it takes quotes in ``${X:-$(f "y")}`` for
        letters, which go."""
        arrays = "|".join(re.findall(r"(\w+)=[\"']?\w+\[@\]", text)) or "(?!)"
        unread = rf'"\$\{{\w+\[@\]/[^}}"]*\}}"|"\$\{{!(?:{arrays})\}}"'
        text = re.sub(unread, lambda match: self.token(match[0]), text)
        for match in reversed(list(re.finditer(r"\$\{\w+:?[-=+]", text))):
            end = _closing(text, match.start() + 1)
            said = text[match.end() : end]
            if "$(" in said and '"' in said:
                needs_them = re.search(r"['\\]|echo|printf", said)
                plain = self.token(said) if needs_them else said.replace('"', "")
                text = text[: match.end()] + plain + text[end:]
        return text

    def _source(self, line: Line, name: str) -> None:
        path = os.path.normpath(os.path.join(line.folder, name))
        if path in self.placed or Path(path).is_file() or self._copied(line.folder, name):
            return
        if NO_SETTINGS.search(name) or name == "/dev/null":
            self.placed[path] = ""
        elif found := self._in_checkout(name):
            self.placed[path] = text_of(str(found))
            self.notes.append(f"{line.place}: {name} is not here; {found} is read in its place")
        else:
            why = f"source {self.shown(name)} is not here"
            said = [f": ${{{name}={self.token(f'${name} ({why})')}}}" for name in self._referenced()]
            self.placed[path] = "\n".join(said)  # it can set what nothing has set before

    def _in_checkout(self, name: str) -> Path | None:
        """A file of the host's checkout in place of one that the script has in its container."""
        parts = Path(name).parts
        at = next((i for i in range(len(parts), 0, -1) if parts[i - 1] in ("slime", "miles")), 0)
        found = self.checkout.joinpath(*parts[at:]) if self.checkout and at else None
        return found if found is not None and found.is_file() else None

    def _copied(self, folder: str, name: str) -> bool:
        """Whether a file named from the folder in which the script begins lies in one of the roots."""
        path = os.path.normpath(os.path.join(folder, name))
        if not path.startswith(self.folder + "/"):
            return False
        found = next((f for root in self.roots if (f := root / path[len(self.folder) + 1 :]).is_file()), None)
        if found is not None:
            self.placed.setdefault(path, text_of(str(found)))
        return found is not None

    def _test(self, line: Line) -> None:
        """Questions after files that do not lie beside the script."""
        for sign, name in TEST_OF_FILE.findall(line.text):
            path = os.path.normpath(os.path.join(line.folder, name.strip("'")))
            inside = any(Path(path).is_relative_to(root) for root in self.roots) and Path(path).exists()
            if not inside and path not in self.placed and name.strip("'"):
                self.tests.setdefault(f"[ -{sign} {path} ]")

    def _errors(self, run: Run) -> None:
        for place, said in re.findall(r"^(\S+: line \d+): (.*)$", run.trace, re.MULTILINE):
            where = f"{Path(place.partition(': ')[0]).name}:{place.rpartition(' ')[2]}"
            if match := re.fullmatch(r"(\w+): unbound variable", said):
                self.needs.setdefault(match[1], where)
            elif match := re.fullmatch(r"(.+?): command not found.*", said):
                self.names.add(match[1])
        pattern = re.compile(r"^\S+: line \d+: ([^:]+): No such file or directory$", re.MULTILINE)
        for match in pattern.finditer(run.trace):
            before = Run(trace=run.trace[: match.start()]).lines[-1:]
            words, folder = (before[0].words, before[0].folder) if before else ([], self.folder)
            if match[1] not in words:  # it stands behind <
                path = os.path.normpath(os.path.join(folder, match[1]))
                if not self._copied(folder, match[1]):
                    self.placed.setdefault(path, self.token(f"$(< {self.shown(match[1])})"))

    def forbid_broken(self, run: Run) -> None:
        """Raises ConfigError for a script that bash cannot read, or that does not end."""
        said = re.search(
            rf"^{re.escape(self.path)}: line (\d+): (syntax error (?:near|: unexpected end).*|unexpected EOF.*"
            r"|syntax error: unexpected end.*)$",
            run.trace,
            re.MULTILINE,
        )
        if said:
            raise ConfigError(
                f"{next(iter(self.files))}: expected a script that bash can read, got line {said[1]}: "
                f"{cut(said[2])}"
            )

    # text

    def where(self, name: str) -> str:
        """``file:line`` of the last mention of a flag or an unknown word outside comments, or the script's name."""
        name = name.partition(" (")[0].removeprefix("$(").removesuffix(")").lstrip("$")
        mention = re.compile(rf"(?<![\w-]){re.escape(name)}(?![\w-])")
        for path, text in self.files.items():
            found = [
                i for i, line in enumerate(text.splitlines(), 1) if mention.search(line.partition("#")[0])
            ]
            if found:
                return f"{Path(path).name}:{found[-1]}"
        return Path(self.path).name

    @property
    def text(self) -> str:
        """All files, without comments."""
        return re.sub(r"(?m)(^|\s)#.*", r"\1", "\n".join(self.files.values()))

    def _referenced(self) -> Iterable[str]:
        return dict.fromkeys(re.findall(r"\$\{?[!#]?([A-Za-z_]\w*)", self.text))

    def _unset(self) -> list[str]:
        """Variables that nothing sets or asks about, so that a script needs them from where it runs.

        One with a default (``${X:-1}``), in a test or at the head of a loop is as bash has it: unset.
        """
        plain: dict[str, bool] = {}
        for line in self.text.split("\n"):
            decides = re.search(r"(?<!\S)(\[\[?|case|test|for|while|until|if|elif|\(\()(?!\S)|&&|\|\|", line)
            for match in re.finditer(r"\$(\w+)|\$\{(\w+)\}|(?<![\w$])([A-Za-z_]\w*)", line):
                name, bare = match[1] or match[2] or match[3], match[3] is not None
                is_plain = not (decides or bare)
                plain[name] = plain.get(name, True) and is_plain
        return [name for name, is_plain in plain.items() if is_plain and re.fullmatch(r"[A-Za-z]\w*", name)]


def _tests(world: World) -> Iterator[tuple[str, str, Answer]]:
    """(the sign, the path, the answer) of the tests of files that a world answers."""
    for question, answer in world.items():
        if match := re.fullmatch(r"\[ (-\w) (.*) \]", question):
            yield match[1], match[2], answer


def _closing(text: str, begin: int) -> int:
    """The brace that closes the one at ``begin``."""
    depth = 0
    for i in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return i
    return len(text)


def _elsewhere(work: Any) -> Any:
    """The result of work that a bash must not do inside another one's callback."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def shell_text(words: Sequence[str]) -> tuple[str, list[str]] | None:
    """The text and its arguments that a program gives to a shell (``docker exec C bash -c TEXT``, ``ssh HOST TEXT``)."""
    for i, word in enumerate(words[:-2]):
        if Path(word).name in SHELLS and re.fullmatch(r"-[a-z]*c", words[i + 1]):
            return words[i + 2], list(words[i + 3 :])
    if words[0] == "ssh":
        takes = re.compile(r"-[bcDEeFIiJLlmOopQRSWw]")
        rest = [
            i
            for i in range(1, len(words))
            if not words[i].startswith("-") and not takes.fullmatch(words[i - 1])
        ]
        if len(rest) > 1:
            return " ".join(words[rest[1] :]), []
    return None


def program_of(words: Sequence[str]) -> int | None:
    """Where in its words a command names the train.py that it starts."""
    if Path(words[0]).name in NO_LAUNCH:
        return None
    return next((i for i, word in enumerate(words) if Path(word).name in PROGRAMS), None)


def script_of(words: Sequence[str]) -> str | None:
    """The script that ``bash`` is given."""
    return next((word for word in words[1:] if not word.startswith("-")), None)


def forbid_carriage_returns(path: str, text: str) -> None:
    """Raises ConfigError for line ends that bash takes for a part of a word."""
    for number, line in enumerate(text.split("\n"), 1):
        if line.endswith("\r") and not line.lstrip().startswith("#"):
            raise ConfigError(
                f"{Path(path).name}:{number}: expected lines that end in \\n, got \\r\\n, whose \\r bash "
                f"takes for a part of the line's last word: sed -i 's/\\r$//' {path}"
            )
