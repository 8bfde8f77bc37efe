"""A CPU backend in slime's registry of accelerators (SLIME_ACCELERATOR=cpu).

Stands for slime/utils/accelerator/cuda.py of slime 624b824, the first release with a registry; without it
`get_accelerator` finds no backend on a machine without CUDA.
"""

from __future__ import annotations

from types import ModuleType

from slime_ext.tools.without_cuda.stand_ins import torch_cuda


def register(registry: ModuleType) -> None:
    """Adds the backend `cpu` to slime's registry."""
    registry.register_accelerator("cpu", _backend, lambda: True, communication_backends=("gloo",))


ANSWERS = torch_cuda.ANSWERS | {
    "is_available": True,
    "device_name": "cpu",
    "current_device": "cpu",
    "device_count": 1,
    "current_stream": None,
    "distributed_device_id": None,
}


def _backend() -> object:
    """An Accelerator of the host's class that gives `ANSWERS`."""
    import torch
    from slime.utils.accelerator.base import Accelerator

    members = {name: torch_cuda.returns(value) for name, value in ANSWERS.items()}
    members |= {"device": torch_cuda.returns(torch.device("cpu"))}
    members |= {"name": "cpu", "device_type": "cpu", "communication_backend_name": "gloo"}
    return type("CPU", (Accelerator,), members)()
