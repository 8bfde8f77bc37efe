"""Forward passes and optimizer steps of a rollout on this rank, through Megatron's schedules."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from slime_ext.host import step_metrics
from slime_ext.host.train_step import Reporter
from slime_ext.launcher.megatron import parallel
from slime_ext.launcher.megatron.batching import (
    Layout,
    MicroBatch,
    micro_batches,
    pack_micro_batch,
    step_slices,
)
from slime_ext.launcher.megatron.loss import (
    PolicyLoss,
    StepLog,
    hook_of,
    proximal_log_probs,
    token_count,
)
from slime_ext.launcher.megatron.model import params_dtype
from slime_ext.launcher.megatron.optimizer import Optimizer
from slime_ext.launcher.training_data import TrainSample
from slime_ext.metrics import MetricsLayout

Minibatches = list[list[MicroBatch]]


@dataclass
class Trainer:
    """Model, optimizer and the functions that the flags name."""

    args: argparse.Namespace
    chunks: list[torch.nn.Module]
    optimizer: Optimizer

    def __post_init__(self) -> None:
        self.hook = hook_of(self.args)
        self.reporter = Reporter.of(self.args, getattr(self.args, "run_path", None))
        self.config = self.chunks[0].config

    def cut(self, samples: Sequence[TrainSample]) -> list[Minibatches]:
        """This rank's part of the rollout: steps of minibatches of micro-batches."""
        args, layout = self.args, layout_of(self.args)
        return [
            [
                [pack_micro_batch([samples[p] for p in positions], layout) for positions in minibatch]
                for minibatch in micro_batches(args, step, layout.dp_rank, layout.dp_size)
            ]
            for step in step_slices(len(samples), args.global_batch_size)
        ]

    @torch.no_grad()
    def proximal(self, steps: list[Minibatches]) -> dict[int, Tensor]:
        """Log-probs of every local sample under the weights of now, before any step is taken."""
        batches = [batch for step in steps for minibatch in step for batch in minibatch]
        found = self._run(
            batches, lambda batch, logits: proximal_log_probs(self.args, batch, logits), forward_only=True
        )
        return {position: values for part in found for position, values in part.items()}

    def train_step(
        self, step: Minibatches, proximal: dict[int, Tensor], optimizer_step: int, rollout_id: int = 0
    ) -> tuple[dict[str, float], StepLog]:
        """Every minibatch forward and backward, then one optimizer step; metrics reduced over all ranks."""
        log = StepLog()
        loss = PolicyLoss(
            self.args,
            proximal=proximal,
            optimizer_step=optimizer_step,
            log=log,
            hook=self.hook,
        )
        self.optimizer.zero_grad()
        reported: list[dict[str, Tensor]] = []
        with self._measured() as measured:
            for minibatch in step:
                finish = self._finish(step[:-1]) if minibatch is step[-1] else None
                reported += self._run(minibatch, loss, finish=finish, scale=len(minibatch))
            lr = self.optimizer.lr
            updated, grad_norm = self.optimizer.step()
            where = {"rollout_id": rollout_id, "optimizer_step": optimizer_step}
            metrics = self._reduce(reported, measured, where)
        return {
            **metrics,
            "train/grad_norm": grad_norm,
            "train/lr-pg_0": lr,
            "train/skipped": float(not updated),
        }, log

    def _finish(self, earlier: Minibatches) -> Callable[..., Any]:
        """Megatron's reduction of the gradients, with the token count of the whole optimizer step.

        Megatron's schedule counts the tokens of the pass that it runs, which is the last minibatch only.
        """
        reduce = self.config.finalize_model_grads_func
        before = sum(token_count(batch) for minibatch in earlier for batch in minibatch)

        def finish(model: list, tokens: Tensor | None, **more: Any) -> None:
            reduce(model, None if tokens is None else tokens + before, **more)

        return finish

    def _run(
        self,
        batches: list[MicroBatch],
        function: Callable[..., Any],
        *,
        forward_only: bool = False,
        finish: Callable[..., Any] | None = None,
        scale: int | None = None,
    ) -> list[Any]:
        """One pass of Megatron's schedule (1F1B with a pipeline); what ``function`` gave, last stage only."""

        def forward(iterator: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[Tensor, Callable]:
            batch = next(iterator)
            logits = model(batch.input_ids, None, None, packed_seq_params=batch.packed_seq_params)
            if forward_only:
                return logits, lambda out, non_loss_data=True: function(batch, out)
            return logits, lambda out: function(batch, scale, out)

        held, self.config.finalize_model_grads_func = self.config.finalize_model_grads_func, finish
        try:
            return get_forward_backward_func()(
                forward_step_func=forward,
                data_iterator=iter(batches),
                model=self.chunks,
                num_microbatches=len(batches),
                seq_length=1,  # not read: packed micro-batches announce their own shapes
                micro_batch_size=1,
                forward_only=forward_only,
                collect_non_loss_data=forward_only,
            )
        finally:
            self.config.finalize_model_grads_func = held

    def _measured(self) -> AbstractContextManager[step_metrics.OptimizerStep | None]:
        """The optimizer step whose hook calls are measured; None where metrics are switched off."""
        if not self.reporter.options.enabled:
            return nullcontext()
        curves = self.reporter.measures_curves
        others = MetricsLayout(curves=curves, of_policies=self.hook is not None)
        return step_metrics.under_way(step_metrics.layout_of(self.args, curves=curves) or others)

    def _reduce(
        self,
        reported: list[dict[str, Tensor]],
        measured: step_metrics.OptimizerStep | None,
        where: dict[str, int],
    ) -> dict[str, float]:
        """slime's reduction: one SUM over data and context parallel ranks, one division, for all stages."""
        metrics: dict[str, float] = {}
        if parallel.is_last_stage():
            names = list(reported[0])
            sums = torch.stack([sum(r[name].double() for r in reported) for name in names])
            dist.all_reduce(sums, group=parallel.dp_group(with_context_parallel=True))
            values = dict(zip(names, sums.tolist(), strict=True))
            metrics = self._means(values)
        if measured is not None:
            found = self.reporter.report_on_every_stage(measured, where)
            metrics |= {f"train/{name}": value for name, value in found.items()}
        box, group = [metrics], parallel.pp_group()
        if group.size() > 1:
            last = dist.get_global_rank(group, group.size() - 1)
            dist.broadcast_object_list(box, src=last, group=group)
        return box[0]

    def _means(self, values: dict[str, float]) -> dict[str, float]:
        tokens, rollouts = values.pop("tokens"), values.pop("rollouts")
        per_token = self.args.calculate_per_token_loss
        # Every context-parallel rank counted the whole masks.
        divisor = tokens / parallel.cp_group().size() if per_token else self.args.global_batch_size
        means = {f"train/{name}": value / divisor for name, value in values.items()}
        return {**means, "train/staleness": values["staleness"] / max(rollouts, 1e-9)}


def layout_of(args: argparse.Namespace) -> Layout:
    """This rank's place, read from Megatron's parallel state."""
    dp, cp = parallel.dp_group(), parallel.cp_group()
    wide = params_dtype(args) is torch.float64
    dtype = torch.float64 if wide else torch.float32
    return Layout(dp.rank(), dp.size(), cp.rank(), cp.size(), parallel.device(), dtype)
