"""torch.cuda as Megatron-LM and the hosts use it, on the CPU: "cuda" means "cpu", streams do nothing.

Needed by every host with every Megatron-LM: tensors made with device="cuda" (in Megatron's
core/optimizer/distrib_optimizer.py, core/pipeline_parallel/schedules.py, core/tensor_parallel/random.py),
`.cuda()` on models and batches, `torch.cuda.current_device()`, a generator per device, memory statistics.
Installed just before megatron.core is imported, so SGLang's and Ray's own processes never see it;
torch.cuda.is_available() stays False.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

FACTORIES = (
    *("zeros", "ones", "empty", "full", "tensor", "arange", "rand", "randn", "randint", "randperm", "eye"),
    *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "linspace"),
    *("as_tensor", "empty_strided"),
)
MEMORY = 1 << 34  # bytes
# of an H100, for checks of features that none of this path reaches
CAPABILITY = (9, 0)
DEVICE = types.SimpleNamespace(major=9, minor=0, total_memory=MEMORY, name="cpu")
DO_NOTHING = (
    *("synchronize", "set_device", "empty_cache", "set_stream", "reset_peak_memory_stats", "ipc_collect"),
    *("init", "manual_seed_all", "_lazy_init", "_lazy_call"),
)
NO_MEMORY = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
ANSWERS: dict[str, object] = {  # of functions of torch.cuda
    **dict.fromkeys(DO_NOTHING),
    **dict.fromkeys(NO_MEMORY, 0),
    "get_device_capability": CAPABILITY,
    "get_device_properties": DEVICE,
    "mem_get_info": (MEMORY // 2, MEMORY),
}


def replace() -> None:
    """Replaces torch.cuda, and what names a CUDA device, in this process."""
    import torch

    for name in FACTORIES:
        setattr(torch, name, on_the_cpu(getattr(torch, name)))
    for name, answer in ANSWERS.items():
        setattr(torch.cuda, name, returns(answer))
    torch.cuda.current_device = returns(torch.device("cpu"))
    _replace_generators(torch)
    _replace_streams(torch)
    _replace_methods(torch)


def _is_cuda(device: object) -> bool:
    import torch

    name = device.type if isinstance(device, torch.device) else device
    return isinstance(name, str) and name.startswith("cuda")


def on_the_cpu(function: Callable) -> Callable:
    """A function that makes tensors, of a device: one of CUDA is the CPU."""

    @functools.wraps(function)
    def call(*args: object, **options: object) -> object:
        if _is_cuda(options.get("device")):
            options["device"] = "cpu"
        options.pop("pin_memory", None)
        return function(*args, **options)

    return call


def returns(value: object) -> Callable:
    """Return a new function that ignores its arguments and returns ``value``; distinct objects, because
    torch._dynamo needs them."""
    return lambda *args, **options: value


def _replace_generators(torch: types.ModuleType) -> None:
    """One generator, the CPU's; Megatron sets CUDA's through torch._C (core/tensor_parallel/random.py)."""

    def get_rng_state(*args: object, **options: object) -> Tensor:
        return torch.get_rng_state()

    torch.cuda.manual_seed = torch.manual_seed
    torch.cuda.get_rng_state = torch.cuda.random.get_rng_state = get_rng_state
    torch.cuda.set_rng_state = lambda state, *args, **options: torch.set_rng_state(state)
    torch._C._cuda_setRNGState = torch.set_rng_state


class _Stream:
    """A stream or an event on which everything has already happened."""

    def __init__(self, *args: object, **options: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable:
        return returns(None)

    def record_event(self, event: _Stream | None = None) -> _Stream:
        return event or self

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: object) -> float:
        return 0.0


def _replace_streams(torch: types.ModuleType) -> None:
    torch.cuda.Stream = torch.cuda.Event = _Stream
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    torch.cuda.current_stream = torch.cuda.default_stream = lambda *args: _Stream()


def _replace_methods(torch: types.ModuleType) -> None:
    torch.Tensor.cuda = torch.Tensor.pin_memory = lambda self, *args, **options: self
    torch.nn.Module.cuda = lambda self, *args, **options: self
    torch.compile = lambda model=None, **options: model if model is not None else (lambda function: function)
    to, kind = torch.Tensor.to, torch.Tensor.type

    def moved(self: Tensor, *args: object, **options: object) -> Tensor:
        args = tuple("cpu" if _is_cuda(arg) else arg for arg in args)
        if _is_cuda(options.get("device")):
            options["device"] = "cpu"
        return to(self, *args, **options)

    def named(self: Tensor, *args: object, **options: object) -> Tensor | str:
        if args or options:
            return kind(self, *args, **options)
        return kind(self).replace("torch.", "torch.cuda.", 1)  # distrib_optimizer.py compares it with cuda's

    torch.Tensor.to, torch.Tensor.type = moved, named
