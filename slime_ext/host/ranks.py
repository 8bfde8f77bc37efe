"""Finds this process's place among the ranks that train."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slime_ext.hosts.running import definers, modules
from slime_ext.ops.segments import AllSum, identity, require_contiguous


@dataclass(frozen=True)
class Parallel:
    """Places this rank among the ranks that share its sequences."""

    rank: int = 0
    size: int = 1
    all_sum: AllSum = identity


ALONE = Parallel()


def parallel_state() -> Any:
    """Returns Megatron's parallel state; None if it is not imported or not initialised."""
    state = sys.modules.get("megatron.core.parallel_state") or sys.modules.get("megatron.core.mpu")
    return state if state is not None and state.model_parallel_is_initialized() else None


def context_parallel() -> Parallel:
    """Places this process among its context-parallel ranks.

    It asks at every call, because slime rebuilds its groups between steps.
    """
    state = parallel_state()
    if state is None or (size := state.get_context_parallel_world_size()) == 1:
        return ALONE
    rank = state.get_context_parallel_rank()
    return Parallel(rank, size, sum_over(state.get_context_parallel_group()))


def sum_over(group: Any) -> AllSum:
    """Makes the in-place SUM over a process group. Raises DataError as ``require_contiguous`` does."""

    def all_sum(values: Tensor) -> Tensor:
        require_contiguous(values)
        torch.distributed.all_reduce(values, group=group)
        return values

    return all_sum


@dataclass(frozen=True)
class Ranks:
    """Places this process among the ranks that train one optimizer step.

    Args:
        is_last_stage: whether this is the pipeline's last stage, which computes the loss.
        dp_rank, dp_size: the place among the ranks that hold different samples.
        context: the place among the ranks that share the tokens of its samples.
        all_sum: SUM over the data x context parallel ranks, which hold each token once.
    """

    is_last_stage: bool = True
    dp_rank: int = 0
    dp_size: int = 1
    context: Parallel = ALONE
    all_sum: AllSum = identity

    @property
    def place(self) -> tuple[int, int]:
        """The rank and the size among the data x context parallel ranks."""
        return self.dp_rank * self.context.size + self.context.rank, self.dp_size * self.context.size


def ranks() -> Ranks:
    """Asks Megatron for this process's place. Without Megatron it is a single process."""
    state = parallel_state()
    if state is None:
        return Ranks()
    group = state.get_data_parallel_group(with_context_parallel=True)
    return Ranks(
        # Between passes there is no current virtual stage, for which older Megatrons would ask by default.
        is_last_stage=state.is_pipeline_last_stage(ignore_virtual=True),
        dp_rank=state.get_data_parallel_rank(),
        dp_size=state.get_data_parallel_world_size(),
        context=context_parallel(),
        all_sum=sum_over(group) if group.size() > 1 else identity,
    )


def global_rank() -> int | None:
    """Returns this process's rank among all that train; None without torch.distributed."""
    dist = torch.distributed
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else None


def is_logging_rank() -> bool:
    """Tells whether slime logs from this rank.

    That is the first rank of the last pipeline stage, in the first replica.
    """
    (module,) = definers("get_parallel_state", modules("miles"))[:1] or (None,)
    replicas = getattr(getattr(module, "_parallel_state", None), "indep_dp", None)  # miles' --ft-components
    if (replicas is not None and replicas.rank) or ranks().place[0]:
        return False
    state = parallel_state()
    return state is None or state.get_tensor_model_parallel_rank() == 0
