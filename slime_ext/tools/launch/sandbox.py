"""Runs a launch script in a sandbox and notes each program that it would start.

The sandbox is bashkit, which interprets bash in this process with a disk in memory. No program starts, and
the only files of this machine are those that ``Surroundings`` copies. A *token* stands for something that
only the cluster knows. No script contains that word, so everything it flows into can be told apart from the
script's text. A command with an unknown answer succeeds and prints a token.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from slime_ext.errors import ConfigError, cut
from slime_ext.tools.launch.questions import NOT_AT_FIRST, ONCE
from slime_ext.tools.launch.starts import folder_of, inherited
from slime_ext.tools.launch.surroundings import END_OF_TYPED, TEXT_TOOLS, Surroundings, is_of_model
from slime_ext.tools.launch.trace import (
    BEGIN,
    BETWEEN,
    END,
    MAPPING,
    SHELL,
    TOKEN,
    TYPED,
    UNKNOWN,
    Call,
    Command,
    Guess,
    Run,
    at,
    program_of,
    script_of,
    shell_text,
    split,
    traced,
)

if TYPE_CHECKING:
    from bashkit import Bash, BuiltinContext, BuiltinResult, FileSystem

T = TypeVar("T")
LIMITS: dict[str, Any] = {"max_commands": 20_000, "max_loop_iterations": 5_000}
MOST_TOKENS = 200  # the sandbox accepts so many tokens as names of commands
SOME_TOKENS = 16  # a shell accepts a multiple of so many, so that the next run can use it, too
MAKERS = ("mkdir", "touch")  # they succeed, unless a guess asks what follows if one fails
OF_NO_MACHINE = ("/etc", "/home", "/proc")  # folders that bashkit makes up
PATIENCE = 20  # runs of one command after which a loop counts as waiting for another answer
ENDLESS = 500  # runs of one command after which its loop counts as waiting for the machine
LOOPS = re.compile(r"\b(?:while|until)\b|\bfor\s*\(\(")  # the loops that can be endless
OF_SANDBOX = ("PS4", "PWD", "OLDPWD", "SHLVL", "_")
STDIN = f"/{BETWEEN}in"
SYNTAX = re.compile(  # run.sh: line 3: syntax error near unexpected token `)'
    r"^(\S+?)(?:: line (\d+))?: "
    r"(syntax error near.*|syntax error: (?:unexpected end|parser|AST).*|unexpected EOF.*)$",
    re.MULTILINE,
)


class Sandbox:
    """Runs one script.

    Args:
        around: the surroundings of the script.
        arguments: the arguments of the script.
    """

    def __init__(self, around: Surroundings, arguments: Sequence[str] = ()) -> None:
        self.around, self.arguments = around, arguments
        # Words, folder and stdin of a text tool -> stdout, stderr and status.
        self._tools: dict[tuple[tuple[str, ...], str, str], tuple[str, str, int]] = {}
        self._runs: dict[Hashable, list[tuple[Guess, Run]]] = {}  # what a run gets -> those that got it
        self._learned: dict[int, int] = {}  # run -> the size of surroundings that know all that it shows
        self._shells: dict[Hashable, Shell] = {}  # what a shell keeps when it is reset -> the last shell
        self._is_ended = False  # whether the sandbox has ended a run

    def run(self, guess: Guess, is_launch: Callable[[Run], bool] | None = None) -> Run:
        """Runs the script until a run misses nothing more. Each run gets what the last run missed.

        Args:
            guess: the guess about the machine.
            is_launch: whether a run reaches a launch. If not, the next run gets the variables it asked for.
                None if it should get none.

        Raises:
            ConfigError: bash cannot read the script.
        """
        needs = dict(self.around.needs)
        while True:
            before = self.around.size()
            run = self.once(guess)
            if self._learned.get(id(run)) != before:
                self.around.learn(run)
            if is_launch is None:
                self.around.needs = dict(needs)
            elif self.around.size() == before and not is_launch(run):
                self.around.learn_from_end(run)
            if self.around.size() == before:
                self._learned[id(run)] = before
                return run

    def once(self, guess: Guess) -> Run:
        """Returns a run of the script: an earlier one if it got the same files, variables and answers."""
        around = self.around
        files, environment = self._files(guess), around.environment()
        commands = len(around.names), len(around.configs), len(around.tests)
        key = guess.is_wide, guess.breaks, *commands, *files.items(), "", *environment.items()
        alike = self._runs.setdefault(key, [])
        for other, run in alike:
            if _answers(run, other) == _answers(run, guess):
                return run
        alike.append((guess, run := self._new(guess, files, environment)))
        return run

    def _new(self, guess: Guess, files: Mapping[str, str], environment: Mapping[str, str]) -> Run:
        around, folder = self.around, guess.worded(self.around.folder)
        key = guess.is_wide, folder, len(around.names), self._tokens(), *environment.items(), "", *files
        if (shell := self._shells.pop(key, None)) is None:
            shell = self._shell(guess, folder, environment, files)
            self._shells.clear()  # each keeps open files
        else:
            shell.reset(files)
        self._shells[key] = shell
        # Only a shell that prints as it runs has the trace of a run that the sandbox ends. It is a third
        # slower, so a script without loops gets one only after such a run.
        follows = self._is_ended or any(LOOPS.search(text) for text in around.files.values())
        run = self._traced(shell, guess, follows=follows)
        if run.error and not follows:
            self._is_ended = True
            shell.reset(files)
            run = self._traced(shell, guess, follows=True)
        for path, line, message in SYNTAX.findall(run.trace):
            if path in around.paths or path == around.path:
                got = f"{f'line {line}: ' if line else ''}{cut(message)}"
                got = "more words and operators than the sandbox can read" if "fuel" in got else got
                is_the_script = path == around.path
                got = got if is_the_script else f"an error in line {line or 1}"
                name = path if is_the_script else around.named(path)
                raise ConfigError(f"{name}: expected a script that bash can read, got {got}")
        return run

    def _traced(self, shell: Shell, guess: Guess, *, follows: bool) -> Run:
        """Returns a run of the script in a shell that is as new.

        Args:
            follows: whether the shell prints as it runs.
        """
        run, around = Run(end=shell.bash.cancel), self.around
        shell.answers[:] = [lambda context: self._answer(run, guess, context)]
        parts: list[str] = []  # of the trace; if the sandbox ends a run, its result has no trace
        command = f"{shlex.join(['bash', '-x', around.path, *self.arguments])} < {TYPED}"
        follow = (lambda _, errors: parts.append(errors)) if follows else None
        result = shell.bash.execute_sync(command, on_output=follow)
        fs = shell.bash.fs()
        run.made = {p for p in around.tests if fs.exists(p) and not around.is_above_matches(p)}
        run.end, shell.answers[:] = None, []  # because they would keep the shell's three open files
        run.trace += "".join(parts) if result.error else result.stderr
        run.error, run.status = result.error or "", result.exit_code
        return run

    def _files(self, guess: Guess) -> dict[str, str]:
        """Returns path -> text of the files that a shell finds."""
        contents = self.around.contents(guess)
        return {guess.worded(path): guess.worded(text) for path, text in contents.items()}

    def _tokens(self) -> int:
        """Returns how many tokens a shell accepts as names of commands: a run shows more of them."""
        return min((len(self.around.tokens) + 9 + SOME_TOKENS) // SOME_TOKENS * SOME_TOKENS, MOST_TOKENS)

    def _shell(
        self, guess: Guess, folder: str, environment: Mapping[str, str], files: Mapping[str, str]
    ) -> Shell:
        tokens = (f"{BEGIN}{i}{END}" for i in range(self._tokens()))
        commands = [*self.around.names, *map(guess.worded, tokens)]
        variables = {name: guess.worded(text) for name, text in environment.items()}
        return Shell(folder, variables, files, commands)

    def _answer(self, run: Run, guess: Guess, context: BuiltinContext) -> BuiltinResult:
        """Answers a command: returns what it prints, and its status."""
        from bashkit import BuiltinResult

        stdin = "" if (context.stdin or "").endswith(END_OF_TYPED) else context.stdin or ""
        words = _words_of(context, stdin)
        if TOKEN.fullmatch(context.name):
            self.around.evaluated.setdefault(f"eval {self.around.quoted(context.name)}")
        run.commands.append(Command(words, context.cwd, stdin))
        if context.name in TEXT_TOOLS and (answer := self._of_tool(context, stdin)) is not None:
            return BuiltinResult(stdout=answer[0], exit_code=answer[1])
        if context.name in ("tee", "sleep") or (context.name == "cat" and stdin and not context.argv):
            return BuiltinResult(stdout=stdin)
        if context.name in (ONCE, NOT_AT_FIRST):
            run.passes[words] += 1
            return BuiltinResult(exit_code=int((run.passes[words] == 1) != (context.name == ONCE)))
        variables = {name: text for name, text in context.env.items() if name not in OF_SANDBOX}
        folder = folder_of(words, context.cwd, self.around.token)
        files = self._written(words, guess, folder, context) if program_of(words) is not None else {}
        changed = self._changed(guess, context.fs) if program_of(words) is not None else frozenset()
        run.calls.append(Call(words, variables, folder, files, changed))
        inner = shell_text(words, stdin)
        if (file := script_of(words)) and _text(context.fs, at(folder, file[0])) is not None:
            inner = shlex.join(["bash", *file]), []
        if inner:
            return self._of_shell(run, guess, words, *inner, folder, context)
        if program_of(words) is None:
            return self._unknown(run, guess, words, context)
        launches = sum(program_of(call.words) is not None for call in run.calls)
        return BuiltinResult(exit_code=int(guess.breaks and launches <= PATIENCE))

    def _unknown(
        self, run: Run, guess: Guess, words: Sequence[str], context: BuiltinContext
    ) -> BuiltinResult:
        """Answers a command of which only the machine knows what it prints, and whether it succeeds."""
        from bashkit import BuiltinResult

        command = " ".join(words)
        run.unknown[command] += 1
        if run.unknown[command] > ENDLESS and run.end:
            run.end()
        is_waited_for = run.unknown[command] > PATIENCE  # a loop ends if the answer becomes another
        fails = _fails(command, guess)
        if _makes(command):
            return _made(context, fails=fails)
        fails ^= is_waited_for
        is_model = any(map(is_of_model, words))
        text = f"$({self.around.quoted(command)})"
        token = self.around.token(text, "", False, False, is_model)
        output = "" if fails else self.around.line_of(token, guess)
        return BuiltinResult(stdout=guess.worded(output), exit_code=int(fails))

    def _written(
        self, words: Sequence[str], guess: Guess, folder: str, context: BuiltinContext
    ) -> dict[str, str]:
        """Returns name -> text of the mappings that a script writes for its launch."""
        there, mappings = self._files(guess), {}
        for name in (word.partition("=")[2] if word.startswith("--") else word for word in words):
            path = at(folder, name)
            text = _text(context.fs, path) if name.endswith(MAPPING) else None
            if text and text != there.get(path) and (path not in there or not UNKNOWN.search(text)):
                mappings[name] = text
        return mappings

    def _changed(self, guess: Guess, fs: FileSystem) -> frozenset[str]:
        """Returns the paths of the configurations whose text is not the one that the sandbox got."""
        there = self._files(guess)
        paths = {path: guess.worded(path) for path in self.around.configs}
        return frozenset(path for path, name in paths.items() if _text(fs, name) != there.get(name))

    def _of_tool(self, context: BuiltinContext, stdin: str) -> tuple[str, int] | None:
        """Returns what a text tool prints, and its status. Returns None if a part of its input is unknown."""
        words = (context.name, *context.argv)
        is_grep = context.name in ("egrep", "fgrep", "grep")
        if is_grep and any(re.fullmatch(r"-\w*[rR]\w*|--recursive", word) for word in words):
            return None

        read = "".join([stdin, *context.argv])
        if UNKNOWN.search(read) or not read:
            return None
        key = (words, context.cwd, stdin)
        if key not in self._tools:  # the runs repeat it
            self._tools[key] = _elsewhere(lambda: _run_tool(*key))
        stdout, stderr, status = self._tools[key]
        lacks_file = is_grep and status > 1  # with -q or -s, grep does not say so
        return None if lacks_file or stderr or UNKNOWN.search(stdout) else (stdout, status)

    def _of_shell(
        self,
        run: Run,
        guess: Guess,
        words: Sequence[str],
        text: str,
        arguments: list[str],
        folder: str,
        context: BuiltinContext,
    ) -> BuiltinResult:
        """Runs a text that the words of a command pass to a shell."""
        from bashkit import BuiltinResult

        if TOKEN.fullmatch(text):
            self.around.evaluated.setdefault(self.around.quoted(text))
        variables, files = inherited(words, context.env, self.around.environment()), self._files(guess)
        for path in (at(folder, word) for word in split(text)):  # a script that the script writes: bash FILE
            if Path(path).suffix in SHELL and (content := _text(context.fs, path)):
                files[path] = content
        text = traced(text)
        shell = _elsewhere(lambda: self._shell(guess, folder, variables, files))
        run.end = shell.bash.cancel
        shell.answers[:] = [lambda context: self._answer(run, guess, context)]
        command = shlex.join(["bash", "-xc", text, *(arguments or ["bash"])])
        result = _elsewhere(lambda: shell.bash.execute_sync(command))
        run.changed |= _elsewhere(lambda: self._changed(guess, shell.bash.fs()))
        run.trace += result.stderr
        return BuiltinResult(stdout=result.stdout, exit_code=result.exit_code)


class Shell:
    """A shell of the sandbox. Resetting one takes an eighth of the time that a new one takes.

    Args:
        folder: the folder in which it starts.
        variables: its environment.
        files: path -> text of its files.
        commands: the names of the commands that it asks the only one of ``answers`` about.
    """

    def __init__(
        self,
        folder: str,
        variables: Mapping[str, str],
        files: Mapping[str, str],
        commands: Sequence[str],
    ) -> None:
        from bashkit import Bash

        answers: list[Callable[[BuiltinContext], BuiltinResult]] = []
        self.answers = answers
        builtins = dict.fromkeys(commands, lambda context: answers[0](context))
        self._files = files
        self.bash = Bash(
            cwd=folder, env=dict(variables), files=dict(files), custom_builtins=builtins, **LIMITS
        )
        _with_files_only(self.bash, files)

    def reset(self, files: Mapping[str, str]) -> None:
        """Makes the shell as new, with other texts of the same files."""
        self.bash.reset()
        fs = _with_files_only(self.bash, files).fs()
        for path in (path for path, text in files.items() if text != self._files[path]):
            fs.write_file(path, files[path].encode())


def _fails(command: str, guess: Guess) -> bool:
    """Whether a command with an unknown answer fails under a guess."""
    return (guess.fails and not _makes(command)) ^ (guess.asked == command)


def _makes(command: str) -> bool:
    return command.partition(" ")[0] in MAKERS


def _answers(run: Run, guess: Guess) -> list[tuple[bool, int]]:
    """Returns whether each command with an unknown answer fails, and the number of words that it prints."""
    answers = []
    for command, count in run.unknown.items():
        fails = _fails(command, guess)
        is_silent = _makes(command) or (fails and count <= PATIENCE)
        answers.append((fails, 0 if is_silent else guess.words))
    return answers


def _words_of(context: BuiltinContext, stdin: str) -> tuple[str, ...]:
    """Returns the words of a command. xargs and parallel add those that they read, or put the last line in.

    The forms are ``xargs P``, ``xargs -0 P``, ``xargs -I{} P {}`` and ``parallel P {} ::: WORDS``.
    """
    words = (context.name, *context.argv)
    if context.name not in ("xargs", "parallel"):
        return words
    if ":::" in words:
        stdin, words = "\n".join(words[words.index(":::") + 1 :]), words[: words.index(":::")]
    into = next((word[2:] or after for word, after in pairwise([*words, ""]) if word.startswith("-I")), "{}")
    if any(into in word for word in words[1:] if word[:1] != "-") or context.name == "parallel":
        line = (stdin.splitlines() or [""])[-1]
        replaced = tuple(word.replace(into, line) for word in words)
        return replaced if replaced != words else (*words, line)
    return (*words, *(stdin.strip("\0").split("\0") if "-0" in words else split(stdin)))


def _run_tool(words: Sequence[str], folder: str, stdin: str) -> tuple[str, str, int]:
    """Runs a text tool, which sees no file but stdin, and returns its stdout, stderr and status."""
    from bashkit import Bash

    files = {STDIN: stdin}
    shell = _with_files_only(Bash(cwd=folder, files=dict(files), **LIMITS), files)
    result = shell.execute_sync(f"{shlex.join(words)} < {STDIN}")
    return result.stdout, result.stderr or result.error or "", result.exit_code


def _made(context: BuiltinContext, *, fails: bool) -> BuiltinResult:
    """Makes the folders or files of ``mkdir`` or ``touch``, which are there as well if it fails."""
    from bashkit import BuiltinResult

    for path in (at(context.cwd, word) for word in context.argv if word[:1] != "-"):
        if context.name == "mkdir":
            context.fs.mkdir(path, recursive=True)
        elif not context.fs.exists(path) and context.fs.exists(str(Path(path).parent)):
            context.fs.write_file(path, b"")
    return BuiltinResult(exit_code=int(fails))


def _with_files_only(shell: Bash, files: Mapping[str, str]) -> Bash:
    """Returns a shell without the files that are not in ``files``, as /etc/hosts and /proc/cpuinfo."""

    fs = shell.fs()
    for folder in OF_NO_MACHINE:
        fs.remove(folder, recursive=True)
        for path in (path for path in files if path.startswith(f"{folder}/")):
            fs.mkdir(str(Path(path).parent), recursive=True)
            fs.write_file(path, files[path].encode())
    return shell


def _text(fs: FileSystem, path: str) -> str | None:
    """Returns the text of a file of the sandbox; None if there is none."""
    is_there = fs.exists(path) and fs.stat(path)["file_type"] == "file"
    return fs.read_file(path).decode(errors="replace") if is_there else None


def _elsewhere(work: Callable[[], T]) -> T:
    """Runs work in another thread, because bashkit refuses to run inside a callback of itself."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()
