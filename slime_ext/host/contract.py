"""slime's contract at the policy-loss boundary, as data: what the hook is called with and what it must
return.

Shapes: ``T`` local response tokens of the micro-batch, ``N`` samples, ``R_i`` full response length, ``L_i``
the part of it that this context-parallel rank holds. The contract is the same from slime v0.2.0 to 624b824.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slime_ext.errors import ConfigError, DataError

if TYPE_CHECKING:  # the names alone are read before torch is worth importing
    from torch import Tensor

REQUIRED = (
    "args",
    "pg_loss",  # [T] with grad, local
    "train_log_probs",  # N x [L_i], proximal policy
    "rollout_log_probs",  # N x [L_i], behavior policy
    "loss_masks",  # N x [R_i] int32, full on every rank
    "total_lengths",  # N host integers
    "response_lengths",  # N host integers
)
OPTIONAL = (
    "cur_log_probs",  # N x [L_i] with grad, target policy
    "advantages",  # N x [L_i], or [T]
)
PADDED = ("max_seq_lens",)  # N lengths that --qkv-format bshd pads to: miles, slime's batches to v0.3.0
PATCHED = ("weight_versions",)  # N lists of the weights' versions that sampled the sample; patch 0002
ALIASES = {"current_log_probs": "cur_log_probs"}
RETURNED = ("pg_loss", "loss_masks", "metrics")
# Argument that names a function -> what the host passes to it, by position. Those that a training rank or the
# rollout's bookkeeping calls; generation, rewards and data sources are not ours to look at.
CALLS = {
    "custom_megatron_init_path": ("args",),
    "custom_megatron_before_log_prob_hook_path": ("args", "model", "store_prefix"),
    "custom_megatron_before_train_step_hook_path": (
        "args",
        "rollout_id",
        "step_id",
        "model",
        "optimizer",
        "opt_param_scheduler",
    ),
    "rollout_data_postprocess_path": ("args", "rollout_id", "rollout_data"),  # (args) before v0.2.4
    "custom_advantage_function_path": ("args", "rollout_data"),  # since v0.3.0
    "custom_loss_function_path": ("args", "batch", "logits", "sum_of_sample_mean"),
    "custom_pg_loss_reducer_function_path": (
        "total_lengths",
        "response_lengths",
        "loss_masks",
        "calculate_per_token_loss",
    ),
    "custom_convert_samples_to_train_data_path": ("args", "samples"),
    "custom_reward_post_process_path": ("args", "samples"),
    "custom_rollout_log_function_path": (
        "rollout_id",
        "args",
        "samples",
        "rollout_extra_metrics",
        "rollout_time",
    ),
    "custom_eval_rollout_log_function_path": ("rollout_id", "args", "data", "extra_metrics"),
}
TIS = "slime_ext.tis"  # the module whose functions --custom-tis-function-path names
SEEDS = ("vanilla_tis_function", "icepop_function", "off_policy_is_function")  # with a formula of their own
NEED_TARGET = ("off_policy_is_function",)  # those of them that read cur_log_probs
CARRY = "--custom-megatron-init-path slime_ext.host.init"
PLAN_FLAG, PLAN = "--rollout-data-postprocess-path", "slime_ext.host.rollout_data_postprocess"
OURS = {  # argument -> the function of ours that it may name
    "custom_megatron_init_path": "slime_ext.host.init",
    "rollout_data_postprocess_path": PLAN,
    "custom_rollout_log_function_path": "slime_ext.host.log_rollout",
}
METRICS = ("off_policy/host/ratio", "off_policy/host/clipped", "off_policy/host/rejected")
# What the policy loss that is running holds and does not pass to the hook; ``host_hooks`` fills it in.
carried: ContextVar[dict[str, Any] | None] = ContextVar("slime_ext_carried", default=None)


def calls_hook(args: Any) -> bool:
    """Whether the host's policy loss calls the function of --custom-tis-function-path."""
    return bool(getattr(args, "use_tis", False) or getattr(args, "get_mismatch_metrics", False))


