"""Runs corrections inside verl.

verl loads this module in every process (entry point ``verl.plugins``).

    +algorithm.rollout_correction.slime_ext=token_tis                     # weights on verl's own loss
    actor_rollout_ref.actor.policy_loss.loss_mode=slime_ext.pure_is       # a loss of ours, in bypass mode

The first flag computes weights once per rollout batch, from rollout and proximal log-probs, at the place
where verl would compute its own. ``normalize`` and ``second_moment`` are over that batch. ``mask_scope: all``
takes rejected tokens out of ``response_mask``, as verl's own rejections do. Otherwise their weight is 0 and
the mask stays. The default trainer since 0.9 keeps rejected tokens in the divisor all the same; with
``denominator: kept`` the weights make up for that, over the rollout batch. The second flag computes a loss
per micro-batch, from target and rollout log-probs.

Source: verl 0.9.1, verl/__init__.py (plugins), trainer/ppo/rollout_corr_helper.py, trainer/ppo/core_algos.py.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from slime_ext import presets
from slime_ext.adapters.seam import ONE_MICRO_BATCH, correct_padded, correction_named, refuse, with_ppo
from slime_ext.core.correction import Correction
from slime_ext.core.losses import HostLoss
from slime_ext.core.needs import Need, require
from slime_ext.errors import ConfigError

KEY = "slime_ext"
WEIGHTS = f"algorithm.rollout_correction.{KEY}"
LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"
BYPASS = "algorithm.rollout_correction.bypass_mode"
WEIGHTS_OFFER = frozenset({Need.WHOLE_STEP, Need.KEPT_COUNT, Need.MASKS})
LOG_PROBS_ALONE = (
    "verl computes weights from rollout and proximal log-probs alone; to read the target's log-probs or "
    f"advantages, use {LOSS}={KEY}.<preset>"
)
NAMES = {"mask": "response_mask", "behavior": "rollout_log_probs", "proximal": "old_log_probs"}
NAMES_OF_LOSS = {  # for a policy loss; in bypass mode old_log_prob is the rollout's
    "mask": "response_mask",
    "behavior": "old_log_prob",
    "proximal": "old_log_prob",
    "target": "log_prob",
}
AGGREGATION = "loss_agg_mode"
LOG_PROBS = "actor_rollout_ref.rollout.calculate_log_probs"


@dataclass(frozen=True)
class PolicyLoss:
    """Computes the corrected loss, which verl's ``agg_loss`` aggregates.

    In bypass mode ``old_log_prob`` is that of the rollout.
    """

    correction: Correction

    def __call__(
        self,
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        """Computes the loss of a micro-batch, a scalar with grad, and its metrics.

        All tensors are [B, T].
        """
        from verl.trainer.ppo.core_algos import agg_loss

        low, high = (
            config.clip_ratio if eps is None else eps
            for eps in (config.clip_ratio_low, config.clip_ratio_high)
        )
        loss, _, metrics = correct_padded(
            with_ppo(self.correction, low, high, "behavior"),
            response_mask,
            old_log_prob,
            old_log_prob,
            NAMES_OF_LOSS,
            target=log_prob,
            advantages=advantages,
        )
        total = agg_loss(
            loss_mat=loss, loss_mask=response_mask, loss_agg_mode=loss_agg_mode, **config.global_batch_info
        )
        clipped = metrics.get("off_policy/surrogate_clipped_fraction", 0.0)
        return total, {"actor/pg_clipfrac": clipped, **metrics}


def add_weights(correction: Correction, batch: Any) -> tuple[Any, dict[str, float]]:
    """Writes ``rollout_is_weights`` [B, T] into a rollout batch.

    With ``mask_scope: all`` it also removes rejected tokens from ``response_mask``. The trainer before 0.9
    divides by what is left there; it alone has ``input_ids`` in the batch. Its successor divides by the
    tokens that were sampled, so with ``denominator: kept`` the weights grow by sampled / kept tokens of the
    batch.

    Raises:
        ConfigError: the batch lacks what the correction reads.
        DataError, NonFiniteError: a tensor has another shape, or holds NaN where the loss would be NaN.
    """
    data = batch.batch
    for name in NAMES.values():
        if name not in data.keys():  # a TensorDict does not allow `in`
            why = f"add {LOG_PROBS}=true" if name == NAMES["behavior"] else "compute it before the weights"
            raise ConfigError(f"{name}: expected it in the rollout batch, got none: {why}")
    mask, behavior, proximal = (data[name] for name in NAMES.values())
    acting = replace(correction, denominator="host")
    weights, keep, metrics = correct_padded(acting, mask, behavior, proximal, NAMES)
    if correction.mask_scope == "all":
        kept = mask * keep.to(mask.dtype)
        if correction.denominator == "kept" and "input_ids" not in data.keys():
            weights = weights * (mask.sum() / kept.sum().clamp(min=1))
        data["response_mask"] = kept
    data["rollout_is_weights"] = weights
    return batch, metrics


def check(config: Any) -> None:
    """Checks the flags that name a correction against verl's configuration, before workers start.

    Raises:
        ConfigError: verl would not call the correction, would correct a second time, or does not pass what
            the correction reads.
    """
    block = config.algorithm.get("rollout_correction") or {}
    mode = str(config.actor_rollout_ref.actor.policy_loss.get("loss_mode", "vanilla"))
    has_weights, has_loss = block.get(KEY) is not None, mode.startswith(f"{KEY}.")
    if has_weights:
        correction = _weights_named(block[KEY])
        _check_weights(correction, block)
        _check_divisor(correction, config)
    if has_loss:
        _check_loss(presets.find(mode.partition(".")[2], LOSS).correction, block)
    if (has_weights or has_loss) and not config.actor_rollout_ref.rollout.get("calculate_log_probs"):
        raise ConfigError(f"{LOG_PROBS}: expected true, got false: add {LOG_PROBS}=true")


def _weights_named(named: str | Mapping[str, Any]) -> Correction:
    """Loads the correction of the first flag. A file is read once, so that its edits do not change a run."""
    return _of_text(named) if isinstance(named, str) else correction_named(named, WEIGHTS)


@functools.cache
def _of_text(name: str) -> Correction:
    return correction_named(name, WEIGHTS)


def _check_weights(correction: Correction, block: Any) -> None:
    second = [key for key in ("rollout_is", "rollout_rs") if block.get(key) is not None]
    in_bypass = f"remove it, or use {LOSS}={KEY}.<preset>, because verl computes no weights in bypass mode"
    refuse(
        [
            (bool(block.get("bypass_mode")), f"{BYPASS}: expected false beside {KEY}, got true: {in_bypass}"),
            (bool(second), f"{WEIGHTS}: expected no {second} beside it, got them: remove them"),
        ]
    )
    require(correction.needs, WEIGHTS_OFFER, WEIGHTS, LOG_PROBS_ALONE)


def _check_divisor(correction: Correction, config: Any) -> None:
    """Raises ConfigError if verl's loss would divide by other tokens than the correction says.

    The trainer before 0.9, and a mean per sequence in both, divide by the tokens that are left in the mask.
    """
    is_kept, reduces = correction.denominator == "kept", correction.mask_scope == "all"
    trainer = getattr(config, "trainer", None) or {}
    uses_v1 = trainer.get("use_v1", False)
    mode = config.actor_rollout_ref.actor.get(AGGREGATION, "token-mean")
    if is_kept and not reduces:
        raise ConfigError(f"{WEIGHTS}: expected mask_scope all with denominator kept, got policy: set both")
    if is_kept and uses_v1 and mode != "token-mean":
        raise ConfigError(
            f"actor_rollout_ref.actor.{AGGREGATION}: expected token-mean beside denominator kept, got "
            f"{mode}: set it, or remove denominator from the correction"
        )
    if reduces and not is_kept and (not uses_v1 or mode == "seq-mean-token-mean"):
        raise ConfigError(
            f"{WEIGHTS}: expected denominator kept with mask_scope all, got host: set both or neither, "
            "because verl divides by the tokens that are left"
        )


def _check_loss(correction: Correction, block: Any) -> None:
    is_proximal = correction.numerator != "target" and bool(correction.steps)
    twice = isinstance(correction.surrogate, HostLoss) and correction.sets_weights
    without = f"set it, or use +{WEIGHTS}=<preset>: verl's loss has rollout log-probs only in bypass mode"
    refuse(
        [
            (not block.get("bypass_mode"), f"{BYPASS}: expected true beside {LOSS}, got false: {without}"),
            (
                is_proximal,
                f"{LOSS}: expected numerator target, got proximal: choose another preset, because in bypass "
                "mode the proximal policy is the rollout's",
            ),
            (
                twice,
                f"{LOSS}: expected a preset with its own surrogate, got host: choose another preset, because "
                "the ratio would be counted twice",
            ),
        ]
    )
    require(correction.needs, ONE_MICRO_BATCH, LOSS, "verl's loss sees one micro-batch and returns no masks")


def _check_or_exit(config: Any) -> None:
    """Checks as ``check`` does, and ends a program that Hydra runs with the message alone.

    Hydra would print a traceback and another line after it. A Ray worker raises, because the driver has to
    get the error.
    """
    from hydra.core.hydra_config import HydraConfig

    try:
        check(config)
    except ConfigError as error:
        if not HydraConfig.initialized():
            raise
        sys.exit(str(error))


def install() -> None:
    """Registers the losses and wraps verl's own functions.

    A second call changes nothing.
    """
    from verl.trainer.ppo import core_algos, rollout_corr_helper
    from verl.utils import config as configuration

    def weights(original: Any, batch: Any, rollout_corr_config: Any) -> Any:
        if (named := rollout_corr_config.get(KEY)) is None:
            return original(batch, rollout_corr_config)
        return add_weights(_weights_named(named), batch)

    def checked(original: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        _check_or_exit(config)
        return original(config, *args, **kwargs)

    for name in presets.NAMES:
        core_algos.register_policy_loss(f"{KEY}.{name}")(PolicyLoss(presets.get(name)))
    seams = [(rollout_corr_helper, "compute_rollout_correction_and_add_to_batch", weights)]
    for module, name, wrapper in (*seams, (configuration, "validate_config", checked)):
        if not hasattr(original := getattr(module, name), "__wrapped__"):
            setattr(module, name, functools.wraps(original)(functools.partial(wrapper, original)))


try:
    install()
except ModuleNotFoundError as missing:
    if missing.name != "verl":  # without verl there is no registry to write to
        raise
