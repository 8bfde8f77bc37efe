"""Rules of the loss: the host's, or a surrogate of slime_ext that replaces it."""

from __future__ import annotations

import math
import statistics

from slime_ext.core.losses import DualClip
from slime_ext.core.state import weight_ranges
from slime_ext.core.steps import Normalize, Reject, Reweight, Veto
from slime_ext.hosts import contract
from slime_ext.hosts.code import LOSS
from slime_ext.hosts.contract import INIT, OURS
from slime_ext.rules.rule import CORRECTION, INIT_ALONE, REFUSE, WARN, rule
from slime_ext.rules.setup import Setup

NO_POLICY_LOSS = (
    "--loss-type: expected policy_loss beside slime_ext, got sft_loss: leave out slime_ext's flags, "
    "because there is no policy loss to measure or correct"
)
DISCARDED = (
    "would be discarded, because a surrogate of slime_ext replaces the host's loss; use surrogate: host"
)
USUAL_K3 = 1e-3  # nats per token, if only the numerics of sampler and trainer differ
VANISHED = 0.1  # below this median weight a correction removes most responses from the loss


@rule(REFUSE)
def sft_beside_function(setup: Setup) -> str | None:
    """The loss is that of supervised fine-tuning, which has no policy loss to correct."""
    return NO_POLICY_LOSS if setup.function and setup.flags.loss_type == "sft_loss" else None


@rule(WARN, INIT_ALONE)
def sft_beside_init(setup: Setup) -> str | None:
    """The loss is that of supervised fine-tuning, which has no policy loss to measure."""
    return NO_POLICY_LOSS if not setup.function and setup.flags.loss_type == "sft_loss" else None


@rule(REFUSE)
def custom_loss_beside_function(setup: Setup) -> str | None:
    """The loss is a user's, which does not call the function, because only the host's policy loss does."""
    if not setup.function or not setup.replaces_policy_loss:
        return None
    return (
        f"--loss-type: expected policy_loss beside {contract.TIS}.{setup.function}, got custom_loss, which "
        f"does not call it: use --loss-type policy_loss, or call {LOSS} in your loss, because only that "
        "function calls the hook; otherwise nothing is corrected or measured"
    )


@rule(WARN, INIT_ALONE)
def custom_loss_beside_init(setup: Setup) -> str | None:
    """The loss is a user's, and only the host's policy loss is measured, and calls a hook."""
    if setup.function or not setup.replaces_policy_loss:
        return None
    return (
        f"--loss-type: expected policy_loss beside {OURS[INIT]}, got custom_loss, which does not call the "
        f"host's {LOSS}: use --loss-type policy_loss, or call {LOSS} in your loss, because otherwise nothing "
        "is measured, and --use-tis corrects nothing"
    )


@rule(REFUSE)
def proximal_not_computed(setup: Setup) -> str | None:
    """The correction needs proximal log-probs before the step, and the host computes none."""
    if not (setup.correction.needs_plan and _skips_proximal(setup)):
        return None
    if setup.flags.skip_actor_forward_only:
        return (
            "--skip-actor-forward-only: expected off with a correction that couples the samples of an "
            "optimizer step, got on: remove it, because with it miles computes no proximal log-probs before "
            "it trains"
        )
    return (
        "--get-mismatch-metrics: expected on with a correction that couples the samples of an optimizer "
        "step, got off: add --get-mismatch-metrics, because without it slime computes no proximal log-probs "
        "before it trains a rollout of one step"
    )


def _skips_proximal(setup: Setup) -> bool:
    """Tells whether the host computes no proximal log-probs for a rollout, according to the flags."""
    flags = setup.flags
    if flags.skip_actor_forward_only:  # miles
        return True
    if flags.use_rollout_logprobs and not flags.get_mismatch_metrics:
        return True
    needed = (
        flags.get_mismatch_metrics,
        flags.kl_coef,
        flags.keep_old_actor,
        flags.use_opd,
        flags.use_critic,
        flags.advantage_estimator == "gspo",
        flags.loss_type not in (None, "policy_loss"),
        flags.use_routing_replay and not flags.use_rollout_routing_replay,
    )
    # slime skips them since v0.3.0; a host that is not known is assumed to be newer.
    may_skip = not setup.trains if setup.host is None else setup.host.may_skip_proximal
    return may_skip and setup.steps == 1 and not any(needed)


