"""Runs a launch script in a sandbox and notes each program that it would start.

The sandbox is bashkit: bash's language in process, writes stay in memory, no program ever starts. What only
the cluster knows is answered by a *world*, a choice of answers. Where it makes none, a command succeeds and
prints a token, a word that no script contains: whatever it flows into can be told from what the script says.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_ext.errors import ConfigError, cut
from slime_ext.tools.folders import is_file
from slime_ext.tools.scripts.surroundings import TEXT_TOOLS, Surroundings, at
from slime_ext.tools.scripts.trace import (
    BEGIN,
    BETWEEN,
    END,
    MAPPING,
    TOKEN,
    Answer,
    Call,
    Run,
    World,
    program_of,
    shell_text,
)

if TYPE_CHECKING:
    from bashkit import Bash, BuiltinContext, BuiltinResult

LIMITS = {"timeout_seconds": 20.0, "max_commands": 20_000, "max_loop_iterations": 5_000}
DISK = {"mounts": [{"host_path": "/"}], "allowed_mount_paths": ["/"]}  # read; what is written stays in memory
MOST_TOKENS = 200  # that can stand where a command does
ASKED_TOO_OFTEN = 20  # a loop that waits for a command's other answer gets it then
ENDLESS = 500  # times the same command, from which a loop waits for ever
OURS = ("PS4", "PWD", "OLDPWD", "SHLVL", "_")
STDIN = f"/{BETWEEN}in"
SYNTAX = r": line (\d+): (syntax error near.*|syntax error: unexpected end.*|unexpected EOF.*)$"


class Sandbox:
    """One script, to be run in several worlds.

    Args:
        around: what the script finds around it.
        given: its own flags.
    """

    def __init__(self, around: Surroundings, given: Sequence[str] = ()) -> None:
        self.around, self.given = around, given

    def run(self, world: World) -> Run:
        """Runs the script until everything that it looks for is there.

        Raises:
            ConfigError: bash cannot read it.
        """
        while True:
            before = self.around.size()
            run = self._once(world)
            self.around.learn(run)
            if self.around.size() == before:
                return run

    def _once(self, world: World) -> Run:
        run = Run()
        shell = self._shell(run, world, self.around.folder, self.around.environment(world))
        for _, path, is_there in _tests(world):
            if not is_there and shell.fs().exists(path):
                shell.fs().remove(path, recursive=True)
        result = shell.execute_sync(shlex.join(["bash", "-x", self.around.path, *self.given]))
        run.end = None  # it holds the shell, which holds three open files
        run.trace, run.error = run.trace + result.stderr, result.error or ""
        if said := re.search(f"^{re.escape(self.around.path)}{SYNTAX}", run.trace, re.MULTILINE):
            what = f"got line {said[1]}: {cut(said[2])}"
            raise ConfigError(f"{self.around.path}: expected a script that bash can read, {what}")
        return run

    def _shell(self, run: Run, world: World, folder: str, environment: Mapping[str, str]) -> Bash:
        from bashkit import Bash

        answer = lambda context: self._answer(run, world, context)  # noqa: E731
        names = [
            *self.around.names,
            *(f"{BEGIN}{i}{END}" for i in range(min(len(self.around.texts) + 9, MOST_TOKENS))),
        ]
        there = {
            f"{path}/.here" if sign == "-d" else path: ""
            for sign, path, is_there in _tests(world)
            if is_there
        }
        files = there | self.around.contents(world)
        commands = dict.fromkeys(names, answer)
        variables = dict(environment)
        shell = Bash(cwd=folder, env=variables, files=files, custom_builtins=commands, **DISK, **LIMITS)
        run.end = shell.cancel
        return shell

    def _answer(self, run: Run, world: World, context: BuiltinContext) -> BuiltinResult:
        """What a program prints, and its status."""
        from bashkit import BuiltinResult

        words = (context.name, *context.argv)
        if TOKEN.fullmatch(context.name):
            self.around.evaluated.setdefault(f"eval {self.around.shown(context.name)}")
        if context.name in TEXT_TOOLS and (said := self._of_tool(context)) is not None:
            return said
        if context.name == "tee":
            return BuiltinResult(stdout=context.stdin or "")
        variables = {name: text for name, text in context.env.items() if name not in OURS}
        files = self._written(words, world, context) if program_of(words) is not None else {}
        run.calls.append(Call(words, variables, context.cwd, files))
        if inner := shell_text(words):
            return self._of_shell(run, world, *inner, context)
        if program_of(words) is not None:
            return BuiltinResult()
        question = self.around.shown(" ".join(words))
        run.asked.setdefault(question)
        run.counts[question] += 1
        status, output = world.get(question, Answer())
        if run.counts[question] > ENDLESS and run.end:
            run.end()
        if run.counts[question] > ASKED_TOO_OFTEN:
            status, output = int(not status), "99"
        said_by_it = self.around.token(f"$({question})") + "\n" if output is None else output
        return BuiltinResult(stdout=said_by_it, exit_code=status)

    def _written(self, words: Sequence[str], world: World, context: BuiltinContext) -> dict[str, str]:
        """The mappings that a launch names and that its script has written: name -> text."""
        there, found = self.around.contents(world), {}
        for name in (word.partition("=")[2] if word.startswith("--") else word for word in words):
            path = at(context.cwd, name)
            if name.endswith(MAPPING) and path not in there and context.fs.exists(path):
                said = context.fs.read_file(path)
                if not (is_file(path) and Path(path).read_bytes() == said):
                    found[name] = said.decode(errors="replace")
        return found

    def _of_tool(self, context: BuiltinContext) -> BuiltinResult | None:
        """What a tool makes of a text that is all known; None if it is not."""
        from bashkit import Bash, BuiltinResult

        if TOKEN.search("".join([context.stdin or "", *context.argv])) or not (context.argv or context.stdin):
            return None
        files = {**self.around.contents({}), STDIN: context.stdin or ""}
        command = f"{shlex.join([context.name, *context.argv])} < {STDIN}"
        found = _elsewhere(lambda: Bash(cwd=context.cwd, files=files, **DISK, **LIMITS).execute_sync(command))
        if found.stderr or found.error or TOKEN.search(found.stdout):
            return None
        return BuiltinResult(stdout=found.stdout, exit_code=found.exit_code)

    def _of_shell(
        self, run: Run, world: World, text: str, given: list[str], context: BuiltinContext
    ) -> BuiltinResult:
        """What a text does that a program passes to a shell."""
        from bashkit import BuiltinResult

        if TOKEN.fullmatch(text):
            self.around.evaluated.setdefault(self.around.shown(text))
        shell = self._shell(run, world, context.cwd, context.env)
        command = shlex.join(["bash", "-xc", text, *(given or ["bash"])])
        found = _elsewhere(lambda: shell.execute_sync(command))
        run.trace += found.stderr
        return BuiltinResult(stdout=found.stdout, exit_code=found.exit_code)


def _tests(world: World) -> Iterator[tuple[str, str, bool]]:
    """(sign, path, whether it holds) of the tests of files that a world answers."""
    for question, answer in world.items():
        if match := re.fullmatch(r"\[ (-\w) (.*) \]", question):
            yield match[1], match[2], not answer.status


def _elsewhere(work: Callable[[], Any]) -> Any:
    """The result of work that bashkit refuses inside the callback of another bash."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()
