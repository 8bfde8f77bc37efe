"""The policy loss, and the call of the function that ``--custom-tis-function-path`` names.

Same keywords, denominators, masks and metric reduction as slime (host-contract: slime 624b824, loss.py), so
that a correction which works here works there. Shapes: T local response tokens of a micro-batch, N samples.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed.nn  # all_reduce with a gradient, for GSPO under context parallelism
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from slime_ext.correction import Correction
from slime_ext.errors import DataError, NonFiniteError
from slime_ext.host import hook as host_hook
from slime_ext.host.contract import HookCall, calls_hook, check_returned, load_function
from slime_ext.host.packing import locate
from slime_ext.launcher.megatron import parallel
from slime_ext.launcher.megatron.batching import MicroBatch
from slime_ext.launcher.megatron.log_probs import log_probs_and_entropy
from slime_ext.ops import ratios, surrogates
from slime_ext.ops.segments import identity

Hook = Callable[..., tuple[Tensor, list[Tensor], Mapping[str, Tensor]]]
Metrics = dict[str, Tensor]
# Names that the loss reports itself; slime lets a hook overwrite them, and then logs something else.
REPORTED = frozenset(
    "tokens rollouts staleness loss pg_loss entropy_loss pg_clipfrac ppo_kl "
    "train_rollout_logprob_abs_diff".split()
)


@dataclass
class StepLog:
    """What the micro-batches of one optimizer step leave behind, reduced once per step."""

    hook_seconds: float = 0.0
    hook_calls: int = 0
    metric_names: list[str] | None = None  # the hook's, in its order, the same in every micro-batch
    target: dict[int, Tensor] = field(default_factory=dict)  # position -> [L_i], for the train dump
    seen: set[int] = field(default_factory=set)  # micro-batches counted, for the recomputed loss


@dataclass(frozen=True)
class PolicyLoss:
    """The loss of one optimizer step: configuration, the resolved functions and the proximal log-probs.

    Attributes:
        hook: of `hook_of`.
        proximal: position -> [L_i] of the recomputed proximal policy; empty: the training forward is it.
        optimizer_step: steps taken before this one, from which staleness counts.
    """

    args: argparse.Namespace
    hook: Hook | None
    proximal: Mapping[int, Tensor]
    optimizer_step: int
    log: StepLog

    def __call__(self, batch: MicroBatch, micro_batches: int, logits: Tensor) -> tuple[Tensor, Tensor, dict]:
        """(loss scaled for Megatron's schedule, its token count, metrics by name), slime's scaling.

        Megatron divides by ``micro_batches`` and averages over data and context parallel ranks; the factor
        undoes both, so that the gradient is that of sum over rollouts / --global-batch-size.
        """
        args = self.args
        if args.recompute_loss_function:
            loss, metrics = checkpoint(self.policy, batch, logits, use_reentrant=False)
        else:
            loss, metrics = self.policy(batch, logits)
        tokens = token_count(batch)
        if args.calculate_per_token_loss:
            scale, count = parallel.cp_group().size(), tokens
        else:
            ranks = parallel.dp_group(with_context_parallel=True).size()
            scale, count = micro_batches / args.global_batch_size * ranks, torch.ones_like(tokens)
        return loss * scale, count, {"tokens": tokens, **metrics}

    def policy(self, batch: MicroBatch, logits: Tensor) -> tuple[Tensor, Metrics]:
        """Unscaled loss and slime's metrics, each the sum over rollouts of its mean over tokens."""
        args = self.args
        cur, entropy = self._current(batch, logits)
        # slime's train_log_probs: the recomputed ones, or this very forward pass.
        proximal = torch.cat([self.proximal[p] for p in batch.positions]) if self.proximal else cur.detach()
        anchor = torch.cat(batch.rollout_log_probs) if args.use_rollout_logprobs else proximal
        log_ratio = self._log_ratio(batch, cur - anchor)
        pg_loss, clipped = self._surrogate(log_ratio, cur, torch.cat(batch.advantages))
        self._observe(batch, cur, proximal)

        reduce = plain = make_reducer(args, batch, batch.loss_masks)
        masks, extra = batch.loss_masks, {}
        if self.hook is not None:
            pg_loss, masks, extra = self._call_hook(batch, pg_loss, proximal, cur)
            extra = {"ois": log_ratio.detach().exp(), **extra}
            reduce = make_reducer(args, batch, masks)

        losses = {"pg_loss": reduce(pg_loss), "entropy_loss": reduce(entropy)}
        loss = losses["pg_loss"] - args.entropy_coef * losses["entropy_loss"]
        if cur.numel() == 0:
            loss = loss + 0.0 * logits.sum()  # a shard without response tokens still joins the backward pass
        gap = ((cur if args.use_rollout_logprobs else proximal) - torch.cat(batch.rollout_log_probs)).abs()
        means = {
            "loss": loss,
            **losses,
            "pg_clipfrac": reduce(clipped.to(cur.dtype)),
            "ppo_kl": reduce(-log_ratio),
            "train_rollout_logprob_abs_diff": reduce(gap),
            "staleness": plain(self._ages(batch).to(cur.dtype)),
            "rollouts": plain(torch.ones_like(cur)),
            **{name: plain(value) for name, value in extra.items()},
        }
        return loss, {name: value.detach().clone() for name, value in means.items()}

    def _current(self, batch: MicroBatch, logits: Tensor) -> tuple[Tensor, Tensor]:
        rows = logits[0].index_select(0, batch.logit_rows)
        cur, entropy = log_probs_and_entropy(rows, batch.targets, self.args.rollout_temperature)
        return cur, entropy if self.args.entropy_coef else entropy.detach()

    def _log_ratio(self, batch: MicroBatch, log_ratio: Tensor) -> Tensor:
        if self.args.advantage_estimator != "gspo":
            return log_ratio
        all_sum = identity
        if batch.cp_size > 1:
            all_sum = partial(torch.distributed.nn.functional.all_reduce, group=parallel.cp_group())
        segments = batch.segments(all_sum)
        return ratios.sequence_mean(log_ratio, segments)

    def _surrogate(self, log_ratio: Tensor, cur: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        args = self.args
        low, high = args.eps_clip, args.eps_clip_high
        if args.advantage_estimator == "cispo":
            return surrogates.cispo(log_ratio, cur, advantages, low, high)
        if args.eps_clip_c is not None:
            return surrogates.dual_clip(log_ratio, advantages, low, high, args.eps_clip_c)
        return surrogates.ppo_clip(log_ratio, advantages, low, high)

    def _call_hook(
        self, batch: MicroBatch, pg_loss: Tensor, proximal: Tensor, cur: Tensor
    ) -> tuple[Tensor, list[Tensor], Mapping[str, Tensor]]:
        """slime's keywords, plus ``cur_log_probs`` and ``advantages``."""
        start = time.perf_counter()
        versions = {"weight_versions": batch.weight_versions} if self._is_ours else {}
        call = self._keywords(batch, pg_loss, proximal, cur)
        out = self.hook(args=self.args, **call, advantages=batch.advantages, **versions)
        self.log.hook_seconds += time.perf_counter() - start
        self.log.hook_calls += 1
        path = self.args.custom_tis_function_path
        out = check_returned(path, out, pg_loss, batch.response_lengths, REPORTED)
        if (names := list(out[2])) != (first := self.log.metric_names or names):
            raise DataError(
                f"--custom-tis-function-path {path}: expected the metrics {', '.join(first)} in every "
                f"micro-batch, got {', '.join(names) or 'none'}"
            )
        self.log.metric_names = names
        return out

    def _keywords(self, batch: MicroBatch, pg_loss: Tensor, proximal: Tensor, cur: Tensor) -> dict[str, Any]:
        return {
            "pg_loss": pg_loss,
            "train_log_probs": batch.split(proximal),
            "rollout_log_probs": batch.rollout_log_probs,
            "loss_masks": batch.loss_masks,
            "total_lengths": batch.total_lengths,
            "response_lengths": batch.response_lengths,
            "cur_log_probs": batch.split(cur),
        }

    @property
    def _is_ours(self) -> bool:
        """Whether the hook is a function of ``slime_ext.tis``, which measures what it does."""
        return getattr(self.hook, "__module__", None) == "slime_ext.tis"

    def _ages(self, batch: MicroBatch) -> Tensor:
        """[T] optimizer steps between the sampling weights and the trained ones; 0 where unknown."""
        return torch.where(batch.versions >= 0, self.optimizer_step - batch.versions, 0)

    @torch.no_grad()
    def _observe(self, batch: MicroBatch, cur: Tensor, proximal: Tensor) -> None:
        """Keeps the log-probs for the dump, once per micro-batch, and measures the step where the hook is not
        ours, which measures it itself."""
        if id(batch) in self.log.seen:
            return
        self.log.seen.add(id(batch))
        mask = batch.local(batch.loss_masks) != 0
        check_finite("trainer log-probs", cur, mask, batch)
        if not self._is_ours:
            call = self._keywords(batch, torch.zeros_like(cur), proximal, cur)
            versions = batch.weight_versions
            host_hook.run(HookCall(self.args, **call, weight_versions=versions), Correction())
        self.log.target.update(zip(batch.positions, batch.split(cur.detach()), strict=True))


def token_count(batch: MicroBatch) -> Tensor:
    """Response tokens of the host's masks, a sample at least 1: what the per-token loss is divided by."""
    return sum(mask.sum().clamp_min(1) for mask in batch.loss_masks)


def make_reducer(
    args: argparse.Namespace, batch: MicroBatch, masks: list[Tensor]
) -> Callable[[Tensor], Tensor]:
    """x [T] -> sum_i sum_t x_t m_t / D_i (D_i: response tokens of the sample's rollout, at least 1).

    D_i is that of the host's masks whatever ``masks`` are, so rejection shrinks the numerator only.
    ``--calculate-per-token-loss``: no division. A masked position may hold anything: it is selected away.
    """
    weight = batch.local(masks).to(batch.denominators.dtype)
    if not args.calculate_per_token_loss:
        per_token = torch.repeat_interleave(
            batch.denominators.clamp_min(1),
            torch.tensor(batch.local_lengths, device=weight.device),
            output_size=sum(batch.local_lengths),
        )
        weight = weight / per_token
    return lambda x: torch.where(weight != 0, x * weight, 0).sum()


def proximal_log_probs(args: argparse.Namespace, batch: MicroBatch, logits: Tensor) -> dict[int, Tensor]:
    """position -> [L_i] log-probs of this forward pass, for the frozen proximal policy."""
    rows = logits[0].index_select(0, batch.logit_rows)
    flat, _ = log_probs_and_entropy(rows, batch.targets, args.rollout_temperature)
    return dict(zip(batch.positions, batch.split(flat.detach()), strict=True))


def check_finite(what: str, values: Tensor, mask: Tensor, batch: MicroBatch) -> None:
    """Stops at the first non-finite value under the mask. Without CUDA: there the look would be a sync, and
    the optimizer stops at the gradient's norm instead.

    Raises:
        NonFiniteError: naming the sample of the rollout and the position in its response.
    """
    bad = mask & ~torch.isfinite(values)
    if values.is_cuda or not bool(bad.any()):
        return
    at = int(bad.nonzero()[0])
    sequence, position = locate(at, batch.segments())
    raise NonFiniteError(
        f"{what}: expected finite numbers, got {float(values[at])} in sample {batch.positions[sequence]}, "
        f"response token {position}: the weights have diverged; go back to a checkpoint or lower --lr"
    )


def hook_of(args: argparse.Namespace) -> Hook | None:
    """The correction, or None where neither --use-tis nor --get-mismatch-metrics is set."""
    path = args.custom_tis_function_path
    return load_function(path, "--custom-tis-function-path") if calls_hook(args) else None