@rule(REFUSE, CORRECTION)
def proximal_unknown_before_step(setup: Setup) -> str | None:
    """The correction needs proximal log-probs before the step, and REINFORCE uses the target's."""
    if not (
        setup.correction.needs_plan
        and setup.changes_loss
        and not setup.has_ratio
        and setup.is_second_step_trained
    ):
        return None
    return (
        "--pg-loss-type: expected ppo with a correction that couples the samples of an optimizer step, got "
        f"reinforce with {setup.steps} steps per rollout: set --pg-loss-type ppo, or train one step per "
        "rollout without --keep-old-actor, because the host passes the target's log-probs as the "
        "proximal's, and they are not known before a step"
    )


@rule(REFUSE, CORRECTION)
def ratio_applied_twice(setup: Setup) -> str | None:
    """The host's loss and the weights would both apply the ratio of trainer to sampler."""
    is_in_loss = (
        setup.changes_loss
        and setup.flags.use_rollout_logprobs
        and not setup.replaces_loss
        and setup.has_ratio
    )
    if not (is_in_loss and setup.correction.sets_weights):
        return None
    return (
        "--use-rollout-logprobs: expected off beside --use-tis, got on: use one of them, because the "
        "ratio would be applied twice"
    )


@rule(REFUSE, CORRECTION)
def target_counted_twice(setup: Setup) -> str | None:
    """The host's loss and the weights both count the target ratio, over several steps."""
    if not (
        setup.counts_target_twice
        and setup.is_second_step_trained
        and setup.function not in contract.SLIME_FUNCTIONS
    ):
        return None
    return (
        f"slime_ext.numerator: expected proximal beside the host's surrogate with {setup.steps} optimizer "
        "steps per rollout or --keep-old-actor, got target: use numerator: proximal or surrogate: "
        "reinforce, because the host's loss has the factor target / proximal already"
    )


@rule(WARN, CORRECTION)
def off_policy_is_counted_twice(setup: Setup) -> str | None:
    """``off_policy_is_function`` counts the target ratio twice, over several steps per rollout."""
    is_it = setup.function == "off_policy_is_function" and setup.counts_target_twice
    if not (is_it and setup.is_second_step_trained):
        return None
    return (
        "off_policy_is_function: expected one optimizer step per rollout and no --keep-old-actor, got "
        f"{setup.steps} steps: use slime_ext.tis.off_policy_is, because the host's loss has the factor "
        "target / proximal already, and the ratio is counted twice"
    )


@rule(REFUSE, CORRECTION)
def discarded_opsm(setup: Setup) -> str | None:
    """A surrogate of slime_ext would discard the mask of ``--use-opsm``."""
    if not (setup.replaces_loss and setup.flags.use_opsm):
        return None
    return f"--use-opsm: expected off, got on: its mask {DISCARDED}"


@rule(REFUSE, CORRECTION)
def discarded_gspo(setup: Setup) -> str | None:
    """A surrogate of slime_ext would discard the sequence ratio of GSPO."""
    if not (setup.replaces_loss and setup.flags.advantage_estimator == "gspo"):
        return None
    return f"--advantage-estimator: expected another, got gspo: its sequence ratio {DISCARDED}"


@rule(REFUSE, CORRECTION)
def discarded_cispo(setup: Setup) -> str | None:
    """A surrogate of slime_ext would discard the clipped weight of CISPO."""
    if not (setup.replaces_loss and "cispo" in (setup.flags.advantage_estimator, setup.flags.pg_loss_type)):
        return None
    return f"--advantage-estimator: expected another, got cispo: its clipped weight {DISCARDED}"


