"""verl's rollout correction in three generations, distinguished by their fields.

``flat``: algorithm.rollout_is* before PR 3984. ``pr3984``: the block algorithm.rollout_correction of PR 3984.
``head``: the same block since PR 4544, with IcePop since PR 5722.

Source: https://github.com/volcengine/verl/pull/3984; https://github.com/verl-project/verl,
verl/trainer/ppo/rollout_corr_helper.py.
"""

from __future__ import annotations

from slime_ext.dialects import verl_head, verl_past
from slime_ext.dialects.block import Block, Reading

SHARED = ("rollout_is", "rollout_is_threshold", "rollout_rs", "rollout_rs_threshold")
FLAT = ("rollout_is_threshold_lower", "rollout_is_level", "rollout_is_mode", "rollout_is_veto_threshold")
PR3984 = (
    "rollout_rs_threshold_lower",
    "rollout_token_veto_threshold",
    "bypass_old_logprob_for_rollout",
    "use_pure_rollout_correction",
)
HEAD = ("rollout_is_batch_normalize", "bypass_mode", "loss_type")
KEYS = (*SHARED, *FLAT, *PR3984, *HEAD)
READERS = {"flat": verl_past.read_flat, "pr3984": verl_past.read_pr3984, "head": verl_head.read}
FIELDS = {"flat": FLAT, "pr3984": PR3984, "head": HEAD}
NAMES = {"flat": "before PR 3984", "pr3984": "of PR 3984", "head": "of today"}


def read(block: Block) -> Reading:
    """Native keys for the generation whose fields the block uses.

    Raises:
        ConfigError: fields of two generations, or what that generation's reader refuses.
    """
    found = {name: keys for name in FIELDS if (keys := _evidence(block, name))}
    if len(found) > 1:
        (one, keys), (other, others) = list(found.items())[:2]
        block.refuse(
            others[0],
            f"the fields of one generation of verl, those {NAMES[one]} or those {NAMES[other]}",
            f"{keys[0]} is {NAMES[one]}",
        )
    return READERS[next(iter(found), "head")](block)


def _evidence(block: Block, generation: str) -> list[str]:
    """The keys that only this generation has, or has with such a value."""
    own = [key for key in block.values if key in FIELDS[generation]]
    rs, cap = block.values.get("rollout_rs"), block.values.get("rollout_is_threshold")
    if generation == "flat" and isinstance(block.values.get("rollout_is"), bool):
        own.append("rollout_is")
    if generation == "pr3984" and rs in verl_past.RS_LEVELS:
        own.append("rollout_rs")
    if generation == "head" and isinstance(rs, str) and "_" in rs:
        own.append("rollout_rs")
    if generation == "head" and isinstance(cap, str) and "_" in cap:
        own.append("rollout_is_threshold")
    return own
