"""SGLang's compiled parts that have no CPU build on PyPI: sgl_kernel, and two operators of torchvision.

SGLang 0.5.23 imports `sgl_kernel` in many places (layers/activation.py, layers/layernorm.py, ...), of which
nothing is reached with --attention-backend torch_native; torchvision 0.28.0 registers a fake for
`torchvision::nms` (_meta_registrations.py), whose library is linked against CUDA and does not load.
"""

from __future__ import annotations

import multiprocessing
import types
from pathlib import Path

_kept: list[object] = []  # a declaration of operators lives as long as its library object


def declare_torchvision_ops() -> None:
    """Declares `torchvision::nms` and `torchvision::qnms`, without an implementation."""
    import torch

    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(library)


def fork_where_it_spawns() -> None:
    """Makes SGLang fork its scheduler and detokenizer where it asks for "spawn", while it has one thread.

    Spawned, each imports all of SGLang again: 26 CPU seconds for a start instead of 13. SGLang spawns because
    a fork would inherit CUDA; here there is none. A scheduler that fails can then signal its server.
    """
    choose = multiprocessing.set_start_method

    def set_start_method(method: str | None, force: bool = False) -> None:
        threads = len(list(Path("/proc/self/task").iterdir()))
        choose("fork" if method == "spawn" and threads == 1 else method, force=force)

    multiprocessing.set_start_method = set_start_method


def refuse_calls(module: types.ModuleType) -> None:
    """Gives `module` every function that is asked for; calling one raises NotImplementedError."""

    def missing(name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: object, **kwargs: object) -> None:
            raise NotImplementedError(f"sgl_kernel.{name}: no CPU build of sgl_kernel is installed")

        return call

    module.__getattr__ = missing
