"""Translates SkyRL's ``off_policy_correction`` and the deprecated pair ``use_tis`` / ``tis_imp_ratio_cap``.

Steps keep SkyRL's order: outlier sequences, token mask, then weights and sequence mask over the kept tokens.
Source: https://github.com/NovaSky-AI/SkyRL/pull/849; off_policy_correction_utils.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from slime_ext.tools.convert.block import SAFE, Block, Reading, band, capped, inside, native, reject
from slime_ext.tools.convert.loss_side import cispo, of_loss

OWN = (
    "tis_ratio_type",
    "token_tis_ratio_clip_high",
    "sequence_tis_ratio_clip_high",
    "sequence_mask_metric",
    "geo_mask_low",
    "geo_mask_high",
    "product_mask_low",
    "product_mask_high",
    "outlier_token_is_threshold_low",
    "outlier_token_is_threshold_high",
    "token_mask_is_threshold_low",
    "token_mask_is_threshold_high",
)
DEPRECATED = ("use_tis", "tis_imp_ratio_cap")
NESTED = "off_policy_correction"
OUTLIER = "outlier_token_is_threshold"
LOSS = ("policy_loss_type", "eps_clip_low", "eps_clip_high", "clip_ratio_c", "cispo", "sapo", "dppo")
CENTERING = "score_centering"
KEYS = (*OWN, *DEPRECATED, NESTED, *LOSS, CENTERING)
OF_THE_TARGET = ("reinforce", "rollout_is", "dppo")  # losses whose weights are target / rollout, or 1
LOSSES = ("regular", "dual_clip", "gspo", "cispo", "sapo", *OF_THE_TARGET)
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
CAPS = {"token": ("token_tis_ratio_clip_high", 2.0), "sequence": ("sequence_tis_ratio_clip_high", 5.0)}
MASKS = {"geometric": ("geo_mask", "mean", 0.99, 1.01), "product": ("product_mask", "sum", 0.5, 2.0)}
IGNORED = "SkyRL ignores {key} {when}"
UNREAD = "no source that we read says what SkyRL centers beside this loss"
READ_BY = {
    "rollout_is": ("eps_clip_low", "eps_clip_high"),
    "dppo": ("dppo",),
}  # loss -> the keys of ``LOSS`` that it reads


def read(block: Block) -> Reading:
    """Reads the steps in SkyRL's order. As in SkyRL, rejected tokens stay in the denominators.

    Raises:
        ConfigError: the token mask has only one bound (SkyRL then masks nothing), bounds do not contain 1, a
            cap is below 1, SkyRL's clamp of +-20 never lets an outlier bound act, or neither slime nor a
            surrogate here has the loss.
    """
    block = _flat(block)
    top_k = _centering(block)
    loss, notes = block.choice("policy_loss_type", LOSSES), list[str]()
    if loss is None:
        loss = "dppo" if block.has(CENTERING) else None
        notes.append(DEFAULT if loss else FORMER_DEFAULT)
    if loss in OF_THE_TARGET:
        return _centered(block, loss, top_k, _with_own_weights(block, loss, notes))
    if top_k is not None:
        block.refuse(CENTERING, f"enabled: false beside policy_loss_type: {loss}", UNREAD)
    of_pair, pair = _deprecated(block)
    tokens = _token_mask(block)
    scope = {"over": "kept"} if tokens else {}
    steps = [*_outliers(block), *tokens, *_weights(block, scope, pair), *_sequence_mask(block, scope)]
    return _beside_loss(block, loss, native(steps, (*notes, *of_pair, *_ignored(block, pair))))


def _beside_loss(block: Block, loss: str | None, reading: Reading) -> Reading:
    """Adds the loss that the weights multiply: a native surrogate, or slime's loss."""
    if loss == "sapo":
        part, defaults = _part(block, "sapo", ("tau_pos", "tau_neg")), {"tau_pos": 1.0, "tau_neg": 1.05}
        tau = {name: part.temperature(name, at) for name, at in defaults.items()}
        surrogate = {"sapo": {"anchor": "proximal", **tau}}
        return replace(reading, mapping={**reading.mapping, "surrogate": surrogate})
    if loss == "cispo":
        ends = ("cispo_eps_clip_low", "cispo_eps_clip_high")
        block.required("cispo", f"it holds {' and '.join(ends)}, whose defaults differ between releases")
        part = _part(block, "cispo", ends)
        for end in ends:
            part.required(end, "its default differs between releases")
        return replace(reading, args=cispo(*(part.given(end, 0.0, least=0) for end in ends)))
    args: dict[str, Any] = {"advantage_estimator": "gspo"} if loss == "gspo" else {}
    args |= {"eps_clip_c": block.given("clip_ratio_c", 3.0)} if loss == "dual_clip" else {}
    said = [(key, block.values[key]) for key in ("eps_clip_low", "eps_clip_high") if block.has(key)]
    return replace(reading, args=args, notes=(*(of_loss("skyrl", *each) for each in said), *reading.notes))