def function_of(args: Any) -> str:
    """The name in ``slime_ext.tis`` that --custom-tis-function-path says; empty where it says another, or
    none."""
    module, _, name = str(getattr(args, "custom_tis_function_path", None) or "").rpartition(".")
    return name if module == TIS else ""


@dataclass(frozen=True)
class HookCall:
    """One call of the hook, as the host made it."""

    args: Any
    pg_loss: Tensor
    train_log_probs: Sequence[Tensor]
    rollout_log_probs: Sequence[Tensor]
    loss_masks: Sequence[Tensor]
    total_lengths: Sequence[int]
    response_lengths: Sequence[int]
    cur_log_probs: Sequence[Tensor] | None = None
    advantages: Sequence[Tensor] | Tensor | None = None
    max_seq_lens: Sequence[int] | None = None
    weight_versions: Sequence[Sequence[str]] | None = None

    @classmethod
    def of(cls, args: Any, arguments: dict[str, Any]) -> HookCall:
        """Sorts the host's keywords: aliases resolved, unknown ones ignored (a newer host may pass more).
        What the host did not pass comes from the policy loss that is running, where ``host_hooks`` carries
        it.

        Raises:
            ConfigError: a required keyword is missing, or the rollout recorded no log-probs.
        """
        named = {ALIASES.get(key, key): value for key, value in arguments.items() if value is not None}
        named = {**(carried.get() or {}), **named}
        if "rollout_log_probs" not in named and "rollout_log_probs" in arguments:
            raise ConfigError(
                "rollout_log_probs: expected one tensor per sample, got None: the rollout must record "
                "the log-probs "
                "of the sampled tokens (return_logprob); a custom generate function has to fill them in"
            )
        missing = [key for key in REQUIRED[1:] if key not in named]
        if missing:
            raise ConfigError(
                f"hook call: expected the keywords {', '.join(REQUIRED)}, got no {', '.join(missing)}: "
                "call it as slime's policy loss does"
            )
        known = (*REQUIRED[1:], *OPTIONAL, *PADDED, *PATCHED)
        return cls(args, **{key: named[key] for key in known if key in named})

    def require_target(self, who: str) -> Sequence[Tensor]:
        """The target policy's log-probs, for ``who`` cannot work without them.

        Raises:
            ConfigError: the host did not pass ``cur_log_probs``.
        """
        if self.cur_log_probs is None:
            raise ConfigError(
                f"{who}: expected cur_log_probs (the trainer's log-probs with gradient), got none: add "
                f"{CARRY}, which carries them on every slime since v0.2.0, or use numerator: proximal"
            )
        return self.cur_log_probs

    def require_advantages(self, who: str) -> Sequence[Tensor] | Tensor:
        """The advantages, for ``who`` cannot work without them.

        Raises:
            ConfigError: the host did not pass ``advantages``.
        """
        if self.advantages is None:
            raise ConfigError(
                f"{who}: expected advantages, got none: add {CARRY}, which carries them on every slime "
                "since v0.2.0"
            )
        return self.advantages


def check_lengths(name: str, got: Sequence[Tensor], expected: Sequence[int]) -> None:
    """Every sample's tensor must have as many tokens as this rank holds of it.

    Raises:
        DataError: naming the sample and both lengths.
    """
    if len(got) != len(expected):
        raise DataError(f"{name}: expected {len(expected)} samples, got {len(got)}: one tensor per sample")
    sizes = [tensor.numel() if hasattr(tensor, "numel") else -1 for tensor in got]
    if sizes == list(expected):
        return
    i = next(i for i, (size, length) in enumerate(zip(sizes, expected, strict=True)) if size != length)
    where = f"{name}, sequence {i} of {len(expected)}"
    if sizes[i] < 0:
        raise DataError(
            f"{where}: expected a tensor, got {type(got[i]).__name__}: turn it into one, as slime does before "
            "it calls the hook"
        )
    raise DataError(
        f"{where}: expected {expected[i]} tokens on this rank, got {sizes[i]}: every log-prob list must come "
        "from the same context-parallel slice"
    )
