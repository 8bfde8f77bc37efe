"""Values of a shell in which some parts may be unknown, and what two possible values have in common."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

FLAG = "--"


@dataclass(frozen=True)
class Unknown:
    """A part of a value that is known only where the script runs.

    Args:
        text: as the script writes it, ``$(hostname)``.
        where: ``file:line``.
        unset: whether it is a variable that nothing sets: a shell has nothing there.
        many: whether it can be any number of words.
        flags: names of the flags that can be among those words; None where any can.
        is_text: whether it is a variable or a command's output rather than a list of words, so that behind a
            flag it is most likely that flag's value.
    """

    text: str
    where: str = ""
    unset: bool = False
    many: bool = False
    flags: frozenset[str] | None = frozenset()
    is_text: bool = False


Value = tuple[str | Unknown, ...]  # parts of one word; no two strings are neighbours, none is empty
Words = list[Value]


def value(*parts: str | Unknown) -> Value:
    """Parts as a value."""
    found: list[str | Unknown] = []
    for part in parts:
        if isinstance(part, str) and found and isinstance(found[-1], str):
            found[-1] += part
        elif part != "":
            found.append(part)
    return tuple(found)


def joined(*values: Value) -> Value:
    """Values one behind the other."""
    return value(*(part for parts in values for part in parts))


def shown(parts: Value) -> str:
    """A value with its unknown parts as the script writes them."""
    return "".join(part if isinstance(part, str) else part.text for part in parts)


def known(parts: Value) -> str | None:
    """The string that a shell has, in which variables that nothing sets are empty; None where a part is
    unknown."""
    kept = [part for part in parts if isinstance(part, str) or not part.unset]
    return "".join(kept) if all(isinstance(part, str) for part in kept) else None  # type: ignore[arg-type]


def is_many(parts: Value) -> bool:
    """Whether a value can be any number of words."""
    return any(isinstance(part, Unknown) and part.many for part in parts)


def resolved(words: Iterable[Value]) -> list[str | None]:
    """Words as a shell gives them to a command; None for one that is unknown, which can be several."""
    found = []
    for word in words:
        if not (word and all(isinstance(part, Unknown) and part.unset and part.many for part in word)):
            found.append(known(word))
    return found


def merged(one: Value, other: Value, why: Unknown) -> Value:
    """A value that is one of two."""
    return one if one == other else (why,)


def merged_words(one: Sequence[Value], other: Sequence[Value], why: Unknown) -> Words:
    """Words that are one of two lists: what they begin and end with alike, and between that one unknown
    part that knows which flags can be in it."""
    if list(one) == list(other):
        return list(one)
    head = _alike(one, other)
    tail = min(_alike(one[::-1], other[::-1]), len(one) - head, len(other) - head)
    middle = [*one[head : len(one) - tail], *other[head : len(other) - tail]]
    flags: frozenset[str] | None = frozenset()
    for word in middle:
        flags = _united(flags, _flags_of(word))
    gap = (Unknown(why.text, why.where, many=True, flags=flags),)
    return collapsed([*one[:head], gap, *one[len(one) - tail :]])


def collapsed(words: Iterable[Value]) -> Words:
    """Words in which neighbours that are unknown in number are one."""
    found: Words = []
    for word in words:
        if found and _is_gap(word) and _is_gap(found[-1]) and not (word[0].unset or found[-1][0].unset):
            first, second = found[-1][0], word[0]
            found[-1] = (
                Unknown(first.text, first.where, many=True, flags=_united(first.flags, second.flags)),
            )
        else:
            found.append(word)
    return found


def _is_gap(word: Value) -> bool:
    return len(word) == 1 and is_many(word)


def _alike(one: Sequence[Value], other: Sequence[Value]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _flags_of(word: Value) -> frozenset[str] | None:
    first = word[0] if word else ""
    if isinstance(first, Unknown):
        return first.flags
    return frozenset([first.partition("=")[0]]) if first.startswith(FLAG) else frozenset()


def _united(one: frozenset[str] | None, other: frozenset[str] | None) -> frozenset[str] | None:
    return None if one is None or other is None else one | other


def glob_as_regex(text: str) -> str:
    """A shell's pattern as a regular expression.

    >>> glob_as_regex("a*[!b]?")
    'a.*[^b].'
    """
    found, at = [], 0
    while at < len(text):
        letter, at = text[at], at + 1
        end = text.find("]", at + 1) if letter == "[" else -1
        if letter == "\\" and at < len(text):
            found.append(re.escape(text[at]))
            at += 1
        elif letter in "*?":
            found.append(".*" if letter == "*" else ".")
        elif end > 0:
            inner = text[at:end]
            found.append(f"[{'^' + inner[1:] if inner[0] in '!^' else inner}]".replace("\\", "\\\\"))
            at = end + 1
        else:
            found.append(re.escape(letter))
    return "".join(found)
