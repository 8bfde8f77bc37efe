"""SGLang's host memory for what a request returns, without registering it with CUDA.

Needed where the hosts replay routing (--use-rollout-routing-replay): SGLang 0.5.23 keeps the experts of each
token in memory that it registers with cudaHostRegister (srt/mem_cache/pool_host/common.py).
"""

from __future__ import annotations

from types import ModuleType


def allocate_plainly(common: ModuleType) -> None:
    """Has SGLang take plain memory for a pool beside a model on the CPU."""
    import torch

    def allocate(size: tuple[int, ...], dtype: torch.dtype, **options: object) -> torch.Tensor:
        return torch.empty(size, dtype=dtype)

    common.ALLOC_MEMORY_FUNCS["cpu"] = allocate
