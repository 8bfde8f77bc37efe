"""A CPU backend in slime's registry of accelerators (SLIME_ACCELERATOR=cpu).

Stands for slime/utils/accelerator/cuda.py of slime 624b824, the first release with a registry; without it
`get_accelerator` finds no backend on a machine without CUDA.
"""

from __future__ import annotations

from types import ModuleType

from slime_ext.without_cuda.stand_ins.torch_cuda import returns


def register(registry: ModuleType) -> None:
    """Adds the backend `cpu` to slime's registry."""
    registry.register_accelerator("cpu", _backend, lambda: True, communication_backends=("gloo",))


ANSWERS = {
    "is_available": True,
    "device_name": "cpu",
    "set_device": None,
    "current_device": "cpu",
    "device_count": 1,
    "synchronize": None,
    "current_stream": None,
    "empty_cache": None,
    "memory_allocated": 0,
    "memory_reserved": 0,
    "distributed_device_id": None,
}


def _backend() -> object:
    """An Accelerator of the host's class that gives `ANSWERS`."""
    import psutil
    import torch
    from slime.utils.accelerator.base import Accelerator

    def mem_get_info(self: object, device: object = None) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    members = {name: returns(value) for name, value in ANSWERS.items()}
    members |= {"device": returns(torch.device("cpu")), "mem_get_info": mem_get_info}
    members |= {"name": "cpu", "device_type": "cpu", "communication_backend_name": "gloo"}
    return type("CPU", (Accelerator,), members)()
