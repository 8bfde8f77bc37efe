"""Translates verl's ``algorithm.rollout_correction`` as its release reads it.

The fields of a block tell its release. PR 3984 (418f964), 0.6.1 and 0.7.0 reject by a level and a veto
(verl_levels). 0.7.1 and later reject by options with thresholds as text (verl_options). 0.6.0 and before
had a different correction, which is refused.

Source: https://github.com/volcengine/verl/pull/3984; https://github.com/verl-project/verl, the wheels 0.6.1,
0.7.0, 0.7.1, 0.8.0 and 0.9.1: verl/trainer/ppo/rollout_corr_helper.py, core_algos.py and ray_trainer.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from slime_ext.tools.convert import verl_levels, verl_options
from slime_ext.tools.convert.block import Block, Reading
from slime_ext.tools.convert.verl_levels import PR3984, V061, V070

LATER = "0.7.1 and later"
RELEASES = (PR3984, V061, V070, LATER)
SHARED = ("rollout_is", "rollout_is_threshold", "rollout_rs", "rollout_rs_threshold")
OF = {  # key -> the releases that have it
    "rollout_rs_threshold_lower": (PR3984, V061, V070),
    "rollout_token_veto_threshold": (PR3984, V061, V070),
    "bypass_old_logprob_for_rollout": (PR3984,),
    "use_pure_rollout_correction": (PR3984,),
    "bypass_mode": (V061, V070, LATER),
    "use_policy_gradient": (V061,),
    "loss_type": (V070, LATER),
    "rollout_is_batch_normalize": (V061, V070, LATER),
}
BEFORE = (  # keys of 0.6.0 and before
    *("rollout_is_threshold_lower", "rollout_is_level", "rollout_is_mode", "rollout_is_veto_threshold"),
)
KEYS = (*SHARED, *OF, *BEFORE, "policy_loss")
# Values of the actor's loss_mode in bypass mode, where verl's driver sets the loss.
BYPASSED = ("vanilla", "bypass_mode", "rollout_correction")


def read(block: Block) -> Reading:
    """Translates a block as its release reads it. The fields of the block tell the release.

    Raises:
        ConfigError: the block has fields of two releases or of 0.6.0, or the release's reader refuses it.
    """
    _forbid_before(block)
    releases: tuple[str, ...] = RELEASES
    first = ""
    for key, of_key in _evidence(block.values):
        if not (common := tuple(name for name in releases if name in of_key)):
            why = f"it belongs to {_listed(of_key)}, {first} to {_listed(releases)}"
            block.refuse(key, "the keys of one release of verl", why)
        first = key if common != releases else first
        releases = common
    # The releases that are left read the block the same way.
    reading = verl_options.read(block) if LATER in releases else verl_levels.read(block, releases)
    idle = [] if block.has("rollout_is") else block.unlike({"rollout_is_threshold": 2.0})
    notes = (*(f"verl ignores {key} without rollout_is" for key in idle), *reading.notes)
    args = _flags_of_loss(block, reading.mapping["surrogate"] == "host")
    return replace(reading, args=args, notes=notes)


def _flags_of_loss(block: Block, decoupled: bool) -> dict[str, Any]:
    """Returns slime's arguments for ``actor.policy_loss``, which weights multiply in decoupled mode."""
    actor = block.values.get("policy_loss")
    if actor is None:
        return {}
    if not isinstance(actor, Mapping):
        block.refuse("policy_loss", "a mapping")
    loss = Block(f"{block.where}.policy_loss", actor)
    mode = loss.values.get("loss_mode") or "vanilla"
    if decoupled and mode in ("gspo", "cispo"):
        return {"advantage_estimator": mode}
    if mode not in (("vanilla",) if decoupled else BYPASSED):
        expected = (
            "vanilla, gspo or cispo" if decoupled else "vanilla or bypass_mode beside bypass_mode: true"
        )
        loss.refuse("loss_mode", expected, "slime has no such loss")
    return {}


def _evidence(values: Any) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yields each key of a block with the releases that have the key or value."""
    for key in values:
        yield key, OF.get(key, RELEASES)
    if values.get("rollout_rs") in verl_levels.RS_LEVELS:
        yield "rollout_rs", (PR3984, V061, V070)
    for key in ("rollout_rs", "rollout_rs_threshold", "rollout_is_threshold"):
        if isinstance(values.get(key), str) and "_" in values[key]:
            yield key, (LATER,)


def _forbid_before(block: Block) -> None:
    """Refuses the correction of verl 0.6.0, which PR 3984 replaced."""
    of_before = sorted((key for key in BEFORE if key in block.values), key=lambda key: not block.has(key))
    of_before += ["rollout_is"] * isinstance(block.values.get("rollout_is"), bool)
    for key in of_before:
        why = "it belongs to verl 0.6.0 and before, which had a different correction"
        block.refuse(key, "the rollout_correction of verl 0.6.1 or later", why)


def _listed(releases: tuple[str, ...]) -> str:
    return ", ".join(releases)
