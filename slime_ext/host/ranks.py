"""Where this process stands among those that train, and their sums; asked anew each time."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slime_ext.host.packing import ALONE, Parallel, context_parallel
from slime_ext.ops.segments import AllSum, identity


@dataclass(frozen=True)
class Ranks:
    """This process among the ranks that train one optimizer step.

    Args:
        is_last_stage: whether it is on the pipeline's last stage, where the loss is.
        dp_rank, dp_size: among the ranks that hold different samples.
        context: among those that share its samples' tokens.
        all_sum: SUM over all of them, data x context parallel: each token once.
    """

    is_last_stage: bool = True
    dp_rank: int = 0
    dp_size: int = 1
    context: Parallel = ALONE
    all_sum: AllSum = identity


def ranks() -> Ranks:
    """What Megatron says; one process alone where Megatron is not initialised. Never imports Megatron."""
    state = sys.modules.get("megatron.core.parallel_state") or sys.modules.get("megatron.core.mpu")
    if state is None or not state.model_parallel_is_initialized():
        return Ranks()
    group = state.get_data_parallel_group(with_context_parallel=True)

    def all_sum(values: Tensor) -> Tensor:
        torch.distributed.all_reduce(values, group=group)
        return values

    return Ranks(
        # Between passes no virtual stage is at work; older releases of Megatron ask for it by default.
        is_last_stage=state.is_pipeline_last_stage(ignore_virtual=True),
        dp_rank=state.get_data_parallel_rank(),
        dp_size=state.get_data_parallel_world_size(),
        context=context_parallel(),
        all_sum=all_sum if group.size() > 1 else identity,
    )


def replica() -> int:
    """Which of miles' independent data parallel replicas this process trains; 0 in releases without them."""
    module = sys.modules.get("miles.backends.training_utils.parallel")
    replicas = getattr(getattr(module, "_parallel_state", None), "indep_dp", None)
    return 0 if replicas is None else replicas.rank


def pipeline_group() -> Any:
    """The process group of this rank's pipeline stages; None where Megatron is not initialised."""
    state = sys.modules.get("megatron.core.parallel_state") or sys.modules.get("megatron.core.mpu")
    ready = state is not None and state.model_parallel_is_initialized()
    return state.get_pipeline_model_parallel_group() if ready else None
