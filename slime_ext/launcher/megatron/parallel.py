"""Process groups of one training rank: torch.distributed, Megatron's parallel state, random seeds.

Megatron's groups under short names: tensor (tp), pipeline (pp), context (cp) and data (dp) parallel, and the
ranks that together hold one copy of the weights (model). They are fetched at each call and never kept: they
are others after ``destroy`` and a new ``initialize``.
"""

from __future__ import annotations

import argparse
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from slime_ext.launcher.megatron import shims

tp_group = parallel_state.get_tensor_model_parallel_group
pp_group = parallel_state.get_pipeline_model_parallel_group
cp_group = parallel_state.get_context_parallel_group
dp_group = parallel_state.get_data_parallel_group
model_group = parallel_state.get_model_parallel_group
is_first_stage = parallel_state.is_pipeline_first_stage
is_last_stage = parallel_state.is_pipeline_last_stage


def device() -> torch.device:
    """This rank's device: its CUDA device where there is one, the CPU otherwise."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def initialize(args: argparse.Namespace, init_method: str = "env://") -> None:
    """Joins the process group (RANK, WORLD_SIZE, LOCAL_RANK of the environment) and builds Megatron's groups.

    A file is the better place to meet: torch's server behind env:// listens on every network interface.

    gloo and the CPU shims without CUDA, nccl with it. A process group that exists already is used as it is.

    Raises:
        ConfigError: what ``shims.install`` refuses.
    """
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    else:
        shims.install()
    if not dist.is_initialized():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            backend="nccl" if torch.cuda.is_available() else "gloo",
            init_method=init_method,
            rank=int(os.environ.get("RANK", "0")),
            world_size=int(os.environ.get("WORLD_SIZE", "1")),
            timeout=timedelta(minutes=args.distributed_timeout_minutes),
        )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        distributed_timeout_minutes=args.distributed_timeout_minutes,
    )
    torch.manual_seed(args.seed)
    # Without CUDA the tracker's fork() must do nothing: there is no generator to save; dropout is refused.
    tensor_parallel.model_parallel_cuda_manual_seed(
        args.seed, inference_rng_tracker=not torch.cuda.is_available(), force_reset_rng=True
    )


def destroy() -> None:
    """Leaves Megatron's groups and the process group; safe to call twice."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
