"""What a shell holds at one point of a script; two states of which either can be are merged into one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from slime_ext.tools.scripts.values import Unknown, Value, Words, is_many, merged, merged_words


class Array:
    """A bash array: elements by index, in order; of an associative one by key."""

    def __init__(self, elements: Mapping[int | str, Value] = {}, *, by_key: bool = False) -> None:
        self.elements, self.by_key = dict(elements), by_key

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Array) and self.elements == other.elements

    __hash__ = None  # type: ignore[assignment]

    @property
    def words(self) -> Words:
        """The elements."""
        return list(self.elements.values())

    @property
    def is_exact(self) -> bool:
        """Whether each element's index is known."""
        return not any(map(is_many, self.elements.values()))

    def with_words(self, words: Iterable[Value]) -> Array:
        """The same with words behind its last element."""
        begin = max((i for i in self.elements if isinstance(i, int)), default=-1) + 1
        return Array({**self.elements, **dict(enumerate(words, begin))}, by_key=self.by_key)

    def with_element(self, index: int | str, word: Value) -> Array:
        """The same with another element."""
        found = {**self.elements, index: word}
        return Array(found if self.by_key else dict(sorted(found.items())), by_key=self.by_key)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Reference:
    """A variable that stands for another one (``declare -n``)."""

    name: str


@dataclass(frozen=True)
class Started:
    """A command by which the script starts train.py.

    Args:
        program: train.py as it is named there.
        words: behind the program.
        environment: variables that its command sets, among them those of ``--runtime-env-json``.
        folder: where it is run.
        where: ``file:line``.
        only_if: what has to hold, where that is unknown.
    """

    program: str
    words: tuple[Value, ...]
    environment: tuple[tuple[str, str], ...]
    folder: Value
    where: str
    only_if: Unknown | None = None


Held = Value | Array | Reference


@dataclass
class State:
    """Variables, positional parameters, working directory, what was written to standard output, and the
    launches so far by where they are written."""

    variables: dict[str, Held] = field(default_factory=dict)
    exported: frozenset[str] = frozenset()
    functions: dict[str, Any] = field(default_factory=dict)
    positional: Words = field(default_factory=list)
    folder: Value = ()
    status: int | None = 0
    stops_at_errors: bool = False
    stops_at_unset: bool = False
    out: Words = field(default_factory=list)
    started: dict[str, Started] = field(default_factory=dict)
    locals: list[dict[str, Held | None]] = field(default_factory=list)
    unread: Unknown | None = None  # what was run that is not here: it can have set any variable

    def copied(self) -> State:
        """A state of its own."""
        found = copy(self)
        for name in ("variables", "functions", "positional", "out", "started"):
            setattr(found, name, copy(getattr(self, name)))
        found.locals = [dict(frame) for frame in self.locals]
        return found

    def taken(self, other: State) -> None:
        """Becomes another state."""
        vars(self).update(vars(other))

    def same_as(self, other: State) -> bool:
        """Whether both hold the same, wherever their launches stand."""
        names = ("variables", "functions", "positional", "folder", "started", "unread", "out")
        return all(getattr(self, name) == getattr(other, name) for name in names)

    def resolved_name(self, name: str) -> str:
        """The variable that a name stands for."""
        for _ in range(len(self.variables)):
            held = self.variables.get(name)
            if not isinstance(held, Reference):
                break
            name = held.name
        return name


def merged_states(one: State, other: State, why: Unknown) -> State:
    """The state where either can be; launches of one alone are conditional."""
    found = one.copied()
    for name in dict.fromkeys((*one.variables, *other.variables)):
        a, b = one.variables.get(name), other.variables.get(name)
        if a != b:
            found.variables[name] = _merged_held(name, a, b, why)
    found.exported = one.exported | other.exported
    found.functions = {**other.functions, **one.functions}
    if one.positional != other.positional:
        found.positional = merged_words(one.positional, other.positional, why)
    found.folder = merged(one.folder, other.folder, why)
    found.status = one.status if one.status == other.status else None
    if one.out != other.out:
        found.out = [(why,)]
    found.unread = one.unread or other.unread
    found.started = _merged_started(one.started, other.started, why)
    return found


def _merged_held(name: str, a: Held | None, b: Held | None, why: Unknown) -> Held:
    if isinstance(a, Array) or isinstance(b, Array):
        words = [h.words if isinstance(h, Array) else [h] if isinstance(h, tuple) else [] for h in (a, b)]
        found = merged_words(*words, why)
        by_key = any(isinstance(h, Array) and h.by_key for h in (a, b))
        return Array(dict(enumerate(found)), by_key=by_key)
    if isinstance(a, Reference) or isinstance(b, Reference):
        return (why,)
    sides = [h if h is not None else () for h in (a, b)]
    flags: frozenset[str] | None = frozenset()
    for side in sides:
        if not all(isinstance(part, str) for part in side):
            flags = None
        elif flags is not None:
            flags |= {w.partition("=")[0] for part in side for w in part.split() if w.startswith("--")}
    return (Unknown(f"${name}", why.where, many=True, flags=flags, is_text=True),)


def _merged_started(one: dict[str, Started], other: dict[str, Started], why: Unknown) -> dict[str, Started]:
    found = {}
    for key in dict.fromkeys((*one, *other)):
        a, b = one.get(key), other.get(key)
        if a and b:
            words = tuple(merged_words(a.words, b.words, why))
            both = {"only_if": a.only_if and b.only_if, "words": words}
            found[key] = Started(**{**vars(a), **both})
        else:
            launch = a or b
            found[key] = Started(**{**vars(launch), "only_if": launch.only_if or why})  # type: ignore[union-attr]
    return found
