"""SGLang 0.5.23 on a CPU: what its CUDA build, or miles' fork of it, has and the one of PyPI lacks."""

from __future__ import annotations

import importlib.machinery
import os
import sys
from types import ModuleType
from typing import Any

from slime_ext_cpu.import_hooks import around
from slime_ext_cpu.processes import MARK

ABSENT = (
    "sgl_kernel",  # compiled; nothing of it is reached with --attention-backend torch_native
    "sglang.srt.entrypoints.openai.encoding_dsv4",  # of miles' fork; miles 31f1ca9 imports it for every model
    # Imported by miles 2b5b7fc whatever its flags say; needs mooncake, and miles' fork of SGLang.
    "miles.backends.megatron_utils.update_weight.update_weight_from_distributed.p2p",
)
_kept: list[object] = []  # a declaration of operators lives as long as its library object


class Absent(ModuleType):
    """A module with every name that is asked for; calling one raises NotImplementedError."""

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
    """Declares two operators, for which torchvision 0.28.0 registers fakes (_meta_registrations.py) and whose
    library does not load without CUDA."""
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(library)


def share_by_name(patch_torch: ModuleType) -> None:
    """Shared memory that has a name, for CUDA's handles of memory, by which colocated trainers push weights.

    The hosts send a pickle of handles (update_weight_from_tensor.py). SGLang rewrites the device in each,
    which a tensor on the CPU has not, and torch's own way for those passes an open file to a child.
    """
    from torch import multiprocessing

    patch_torch.monkey_patch_torch_reductions = lambda: multiprocessing.set_sharing_strategy("file_system")


def allocate_plainly(common: ModuleType) -> None:
    """Plain memory for the experts that are replayed (--use-rollout-routing-replay), which SGLang registers
    with cudaHostRegister."""
    import torch

    common.ALLOC_MEMORY_FUNCS["cpu"] = lambda size, dtype, **options: torch.empty(size, dtype=dtype)


def mark_files(load_snapshot: ModuleType) -> None:
    """Puts the mark of the run into the names of files in /dev/shm, which a killed SGLang leaves there."""

    @around(load_snapshot, "shm_path_for")
    def marked(name: Any, ipc_name: str) -> str:
        return name(ipc_name).removesuffix(".shm") + f"_{os.environ.get(MARK, '')}.shm"


def give_fields(server_args: ModuleType) -> None:
    """Lets `dataclasses.fields` answer for ServerArgs, a msgspec.Struct; slime 624b824 (sglang_engine.py:633)
    and miles ask it."""
    import dataclasses

    @around(dataclasses, "fields")
    def fields(plain: Any, record: Any) -> tuple:
        kind = record if isinstance(record, type) else type(record)
        return tuple(server_args.record_fields(record) if kind is server_args.ServerArgs else plain(record))
