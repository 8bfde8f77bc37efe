"""Translates SkyRL's ``off_policy_correction`` and the deprecated pair ``use_tis`` / ``tis_imp_ratio_cap``.

Steps keep SkyRL's order: outlier sequences, token mask, then weights and sequence mask over the kept tokens.

Source: SkyRL 0.4.0, skyrl/backends/skyrl_train/utils/off_policy_correction_utils.py and ppo_utils.py;
https://github.com/NovaSky-AI/SkyRL/pull/849 and, for reinforce and centering, pull/2244.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from slime_ext.tools.convert.block import LARGEST, SAFE, Block, Reading, band, capped, inside, native, reject
from slime_ext.tools.convert.loss_side import cispo, of_loss

NESTED, CENTERING = "off_policy_correction", "score_centering"
CORRECTION: dict[str, Any] = {
    **{"tis_ratio_type": None, "token_tis_ratio_clip_high": 2.0, "sequence_tis_ratio_clip_high": 5.0},
    **{"sequence_mask_metric": None, "geo_mask_low": 0.99, "geo_mask_high": 1.01},
    **{"product_mask_low": 0.5, "product_mask_high": 2.0},
    **dict.fromkeys(("outlier_token_is_threshold_low", "outlier_token_is_threshold_high")),
    **dict.fromkeys(("token_mask_is_threshold_low", "token_mask_is_threshold_high")),
}
LOSS: dict[str, Any] = {
    **{"policy_loss_type": None, "eps_clip_low": 0.2, "eps_clip_high": 0.2, "clip_ratio_c": 3.0},
    **{"cispo": None, "sapo": None, "dppo": None},
}
DEFAULTS = {**CORRECTION, "use_tis": False, "tis_imp_ratio_cap": -1.0, NESTED: None, **LOSS, CENTERING: None}
CISPO: dict[str, Any] = {"cispo_eps_clip_low": None, "cispo_eps_clip_high": None, "cispo_anchor": "old"}
SAPO: dict[str, Any] = {"tau_pos": 1.0, "tau_neg": 1.05}
DPPO: dict[str, Any] = {"dppo_type": "binary_tv", "delta_low": 0.2, "delta_high": 0.2}
HEAD: dict[str, Any] = {"enabled": None, "top_k": None}
OF_THE_TARGET = ("reinforce", "rollout_is", "dppo")  # losses whose weights are target / rollout, or 1
LOSSES = ("regular", "dual_clip", "gspo", "cispo", "sapo", "importance_sampling", *OF_THE_TARGET)
MASKS = {"geometric": ("geo_mask", "mean"), "product": ("product_mask", "sum")}
FORMER_DEFAULT = (
    "policy_loss_type is absent: read as regular, SkyRL's default before 0.5.0; since then the default is "
    "dppo with score_centering, so write policy_loss_type"
)
DEFAULT = "policy_loss_type is absent: read as dppo, SkyRL's default since 0.5.0, which has score_centering"
TWO_RATIOS = (
    "SkyRL masks by old/rollout but weights by current/rollout, and a correction has one ratio; leave out "
    "policy_loss_type to mask and weight by old/rollout, which is nearest"
)
DPPO_EDGE = (
    "SkyRL's binary_kl adds 1e-8 to its logarithms; here probabilities are clamped to [1e-6, 1 - 1e-6]"
)
DEPRECATED_PAIR = (
    "use_tis and tis_imp_ratio_cap are deprecated in SkyRL; the new spelling is tis_ratio_type: token, "
    "token_tis_ratio_clip_high: {cap:g}"
)
UNREAD = "no source that we read says what SkyRL centers beside this loss"
NO_SAMPLER = (
    "policy_loss_type importance_sampling reads no log-prob of the sampler: its ratio is that of the current "
    "policy over the policy before the step, without a clip, so it corrects no mismatch"
)


def read(block: Block) -> Reading:
    """Reads the steps in SkyRL's order. As in SkyRL, rejected tokens stay in the denominators.

    Raises:
        ConfigError: the token mask has only one bound (SkyRL then masks nothing), bounds do not contain 1, a
            cap is below 1, SkyRL's clamp of +-20 never lets an outlier bound act, or neither slime nor a
            surrogate here has the loss.
    """
    correction = block
    if block.has(NESTED):
        if mixed := [key for key in block.values if key in CORRECTION]:
            block.refuse(mixed[0], f"this key under {NESTED}, like the other keys")
        correction = block.part(NESTED, CORRECTION)
    top_k = _centering(block)
    loss, notes = block.choice("policy_loss_type", LOSSES), list[str]()
    if loss is None:
        loss = "dppo" if block.has(CENTERING) else "regular"
        notes.append(DEFAULT if loss == "dppo" else FORMER_DEFAULT)
    if loss in OF_THE_TARGET:
        return _centered(block, loss, top_k, _of_the_target(block, correction, loss, notes))
    if top_k is not None:
        block.refuse(CENTERING, f"enabled: false beside policy_loss_type: {loss}", UNREAD)
    if loss == "importance_sampling":
        clip = {"anchor": "proximal", "eps_low": 1.0, "eps_high": LARGEST}
        return native([], (NO_SAMPLER,), "target", {"ppo_clip": clip})
    if loss == "cispo" and block.part("cispo", CISPO).choice("cispo_anchor", ("old", "rollout")) == "rollout":
        return _clamped_over_rollout(block, correction, notes)
    return _beside_loss(block, loss, _before_step(block, correction, notes))


def _before_step(block: Block, correction: Block, notes: Sequence[str]) -> Reading:
    """Reads what corrects by the policy before the step: masks, and weights over kept tokens."""
    pair = _deprecated(block)
    tokens = _token_mask(correction)
    scope = {"over": "kept"} if tokens else {}
    weights = capped("token", pair) if pair is not None else _weights(correction, scope)
    steps = [*_outliers(correction), *tokens, *weights, *_sequence_mask(correction, scope)]
    notes = [*notes, *([] if pair is None else [DEPRECATED_PAIR.format(cap=pair)])]
    return native(steps, notes)


def _beside_loss(block: Block, loss: str, reading: Reading) -> Reading:
    """Adds the loss that the weights multiply: a native surrogate, or slime's loss."""
    if loss == "sapo":
        part = block.part("sapo", SAPO)
        surrogate = {"sapo": {"anchor": "proximal", **{name: part.temperature(name) for name in SAPO}}}
        return replace(reading, mapping={**reading.mapping, "surrogate": surrogate})
    if loss == "cispo":
        return replace(reading, args=cispo(*_cispo_ends(block)))
    args: dict[str, Any] = {"advantage_estimator": "gspo"} if loss == "gspo" else {}
    args |= {"eps_clip_c": block.required_number("clip_ratio_c")} if loss == "dual_clip" else {}
    ends = [(key, block.get(key)) for key in ("eps_clip_low", "eps_clip_high")]
    said = tuple(of_loss("skyrl", key, value) for key, value in ends if block.has(key))
    return replace(reading, args=args, notes=(*said, *reading.notes))


