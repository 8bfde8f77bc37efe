"""One file per stand-in: what it stands for, and which release of which host needs it.

tests/tools/without_cuda shows that something fails without each; one that no host needs is deleted.
"""

from __future__ import annotations

import importlib
import sys

from slime_ext.tools.without_cuda.import_hooks import ImportHooks

HOSTS = ("miles", "slime")
# file, when it acts, on the import of which module (".x": of both hosts), by which of its functions
PLACES = (
    ("torch_cuda", "before", "megatron.core", "replace"),
    ("accelerator", "after", "slime.utils.accelerator", "register"),
    ("adam_state", "after", "megatron.core.optimizer.distrib_optimizer", "fill_before_loading"),
    ("cuda_ipc", "after", "sglang.srt.utils.patch_torch", "share_by_name"),
    ("free_ports", "after", ".utils.misc", "start_at_own_range"),
    ("gloo", "after", ".utils.distributed_utils", "use_gloo"),
    ("hf_weights", "after", ".backends.megatron_utils.checkpoint", "replace_loader"),
    ("load_files", "after", "sglang.srt.managers.load_snapshot", "mark_names"),
    ("loopback", "after", "torch.distributed.rendezvous", "bind_stores"),
    ("host_memory", "after", "sglang.srt.mem_cache.pool_host.common", "allocate_plainly"),
    ("mooncake", "before", "miles.backends.megatron_utils.update_weight", "replace_transfer"),
    ("process_groups", "after", ".utils.reloadable_process_group", "add_names"),
    ("rounded_weights", "after", ".backends.megatron_utils.megatron_to_hf", "round_pushed"),
    ("server_args", "after", "sglang.srt.server_args", "give_fields"),
    ("server_args", "after", ".backends.sglang_utils.arguments", "give_older_names"),
    ("sglang_attention", "after", "sglang.srt.layers.attention.torch_native_backend", "attend_batched"),
    ("sglang_fork", "make", "sglang.srt.entrypoints.openai.encoding_dsv4", "refuse_use"),
    ("sglang_kernels", "make", "sgl_kernel", "refuse_calls"),
    ("sglang_kernels", "before", "torchvision", "declare_torchvision_ops"),
    ("weight_endpoints", "after", ".backends.sglang_utils.sglang_engine", "translate_requests"),
)


def install() -> None:
    """Registers every stand-in to be put in place when the module that needs it is imported."""
    hooks = ImportHooks()
    for name, when, module, function in PLACES:
        call = getattr(importlib.import_module(f"{__name__}.{name}"), function)
        for host in HOSTS if module.startswith(".") else ("",):
            hooks.add(when, f"{host}{module}", call)
    hooks.install()
    find_torchvision()


def find_torchvision() -> None:
    """Puts the folder that install.py made on the path, which no other process may see; idempotent."""
    if (folder := f"{sys.prefix}/torchvision") not in sys.path:
        sys.path.append(folder)
