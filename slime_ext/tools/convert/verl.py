"""Translates verl's ``algorithm.rollout_correction`` as its release reads it.

The fields of a block tell its release. PR 3984 (418f964), 0.6.1 and 0.7.0 reject by a level and a veto
(verl_levels). 0.7.1 and later reject by options with thresholds as text (verl_options). 0.6.0 and before
had a different correction, which is refused.

Source: https://github.com/volcengine/verl/pull/3984; https://github.com/verl-project/verl, the wheels 0.6.1,
0.7.0, 0.7.1, 0.8.0 and 0.9.1: verl/trainer/ppo/rollout_corr_helper.py, core_algos.py and ray_trainer.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from slime_ext.tools.convert import verl_levels, verl_options
from slime_ext.tools.convert.block import Block, Reading
from slime_ext.tools.convert.loss_side import of_loss
from slime_ext.tools.convert.verl_levels import PR3984, V061, V070

LATER = "0.7.1 and later"
RELEASES = (PR3984, V061, V070, LATER)
OPTIONS: dict[str, Any] = {
    **{"rollout_is": None, "rollout_is_threshold": 2.0, "rollout_is_batch_normalize": False},
    **{"rollout_rs": None, "rollout_rs_threshold": None, "bypass_mode": False, "loss_type": "ppo_clip"},
}
RELEASES_WITH = {  # key -> the releases that have it
    "rollout_rs_threshold_lower": (PR3984, V061, V070),
    "rollout_token_veto_threshold": (PR3984, V061, V070),
    "bypass_old_logprob_for_rollout": (PR3984,),
    "use_pure_rollout_correction": (PR3984,),
    "bypass_mode": (V061, V070, LATER),
    "use_policy_gradient": (V061,),
    "loss_type": (V070, LATER),
    "rollout_is_batch_normalize": (V061, V070, LATER),
    "use_v1": (LATER,),
}
KEYS_OF_0_6_0 = (  # keys of 0.6.0 and before
    *("rollout_is_threshold_lower", "rollout_is_level", "rollout_is_mode", "rollout_is_veto_threshold"),
)
DEFAULTS: dict[str, Any] = {
    **OPTIONS,
    **dict.fromkeys(("rollout_rs_threshold_lower", "rollout_token_veto_threshold", *KEYS_OF_0_6_0)),
    **dict.fromkeys(("bypass_old_logprob_for_rollout", "use_pure_rollout_correction"), False),
    "use_policy_gradient": False,
    # Of the rest of a configuration: actor_rollout_ref.actor and trainer.
    **{"policy_loss": None, "loss_agg_mode": "token-mean", "use_v1": None},
}
POLICY_LOSS: dict[str, Any] = {"loss_mode": "vanilla", "rollout_correction": None}
PER_TOKEN, PER_SEQUENCE = "token-mean", "seq-mean-token-mean"
SUMS = ("token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm")
UNKNOWN_TRAINER = (
    "rejected tokens stay in the denominator, as in the default trainer of verl 0.9.1 (trainer.use_v1: "
    "true); for 0.7.1 to 0.8.0, for use_v1: false and for loss_agg_mode: seq-mean-token-mean add "
    "denominator: kept"
)
SLIMES_MEAN = f"loss_agg_mode: {PER_SEQUENCE} is slime's mean without --calculate-per-token-loss"
SEQUENCES = (
    "sequences without kept tokens leave the mean over sequences in verl before 0.7.1; here they stay, with "
    "loss 0"
)
DIVISOR = "loss_agg_mode {mode} has a special divisor, for which slime has no flag"
VANILLA = (
    "actor.policy_loss.loss_mode is vanilla, so the actors run PPO's clip around the sampler's policy, and "
    "nothing of algorithm.rollout_correction but bypass_mode reaches them"
)
HANDED_OVER = (
    "read as if the actors had these settings: verl gives them only what actor.policy_loss says, with "
    "loss_mode: bypass_mode and the same keys under policy_loss.rollout_correction; with loss_mode: vanilla "
    "they run PPO's clip around the sampler's policy, without weights and rejection"
)


def read(block: Block) -> Reading:
    """Translates a block as its release reads it. The fields of the block tell the release.

    Raises:
        ConfigError: the block has fields of two releases or of 0.6.0, or the release's reader refuses it.
    """
    _forbid_before(block)
    releases = _releases(block)
    if LATER not in releases:
        reading = _with_flags(block, verl_levels.read(block, releases))
    elif block.flag("bypass_mode"):
        reading = _bypass(block)
    else:
        reading = _with_flags(block, verl_options.read(block, bypass=False))
    uses_v1 = None if block.get("use_v1") is None else block.flag("use_v1")
    mode = block.choice("loss_agg_mode", (PER_TOKEN, PER_SEQUENCE, *SUMS))
    notes = []
    if mode in SUMS:
        notes.append(DIVISOR.format(mode=mode))
    elif mode == PER_SEQUENCE:
        rejects = "mask_scope" in reading.mapping
        notes += [SLIMES_MEAN, *([SEQUENCES] if rejects and LATER not in releases else [])]
    elif block.has("loss_agg_mode"):
        notes.append(of_loss("verl", "loss_agg_mode", mode))
    if reading.mapping.get("denominator") == "kept" and LATER in releases and mode != PER_SEQUENCE:
        reading = _of_trainer(uses_v1, reading)
    return replace(reading, notes=(*notes, *reading.notes))


def _releases(block: Block) -> tuple[str, ...]:
    """Returns the releases that have every field of a block, and read it the same way."""
    releases: tuple[str, ...] = RELEASES
    decisive = ""
    for key, of_key in _evidence(block.values):
        if not (common := tuple(name for name in releases if name in of_key)):
            why = f"it belongs to {', '.join(of_key)}, {decisive} to {', '.join(releases)}"
            block.refuse(key, "the keys of one release of verl", why)
        decisive = key if common != releases else decisive
        releases = common
    return releases


def _of_trainer(uses_v1: bool | None, reading: Reading) -> Reading:
    """Returns a reading that rejects with the divisor of verl's trainer.

    The trainer of 0.9 counts tokens when they are sampled, so rejected tokens stay in the divisor. Its
    predecessor counts the mask that rejection has reduced. Means per sequence use that mask in both.
    """
    if uses_v1 is False:
        return reading
    mapping = {key: value for key, value in reading.mapping.items() if key != "denominator"}
    notes = [note for note in reading.notes if note != verl_levels.KEPT]
    notes += [UNKNOWN_TRAINER] if uses_v1 is None else []
    return replace(reading, mapping=mapping, notes=tuple(notes))


def _bypass(block: Block) -> Reading:
    """Reads bypass mode since 0.7.1, whose loss is what ``actor.policy_loss`` says.

    verl's driver hands the settings to the actors too late (0.7.1 to 0.8.0) or never (0.9), verl issue 4272.
    """
    if not block.has("policy_loss"):
        reading = verl_options.read(block, bypass=True)
        return replace(reading, notes=(HANDED_OVER, *reading.notes))
    loss = block.part("policy_loss", POLICY_LOSS, among_others=True)
    if (mode := loss.get("loss_mode") or "vanilla") == "vanilla":
        return verl_levels.reading(verl_levels.BYPASS, [], [], (VANILLA,))
    if mode != "bypass_mode":
        loss.refuse("loss_mode", "vanilla or bypass_mode beside bypass_mode: true", "slime has no such loss")
    return verl_options.read(loss.part("rollout_correction", OPTIONS), bypass=True)


def _with_flags(block: Block, reading: Reading) -> Reading:
    """Adds slime's arguments for ``actor.policy_loss``, which weights multiply in decoupled mode."""
    loss = block.part("policy_loss", POLICY_LOSS, among_others=True)
    mode = loss.get("loss_mode") or "vanilla"
    if reading.mapping["surrogate"] != "host":
        if mode not in ("vanilla", "bypass_mode", "rollout_correction"):
            known = "vanilla or bypass_mode beside bypass_mode: true"
            loss.refuse("loss_mode", known, "slime has no such loss")
    elif mode in ("gspo", "cispo"):
        return replace(reading, args={"advantage_estimator": mode})
    elif mode != "vanilla":
        loss.refuse("loss_mode", "vanilla, gspo or cispo", "slime has no such loss")
    return reading


def _evidence(values: Any) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yields each key of a block with the releases that have the key or value."""
    for key in values:
        yield key, RELEASES_WITH.get(key, RELEASES)
    if values.get("rollout_rs") in verl_levels.RS_LEVELS:
        yield "rollout_rs", (PR3984, V061, V070)
    for key in ("rollout_rs", "rollout_rs_threshold", "rollout_is_threshold"):
        if isinstance(values.get(key), str) and "_" in values[key]:
            yield key, (LATER,)


def _forbid_before(block: Block) -> None:
    """Refuses the correction of verl 0.6.0, which PR 3984 replaced."""
    of_before = sorted(
        (key for key in KEYS_OF_0_6_0 if key in block.values), key=lambda key: not block.has(key)
    )
    of_before += ["rollout_is"] * isinstance(block.values.get("rollout_is"), bool)
    for key in of_before:
        why = "it belongs to verl 0.6.0 and before, which had a different correction"
        block.refuse(key, "the rollout_correction of verl 0.6.1 or later", why)
