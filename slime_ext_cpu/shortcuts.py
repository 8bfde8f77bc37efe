"""Leaves out work of miles' trainer that changes no number of a run of ``slime-ext train``.

**The log-prob pass.** Before miles trains on a rollout, it computes the log-probs of the samples in a pass
without gradients. If the rollout is one optimizer step, training computes the same log-probs with the same
weights. Without dropout they are equal bit for bit: ``train/ppo_kl`` is 0.0 in each rollout. So the pass is
left out, which saves a quarter of the trainer's time. slime does the same since v0.3.0
(``can_reuse_log_probs_in_loss``).

In its place stand tensors of NaN. The policy loss of a micro-batch fills those of its samples before it reads
them. What the host logs about the rollout's log-probs is logged after training.

**Slices of the logits.** miles slices a micro-batch's logits once per sample. The gradient of each slice is a
tensor of zeros as large as all logits, 126 MB for 640 tokens. `select_once` selects the rows of all samples
at once, so that one such tensor is made instead of 16. The sums are the same, because the others are zeros.
"""

from __future__ import annotations

import copy
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any

from slime_ext_cpu.import_hooks import ImportHooks, around

if TYPE_CHECKING:  # `install` runs in every process, before anything imports torch
    from torch import Tensor

ACTOR, LOSS = "miles.backends.megatron_utils.actor", "miles.backends.training_utils.loss"
# Values of the host's arguments with which nothing reads the log-probs before the policy loss, or other ones
# than those of the trained weights.
NEEDLESS = {
    "loss_type": "policy_loss",
    "kl_coef": 0,
    "hidden_dropout": 0,
    "attention_dropout": 0,
    "context_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "use_critic": False,
    "keep_old_actor": False,
    "use_rollout_logprobs": False,
    "use_rollout_entropy": False,
    "use_routing_replay": False,
    "use_rollout_routing_replay": False,
    "rollout_data_postprocess_path": None,
    "custom_megatron_before_log_prob_hook_path": None,
    "custom_megatron_before_train_step_hook_path": None,
}
ESTIMATORS = ("grpo", "gspo")  # read the log-probs' shapes only


@dataclass
class Awaited:
    """The log-probs of a rollout that training has yet to compute.

    Args:
        rollout: a tensor per sample; empty if the host has made its log-prob pass.
        batch: those of the micro-batch whose policy loss runs.
        log: what the host logs about the rollout.
    """

    rollout: list[Tensor] = field(default_factory=list)
    batch: list[Tensor] = field(default_factory=list)
    log: list[Callable[[], None]] = field(default_factory=list)


_awaited = Awaited()


def install() -> None:
    """Adds the shortcuts to the import hooks that the stand-ins installed in this process."""
    hooks = next(finder for finder in sys.meta_path if isinstance(finder, ImportHooks))
    hooks.add("after", LOSS, fill_log_probs)
    hooks.add("after", LOSS, select_once)
    hooks.add("after", ACTOR, skip_log_prob_pass)


def is_needless(args: Namespace, steps: int) -> bool:
    """Returns whether training computes the log-prob pass's numbers, and nothing reads them earlier.

    Args:
        steps: optimizer steps of the rollout.
    """
    options = vars(args)
    return (
        steps == 1
        and options.get("advantage_estimator") in ESTIMATORS
        and all(options.get(name, value) == value for name, value in NEEDLESS.items())
    )


def skip_log_prob_pass(actor: ModuleType) -> None:
    """Replaces a needless log-prob pass, and logs the rollout after training instead of before."""
    import torch

    @around(actor.MegatronTrainRayActor, "compute_log_prob")
    def compute_log_prob(
        plain: Any, self: Any, data_iterator: Any, num_microbatches: Sequence[int], store_prefix: str = ""
    ) -> dict[str, list[Tensor]]:
        if store_prefix or not is_needless(self.args, len(num_microbatches)):
            return plain(self, data_iterator, num_microbatches, store_prefix)
        lengths = data_iterator[0].rollout_data["response_lengths"]
        _awaited.rollout = [torch.full((length,), torch.nan) for length in lengths]
        return {"log_probs": _awaited.rollout}

    @around(actor, "log_rollout_data")
    def log_rollout_data(plain: Any, *args: Any, **options: Any) -> None:
        if _awaited.rollout:
            _awaited.log.append(lambda: plain(*args, **options))
        else:
            plain(*args, **options)

    @around(actor, "train")
    def train(plain: Any, *args: Any, **options: Any) -> None:
        plain(*args, **options)
        _awaited.rollout = []
        while _awaited.log:
            _awaited.log.pop()()


def fill_log_probs(loss: ModuleType) -> None:
    """Makes the policy loss fill the log-probs that its micro-batch awaits."""

    @around(loss, "policy_loss_function")
    def policy_loss_function(plain: Any, args: Namespace, batch: dict, *rest: Any, **options: Any) -> Any:
        _awaited.batch = batch["log_probs"] if _awaited.rollout else []
        try:
            return plain(args, batch, *rest, **options)
        finally:
            _awaited.batch = []

    @around(loss, "get_log_probs_and_entropy")
    def get_log_probs_and_entropy(plain: Any, *args: Any, **options: Any) -> dict[str, list[Tensor]]:
        result = plain(*args, **options)
        if _awaited.batch:
            for awaited, values in zip(_awaited.batch, result["log_probs"], strict=True):
                awaited.copy_(values.detach())
        return result


def select_once(loss: ModuleType) -> None:
    """Selects the rows of a micro-batch's logits with one operation.

    The host's own function says which rows, because it also slices row numbers.
    """
    import torch

    @around(loss, "get_responses")
    def get_responses(
        plain: Any, logits: Tensor, *, args: Namespace, **options: Any
    ) -> Iterator[tuple[Tensor, Tensor]]:
        if args.true_on_policy_mode:  # rounds the logits
            return plain(logits, args=args, **options)
        numbers = torch.arange(logits.shape[:-1].numel(), dtype=torch.float32).view(*logits.shape[:-1], 1)
        as_they_are = copy.copy(args)
        as_they_are.rollout_temperature = 1.0
        rows, tokens = zip(*plain(numbers, args=as_they_are, **options), strict=True)
        chosen = logits.reshape(-1, logits.shape[-1]).index_select(0, torch.cat(rows)[:, 0].long())
        if args.rollout_temperature != 1:
            chosen = chosen.div(args.rollout_temperature)
        return zip(chosen.split([len(each) for each in rows]), tokens, strict=True)