def _cispo_ends(block: Block) -> tuple[float, float]:
    """Returns how far below and above 1 CISPO clips its ratio."""
    ends = ("cispo_eps_clip_low", "cispo_eps_clip_high")
    block.required("cispo", f"it holds {' and '.join(ends)}, whose defaults differ between releases")
    part = block.part("cispo", CISPO)
    for end in ends:
        part.required(end, "its default differs between releases")
    low, high = (part.required_number(end, least=0) for end in ends)
    return low, high


def _clamped_over_rollout(block: Block, correction: Block, notes: Sequence[str]) -> Reading:
    """Reads CISPO over the sampler: REINFORCE with the ratio current / rollout, clipped."""
    low, high = _cispo_ends(block)
    _forbid_old_ratio(block, correction, "cispo with cispo_anchor: rollout")
    bound = {"clip": {"low": 1 - low, "high": 1 + high}} if low < 1 else {"truncate": {"high": 1 + high}}
    steps: list[dict[str, Any]] = [{"reweight": {"level": "token", "clamp": SAFE}}, bound]
    return native(steps, notes, numerator="target", surrogate="reinforce")


def _centering(block: Block) -> int | None:
    """Returns how many tokens per position SkyRL asks the sampler for; None without centering."""
    if block.get(CENTERING) is None:
        return None
    part = block.part(CENTERING, HEAD)
    part.required("enabled", "its default differs between releases")
    if not part.flag("enabled"):
        return None
    part.required("top_k", "it decides how much of the sampler's distribution is modelled")
    top_k = part.required_number("top_k", least=1)
    if top_k != int(top_k):
        part.refuse("top_k", "a whole number")
    return int(top_k)


def _centered(block: Block, loss: str, top_k: int | None, reading: Reading) -> Reading:
    """Centers the weighted score over the sampler's head, if SkyRL does.

    The weight f of a token is 1 for reinforce, and the ratio inside its band for rollout_is (SkyRL PR 2244,
    tests/train/test_score_centering.py). SkyRL models the tail as we do, with masses of at least 1e-6.
    """
    if top_k is None:
        return reading
    if loss == "dppo":
        block.refuse(CENTERING, "enabled: false beside policy_loss_type: dppo", UNREAD)
    return replace(reading, mapping={**reading.mapping, "center": {"top_k": top_k}})