def _part(block: Block, key: str, keys: Sequence[str]) -> Block:
    """Returns a nested mapping, which has these keys. A block without it has an empty one."""
    nested = block.values.get(key) or {}
    if not isinstance(nested, Mapping):
        block.refuse(key, "a mapping")
    return Block.closed(f"{block.where}.{key}", nested, keys)


def _centering(block: Block) -> int | None:
    """Returns how many tokens per position SkyRL asks the sampler for; None without centering."""
    if block.values.get(CENTERING) is None:
        return None
    part = _part(block, CENTERING, ("enabled", "top_k"))
    part.required("enabled", "its default differs between releases")
    if not part.flag("enabled"):
        return None
    part.required("top_k", "it decides how much of the sampler's distribution is modelled")
    top_k = part.given("top_k", 0, least=1)
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


def _with_own_weights(block: Block, loss: str, notes: Sequence[str] = ()) -> Reading:
    """Reads a loss without the policy before the step.

    For reinforce the weight is 1. For rollout_is it is target / sampler, or 0 outside a range. For dppo it is
    target / sampler, and a divergence drops tokens.
    """
    bounds = [key for key in OWN if "is_threshold" in key]
    for key in ("tis_ratio_type", "sequence_mask_metric", "use_tis", *bounds):
        if block.has(key) and block.values[key] is not False:
            block.refuse(key, f"null beside policy_loss_type: {loss}", TWO_RATIOS)
    unread = [key for key in LOSS[1:] if key not in READ_BY.get(loss, ()) and block.has(key)]
    notes = [*notes, *(IGNORED.format(key=key, when=f"beside policy_loss_type: {loss}") for key in unread)]
    if loss == "reinforce":
        return native([], notes, numerator="target", surrogate="reinforce")
    if loss == "rollout_is":
        low, high = (block.given(key, 0.2, least=0) for key in LOSS[1:3])
        steps = inside("token", max(0.0, 1 - low), 1 + high, clamp=SAFE)
        return native(steps, notes, numerator="target", surrogate="reinforce")
    part = _part(block, "dppo", ("dppo_type", "delta_low", "delta_high"))
    kind = part.choice("dppo_type", ("binary_tv", "binary_kl"), "binary_tv")
    statistic = {"binary_tv": "tv", "binary_kl": "binary_kl"}[kind]
    ends = {"outward_positive": "delta_high", "outward_negative": "delta_low"}
    far = {when: part.given(key, 0.2, least=0) for when, key in ends.items()}
    drops = [reject("token", "sum", None, at, statistic=statistic, when=when) for when, at in far.items()]
    weigh = {"reweight": {"level": "token", "clamp": SAFE}}
    notes = (*notes, *((DPPO_EDGE,) if kind == "binary_kl" else ()))
    return native([weigh, *drops], notes, numerator="target", surrogate="reinforce")


