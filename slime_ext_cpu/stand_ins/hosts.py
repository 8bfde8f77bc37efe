"""Adapts slime and miles to one machine, gloo, torch 2.13 and SGLang 0.5.23."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from slime_ext_cpu.import_hooks import around
from slime_ext_cpu.stand_ins import torch_cuda

FIRST_PORT = "SLIME_EXT_FIRST_PORT"
LOWEST_PORT = 20000  # leaves 12,000 ports below those that Linux gives to clients (32768 and up)
ROUND = "SLIME_EXT_ROUND"
SCORE = "SLIME_EXT_SCORE"  # "both": evaluates with the pushed weights, then with the trainer's
SCORES = ("served", "both")
UNROUNDED = "SLIME_EXT_UNROUNDED"  # a file; while it exists, pushes are not rounded
COLLECTIVES = (
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
)
LONG_NAMES = {"dp": "data_parallel", "pp": "pipeline_parallel", "ep": "expert_parallel"}
GONE = {"sglang_enforce_piecewise_cuda_graph": False, "sglang_disable_piecewise_cuda_graph": True}
IN_A_SESSION = ("update_weights_from_distributed", "update_weights_from_tensor")
OF_ACCELERATOR = torch_cuda.ANSWERS | {
    "is_available": True,
    "device_name": "cpu",
    "current_device": "cpu",
    "device_count": 1,
    "current_stream": None,
    "distributed_device_id": None,
}


def register_cpu(accelerator: ModuleType) -> None:
    """Adds `cpu` to the accelerators of slime 624b824, the first version with a registry."""
    accelerator.register_accelerator("cpu", _cpu, lambda: True, communication_backends=("gloo",))


def _cpu() -> object:
    import torch
    from slime.utils.accelerator.base import Accelerator

    members = {name: torch_cuda.returns(value) for name, value in OF_ACCELERATOR.items()}
    members |= {"device": torch_cuda.returns(torch.device("cpu"))}
    members |= {"name": "cpu", "device_type": "cpu", "communication_backend_name": "gloo"}
    return type("CPU", (Accelerator,), members)()


def start_at_own_port(misc: ModuleType) -> None:
    """Starts the search for free ports at a number that other runs do not use.

    Every release takes the first free port from 15000 upwards (utils/misc.py) and binds it half a minute
    later, when SGLang is up. In between, another run would find the same port free.
    """
    first = int(os.environ.get(FIRST_PORT, LOWEST_PORT))

    @around(misc, "get_free_port")
    def get_free_port(free: Any, start_port: int = first, consecutive: int = 1) -> int:
        return free(max(start_port, first), consecutive)


def draw_own_ports(http_utils: ModuleType) -> None:
    """Shifts the router's ports by a number that differs between runs.

    The hosts draw these ports with the run's seed. Two runs with the same seed that start in the same second
    would draw the same port, and both would find it free.
    """

    @around(http_utils, "find_available_port")
    def find_available_port(free: Any, base_port: int) -> int:
        return free(base_port + int(os.environ.get(FIRST_PORT, LOWEST_PORT)) - LOWEST_PORT)


def use_gloo(distributed_utils: ModuleType) -> None:
    """Replaces NCCL by gloo in the process group that pushes weights to the engines.

    The hosts make the group with the backend "nccl". They also compare torch's version as text, where
    "2.13" >= "2.6" is false, and so give an option the name that it had before torch 2.6.
    """

    @around(distributed_utils, "init_process_group")
    def init_process_group(make: Any, backend: str | None = None, **options: Any) -> Any:
        return make(backend="gloo" if backend == "nccl" else backend, **options)

    @around(distributed_utils, "_new_process_group_helper")
    def new_group(make: Any, *args: Any, pg_options: Any = None, **options: Any) -> Any:
        return make(*args, **{"backend_options": pg_options, **options})


def add_collectives(reloadable: ModuleType) -> None:
    """Adds torch 2.13's collectives to the hosts' ReloadableProcessGroup, which forwards each by its name.

    torch 2.13 calls `all_gather_single` where the torch of their images called `_allgather_base`. Context
    parallelism gathers with it.
    """
    group = reloadable.ReloadableProcessGroup
    for name in COLLECTIVES:
        if name not in vars(group):
            setattr(group, name, functools.partialmethod(_inner, name))


def _inner(self: Any, name: str, *args: Any, **options: Any) -> Any:
    return getattr(self.group, name)(*args, **options)


def give_older_names(arguments: ModuleType) -> None:
    """Sets two kinds of arguments that miles 2b5b7fc reads and SGLang 0.5.23 lacks.

    These are the long names of the parallel sizes and, with --colocate, flags that were removed.
    """

    @around(arguments, "add_sglang_arguments")
    def add(plain: Any, parser: Any) -> Any:
        parser = plain(parser)
        parser.set_defaults(**{name: GONE[name] for name in GONE if parser.get_default(name) is None})
        return parser

    @around(arguments, "validate_args")
    def validate(plain: Any, args: Any) -> None:
        for short, long in LONG_NAMES.items():
            if not hasattr(args, f"sglang_{long}_size"):
                setattr(args, f"sglang_{long}_size", getattr(args, f"sglang_{short}_size"))
        plain(args)


def translate_requests(sglang_engine: ModuleType) -> None:
    """Pushes weights through the endpoints of SGLang 0.5.23.

    miles 2b5b7fc names NCCL and calls post_process_weights, which repacks int4 and fp4 weights in its fork of
    SGLang. SGLang 0.5.23 accepts weights only between begin_weight_update and end_weight_update, which miles
    31f1ca9 calls itself.
    """
    opens_itself = hasattr(sglang_engine.SGLangEngine, "begin_weight_update")

    @around(sglang_engine.SGLangEngine, "_make_request")
    def request(send: Any, self: Any, endpoint: str, payload: dict | None = None) -> Any:
        if endpoint == "post_process_weights":
            return None
        if endpoint == "init_weights_update_group":
            payload = {**payload, "backend": "gloo"}
        if opens_itself or endpoint not in IN_A_SESSION:
            return send(self, endpoint, payload)
        send(self, "begin_weight_update")
        try:
            return send(self, endpoint, payload)
        finally:
            send(self, "end_weight_update")


def round_pushed(megatron_to_hf: ModuleType) -> None:
    """Rounds the weights at each push, as in a quantised sampler: SLIME_EXT_ROUND=int4 (or fp8, int8).

    The trainer keeps the unrounded weights. Rollouts and evaluations are sampled with the rounded ones.
    SLIME_EXT_SCORE=both adds an evaluation with the trainer's weights.
    """
    if rounding := os.environ.get(ROUND):
        from slime_ext_cpu.rounding import round_weights

        @around(megatron_to_hf, "convert_to_hf")
        def convert(plain: Any, *args: Any, **options: Any) -> Any:
            named = plain(*args, **options)
            return named if is_unrounded() else round_weights(named, rounding)


def is_unrounded() -> bool:
    """Returns whether pushes are unrounded at the moment. Every process of a run sees the same file."""
    return Path(os.environ.get(UNROUNDED, "")).is_file()


@contextlib.contextmanager
def unrounded() -> Iterator[None]:
    """Makes every process of this run push unrounded weights inside the block."""
    file = Path(os.environ[UNROUNDED])
    file.touch()
    try:
        yield
    finally:
        file.unlink()


async def score(evaluate: Callable[[], Awaitable[object]], push: Callable[[], Awaitable[object]]) -> None:
    """Evaluates with the engine's weights, and with SLIME_EXT_SCORE=both also with the trainer's.

    For the second evaluation the trainer's weights are pushed unrounded. Afterwards the rounded ones are
    pushed again. No sample of an evaluation is trained on.
    """
    await evaluate()
    if os.environ.get(SCORE) == "both":
        with unrounded():
            await push()
            await evaluate()
        await push()