def _forbid_old_ratio(block: Block, correction: Block, loss: str) -> None:
    """Refuses the keys that correct by the policy before the step, beside a loss over the sampler."""
    bounds = [key for key in CORRECTION if "is_threshold" in key]
    for key in ("tis_ratio_type", "sequence_mask_metric", *bounds):
        if correction.get(key) is not None:
            correction.refuse(key, f"null beside policy_loss_type: {loss}", TWO_RATIOS)
    if block.get("use_tis"):
        block.refuse("use_tis", f"false beside policy_loss_type: {loss}", TWO_RATIOS)


def _of_the_target(block: Block, correction: Block, loss: str, notes: Sequence[str]) -> Reading:
    """Reads a loss without the policy before the step.

    For reinforce the weight is 1. For rollout_is it is target / sampler, or 0 outside a range. For dppo it is
    target / sampler, and a divergence drops tokens.
    """
    _forbid_old_ratio(block, correction, loss)
    if loss == "reinforce":
        return native([], notes, numerator="target", surrogate="reinforce")
    if loss == "rollout_is":
        low, high = (block.required_number(key, least=0) for key in ("eps_clip_low", "eps_clip_high"))
        steps = inside("token", max(0.0, 1 - low), 1 + high, clamp=SAFE)
        return native(steps, notes, numerator="target", surrogate="reinforce")
    part = block.part("dppo", DPPO)
    kind = part.choice("dppo_type", ("binary_tv", "binary_kl"))
    statistic = {"binary_tv": "tv", "binary_kl": "binary_kl"}[kind]
    ends = {"outward_positive": "delta_high", "outward_negative": "delta_low"}
    far = {when: part.required_number(key, least=0) for when, key in ends.items()}
    drops = [reject("token", "sum", None, at, statistic=statistic, when=when) for when, at in far.items()]
    weigh = {"reweight": {"level": "token", "clamp": SAFE}}
    notes = (*notes, *((DPPO_EDGE,) if kind == "binary_kl" else ()))
    return native([weigh, *drops], notes, numerator="target", surrogate="reinforce")


def _deprecated(block: Block) -> float | None:
    """Returns the cap of ``use_tis``, which overrides the new keys as in SkyRL; None without it."""
    if not block.flag("use_tis"):
        if (block.number("tis_imp_ratio_cap") or 0) > 0:
            block.refuse("tis_imp_ratio_cap", "use_tis: true beside it", "SkyRL ignores it otherwise")
        return None
    block.required("tis_imp_ratio_cap", "SkyRL's default -1 would make every weight -1")
    return block.required_number("tis_imp_ratio_cap", least=1)


def _outliers(block: Block) -> list[dict[str, Any]]:
    keys = {end: f"outlier_token_is_threshold_{end}" for end in ("low", "high")}
    both = {end: block.positive(key) for end, key in keys.items()}
    bounds = {end: bound for end, bound in both.items() if bound is not None}
    if not bounds:
        return []
    for end, bound in bounds.items():
        if abs(math.log(bound)) > SAFE:
            block.refuse(keys[end], "a bound within e^-20 .. e^20", "SkyRL clamps the ratio to that")
    block.interval(keys[next(iter(bounds))], bounds.get("low", 0.0), bounds.get("high", math.inf))
    return [{"veto": bounds}]


def _token_mask(block: Block) -> list[dict[str, Any]]:
    keys = [f"token_mask_is_threshold_{end}" for end in ("low", "high")]
    present = [key for key in keys if block.has(key)]
    if not present:
        return []
    if len(present) == 1:
        missing = next(key for key in keys if key not in present)
        block.refuse(present[0], f"{missing} beside it", "SkyRL masks nothing when one of the two is missing")
    low, high = block.interval(keys[0], *(block.required_number(key) for key in keys))
    return [band("token", low, high)]


def _weights(block: Block, scope: dict[str, str]) -> list[dict[str, Any]]:
    level = block.choice("tis_ratio_type", ("token", "sequence"))
    if level is None:
        return []
    cap = block.required_number(f"{level}_tis_ratio_clip_high", least=1)
    return capped(level, cap, **(scope if level == "sequence" else {}))


def _sequence_mask(block: Block, scope: dict[str, Any]) -> list[dict[str, Any]]:
    metric = block.choice("sequence_mask_metric", tuple(MASKS))
    if metric is None:
        return []
    stem, aggregate = MASKS[metric]
    low, high = (block.required_number(f"{stem}_{end}") for end in ("low", "high"))
    return [reject("sequence", aggregate, *block.interval(f"{stem}_low", low, high), **scope)]
