"""Rules between a configuration and the host's arguments; what the host does not have is not checked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slime_ext.errors import ConfigError, shown
from slime_ext.losses import DualClip, HostLoss
from slime_ext.optional_args import steps_per_rollout

if TYPE_CHECKING:
    from slime_ext.config import Loaded
    from slime_ext.correction import Correction


def check_args(loaded: Loaded, args: Any) -> None:
    """Rules between a correction and the host's arguments (slime's names; absent ones are not checked).

    Raises:
        ConfigError: a ratio would be counted twice, a surrogate's work would be discarded, or a dialect's
            block contradicts the arguments.
    """
    for key, value in loaded.args.items():
        _same_as_args(key, value, args)
    if not getattr(args, "use_tis", True):  # it only measures: the loss comes back as it was
        return
    if isinstance(loaded.correction.surrogate, HostLoss):
        _check_beside_host_loss(loaded.correction, args)
    else:
        _check_own_loss(loaded.correction, args)
    _check_whole_step(loaded.correction, args)


def _check_beside_host_loss(correction: Correction, args: Any) -> None:
    """Weights on a host's loss, which has a ratio of its own."""
    if multiplies_target_ratio(correction):
        _forbid_double_count(args)
    if correction.sets_weights and _on(args, "use_tis") and _on(args, "use_rollout_logprobs"):
        why = "the host's loss divides by the behavior policy already"
        _refuse_flag("--use-rollout-logprobs", "off beside a step that sets weights", "on", why)


def multiplies_target_ratio(correction: Correction) -> bool:
    """Whether the weights hold target / behavior on a host's loss with the factor target / proximal: right
    while both policies are the same, which ends with the first optimizer step of a rollout."""
    return (
        correction.numerator == "target"
        and isinstance(correction.surrogate, HostLoss)
        and correction.sets_weights
    )


# Estimators that make a loss of their own -> what is lost of it.
DISCARDED = {"gspo": "sequence ratio", "cispo": "clipped weight"}


def _check_own_loss(correction: Correction, args: Any) -> None:
    """What the host does to a loss that ours replaces."""
    if _on(args, "use_opsm"):
        _refuse_flag("--use-opsm", "off beside a surrogate of slime_ext", "on", "its mask would be discarded")
    estimator = getattr(args, "advantage_estimator", None)
    if estimator in DISCARDED:
        why = f"its {DISCARDED[estimator]} would be discarded; use surrogate: host"
        _refuse_flag("--advantage-estimator", "another beside a surrogate of slime_ext", estimator, why)
    floor = getattr(args, "eps_clip_c", None)
    if floor is not None and not isinstance(correction.surrogate, DualClip):
        why = "its floor would be discarded; use surrogate: dual_clip"
        _refuse_flag("--eps-clip-c", "none beside this surrogate of slime_ext", floor, why)


# What undoes or replaces slime's group baseline -> when it does, and what to call it.
BASELINE = {
    "advantage_estimator": (
        lambda v: v not in ("grpo", "gspo", "cispo"),
        "an --advantage-estimator other than grpo, gspo and cispo (its advantages have no group baseline)",
    ),
    "rewards_normalization": (
        lambda v: not v,
        "--disable-rewards-normalization (there is no baseline to compute again)",
    ),
    "normalize_advantages": (
        bool,
        "--normalize-advantages (the advantages are whitened over the whole batch afterwards)",
    ),
    "use_opd": (bool, "--use-opd (the teacher's term is in the advantages already)"),
    "custom_advantage_function_path": (
        bool,
        "--custom-advantage-function-path (its baseline is not known)",
    ),
    "custom_reward_post_process_path": (
        bool,
        "--custom-reward-post-process-path (its baseline is not known)",
    ),
}


def _check_whole_step(correction: Correction, args: Any) -> None:
    """``denominator`` and ``group`` where they could not act, or would undo another flag's work."""
    if correction.denominator == "kept" and _on(args, "custom_pg_loss_reducer_function_path"):
        raise ConfigError(
            "slime_ext.denominator: expected host beside --custom-pg-loss-reducer-function-path, got kept: "
            "what that function divides by is not known"
        )
    if correction.group == "ignore":
        return
    if getattr(args, "n_samples_per_prompt", None) == 1:
        raise ConfigError(
            f"slime_ext.group: expected ignore with --n-samples-per-prompt 1, got {correction.group}: a "
            "group of one sample has no others"
        )
    for flag, (is_refused, what) in BASELINE.items() if correction.group == "rebaseline" else ():
        value = getattr(args, flag, None)
        if value is not None and is_refused(value):
            raise ConfigError(f"slime_ext.group: expected ignore or atomic with {what}, got rebaseline")


def _on(args: Any, flag: str) -> bool:
    return bool(getattr(args, flag, False))


def _same_as_args(key: str, value: float, args: Any) -> None:
    host = getattr(args, key, None)
    host = getattr(args, "eps_clip", None) if host is None else host
    if host is not None and abs(host - value) > 1e-12:
        flag = f"--{key.replace('_', '-')}"
        raise ConfigError(
            f"slime_ext.fireworks.{key}: expected {host!r}, the {flag} of this run, got {shown(value)}: "
            "the host clips by its flag; make them agree"
        )


def _forbid_double_count(args: Any) -> None:
    steps, kept = steps_per_rollout(args), getattr(args, "keep_old_actor", False)
    if steps > 1 or kept:
        why = "its loss counts target / proximal already; use surrogate: reinforce"
        raise ConfigError(
            f"slime_ext.numerator: expected proximal beside the host's surrogate with "
            f"{'--keep-old-actor' if kept else f'{steps} optimizer steps per rollout'}, got target: {why}"
        )


def _refuse_flag(flag: str, expected: str, got: object, why: str) -> None:
    raise ConfigError(f"{flag}: expected {expected}, got {got}: {why}")
