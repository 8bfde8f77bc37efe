"""Registers a policy loss in SkyRL.

The loss is any correction of PPO's clipped loss, or of the correction's own surrogate.

    python -m skyrl.train.entrypoints.main_base trainer.override_entrypoint=slime_ext.adapters.skyrl \\
        trainer.algorithm.policy_loss_type=slime_ext slime_ext=token_tis ...

``slime_ext`` is a preset's name or a YAML file's path. SkyRL passes the log-probs of all three policies, one
micro-batch at a time. It has already scaled the advantages, so this module only sums the losses of tokens,
and does not divide.

Source: SkyRL 0.4.0, skyrl/backends/skyrl_train/utils/ppo_utils.py (PolicyLossRegistry).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from slime_ext.adapters.seam import (
    ONE_MICRO_BATCH,
    Rule,
    correct_padded,
    correction_named,
    refuse,
    with_ppo,
)
from slime_ext.core.correction import Correction
from slime_ext.core.needs import require
from slime_ext.errors import ConfigError, SlimeExtError

NAME = "slime_ext"
OVERRIDE = "trainer.override_entrypoint="
NAMES = {  # our tensors -> what SkyRL calls them
    "mask": "loss_mask",
    "behavior": "rollout_logprobs",
    "proximal": "old_log_probs",
    "target": "log_probs",
}
CORRECTION_KEYS = (
    *("tis_ratio_type", "sequence_mask_metric"),
    *("outlier_token_is_threshold_low", "outlier_token_is_threshold_high"),
    *("token_mask_is_threshold_low", "token_mask_is_threshold_high"),
)


@dataclass(frozen=True)
class PolicyLoss:
    """Computes the sum over t of mask_t L_t, where L is the corrected loss."""

    correction: Correction

    def __call__(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        config: Any,
        loss_mask: Tensor | None = None,
        rollout_logprobs: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        """Computes the loss of a micro-batch, a scalar with grad, and its metrics.

        All tensors are [B, T].

        Raises:
            ConfigError: the rollout's log-probs are missing.
            DataError, NonFiniteError: a tensor has another shape, or holds NaN where the loss would be NaN.
        """
        if rollout_logprobs is None:
            raise ConfigError(
                f"{NAME}: expected rollout log-probs, got None: add generator.sampling_params.logprobs=1"
            )
        mask = log_probs.new_ones(log_probs.shape) if loss_mask is None else loss_mask
        correction = with_ppo(self.correction, config.eps_clip_low, config.eps_clip_high)
        loss, _, metrics = correct_padded(
            correction,
            mask,
            rollout_logprobs,
            old_log_probs,
            NAMES,
            target=log_probs,
            advantages=advantages,
        )
        clipped = metrics.get("off_policy/surrogate_clipped_fraction", 0.0)
        return (loss * mask).sum(), {"clip_ratio": clipped, **metrics}


def check(correction: Correction, config: Any) -> None:
    """Checks a correction against SkyRL's configuration, before Ray starts.

    Raises:
        ConfigError: SkyRL would not call the correction, would correct a second time, or does not pass what
            the correction reads.
    """
    algorithm = config.trainer.algorithm
    keys = [name for name in CORRECTION_KEYS if getattr(algorithm.off_policy_correction, name) is not None]
    rules: list[Rule] = [
        (
            algorithm.policy_loss_type != NAME,
            f"trainer.algorithm.policy_loss_type: expected {NAME}, got {algorithm.policy_loss_type}: "
            f"write trainer.algorithm.policy_loss_type={NAME}, or nothing calls the correction",
        ),
        (
            bool(keys),
            f"trainer.algorithm.off_policy_correction: expected nothing beside {NAME}, got "
            f"{', '.join(keys)}: put it into the correction, because SkyRL does not read it with this loss",
        ),
        (
            config.generator.sampling_params.logprobs is None,
            "generator.sampling_params.logprobs: expected 1, got none: add "
            "generator.sampling_params.logprobs=1, because the correction reads them",
        ),
    ]
    refuse(rules)
    require(correction.needs, ONE_MICRO_BATCH, NAME, "SkyRL's loss sees one micro-batch and returns no masks")
    with_ppo(correction, algorithm.eps_clip_low, algorithm.eps_clip_high)  # may refuse the steps


def register(correction: Correction) -> None:
    """Puts the policy loss ``slime_ext`` into SkyRL's registry. A later call replaces it."""
    from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry

    if NAME in PolicyLossRegistry.list_available():
        PolicyLossRegistry.unregister(NAME)
    PolicyLossRegistry.register(NAME, PolicyLoss(correction))


def main() -> None:
    """Runs SkyRL's own entry point with the loss registered.

    SkyRL calls it because of ``trainer.override_entrypoint``.
    """
    from skyrl.train.config import SkyRLTrainConfig
    from skyrl.train.entrypoints import main_base

    named = [word.partition("=")[2] for word in sys.argv[1:] if word.startswith(f"{NAME}=")]
    sys.argv[1:] = [word for word in sys.argv[1:] if not word.startswith((OVERRIDE, f"{NAME}="))]
    try:
        if len(named) != 1:
            raise ConfigError(f"{NAME}: expected one value, got {len(named)}: write {NAME}=token_tis")
        correction = correction_named(named[0])
        check(correction, SkyRLTrainConfig.from_cli_overrides(sys.argv[1:]))
    except SlimeExtError as error:
        sys.exit(str(error))
    register(correction)
    main_base.main()
