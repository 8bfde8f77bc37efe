"""Rules between a configuration and the host's arguments; what the host does not have is not checked."""

from __future__ import annotations

import dataclasses
from typing import Any

from slime_ext.config.dialects.block import FLOAT32, is_float32
from slime_ext.config.loaded import Loaded
from slime_ext.config.optional_args import OptionalArgs, steps_per_rollout
from slime_ext.core.correction import Correction
from slime_ext.core.losses import DualClip, HostLoss
from slime_ext.errors import ConfigError, shown

# Estimators that make a loss of their own -> what is lost of it.
DISCARDED = {"gspo": "sequence ratio", "cispo": "clipped weight"}
RANGE = {"eps_low": "--eps-clip", "eps_high": "--eps-clip-high", "eps_c": "--eps-clip-c"}
WITH_BASELINE = (None, "grpo", "gspo", "cispo")  # estimators whose advantages have one


def check_args(loaded: Loaded, args: Any) -> None:
    """Rules between a correction and the host's arguments (slime's names; absent ones are not checked).

    Raises:
        ConfigError: a ratio would be counted twice, a surrogate's work would be discarded, or a dialect's
            block contradicts the arguments.
    """
    for key, value in loaded.args.items():
        _same_as_args(key, value, args)
    if loaded.correction.center is not None:
        raise ConfigError(
            "slime_ext.center: expected none on a host, got one: no host hands the sampler's head to this "
            "hook; a slime that has --use-score-centering centers its own loss"
        )
    if not getattr(args, "use_tis", True):  # it only measures: the loss comes back as it was
        return
    correction, a = loaded.correction, OptionalArgs(args)
    of_loss = _beside_host_loss if isinstance(correction.surrogate, HostLoss) else _beside_own_loss
    for line, is_broken in {**of_loss(correction, a), **_of_whole_step(correction, a)}.items():
        if is_broken:
            raise ConfigError(line)
    _check_range(correction, {"eps_low": a.eps_clip, "eps_high": a.eps_clip_high, "eps_c": a.eps_clip_c})


def _check_range(correction: Correction, given: dict[str, float | None]) -> None:
    """Holds the host's clip range against what the surrogate that reads it allows of its own."""
    for field in dataclasses.fields(correction.surrogate):
        eps = given.get(field.name)
        if eps is None or getattr(correction.surrogate, field.name) is not None:
            continue
        flag = RANGE[field.name]
        if not is_float32(eps):
            raise ConfigError(f"{flag}: expected {FLOAT32}, got {eps}")
        try:
            changed: Any = {field.name: eps}
            dataclasses.replace(correction.surrogate, **changed)
        except ConfigError as error:
            raise ConfigError(f"{flag}: {str(error).partition(': ')[2]}") from None


def multiplies_target_ratio(correction: Correction) -> bool:
    """Whether the weights hold target / behavior on a host's loss with the factor target / proximal: right
    while both policies are the same, which ends with the first optimizer step of a rollout."""
    return (
        correction.numerator == "target"
        and isinstance(correction.surrogate, HostLoss)
        and correction.sets_weights
    )


def _beside_host_loss(correction: Correction, a: OptionalArgs) -> dict[str, Any]:
    """Line -> whether it is deserved, of weights on a host's loss, which has a ratio of its own."""
    steps, kept = steps_per_rollout(a), a.keep_old_actor
    which = "--keep-old-actor" if kept else f"{steps} optimizer steps per rollout"
    return {
        f"slime_ext.numerator: expected proximal beside the host's surrogate with {which}, got target: its "
        "loss counts target / proximal already; use surrogate: reinforce": (
            multiplies_target_ratio(correction) and (steps > 1 or kept)
        ),
        "--use-rollout-logprobs: expected off beside a step that sets weights, got on: the host's loss "
        "divides by the behavior policy already": (
            correction.sets_weights and a.use_tis and a.use_rollout_logprobs
        ),
    }


def _beside_own_loss(correction: Correction, a: OptionalArgs) -> dict[str, Any]:
    """The same of what the host does to a loss that ours replaces."""
    estimator, floor = a.advantage_estimator, a.eps_clip_c
    return {
        "--use-opsm: expected off beside a surrogate of slime_ext, got on: its mask would be "
        "discarded": a.use_opsm,
        f"--advantage-estimator: expected another beside a surrogate of slime_ext, got {estimator}: its "
        f"{DISCARDED.get(estimator)} would be discarded; use surrogate: host": estimator in DISCARDED,
        f"--eps-clip-c: expected none beside this surrogate of slime_ext, got {floor}: its floor would be "
        "discarded; use surrogate: dual_clip": (
            floor is not None and not isinstance(correction.surrogate, DualClip)
        ),
    }


def _of_whole_step(correction: Correction, a: OptionalArgs) -> dict[str, Any]:
    """The same of ``denominator`` and ``group`` where they could not act, or would undo another flag's
    work."""
    undone = {  # what undoes or replaces slime's group baseline
        "an --advantage-estimator other than grpo, gspo and cispo (its advantages have no group "
        "baseline)": a.advantage_estimator not in WITH_BASELINE,
        "--disable-rewards-normalization (there is no baseline to compute again)": a.rewards_normalization
        is False,
        "--normalize-advantages (the advantages are whitened over the whole batch "
        "afterwards)": a.normalize_advantages,
        "--use-opd (the teacher's term is in the advantages already)": a.use_opd,
        "--custom-advantage-function-path (its baseline is not known)": a.custom_advantage_function_path,
        "--custom-reward-post-process-path (its baseline is not known)": a.custom_reward_post_process_path,
    }
    return {
        "slime_ext.denominator: expected host beside --custom-pg-loss-reducer-function-path, got kept: what "
        "that function divides by is not known": (
            correction.denominator == "kept" and a.custom_pg_loss_reducer_function_path
        ),
        f"slime_ext.group: expected ignore with --n-samples-per-prompt 1, got {correction.group}: a group of "
        "one sample has no others": correction.group != "ignore" and a.n_samples_per_prompt == 1,
    } | {
        f"slime_ext.group: expected ignore or atomic with {what}, got rebaseline": is_there
        for what, is_there in undone.items()
        if correction.group == "rebaseline"
    }


def _same_as_args(key: str, value: float, args: Any) -> None:
    host = getattr(args, key, None)
    host = getattr(args, "eps_clip", None) if host is None else host
    if host is not None and abs(host - value) > 1e-12:
        flag = f"--{key.replace('_', '-')}"
        raise ConfigError(
            f"slime_ext.fireworks.{key}: expected {host!r}, the {flag} of this run, got {shown(value)}: "
            "the host clips by its flag; make them agree"
        )
