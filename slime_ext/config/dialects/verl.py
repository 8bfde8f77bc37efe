"""verl's rollout correction in three generations, distinguished by their fields.

``flat``: algorithm.rollout_is* before PR 3984. ``pr3984``: the block algorithm.rollout_correction of PR 3984.
``head``: the same block since PR 4544, with IcePop since PR 5722.

Source: https://github.com/volcengine/verl/pull/3984; https://github.com/verl-project/verl,
verl/trainer/ppo/rollout_corr_helper.py.
"""

from __future__ import annotations

from slime_ext.config.dialects import verl_head, verl_past
from slime_ext.config.dialects.block import Block, Reading

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
GENERATIONS = {  # as messages call it -> the keys that it alone has, and its reader
    "before PR 3984": (FLAT, verl_past.read_flat),
    "of PR 3984": (PR3984, verl_past.read_pr3984),
    "of today": (HEAD, verl_head.read),
}


def read(block: Block) -> Reading:
    """Native keys for the generation whose fields the block uses.

    Raises:
        ConfigError: fields of two generations, or what that generation's reader refuses.
    """
    found = {name: keys for name, keys in _evidence(block).items() if keys}
    if len(found) > 1:
        (one, keys), (other, others) = list(found.items())[:2]
        expected = f"the fields of one generation of verl, those {one} or those {other}"
        block.refuse(others[0], expected, f"{keys[0]} is {one}")
    _, reader = GENERATIONS[next(iter(found), "of today")]
    return reader(block)


def _evidence(block: Block) -> dict[str, list[str]]:
    """Generation -> the given keys or values that only this generation has."""
    values = block.values
    found = {name: [key for key in values if key in own] for name, (own, _) in GENERATIONS.items()}
    if isinstance(values.get("rollout_is"), bool):
        found["before PR 3984"].append("rollout_is")
    if values.get("rollout_rs") in verl_past.RS_LEVELS:
        found["of PR 3984"].append("rollout_rs")
    for key in ("rollout_rs", "rollout_is_threshold"):
        if isinstance(values.get(key), str) and "_" in values[key]:
            found["of today"].append(key)
    return found
