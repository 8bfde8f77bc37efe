"""Shared memory that has a name for CUDA's handles of memory, by which colocated trainers push weights.

slime and miles (backends/megatron_utils/update_weight/update_weight_from_tensor.py, with --colocate) send the
engine a pickle of handles. SGLang (srt/utils/patch_torch.py) rewrites the device in each, which a tensor on
the CPU has not, and torch's own way for those passes an open file to a child.
"""

from __future__ import annotations

from types import ModuleType


def share_by_name(module: ModuleType) -> None:
    """Lets `monkey_patch_torch_reductions` choose torch's sharing by files that have names."""
    from torch import multiprocessing

    module.monkey_patch_torch_reductions = lambda: multiprocessing.set_sharing_strategy("file_system")
