"""A CPU backend in slime's registry of accelerators (SLIME_ACCELERATOR=cpu).

Stands for slime/utils/accelerator/cuda.py of slime 624b824, the first release with a registry; without it
`get_accelerator` finds no backend on a machine without CUDA.
"""

from __future__ import annotations

from types import ModuleType

from slime_ext.without_cuda.import_hooks import ImportHooks


def install(hooks: ImportHooks) -> None:
    """Registers the backend once slime's registry is imported."""
    hooks.after("slime.utils.accelerator", register)


def register(registry: ModuleType) -> None:
    """Adds the backend `cpu` to slime's registry."""
    registry.register_accelerator("cpu", _backend, lambda: True, communication_backends=("gloo",))


def _backend() -> object:
    import psutil
    import torch
    from slime.utils.accelerator.base import Accelerator

    class CPU(Accelerator):
        name = device_type = "cpu"
        communication_backend_name = "gloo"

        def is_available(self):
            return True

        def device(self, index=None):
            return torch.device("cpu")

        def device_name(self, index=None):
            return "cpu"

        def set_device(self, index):
            pass

        def current_device(self):
            return "cpu"

        def device_count(self):
            return 1

        def synchronize(self, device=None):
            pass

        def current_stream(self, device=None):
            return None

        def empty_cache(self):
            pass

        def mem_get_info(self, device=None):
            memory = psutil.virtual_memory()
            return memory.available, memory.total

        def memory_allocated(self, device=None):
            return 0

        def memory_reserved(self, device=None):
            return 0

        def distributed_device_id(self, index=None):
            return None

    return CPU()
