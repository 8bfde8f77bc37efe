"""Stand-ins for what arrays and numbers of numpy unpickle through.

numpy's own functions make whatever a pickle describes, objects and pointers among it. These take the type of
a number, a shape, and as many bytes as they need.
"""

from __future__ import annotations

import pickle
from typing import Any

import numpy

CODES = ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "b1")
KINDS = frozenset(numpy.dtype(code).str for code in CODES)


class Kind:
    """For a dtype: its name alone, such as <f8."""

    def __init__(self, code: Any, *_: Any) -> None:
        self.code = self.str = code

    def __setstate__(self, state: Any) -> None:
        self.str = f"{state[1]}{self.code}"  # the byte order; what else is there makes other things of it


class Array(numpy.ndarray):
    """For an array, and for the function that makes one: empty until its state comes."""

    def __new__(cls, *_: Any) -> Array:
        return super().__new__(cls, 0)

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, is_fortran, content = state
        if kind.str not in KINDS:
            raise pickle.UnpicklingError(f"numpy array of dtype {kind.str}")
        super().__setstate__((1, shape, numpy.dtype(kind.str), bool(is_fortran), content))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return numpy.asarray(self).__reduce_ex__(protocol)  # it travels as what it stands for


class Number:
    """For the function that makes a number: a number of Python."""

    def __new__(cls, kind: Kind, content: bytes) -> Any:
        found = Array()
        found.__setstate__((1, (), kind, False, content))
        return found.item()


class Empty:
    """For ``bytes``, which empty arrays call without arguments; bytes(n) would take n bytes of memory."""

    def __new__(cls) -> Any:
        return b""


def _called(name: str, stand_in: type) -> type:
    """A stand-in under the name that a pickle has, by which torch finds it."""
    module, _, own = name.rpartition(".")
    return type(own, (stand_in,), {"__module__": module})


# As numpy 2 and numpy 1 name them.
STAND_INS = [
    _called("numpy.dtype", Kind),
    _called("numpy.ndarray", Array),
    *(_called(f"numpy.{core}.multiarray._reconstruct", Array) for core in ("_core", "core")),
    *(_called(f"numpy.{core}.multiarray.scalar", Number) for core in ("_core", "core")),
    _called("builtins.bytes", Empty),
]
