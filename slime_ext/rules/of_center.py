"""Rules of ``center``."""

from __future__ import annotations

from slime_ext.core.centering import split
from slime_ext.core.losses import DualClip, HostLoss, PpoClip, Reinforce
from slime_ext.core.steps import Reweight
from slime_ext.errors import cut
from slime_ext.hosts.code import RESPONSES, SCORE, STEP
from slime_ext.hosts.contract import LOG, flag_of
from slime_ext.rules.rule import CORRECTION, REFUSE, WARN, rule
from slime_ext.rules.setup import Setup

ALL_TOKENS = (
    "the sampler's head is normalised over the whole vocabulary, so tokens must be drawn from all of it"
)
BYTES_OF_ENTRY = 8  # an entry of a head is an id and a log-prob
ENGINE = "sglang_router_ip"  # a host has this argument if its engine is SGLang


@rule(REFUSE, CORRECTION)
def center_without_generate(setup: Setup) -> str | None:
    """``center`` is set without the generate function that asks for the sampler's head."""
    if setup.correction.center is None or setup.flags.custom_generate_function_path:
        return None
    top_k = setup.correction.center.top_k
    return (
        "--custom-generate-function-path: expected slime_ext.host.generate beside center, got none: add it, "
        f"because it asks SGLang for the sampler's {top_k} most likely tokens; this costs "
        f"{BYTES_OF_ENTRY * top_k:,} bytes per response token (four times as many as JSON), and less than a "
        "tenth of SGLang's time with a model of 135M parameters (docs/slime.md)"
    )


@rule(WARN)
def center_beside_own_generate(setup: Setup) -> str | None:
    """``center`` is set, and the file of the user's generate function does not name ours."""
    if setup.correction.center is None or setup.custom_generate is None:
        return None
    function = cut(setup.flags.custom_generate_function_path)
    if "slime_ext" in setup.custom_generate or "slime_ext" in function:
        return None
    return (
        f"--custom-generate-function-path: expected slime_ext.host.generate beside center, got {function}, "
        "whose file does not name it: await slime_ext.host.generate(args, sample, sampling_params) in it, "
        "because otherwise no token has the sampler's head, and the run stops after its first rollout"
    )


@rule(REFUSE, CORRECTION)
def center_beside_allgather_cp(setup: Setup) -> str | None:
    """``center`` is set beside ``--allgather-cp``."""
    if setup.correction.center is None or not setup.flags.allgather_cp:
        return None
    return (
        "--allgather-cp: expected off beside center, got on: remove the flag, because it puts the log-probs "
        "on other ranks than the logits"
    )


@rule(REFUSE, CORRECTION)
def center_beside_top_p(setup: Setup) -> str | None:
    """``center`` is set, the sampler uses top-p, and nothing records which tokens that keeps."""
    if setup.correction.center is None or setup.flags.rollout_top_p in (None, 1):
        return None
    host = setup.known_host("whether this host records what --rollout-top-p leaves, which center then reads")
    if host.replays_top_p:
        return None
    return (
        f"--rollout-top-p: expected 1.0 beside center, got {setup.flags.rollout_top_p}: {ALL_TOKENS}; "
        "remove the flag, or use slime v0.3.1 or newer, which records the tokens that top-p leaves "
        f"(rollout_top_p_token_ids, _offsets); {host.name} does not"
    )


@rule(REFUSE, CORRECTION)
def center_beside_top_k(setup: Setup) -> str | None:
    """``center`` is set, and the sampler leaves out tokens because of top-k."""
    if setup.correction.center is None or setup.flags.rollout_top_k in (None, -1):
        return None
    return (
        f"--rollout-top-k: expected -1 beside center, got {setup.flags.rollout_top_k:g}: {ALL_TOKENS}; "
        "remove the flag: no host records the tokens that top-k leaves (slime since v0.3.1 records those "
        "that top-p leaves)"
    )


@rule(REFUSE, CORRECTION)
def center_beside_sequence_ratio(setup: Setup) -> str | None:
    """``center`` is set on the host's GSPO loss, which has one ratio per sequence."""
    if not _centers_the_hosts_loss(setup) or setup.flags.advantage_estimator != "gspo":
        return None
    return (
        "--advantage-estimator: expected grpo, or another without a sequence ratio, beside center on the "
        "host's loss, got gspo: set grpo, because the ratio of gspo is that of a whole sequence, and a token "
        "that was not sampled has none"
    )


