"""Entry that runs a real SGLang server on a machine without CUDA, from the wheels of PyPI.

Executed by path with the Python of the SGLang environment, therefore it imports nothing of slime_ext. Python
runs the top level of this file again in every process that SGLang spawns; all of them need the stand-ins.
Works with sglang 0.5.23.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import socket
import sys
import types
from pathlib import Path

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")  # read while sglang is imported

KERNELS = Path(__file__).parents[2] / "without_cuda/stand_ins/sglang_kernels.py"


def _stand_ins() -> types.ModuleType:
    """Puts stand-ins in place of the compiled parts that have no CPU build, the same as for the hosts."""
    spec = importlib.util.spec_from_file_location("sglang_kernels", KERNELS)
    kernels = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kernels)
    kernels.declare_torchvision_ops()
    module = types.ModuleType("sgl_kernel")
    module.__spec__ = importlib.machinery.ModuleSpec("sgl_kernel", None, is_package=True)
    module.__path__ = []
    kernels.refuse_calls(module)
    sys.modules.setdefault("sgl_kernel", module)
    return kernels


def _listen_on_loopback() -> None:
    """Has the store at which SGLang's schedulers meet listen on their host only, not on every interface."""
    rendezvous = importlib.import_module("torch.distributed.rendezvous")  # the attribute is a function
    create = rendezvous.TCPStore

    def store(host_name: str, port: int, is_master: bool = False, **options: object) -> object:
        if is_master:
            options["master_listen_fd"] = socket.create_server((host_name, port)).detach()
        return create(host_name=host_name, port=port, is_master=is_master, **options)

    rendezvous.TCPStore = store


kernels = _stand_ins()
_listen_on_loopback()


def _allow_fp8_keys() -> None:
    """Lets the KV cache be FP8 beside torch_native attention.

    On a CPU SGLang rounds and stores it with plain torch, and torch_native converts what it reads; the check
    in mem_cache/kv_cache_configurator.py:458 wants the AMX kernels all the same, which have no wheel.
    """
    from sglang.srt.mem_cache import kv_cache_configurator

    kv_cache_configurator.cpu_has_amx_support = lambda: True
    kv_cache_configurator.attention_backends = lambda: ("intel_amx",)


def _keep_experts_in_plain_memory() -> None:
    """Experts to be returned wait in memory that CUDA did not register, mem_cache/pool_host/common.py:349."""
    import torch
    from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS

    ALLOC_MEMORY_FUNCS["cpu"] = lambda size, dtype, **rest: torch.empty(size, dtype=dtype)


def main(argv: list[str]) -> None:
    """Serves until it is told to stop; takes the flags of `python -m sglang.launch_server`."""
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    if "fp8_e4m3" in argv:
        _allow_fp8_keys()
    if "--enable-return-routed-experts" in argv:
        _keep_experts_in_plain_memory()
    kernels.fork_where_it_spawns()
    try:
        run_server(prepare_server_args(argv))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main(sys.argv[1:])
