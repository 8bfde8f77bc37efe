"""The errors that a user of slime_ext can meet. Importable everywhere; imports nothing but the
standard library."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SlimeExtError(Exception):
    """Base of every error raised on purpose. Its text is one line: ``<where>: expected X, got Y: what to
    do``."""


class ConfigError(SlimeExtError, ValueError):
    """A flag, a YAML key or a combination of them that cannot work."""


class DataError(SlimeExtError, ValueError):
    """An input file or a tensor that does not hold what it must hold."""


class EngineError(SlimeExtError, RuntimeError):
    """The rollout engine does not answer, or answers what it must not."""


class NonFiniteError(SlimeExtError, FloatingPointError):
    """A log-prob that is NaN or infinite where that has already poisoned the loss."""


class GuardError(SlimeExtError, RuntimeError):
    """A metric outside the range of a guard whose action is to stop."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The nearest known name as a clause, or nothing.

    >>> did_you_mean("truncat", ["clip", "truncate"])
    "; did you mean 'truncate'?"
    >>> did_you_mean("zzz", ["clip", "truncate"])
    ''
    """
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean '{near[0]}'?" if near else ""
