"""Rules of the engine: how it samples, and what it records as a token's log-prob."""

from __future__ import annotations

from slime_ext.rules.rule import REFUSE, WARN, rule
from slime_ext.rules.setup import Setup

RATIO_OFF = (
    "the sampler draws from a part of the vocabulary, and SGLang records log-probs over all of it, so every "
    "ratio is too large by a factor of 1 / the probability of that part"
)


@rule(REFUSE)
def greedy_sampling(setup: Setup) -> str | None:
    """The sampler's temperature is 0, so its tokens are not drawn at random."""
    if not setup.function or setup.flags.rollout_temperature is None or setup.flags.rollout_temperature > 0:
        return None
    return (
        f"--rollout-temperature: expected a number above 0, got {setup.flags.rollout_temperature}: set "
        "--rollout-temperature 1.0, because greedy decoding has no probabilities to correct"
    )


@rule(WARN)
def top_p_without_replay(setup: Setup) -> str | None:
    """The sampler leaves out tokens because of top-p, and the trainer's log-probs keep them."""
    if (
        not setup.function
        or setup.flags.rollout_top_p in (None, 1)
        or setup.flags.use_sampling_support_replay
    ):
        return None
    host = setup.known_host("whether this host's trainer normalises over what --rollout-top-p leaves")
    if host.replays_top_p:
        return None
    return (
        "--rollout-top-p: expected 1.0, or a host that replays what top-p leaves, got "
        f"{setup.flags.rollout_top_p}: remove the flag, or use slime v0.3.1 or newer, or miles' main with "
        f"--use-sampling-support-replay, because {RATIO_OFF}"
    )


@rule(WARN)
def top_k_without_replay(setup: Setup) -> str | None:
    """The sampler leaves out tokens because of top-k, and the trainer's log-probs keep them."""
    if (
        not setup.function
        or setup.flags.rollout_top_k in (None, -1)
        or setup.flags.use_sampling_support_replay
    ):
        return None
    return (
        "--rollout-top-k: expected -1, or a host that replays what top-k leaves, got "
        f"{setup.flags.rollout_top_k:g}: remove the flag, or use miles' main with "
        f"--use-sampling-support-replay, because {RATIO_OFF}"
    )
