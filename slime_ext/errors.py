"""Defines errors and warnings for users, one line each.

It imports only the standard library.
"""

from __future__ import annotations

import atexit
import difflib
import functools
import logging
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

LINE = 100  # characters of a value that a message shows


class SlimeExtError(Exception):
    """Base of every error that is raised on purpose.

    Its message is one line, ``<where>: expected X, got Y: what to do``. Control characters are escaped.
    """

    def __init__(self, message: object = "") -> None:
        super().__init__(printable(str(message)))

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (type(self), *self.args)


class ConfigError(SlimeExtError, ValueError):
    """A flag, a YAML key or a combination that cannot work."""


class DataError(SlimeExtError, ValueError):
    """A file or a tensor with the wrong content or shape."""


class NonFiniteError(SlimeExtError, FloatingPointError):
    """A NaN or infinite log-prob that has already made the loss NaN."""


class GuardError(SlimeExtError, RuntimeError):
    """A metric left the range of a guard with ``action: stop``."""


def _received(kind: type[SlimeExtError], *args: Any) -> SlimeExtError:
    """Unpickles an error that another process raised.

    Under Ray, the driver ends with dozens of lines of traceback and worker output. So the error is printed
    again as the last line.
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
    sys.modules["ray"].shutdown()  # called first, because it prints the output of the workers
    print(f"\n{line}", file=sys.stderr, flush=True)


@functools.cache
def warn_once(message: str) -> None:
    """Logs a warning once per process."""
    logging.getLogger("slime_ext").warning(message)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns the nearest known name as a clause; empty if none is near.

    >>> did_you_mean("truncat", ["clip", "truncate"])
    "; did you mean 'truncate'?"
    >>> did_you_mean("zzz", ["clip", "truncate"])
    ''
    """
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean '{near[0]}'?" if near else ""


def check_known(where: str, kind: str, name: object, known: Collection[str]) -> None:
    """Raises ConfigError for an unknown name. The message has the nearest known name.

    >>> check_known("x", "key", "hihg", ["low", "high"])
    Traceback (most recent call last):
    slime_ext.errors.ConfigError: x: expected a known key, got 'hihg'; did you mean 'high'? (known: low, high)
    """
    if name not in known:
        near = did_you_mean(cut(name), known)
        listed = ", ".join(known) or "none"
        raise ConfigError(f"{where}: expected a known {kind}, got '{cut(name)}'{near} (known: {listed})")


def expect(ok: bool, where: str, expected: str, got: object, why: str) -> None:
    """Raises ConfigError in the form of all our messages, unless ``ok``."""
    if not ok:
        raise ConfigError(f"{where}: expected {expected}, got {got}: {why}")


def printable(text: str) -> str:
    """Escapes control characters, newlines included.

    >>> printable("a\\tb\\x1b[31m")
    'a\\\\tb\\\\x1b[31m'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def quoted(value: object) -> str:
    """Formats a value as its repr, cut to one line.

    >>> quoted("1e-4"), len(quoted([0] * 100))
    ("'1e-4'", 100)
    """
    return cut("".join(_first(_pieces(value))))


def cut(text: object) -> str:
    """Formats a value as text, cut to one line."""
    is_large = isinstance(text, Mapping | list | tuple) or type(text) is int
    line = "".join(_first(_pieces(text))) if is_large else f"{text}"
    return line if len(line) <= LINE else f"{line[: LINE - 3]}..."


def _first(pieces: Iterable[str]) -> Iterator[str]:
    """Yields pieces until they fill a line, and then one more."""
    length = 0
    for piece in pieces:
        yield piece
        length += len(piece)
        if length > LINE:
            return


def _pieces(value: object) -> Iterator[str]:
    """Yields the parts of a repr, one after the other.

    A repr must be cut while it is written, because YAML aliases make a value of 1e8 items out of 400 bytes.
    """
    if isinstance(value, Mapping):
        yield "{"
        for i, (key, item) in enumerate(value.items()):
            yield ", " if i else ""
            yield from _pieces(key)
            yield ": "
            yield from _pieces(item)
        yield "}"
    elif isinstance(value, list | tuple):
        begin, end = "[]" if isinstance(value, list) else "()"
        yield begin
        for i, item in enumerate(value):
            yield ", " if i else ""
            yield from _pieces(item)
        yield f",{end}" if isinstance(value, tuple) and len(value) == 1 else end
    elif type(value) is str:
        yield repr(value[: LINE + 1])
    elif type(value) is int and value.bit_length() > 4 * LINE:  # repr raises above 4,300 digits
        yield hex(value >> value.bit_length() - 4 * LINE)
    else:
        yield repr(value)