def _flat(block: Block) -> Block:
    nested = block.values.get(NESTED)
    if nested is None:
        return Block(block.where, {k: v for k, v in block.values.items() if k != NESTED})
    if not isinstance(nested, Mapping):
        block.refuse(NESTED, "a mapping")
    if mixed := [key for key in block.values if key in OWN]:
        block.refuse(mixed[0], f"this key under {NESTED}, like the other keys")
    Block.closed(f"{block.where}.{NESTED}", nested, OWN)
    return Block(block.where, {**nested, **{k: v for k, v in block.values.items() if k != NESTED}})


def _deprecated(block: Block) -> tuple[tuple[str, ...], float | None]:
    """Returns notes, and the cap of ``use_tis``, which overrides the new keys as in SkyRL."""
    if not block.flag("use_tis"):
        if (block.number("tis_imp_ratio_cap") or 0) > 0:
            block.refuse("tis_imp_ratio_cap", "use_tis: true beside it", "SkyRL ignores it otherwise")
        return (), None
    block.required("tis_imp_ratio_cap", "SkyRL's default -1 would make every weight -1")
    cap = block.number("tis_imp_ratio_cap", least=1)
    return (DEPRECATED_PAIR.format(cap=cap),), cap


def _outliers(block: Block) -> list[dict[str, Any]]:
    both = {end: block.positive(f"{OUTLIER}_{end}") for end in ("low", "high")}
    bounds = {end: bound for end, bound in both.items() if bound is not None}
    if not bounds:
        return []
    for end, bound in bounds.items():
        if abs(math.log(bound)) > SAFE:
            block.refuse(f"{OUTLIER}_{end}", "a bound within e^-20 .. e^20", "SkyRL clamps the ratio to that")
    block.interval(f"{OUTLIER}_{next(iter(bounds))}", bounds.get("low", 0.0), bounds.get("high", math.inf))
    return [{"veto": bounds}]


def _token_mask(block: Block) -> list[dict[str, Any]]:
    keys = [f"token_mask_is_threshold_{end}" for end in ("low", "high")]
    present = [key for key in keys if block.has(key)]
    if not present:
        return []
    if len(present) == 1:
        missing = next(key for key in keys if key not in present)
        block.refuse(present[0], f"{missing} beside it", "SkyRL masks nothing when one of the two is missing")
    low, high = block.interval(keys[0], *(block.given(key, 1.0) for key in keys))
    return [band("token", low, high)]


def _weights(block: Block, scope: dict[str, str], pair: float | None) -> list[dict[str, Any]]:
    level = "token" if pair is not None else block.choice("tis_ratio_type", tuple(CAPS))
    if level is None:
        return []
    cap = block.given(*CAPS[level], least=1) if pair is None else pair
    scope = scope if level == "sequence" else {}
    return capped(level, cap, **scope)


def _sequence_mask(block: Block, scope: dict[str, Any]) -> list[dict[str, Any]]:
    metric = block.choice("sequence_mask_metric", tuple(MASKS))
    if metric is None:
        return []
    stem, aggregate, low, high = MASKS[metric]
    low, high = block.given(f"{stem}_low", low), block.given(f"{stem}_high", high)
    return [reject("sequence", aggregate, *block.interval(f"{stem}_low", low, high), **scope)]


def _ignored(block: Block, pair: float | None) -> list[str]:
    """Returns notes on settings that SkyRL never reads, unless they have SkyRL's default."""
    level, metric = (block.values.get(key) for key in ("tis_ratio_type", "sequence_mask_metric"))
    idle = []
    for name, (key, default) in CAPS.items():
        if pair is not None or name != level:
            why = "beside use_tis: true" if pair is not None else f"without tis_ratio_type: {name}"
            idle.append((key, default, why))
    for name, (stem, _, low, high) in MASKS.items():
        if name != metric:
            why = f"without sequence_mask_metric: {name}"
            idle += [(f"{stem}_low", low, why), (f"{stem}_high", high, why)]
    unlike = (row for row in idle if block.number(row[0], row[1]) not in (row[1], None))
    return [IGNORED.format(key=key, when=why) for key, _, why in unlike]
