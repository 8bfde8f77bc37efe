"""Plants a fault for docs/analyze.md: each log-prob belongs to the token before.

A generate function that joins tokens and log-probs by hand easily loses one. Here the reward function plants
this fault, because it gets every sample before the sample is trained on:

    slime-ext train --task letters -- --custom-rm-path examples.off_by_one.reward
"""

from slime_ext_cpu.tiny import tokens_in_place


async def reward(args, sample, **kwargs):
    """Shifts the sample's log-probs by one token, and returns the reward of the letters."""
    shifted = [0.0, *sample.rollout_log_probs[:-1]]
    sample.rollout_log_probs = shifted[: sample.response_length]
    return tokens_in_place(args, sample)
