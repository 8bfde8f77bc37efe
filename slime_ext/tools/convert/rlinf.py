"""Translates RLinf's ``importance_sampling_fix``: the weight of a token, which multiplies its advantage.

Source: RLinf 0.3.0, rlinf/workers/actor/fsdp_actor_worker.py; rlinf/algorithms/losses.py.
"""

from __future__ import annotations

from typing import Any

from slime_ext.tools.convert.block import Block, Reading, capped, native

FIX, CLIP, BEHAVE = "importance_sampling_fix", "importance_sampling_clip", "behave_weight_threshold"
DEFAULTS: dict[str, Any] = {FIX: False, CLIP: None, BEHAVE: None}
SAMPLER = (
    "RLinf corrects nothing without importance_sampling_fix; without recompute_logprobs its PPO clips around "
    "the sampler's policy, for which slime has --use-rollout-logprobs"
)


def read(block: Block) -> Reading:
    """Reads a capped weight per token.

    Raises:
        ConfigError: the cap is missing or below 1, or the block is of the trainer for robots.
    """
    if block.has(BEHAVE):
        why = (
            "the loss decoupled_actor_critic for robots reads it, over a proximal policy that it interpolates"
        )
        block.refuse(BEHAVE, "null", why)
    if not block.flag(FIX):
        return Reading({"preset": "metrics_only"}, (SAMPLER,))
    block.required(CLIP, f"{FIX} reads it and has no default")
    return native(capped("token", block.required_number(CLIP, least=1)))
