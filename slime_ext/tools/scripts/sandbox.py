"""Runs a launch script in a sandbox and notes each program that it would start.

The sandbox is bashkit: bash's language in process, with a disk in memory. No program ever starts, and no file
of this machine is there but those that ``Surroundings`` puts there. What only the cluster knows is a *token*,
a word that no script contains: whatever it flows into can be told from what the script says. A command whose
answer is not known succeeds and prints one.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from slime_ext.errors import ConfigError, cut
from slime_ext.tools.scripts.surroundings import TEXT_TOOLS, Surroundings, at
from slime_ext.tools.scripts.trace import (
    BEGIN,
    BETWEEN,
    END,
    MAPPING,
    TOKEN,
    UNKNOWN,
    Call,
    Guess,
    Run,
    program_of,
    shell_text,
)

if TYPE_CHECKING:
    from bashkit import Bash, BuiltinContext, BuiltinResult

LIMITS = {"max_commands": 20_000, "max_loop_iterations": 5_000}
MOST_TOKENS = 200  # that can stand where a command does
ENDLESS = 500  # times the same command, from which a loop waits for the machine
OURS = ("PS4", "PWD", "OLDPWD", "SHLVL", "_")
STDIN = f"/{BETWEEN}in"
SYNTAX = re.compile(
    r"^(\S+?)(?:: line (\d+))?: "
    r"(syntax error near.*|syntax error: (?:unexpected end|parser|AST).*|unexpected EOF.*)$",
    re.MULTILINE,
)


class Sandbox:
    """One script.

    Args:
        around: what the script finds around it.
        given: its own flags.
    """

    def __init__(self, around: Surroundings, given: Sequence[str] = ()) -> None:
        self.around, self.given = around, given

    def run(self, guess: Guess, is_launch: Callable[[Run], bool]) -> Run:
        """Runs the script until everything that it looks for is there.

        Args:
            is_launch: whether a run makes a launch; after one that makes none, variables that it asked for
                are there.

        Raises:
            ConfigError: bash cannot read it.
        """
        while True:
            before = self.around.size()
            run = self.once(guess)
            self.around.learn(run)
            if self.around.size() == before and not is_launch(run):
                self.around.learn_from_end(run)
            if self.around.size() == before:
                return run

    def once(self, guess: Guess) -> Run:
        """One run."""
        run, around = Run(), self.around
        shell = self._shell(run, guess, guess.worded(around.folder), around.environment())
        parts: list[str] = []  # of the trace; one that is ended has no other
        command = shlex.join(["bash", "-x", around.path, *self.given])
        result = shell.execute_sync(command, on_output=lambda _, errors: parts.append(errors))
        if not guess.is_there:
            run.made = {path for path in around.tests if shell.fs().exists(path)}
        run.end = None  # it holds the shell, which holds three open files
        run.trace += "".join(parts) if result.error else result.stderr
        run.error, run.status = result.error or "", result.exit_code
        for said in SYNTAX.finditer(run.trace):
            if said[1] in around.paths or said[1] == around.path:
                got = f"{f'line {said[2]}: ' if said[2] else ''}{cut(said[3])}"
                got = "more words and operators than the reader takes" if "fuel" in got else got
                is_own = said[1] == around.path
                got = got if is_own else f"an error in line {said[2] or 1}"
                name = said[1] if is_own else around.named(said[1])
                raise ConfigError(f"{name}: expected a script that bash can read, got {got}")
        return run

    def _shell(self, run: Run, guess: Guess, folder: str, environment: Mapping[str, str]) -> Bash:
        from bashkit import Bash

        answer = lambda context: self._answer(run, guess, context)  # noqa: E731
        tokens = (f"{BEGIN}{i}{END}" for i in range(min(len(self.around.tokens) + 9, MOST_TOKENS)))
        commands = dict.fromkeys([*self.around.names, *map(guess.worded, tokens)], answer)
        contents = self.around.contents(guess)
        files = {guess.worded(path): guess.worded(text) for path, text in contents.items()}
        variables = {name: guess.worded(text) for name, text in environment.items()}
        shell = Bash(cwd=folder, env=variables, files=files, custom_builtins=commands, **LIMITS)
        run.end = shell.cancel
        return shell

    def _answer(self, run: Run, guess: Guess, context: BuiltinContext) -> BuiltinResult:
        """What a program prints, and its status."""
        from bashkit import BuiltinResult

        words = (context.name, *context.argv)
        if TOKEN.fullmatch(context.name):
            self.around.evaluated.setdefault(f"eval {self.around.shown(context.name)}")
        if context.name in TEXT_TOOLS and (said := self._of_tool(context)) is not None:
            return said
        if context.name in ("tee", "sleep"):
            return BuiltinResult(stdout=context.stdin or "")
        variables = {name: text for name, text in context.env.items() if name not in OURS}
        files = self._written(words, context) if program_of(words) is not None else {}
        run.calls.append(Call(words, variables, context.cwd, files))
        if inner := shell_text(words):
            return self._of_shell(run, guess, *inner, context)
        if program_of(words) is not None:
            return BuiltinResult()
        command = " ".join(words)
        run.unknown[command] += 1
        if run.unknown[command] > ENDLESS and run.end:
            run.end()
        said_by_it = "" if guess.fails else self.around.token(f"$({self.around.shown(command)})") + "\n"
        return BuiltinResult(stdout=guess.worded(said_by_it), exit_code=int(guess.fails))

    def _written(self, words: Sequence[str], context: BuiltinContext) -> dict[str, str]:
        """The mappings that a launch names and that its script has written: name -> text."""
        there, found = self.around.contents(), {}
        for name in (word.partition("=")[2] if word.startswith("--") else word for word in words):
            path = at(context.cwd, name)
            if name.endswith(MAPPING) and path not in there and context.fs.exists(path):
                found[name] = context.fs.read_file(path).decode(errors="replace")
        return found

    def _of_tool(self, context: BuiltinContext) -> BuiltinResult | None:
        """What a tool makes of a text that is all known; None if it is not."""
        from bashkit import Bash, BuiltinResult

        read = "".join([context.stdin or "", *context.argv])
        if UNKNOWN.search(read) or not read:
            return None
        files = {STDIN: context.stdin or ""}  # what a file holds is not known
        command = f"{shlex.join([context.name, *context.argv])} < {STDIN}"
        found = _elsewhere(lambda: Bash(cwd=context.cwd, files=files, **LIMITS).execute_sync(command))
        if found.stderr or found.error or UNKNOWN.search(found.stdout):
            return None
        return BuiltinResult(stdout=found.stdout, exit_code=found.exit_code)

    def _of_shell(
        self, run: Run, guess: Guess, text: str, given: list[str], context: BuiltinContext
    ) -> BuiltinResult:
        """What a text does that a program passes to a shell."""
        from bashkit import BuiltinResult

        if TOKEN.fullmatch(text):
            self.around.evaluated.setdefault(self.around.shown(text))
        shell = self._shell(run, guess, context.cwd, context.env)
        command = shlex.join(["bash", "-xc", text, *(given or ["bash"])])
        found = _elsewhere(lambda: shell.execute_sync(command))
        run.trace += found.stderr
        return BuiltinResult(stdout=found.stdout, exit_code=found.exit_code)


def _elsewhere(work: Callable[[], Any]) -> Any:
    """The result of work that bashkit refuses inside the callback of another bash."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()