@rule(REFUSE, CORRECTION)
def discarded_dual_clip(setup: Setup) -> str | None:
    """A surrogate of slime_ext without a dual clip would discard the floor of ``--eps-clip-c``."""
    if (
        not setup.replaces_loss
        or setup.flags.eps_clip_c is None
        or isinstance(setup.correction.surrogate, DualClip)
    ):
        return None
    return (
        f"--eps-clip-c: expected none beside this surrogate of slime_ext, got {setup.flags.eps_clip_c}: "
        "remove the flag, or use surrogate: dual_clip, because this surrogate would discard the floor"
    )


@rule(REFUSE, CORRECTION)
def kept_denominator_beside_reducer(setup: Setup) -> str | None:
    """``denominator: kept`` is set beside a user's reducer."""
    is_kept = setup.correction.denominator == "kept" and setup.changes_loss
    if not (is_kept and setup.flags.custom_pg_loss_reducer_function_path):
        return None
    return (
        "slime_ext.denominator: expected host beside --custom-pg-loss-reducer-function-path, got kept: use "
        "denominator: host, or remove the flag, because slime_ext cannot know what that function divides by"
    )


@rule(WARN)
def masks_beside_reducer(setup: Setup) -> str | None:
    """The correction rejects tokens beside a user's reducer, which may divide by the masks."""
    rejects = any(isinstance(step, Reject | Veto) for step in setup.correction.steps)
    if not (rejects and setup.flags.custom_pg_loss_reducer_function_path):
        return None
    return (
        f"--custom-pg-loss-reducer-function-path {setup.flags.custom_pg_loss_reducer_function_path}: "
        f"expected slime's reducer beside mask_scope: {setup.correction.mask_scope}, got yours: if it "
        "divides by the masks, choose mask_scope: policy for the host's masks, or all for masks without "
        "the rejected tokens"
    )


@rule(WARN)
def sequence_weights_vanish(setup: Setup) -> str | None:
    """Weights are products over whole responses, and the launch allows responses that are too long."""
    tokens, steps = setup.flags.rollout_max_response_len, setup.correction.steps
    of_sequences = any(isinstance(step, Reweight) and step.level == "sequence" for step in steps)
    of_mean_1 = any(isinstance(step, Normalize) for step in steps)
    if not (of_sequences and tokens and setup.changes_loss and setup.function) or of_mean_1:
        return None
    bounds = weight_ranges(steps)[-1]
    mean, median = expected_weight(tokens, USUAL_K3, bounds.high)
    if max(median, bounds.low) >= VANISHED:
        return None
    return (
        "slime_ext.steps: expected weights of tokens, or a geometric mean, beside --rollout-max-response-len "
        f"{tokens}, got the product over a response: use level: token or level: geometric, because at a k3 "
        f"of {USUAL_K3:g} the weight of a response of that length has mean {mean:.2g} and median {median:.1g}"
    )


def expected_weight(tokens: int, k3: float, cap: float) -> tuple[float, float]:
    """Computes the mean and the median of min(Pi, cap) under the sampler.

    Pi is the product of the ratios of a response. The log-ratios are assumed to be independent and normal,
    with mean -k3 and variance 2 k3. Then the mean of each ratio is 1, and the mean of the k3 estimator is k3
    to second order. With s^2 = 2 tokens k3, log Pi is N(-s^2 / 2, s^2):

        E[min(Pi, cap)] = Phi((log cap - s^2 / 2) / s) + cap Phi(-(log cap + s^2 / 2) / s)

    >>> [round(x, 4) for x in expected_weight(8192, 1e-3, 2.0)]
    [0.0601, 0.0003]
    >>> expected_weight(8192, 1e-3, math.inf)[0]
    1.0
    """
    spread, median = math.sqrt(2 * tokens * k3), math.exp(-tokens * k3)
    if cap == math.inf:
        return 1.0, median
    phi, of_cap = statistics.NormalDist().cdf, math.log(cap) if cap > 0 else -math.inf
    mean = phi((of_cap - spread**2 / 2) / spread) + cap * phi(-(of_cap + spread**2 / 2) / spread)
    return mean, min(median, cap)
