"""The errors that a user of slime_ext can meet. Importable everywhere; imports nothing but the
standard library."""

from __future__ import annotations

import atexit
import difflib
import functools
import logging
import sys
from collections.abc import Callable, Collection, Iterable
from typing import Any

LINE = 100  # characters of a value that a message shows


class SlimeExtError(Exception):
    """Base of every error raised on purpose. Its text is one line: ``<where>: expected X, got Y: what to
    do``; control characters in it are shown as such."""

    def __init__(self, message: object = "") -> None:
        super().__init__(printable(str(message)))

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (type(self), *self.args)


class ConfigError(SlimeExtError, ValueError):
    """A flag, a YAML key or a combination of them that cannot work."""


class DataError(SlimeExtError, ValueError):
    """An input file or a tensor that does not hold what it must hold."""


class NonFiniteError(SlimeExtError, FloatingPointError):
    """A log-prob that is NaN or infinite where that has already made the loss NaN."""


class GuardError(SlimeExtError, RuntimeError):
    """A metric outside the range of a guard whose action is to stop."""


def _received(kind: type[SlimeExtError], *args: Any) -> SlimeExtError:
    """An error that another process raised, as unpickling makes it here.

    Ray hands an actor's error to the driver, which ends with dozens of lines of traceback and of what its
    workers still print. There the error's own line is printed once more, as the last one.
    """
    hook = sys.excepthook
    if "ray" in sys.modules and getattr(hook, "func", None) is not _show_and_repeat:
        sys.excepthook = functools.partial(_show_and_repeat, hook)
    return kind(*args)


def _show_and_repeat(
    show: Callable[..., None], kind: type[BaseException], error: BaseException, trace: Any
) -> None:
    show(kind, error, trace)
    while isinstance(error, sys.modules["ray"].exceptions.RayTaskError):
        error = error.cause
    if isinstance(error, SlimeExtError):
        atexit.register(_print_last, f"slime_ext: {error}")


def _print_last(line: str) -> None:
    sys.modules["ray"].shutdown()  # prints what its workers have written so far
    print(f"\n{line}", file=sys.stderr, flush=True)


@functools.cache
def warn_once(message: str) -> None:
    """Logs a warning the first time that this process has it."""
    logging.getLogger("slime_ext").warning(message)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The nearest known name as a clause, or nothing.

    >>> did_you_mean("truncat", ["clip", "truncate"])
    "; did you mean 'truncate'?"
    >>> did_you_mean("zzz", ["clip", "truncate"])
    ''
    """
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean '{near[0]}'?" if near else ""


def check_known(where: str, kind: str, name: object, known: Collection[str]) -> None:
    """Raises ConfigError unless a name is one of those that are known.

    >>> check_known("x", "step", "truncat", ["clip", "truncate"])
    Traceback (most recent call last):
    slime_ext.errors.ConfigError: x: unknown step 'truncat'; did you mean 'truncate'? (known: clip, truncate)
    """
    if name not in known:
        near = did_you_mean(str(name), known)
        raise ConfigError(f"{where}: unknown {kind} '{cut(name)}'{near} (known: {', '.join(known)})")


def printable(text: str) -> str:
    """Text in which every control character, a line end too, is its escape.

    >>> printable("a\\tb\\x1b[31m")
    'a\\\\tb\\\\x1b[31m'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def shown(value: object) -> str:
    """The repr of a value, cut where it is longer than a line.

    >>> shown("1e-4"), len(shown([0] * 100))
    ("'1e-4'", 100)
    """
    return cut(repr(value))


def cut(text: object) -> str:
    """Text as it is, or its beginning where it is longer than a line."""
    found = str(text)
    return found if len(found) <= LINE else f"{found[: LINE - 3]}..."
