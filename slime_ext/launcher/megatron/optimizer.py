"""One optimizer over two engines: torch's AdamW without CUDA, Megatron's distributed optimizer with it.

Both read the gradients that Megatron's DistributedDataParallel left in ``param.main_grad``, clip them by
their norm over the whole model, and follow Megatron's learning-rate schedule.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from torch import nn

from slime_ext.errors import NonFiniteError
from slime_ext.launcher.megatron import parallel
from slime_ext.launcher.megatron.model import params_dtype

SHARED = ("lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad")
Chunks = Sequence[DistributedDataParallel]


class Optimizer:
    """An engine and its learning-rate schedule, advanced together, one optimizer step at a time."""

    def __init__(self, engine: Engine, schedule: OptimizerParamScheduler, chunks: Chunks) -> None:
        self._engine, self._schedule, self._chunks = engine, schedule, chunks

    @property
    def lr(self) -> float:
        """The learning rate that the next step uses."""
        return self._engine.param_groups[0]["lr"]

    def zero_grad(self) -> None:
        """Clears the gradient buffers of the model; call before the first micro-batch of a step."""
        for chunk in self._chunks:
            chunk.zero_grad_buffer()

    def step(self) -> tuple[bool, float]:
        """(whether the weights were updated, gradient norm over the whole model before clipping).

        Only ``--fp16`` answers False: Megatron then lowers the loss scale and skips the step.

        Raises:
            NonFiniteError: a gradient is NaN or infinite; without CUDA the weights are untouched.
        """
        successful, norm = self._engine.update()
        if not successful:
            return False, norm
        if not math.isfinite(norm):
            raise NonFiniteError(
                f"optimizer step {self._schedule.num_steps}: expected a finite gradient norm, got {norm}: "
                "look for NaN or infinite log-probs and advantages in this step's batch"
            )
        self._schedule.step(increment=1)
        return True, norm

    def state_dict(self) -> dict[str, Any]:
        """State of the engine (this rank's shard) and of the schedule, for the same layout."""
        return {"engine": self._engine.state_dict(), "schedule": self._schedule.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where ``state_dict`` was taken, in the same layout."""
        self._engine.load_state_dict(state["engine"])
        self._schedule.num_steps = 0  # loading adds the saved steps to it
        self._schedule.load_state_dict(state["schedule"])


def build_optimizer(args: argparse.Namespace, model_chunks: Chunks) -> Optimizer:
    """The optimizer of this rank's parameters, as they are loaded now."""
    engine = (_CudaEngine if torch.cuda.is_available() else _CpuEngine)(args, model_chunks)
    return Optimizer(engine, _schedule(args, engine), model_chunks)


def clip_gradients(parameters: Sequence[nn.Parameter], max_norm: float) -> float:
    """L2 norm of ``.grad`` over the whole model; scales them by max_norm / norm where the norm is larger.

    sqrt(sum of |g|^2 over the ranks of one model copy). What several tensor-parallel ranks hold
    whole, and the last stage's copy of a tied embedding, count once. ``max_norm`` 0 only measures.
    """
    once = (p for p in parameters if param_is_not_shared(p) and param_is_not_tensor_parallel_duplicate(p))
    squares = [p.grad.square().sum() for p in once]
    total = torch.stack(squares).sum() if squares else parameters[0].grad.new_zeros(())
    dist.all_reduce(total, group=parallel.model_group())
    norm = float(total.sqrt())
    scale = max_norm / (norm + 1e-6)  # Megatron's formula
    if 0 < scale < 1:  # neither without a limit nor for a norm that is not finite
        for parameter in parameters:
            parameter.grad *= scale
    return norm


class _CpuEngine(torch.optim.AdamW):
    """AdamW on the parameters themselves; no weight decay on vectors (norms), as in Megatron."""

    def __init__(self, args: argparse.Namespace, chunks: Chunks) -> None:
        self._parameters = [p for chunk in chunks for p in chunk.parameters() if p.requires_grad]
        self._max_norm = args.clip_grad
        super().__init__(
            _decay_groups(self._parameters),
            lr=args.lr,
            betas=(args.adam_beta1, args.adam_beta2),
            eps=args.adam_eps,
            weight_decay=args.weight_decay,
        )

    def update(self) -> tuple[bool, float]:
        for parameter in self._parameters:
            parameter.grad = parameter.main_grad
        norm = clip_gradients(self._parameters, self._max_norm)
        if math.isfinite(norm):
            self.step()
        self.zero_grad(set_to_none=True)
        return True, norm


def _decay_groups(parameters: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    """Two groups, matrices and vectors; ``wd_mult`` is the factor that Megatron's schedule applies."""
    matrices = [p for p in parameters if p.ndim > 1]
    vectors = [p for p in parameters if p.ndim <= 1]
    return [{"params": group, "wd_mult": mult} for group, mult in ((matrices, 1.0), (vectors, 0.0)) if group]


class _CudaEngine:
    """Megatron's mixed-precision Adam, its state split over the data-parallel ranks.

    ``state_dict`` is a collective call that gathers the moments on data-parallel rank 0.
    """

    def __init__(self, args: argparse.Namespace, chunks: Chunks) -> None:
        dtype = params_dtype(args)
        config = OptimizerConfig(
            optimizer="adam",
            **{name: getattr(args, name) for name in SHARED},
            bf16=dtype is torch.bfloat16,
            fp16=dtype is torch.float16,
            params_dtype=dtype,
            use_distributed_optimizer=True,
        )
        self._optimizer = get_megatron_optimizer(config, list(chunks))
        for chunk in chunks:
            chunk.config.grad_scale_func = self._optimizer.scale_loss
        self.param_groups = self._optimizer.param_groups

    def update(self) -> tuple[bool, float]:
        successful, norm, _ = self._optimizer.step()
        return successful, math.nan if norm is None else float(norm)

    def state_dict(self) -> dict[str, Any]:
        return {
            "optimizer": self._optimizer.state_dict(),
            "moments": [part.get_parameter_state_dp_zero() for part in self._optimizer.chained_optimizers],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state["optimizer"])
        for part, saved in zip(self._optimizer.chained_optimizers, state["moments"], strict=True):
            part.load_parameter_state_from_dp_zero(saved)
        self.param_groups = self._optimizer.param_groups


Engine = _CpuEngine | _CudaEngine  # `param_groups` is what the schedule writes to


def _schedule(args: argparse.Namespace, engine: Engine) -> OptimizerParamScheduler:
    return OptimizerParamScheduler(
        engine,
        init_lr=0.0,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=args.lr_warmup_iters,
        lr_decay_steps=args.lr_decay_iters,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.weight_decay,
        end_wd=args.weight_decay,
        wd_incr_steps=args.lr_decay_iters,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,  # after --load the flags of the new command hold
    )
