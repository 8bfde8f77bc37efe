"""Rules of ``group``."""

from __future__ import annotations

from slime_ext.rules.rule import CORRECTION, REFUSE, rule
from slime_ext.rules.setup import Setup

WITH_BASELINE = (None, "grpo", "gspo", "cispo")  # estimators that only subtract the group's mean


@rule(REFUSE, CORRECTION)
def group_of_one_sample(setup: Setup) -> str | None:
    """``group`` is set, and each prompt has one sample."""
    if not (
        setup.correction.group != "ignore" and setup.changes_loss and setup.flags.n_samples_per_prompt == 1
    ):
        return None
    return (
        f"slime_ext.group: expected ignore with --n-samples-per-prompt 1, got {setup.correction.group}: use "
        "group: ignore, because a group of one sample has no other samples"
    )


@rule(REFUSE, CORRECTION)
def rebaseline_without_group_baseline(setup: Setup) -> str | None:
    """``group: rebaseline`` is set beside an estimator without a group baseline."""
    if not _rebaselines(setup) or setup.flags.advantage_estimator in WITH_BASELINE:
        return None
    return _not_rebaselined(
        "an --advantage-estimator other than grpo, gspo and cispo (such advantages have no group baseline)"
    )


@rule(REFUSE, CORRECTION)
def rebaseline_without_normalization(setup: Setup) -> str | None:
    """``group: rebaseline`` is set, and the host subtracts no baseline."""
    if not _rebaselines(setup) or setup.flags.rewards_normalization is not False:
        return None
    return _not_rebaselined("--disable-rewards-normalization (there is no baseline to compute again)")


@rule(REFUSE, CORRECTION)
def rebaseline_beside_whitening(setup: Setup) -> str | None:
    """``group: rebaseline`` is set, and the host normalises the advantages afterwards."""
    if not _rebaselines(setup) or not setup.flags.normalize_advantages:
        return None
    return _not_rebaselined(
        "--normalize-advantages (the host normalises the advantages over the whole batch afterwards)"
    )


@rule(REFUSE, CORRECTION)
def rebaseline_beside_distillation(setup: Setup) -> str | None:
    """``group: rebaseline`` is set beside on-policy distillation."""
    if not _rebaselines(setup) or not setup.flags.use_opd:
        return None
    return _not_rebaselined("--use-opd (the advantages already contain the teacher's term)")


@rule(REFUSE, CORRECTION)
def rebaseline_beside_own_advantages(setup: Setup) -> str | None:
    """``group: rebaseline`` is set beside a user's advantage function."""
    if not _rebaselines(setup) or not setup.flags.custom_advantage_function_path:
        return None
    return _not_rebaselined("--custom-advantage-function-path (its baseline is not known)")


@rule(REFUSE, CORRECTION)
def rebaseline_beside_own_rewards(setup: Setup) -> str | None:
    """``group: rebaseline`` is set beside a user's reward post-processing."""
    if not _rebaselines(setup) or not setup.flags.custom_reward_post_process_path:
        return None
    return _not_rebaselined("--custom-reward-post-process-path (its baseline is not known)")


def _rebaselines(setup: Setup) -> bool:
    return setup.correction.group == "rebaseline" and setup.changes_loss


def _not_rebaselined(beside: str) -> str:
    return f"slime_ext.group: expected ignore or atomic with {beside}, got rebaseline"
