"""Runs ``slime-ext``. Each command is imported when it is called, so that --help stays fast."""

from __future__ import annotations

import atexit
import errno
import importlib.util
import io
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from slime_ext import __version__
from slime_ext.errors import ConfigError, SlimeExtError, did_you_mean
from slime_ext.tools.folders import working_folder

COMMANDS = {
    "train": "train a language model to add, on a real host, without a GPU",
    "rehearse": "run two small rollouts of a launch script on the real host, without a GPU",
    "presets": "list corrections by name, with formula and flags",
    "check": "find mistakes in a configuration or a launch script",
    "convert": "translate another system's correction into native keys",
    "doctor": "print the versions that a launch needs, and what is missing here",
    "analyze": "find faults in a run's dumps, and what corrections would do",
    "report": "draw reward, mismatch, clipping and staleness of runs",
    "completion": "print a script that completes commands and flags after TAB",
}
# Commands whose answer can be an error: they exit with 1.
JUDGES = ("check", "rehearse")
REQUIRED = {"torch": "torch", "yaml": "PyYAML"}  # module -> package
TOOLS = ("rich", "jinja2", "matplotlib", "numpy", "pydantic", "bashkit", "shtab")
# Extra of setup.py -> modules that it installs. For `train`, only modules that show whether it is installed.
MODULES = {"tools": TOOLS, "train": (*TOOLS, "psutil", "ray", "transformers"), "": ()}
HOW = {  # how to install an extra; pip cannot resolve the second half of `train` (slime_ext_cpu/install.py)
    "tools": 'pip install "slime-ext[tools]"',
    "train": 'pip install "slime-ext[train]", then python -m slime_ext_cpu.install',
}
# Command -> its extra; `tools` by default. doctor says what is missing, so it needs no extra.
EXTRAS = {"train": "train", "rehearse": "train", "doctor": ""}
ELSEWHERE = {"train": "slime_ext_cpu.train", "rehearse": "slime_ext_cpu.rehearse"}  # command -> its module
GONE = {"bench": "python -m benchmarks.fidelity, in a checkout of slime_ext"}
WRONG, USER_ERROR, INTERRUPTED, UNREAD = 1, 2, 130, 1


def usage() -> str:
    """Returns the text of ``slime-ext --help``."""
    rows = "\n".join(f"  {name:<10} {text}" for name, text in COMMANDS.items())
    head = "usage: slime-ext COMMAND [FLAG ...]\n       slime-ext --version"
    return f"{head}\n\n{rows}\n\nslime-ext help COMMAND lists the flags of a command."


def run() -> NoReturn:
    """Runs the command that the process was started with, and ends the process.

    A command of the tools ends without Python's finalisation, which frees what torch made object by object,
    and takes 0.06 s of the 1.0 s of a small ``analyze``. ``train`` and ``rehearse`` end as any program does,
    because Ray has processes to end.
    """
    status = main()
    if sys.argv[1:2] and sys.argv[1] in ELSEWHERE:
        sys.exit(status)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        print(end="", file=stream, flush=True)
    os._exit(status)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command that is named first. A user's mistake is one line on stderr and exit status 2."""
    words = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A path may hold characters that the terminal lacks.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status = _answer(words)
        print(end="", flush=True)
        return status
    except OSError as error:  # the reader of a pipe has ended, as in `| head`, or the disk is full
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        # Python flushes once more when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.ENOSPC:
            place = error.filename or "standard output"
            print(
                f"{_says(words)}: {place}: expected room to write, got none: make room there", file=sys.stderr
            )
        return UNREAD


def _answer(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return 0
    if words[0] == "help":  # `help COMMAND` prints what `COMMAND --help` prints
        return _answer([*words[1:2], "--help"])
    if words[0] == "--version":
        print(f"slime-ext {__version__}")
        return 0
    try:
        return _run(words[0], words[1:])
    except SlimeExtError as error:
        print(f"{_says(words)}: {error}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED


def _says(words: Sequence[str]) -> str:
    """Returns how every message on stderr begins, as argparse begins its own."""
    return " ".join(["slime-ext", *(word for word in words[:1] if word in COMMANDS)])


def _run(name: str, argv: list[str]) -> int:
    if name in GONE:
        raise ConfigError(f"command line: expected a command, got '{name}': run {GONE[name]}")
    if name not in COMMANDS:
        known = ", ".join(COMMANDS)
        near = did_you_mean(name, COMMANDS) or f": type one of {known}"
        raise ConfigError(f"command line: expected a command, got '{name}'{near}")
    _check_extra(name)
    working_folder()  # because torch cannot load its libraries from a removed working directory
    try:
        command = importlib.import_module(module_of(name))
        return int(command.main(argv) or 0)
    except SlimeExtError as error:
        if name not in JUDGES:
            raise
        print(f"{_says([name])}: {error}", file=sys.stderr)
        return WRONG
    except ModuleNotFoundError as error:
        missing = str(error.name).partition(".")[0]
        package = REQUIRED.get(missing)
        if package is None:
            raise
        why = f"expected the package {package}, got none: pip install {package}"
        raise ConfigError(why) from None


def module_of(name: str) -> str:
    """Returns the module of a command."""
    return ELSEWHERE.get(name, f"slime_ext.tools.commands.{name}")


def _check_extra(name: str) -> None:
    """Raises ConfigError if a package of the command's extra is missing."""
    extra = EXTRAS.get(name, "tools")
    if missing := [module for module in MODULES[extra] if not _is_installed(module)]:
        raise ConfigError(
            f"expected the packages of slime-ext[{extra}], got no {', '.join(missing)}: {HOW[extra]}"
        )


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # something in sys.modules or sys.path hides it
        return False


if __name__ == "__main__":
    run()
