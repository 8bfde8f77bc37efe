"""Saves a dump as ``torch.save`` does, byte by byte, in less time."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

STORAGES = (torch.TypedStorage, torch.UntypedStorage)
_torch_save = torch.save  # which a test replaces in scripts that are not ours


class _Held(Exception):
    """The content holds a tensor."""


class _WithoutTensors(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, (torch.Tensor, *STORAGES)):
            raise _Held
        return NotImplemented


class _Pickler(pickle.Pickler):
    """The pickler that ``torch.save`` extends, and which then asks of each number whether it is a storage.

    Asking takes half of the time. Here nothing is asked without a tensor, else only of which type each is.
    """

    def __init__(self, file: Any, protocol: int) -> None:
        self.file, self.form = file, protocol

    def dump(self, value: Any) -> None:
        begin, name_of = self.file.tell(), self.persistent_id

        class WithTensors(pickle.Pickler):
            def persistent_id(self, value: Any) -> Any:
                return name_of(value) if type(value) in STORAGES else None

        try:
            _WithoutTensors(self.file, self.form).dump(value)
        except _Held:
            self.file.seek(begin)
            self.file.truncate()
            WithTensors(self.file, self.form).dump(value)


_MODULE = SimpleNamespace(__name__="pickle", Pickler=_Pickler)


def save(content: Any, path: str | Path) -> None:
    """Writes a file."""
    _torch_save(content, path, pickle_module=_MODULE)