@rule(REFUSE, CORRECTION)
def center_beside_cispo(setup: Setup) -> str | None:
    """``center`` is set on the host's CISPO loss, which has a gradient at clipped ratios."""
    if not _centers_the_hosts_loss(setup) or "cispo" not in (
        setup.flags.advantage_estimator,
        setup.flags.pg_loss_type,
    ):
        return None
    return (
        "--advantage-estimator: expected grpo, or another with PPO's loss, beside center on the host's loss, "
        "got cispo: set grpo and use center with the preset cispo, whose ratio is that to the sampler; the "
        "host's cispo has a gradient where its ratio is clipped, and center knows only PPO's gradient"
    )


@rule(REFUSE, CORRECTION)
def center_beside_opsm(setup: Setup) -> str | None:
    """``center`` is set on the host's loss, which ``--use-opsm`` masks before our hook sees it."""
    if not _centers_the_hosts_loss(setup) or not setup.flags.use_opsm:
        return None
    return (
        "--use-opsm: expected off beside center on the host's loss, got on: remove the flag, and copy the "
        "step of the preset opsm to slime_ext.steps, because the flag drops sequences from the loss and not "
        "from what center adds"
    )


@rule(REFUSE, CORRECTION)
def center_without_proximal_head(setup: Setup) -> str | None:
    """``center`` needs proximal log-probs of the head, and this host's log-prob pass is unknown."""
    if not (setup.reads_proximal_head and setup.is_second_step_trained):
        return None
    host = setup.known_host(
        "whether this host's log-prob pass can be reached, where center reads the proximal policy"
    )
    if host.defines(SCORE) and setup.flags.train_backend != "fsdp":
        return None
    return (
        "slime_ext.center: expected one optimizer step per rollout and no --keep-old-actor, got "
        f"{setup.steps} steps on a {host.name} without {SCORE}: train one step without --keep-old-actor, or "
        "use surrogate: reinforce with numerator: target, because center needs the proximal policy's "
        "log-probs at the head, and this host has no pass for them"
    )


@rule(REFUSE)
def missing_head(setup: Setup) -> str | None:
    """``center`` is set, and the host cannot bring the sampler's head to the loss."""
    if setup.correction.center is None:
        return None
    host = setup.known_host("whether the sampler's head reaches this host's loss")
    lacks = {
        f"{STEP} (Megatron's trainer)": not host.has_step or setup.flags.train_backend == "fsdp",
        f"{RESPONSES} among its modules": not host.defines(RESPONSES),
        f"{flag_of(LOG)} (slime since v0.2.2)": not host.accepts(LOG, setup.args),
        "SGLang as its engine": not host.accepts(ENGINE, setup.args),
    }
    lacking = next((what for what, is_lacking in lacks.items() if is_lacking), None)
    if lacking is None:
        return None
    return (
        f"slime_ext.center: expected a host with {lacking}, got {host.name} without: remove center, or use "
        "such a host, because otherwise the sampler's head does not reach the loss"
    )


@rule(WARN)
def center_without_effect(setup: Setup) -> str | None:
    """``center`` is set, and the mean that it would subtract is already 0."""
    correction = setup.correction
    if correction.center is None or not setup.changes_loss or split(correction.steps)[0] != (Reweight(),):
        return None
    # E_q[(p / q) grad log p] = E_p[grad log p] = 0 if p is the policy that is trained. With PPO's loss, or
    # with weights of the proximal policy, p is that policy only in the first step of a rollout.
    is_of_target = correction.numerator == "target" and isinstance(correction.surrogate, Reinforce)
    is_known = isinstance(correction.surrogate, Reinforce | HostLoss | PpoClip | DualClip)
    if not is_known or (setup.is_second_step_trained and not is_of_target):
        return None
    return (
        "slime_ext.center: expected a bound on the token weights beside it, such as truncate: {high: 2.0}, "
        "got none: add one, because under the sampler the unbounded ratio times the score has mean 0, and "
        "center adds a gradient of exactly 0"
        + ("" if is_of_target else " while a rollout is one optimizer step")
    )


def _centers_the_hosts_loss(setup: Setup) -> bool:
    return setup.correction.center is not None and setup.changes_loss and not setup.replaces_loss
