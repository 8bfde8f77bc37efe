"""Replaces torch.cuda by the CPU: "cuda" means "cpu", and streams do nothing.

Every host with every Megatron-LM needs it. They make tensors with device="cuda" (in Megatron's
core/optimizer/distrib_optimizer.py, core/pipeline_parallel/schedules.py, core/tensor_parallel/random.py).
They also call `.cuda()` on models and batches, and use `torch.cuda.current_device()`, a generator per device
and memory statistics. The replacement happens just before megatron.core is imported, so the processes of
SGLang and Ray never see it. torch.cuda.is_available() stays False.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import sys
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from slime_ext_cpu.import_hooks import around

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

FACTORIES = (
    *("zeros", "ones", "empty", "full", "tensor", "arange", "rand", "randn", "randint", "randperm", "eye"),
    *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "linspace"),
    *("as_tensor", "empty_strided"),
)
MEMORY = 1 << 34  # bytes
# The values of an H100, for checks of features that a run without CUDA never uses.
CAPABILITY = (9, 0)
DEVICE = types.SimpleNamespace(major=9, minor=0, total_memory=MEMORY, name="cpu")
DO_NOTHING = (
    *("synchronize", "set_device", "empty_cache", "set_stream", "reset_peak_memory_stats", "ipc_collect"),
    *("init", "manual_seed_all", "_lazy_init", "_lazy_call"),
)
NO_MEMORY = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
ANSWERS: dict[str, object] = {  # what functions of torch.cuda return
    **dict.fromkeys(DO_NOTHING),
    **dict.fromkeys(NO_MEMORY, 0),
    "get_device_capability": CAPABILITY,
    "get_device_properties": DEVICE,
    "mem_get_info": (MEMORY // 2, MEMORY),
}


def replace(megatron: types.ModuleType | None = None) -> None:
    """Replaces torch.cuda, and functions that take a CUDA device, in this process."""
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
    """Wraps a function that creates tensors, so that a CUDA device becomes the CPU."""

    @functools.wraps(function)
    def call(*args: object, **options: object) -> object:
        if _is_cuda(options.get("device")):
            options["device"] = "cpu"
        options.pop("pin_memory", None)
        return function(*args, **options)

    return call


def returns(value: object) -> Callable:
    """Makes a new function that returns `value`, because torch._dynamo needs distinct objects."""
    return lambda *args, **options: value


def _replace_generators(torch: types.ModuleType) -> None:
    """Uses the CPU's generator for every device.

    Megatron sets CUDA's generators through torch._C (core/tensor_parallel/random.py).
    """

    def get_rng_state(*args: object, **options: object) -> Tensor:
        return torch.get_rng_state()

    torch.cuda.manual_seed = torch.manual_seed
    torch.cuda.get_rng_state = torch.cuda.random.get_rng_state = get_rng_state
    torch.cuda.set_rng_state = lambda state, *args, **options: torch.set_rng_state(state)
    torch._C._cuda_setRNGState = torch.set_rng_state


class _Stream:
    """A stream or an event whose work is already complete."""

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

    @around(torch.Tensor, "to")
    def moved(to: Callable, self: Tensor, *args: object, **options: object) -> Tensor:
        args = tuple("cpu" if _is_cuda(arg) else arg for arg in args)
        if _is_cuda(options.get("device")):
            options["device"] = "cpu"
        return to(self, *args, **options)

    @around(torch.Tensor, "type")
    def named(kind: Callable, self: Tensor, *args: object, **options: object) -> Tensor | str:
        if args or options:
            return kind(self, *args, **options)
        return kind(self).replace("torch.", "torch.cuda.", 1)  # distrib_optimizer.py expects CUDA types


def fill_before_loading(distrib_optimizer: types.ModuleType) -> None:
    """Gives a distributed optimizer's Adam an empty state before --load asks what it can load.

    Adam of Transformer Engine and apex counts steps per group of parameters. With torch's Adam, Megatron-LM
    (distrib_optimizer.py:664) reads the count from the parameters' state, even if that does not exist yet.
    """

    @around(distrib_optimizer.DistributedOptimizer, "sharded_state_dict")
    def sharded_state_dict(shard: Callable, self: Any, *args: object, **options: object) -> object:
        if not distrib_optimizer.HAVE_APEX_OR_TE:
            _fill(self.optimizer)
        return shard(self, *args, **options)


def _fill(optimizer: Optimizer) -> None:
    import torch

    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                moments = {name: torch.zeros_like(parameter.data) for name in ("exp_avg", "exp_avg_sq")}
                optimizer.state[parameter] |= {"step": torch.tensor(0.0), **moments}


def bind_stores(rendezvous: types.ModuleType) -> None:
    """Makes torch.distributed.TCPStore listen only on the address that other ranks connect to, 127.0.0.1.

    In torch 2.13 it listens on [::], where anyone who reaches the port can read and write what the ranks tell
    each other.
    """

    class TCPStore(rendezvous.TCPStore):
        def __init__(
            self, host_name: str, port: int, world_size: int | None = None, is_master: bool = False,
            *args: object, **options: object,
        ) -> None:  # fmt: skip
            if is_master and "master_listen_fd" not in options:
                # If the port is in use, a store of this process has it, and torch shares that store.
                with contextlib.suppress(OSError):
                    server = socket.create_server((host_name, port), backlog=512)
                    port = server.getsockname()[1]
                    options["master_listen_fd"] = server.detach()
            super().__init__(host_name, port, world_size, is_master, *args, **options)

    # torch.distributed is still being imported, so we take it from sys.modules.
    sys.modules["torch.distributed"].TCPStore = rendezvous.TCPStore = TCPStore
