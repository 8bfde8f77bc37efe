"""A planted fault for docs/analyze.md: the engine's log-probs belong to the token before.

A generate function that joins tokens and log-probs by hand easily loses one; here the reward function does
it, because it sees every sample before it is trained on:

    slime-ext train --task letters -- --custom-rm-path examples.off_by_one.reward
"""

from slime_ext_cpu.tiny import tokens_in_place


async def reward(args, sample, **kwargs):
    """The reward of the letters; shifts the sample's log-probs by one token."""
    shifted = [0.0, *sample.rollout_log_probs[:-1]]
    sample.rollout_log_probs = shifted[: sample.response_length]
    return tokens_in_place(args, sample)
