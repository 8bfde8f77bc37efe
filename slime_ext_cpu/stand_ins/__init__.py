"""Replaces what CUDA, NCCL, Transformer Engine and the hosts' images provide, as modules are imported.

tests/cpu shows for each stand-in that something fails without it. A stand-in that no host needs is deleted.
"""

from __future__ import annotations

import sys

from slime_ext_cpu.import_hooks import ImportHooks
from slime_ext_cpu.stand_ins import (
    bfloat16,
    engine,
    hf_weights,
    hosts,
    sglang_attention,
    torch_cuda,
)

HOSTS = ("miles", "slime")
# When the stand-in acts, on the import of which module (".x" is in both hosts), and the stand-in itself.
PLACES = (
    ("after", "torch", bfloat16.multiply_in_float32),
    ("before", "megatron.core", torch_cuda.replace),
    ("after", "megatron.core.optimizer.distrib_optimizer", torch_cuda.fill_before_loading),
    ("after", "torch.distributed.rendezvous", torch_cuda.bind_stores),
    ("before", "torchvision", engine.declare_operators),
    ("after", "sglang.srt.utils.patch_torch", engine.share_by_name),
    ("after", "sglang.srt.mem_cache.pool_host.common", engine.allocate_plainly),
    ("after", "sglang.srt.managers.load_snapshot", engine.mark_files),
    ("after", "sglang.srt.server_args", engine.give_fields),
    ("after", "sglang.srt.layers.attention.torch_native_backend", sglang_attention.attend_batched),
    ("after", "slime.utils.accelerator", hosts.register_cpu),
    ("after", ".utils.misc", hosts.start_at_own_port),
    ("after", ".utils.http_utils", hosts.draw_own_ports),
    ("after", ".utils.distributed_utils", hosts.use_gloo),
    ("after", ".utils.reloadable_process_group", hosts.add_collectives),
    ("after", ".backends.sglang_utils.arguments", hosts.give_older_names),
    ("after", ".backends.sglang_utils.sglang_engine", hosts.translate_requests),
    ("after", ".backends.megatron_utils.megatron_to_hf", hosts.round_pushed),
    ("after", ".backends.megatron_utils.checkpoint", hf_weights.replace_loader),
)


def install() -> None:
    """Registers every stand-in. Each takes effect when the module that needs it is imported."""
    hooks = ImportHooks()
    for when, module, call in PLACES:
        for host in HOSTS if module.startswith(".") else ("",):
            hooks.add(when, f"{host}{module}", call)
    hooks.install()
    engine.add_absent()
    find_torchvision()


def find_torchvision() -> None:
    """Adds the folder of torchvision that install.py made to the path, once.

    It is not on the path of other processes, because importing torchvision fails there.
    """
    if (folder := f"{sys.prefix}/torchvision") not in sys.path:
        sys.path.append(folder)
