"""Adds to SGLang 0.5.23 what only its CUDA build or miles' fork has."""

from __future__ import annotations

import importlib.machinery
import os
import sys
from types import ModuleType
from typing import Any

from slime_ext_cpu.import_hooks import around
from slime_ext_cpu.processes import MARK

ABSENT = (
    "sgl_kernel",  # compiled for CUDA; --attention-backend torch_native calls nothing in it
    "sglang.srt.entrypoints.openai.encoding_dsv4",  # in miles' fork; miles 31f1ca9 always imports it
    # miles 2b5b7fc imports it whatever its flags are. It needs mooncake and miles' fork of SGLang.
    "miles.backends.megatron_utils.update_weight.update_weight_from_distributed.p2p",
)
_kept: list[object] = []  # keeps the library object alive, because its operators end with it


class Absent(ModuleType):
    """A module in which every name exists. Calling a name raises NotImplementedError."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__, self.__path__ = importlib.machinery.ModuleSpec(name, None), []

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: object, **options: object) -> None:
            raise NotImplementedError(f"{self.__name__}.{name}: not in the packages of PyPI")

        return call


def add_absent() -> None:
    """Puts the absent modules in place."""
    sys.modules.update((name, Absent(name)) for name in ABSENT)


def declare_operators(torchvision: ModuleType) -> None:
    """Declares two operators of torchvision, whose library does not load without CUDA.

    torchvision 0.28.0 registers fakes for them (_meta_registrations.py), which fails if they do not exist.
    """
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(library)


def share_by_name(patch_torch: ModuleType) -> None:
    """Pushes the weights of a colocated trainer through named shared memory instead of CUDA's handles.

    The hosts send a pickle of handles (update_weight_from_tensor.py). SGLang rewrites the device in each
    handle, but handles of CPU tensors have no device. torch's default for CPU tensors is to pass an open file
    to a child process.
    """
    from torch import multiprocessing

    patch_torch.monkey_patch_torch_reductions = lambda: multiprocessing.set_sharing_strategy("file_system")


def allocate_plainly(common: ModuleType) -> None:
    """Allocates plain memory for replayed experts (--use-rollout-routing-replay).

    SGLang would register this memory with cudaHostRegister.
    """
    import torch

    common.ALLOC_MEMORY_FUNCS["cpu"] = lambda size, dtype, **options: torch.empty(size, dtype=dtype)


def mark_files(load_snapshot: ModuleType) -> None:
    """Puts the run's mark into names of files in /dev/shm. A killed SGLang leaves them there."""

    @around(load_snapshot, "shm_path_for")
    def marked(name: Any, ipc_name: str) -> str:
        return name(ipc_name).removesuffix(".shm") + f"_{os.environ.get(MARK, '')}.shm"


def give_fields(server_args: ModuleType) -> None:
    """Makes `dataclasses.fields` work for ServerArgs, which is a msgspec.Struct.

    slime 624b824 (sglang_engine.py:633) and miles call it.
    """
    import dataclasses

    @around(dataclasses, "fields")
    def fields(plain: Any, record: Any) -> tuple:
        kind = record if isinstance(record, type) else type(record)
        return tuple(server_args.record_fields(record) if kind is server_args.ServerArgs else plain(record))
