"""Arrays whose operations are noticed, as PyTorch's dispatch modes notice those of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from slime_ext.ops import arrays

Note = Callable[[str, list[np.ndarray], list[np.ndarray]], None]  # an operation's name, what it read and made
NEW = "new"  # what is no operation, but takes memory
METHODS = ("astype", "copy", "fill", "dot", "repeat", "sum", "max", "min")
VIEWS = {"broadcast_to", "ndim", "shape", "reshape"}
_notes: list[Note] = []


class Watched(np.ndarray):
    """Its operations are noted, and so are those of what they make."""

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *read: Any, out: Any = (), **more: Any) -> Any:
        more = {name: _plain(x) for name, x in more.items()}
        if out:
            more["out"] = tuple(map(_plain, out))
        return _made(ufunc.__name__, read, getattr(ufunc, method)(*map(_plain, read), **more))

    def __array_function__(self, function: Callable, types: Any, read: Any, more: dict) -> Any:
        found = function(*map(_plain, read), **{name: _plain(x) for name, x in more.items()})
        return _watching(found) if function.__name__ in VIEWS else _made(function.__name__, read, found)

    def __setitem__(self, at: Any, values: Any) -> None:
        _plain(self)[_plain(at)] = _plain(values)
        _made("setitem", (self, values), None)


def _of_method(name: str) -> Callable[..., Any]:
    def method(self: Watched, *read: Any, **more: Any) -> Any:
        own = _plain(self)
        found = getattr(own, name)(*map(_plain, read), **more)
        return self if found is own else _made(name, (self, *read), found)

    return method


for _name in METHODS:
    setattr(Watched, _name, _of_method(_name))


def _plain(value: Any) -> Any:
    if isinstance(value, Watched):
        return value.view(np.ndarray)
    return type(value)(map(_plain, value)) if type(value) in (list, tuple) else value


def _watching(value: Any) -> Any:
    return value.view(Watched) if isinstance(value, np.ndarray) else value


def _made(name: str, read: Any, found: Any) -> Any:
    made = [found] if isinstance(found, np.ndarray) else []
    for note in _notes:
        note(name, [x for x in read if isinstance(x, np.ndarray)], made)
    return _watching(found)


@contextmanager
def watched(note: Note) -> Iterator[None]:
    """Notes what numpy does meanwhile with the tensors that it is shown, and with what it makes of them."""
    of, new, table = arrays.of, arrays.new, arrays.table
    arrays.of = lambda values: _watching(of(values))
    arrays.new = lambda *how: _made(NEW, (), new(*how))
    arrays.table = lambda rows: _made("table", rows, table(list(map(_plain, rows))))
    _notes.append(note)
    try:
        yield
    finally:
        arrays.of, arrays.new, arrays.table = of, new, table
        _notes.remove(note)
