"""Translates prime-rl's ``trainer.loss``, with and without ``kl_tau``.

Releases until Autumn 2026 (559b447) have the types default (DPPO) and ipo. They add a squared log-ratio to
the loss (kl_tau, 1e-3 by default) and bound no weight. Today's release has the types ipo, icepop, ppo and
cispo. It has no such term and caps the weights of ipo and ppo. Defaults differ, so a block has to show its
release.

Source: https://github.com/PrimeIntellect-ai/prime-rl, prime_rl/configs/trainer.py (LossConfig);
src/prime_rl/trainer/rl/loss.py.
"""

from __future__ import annotations

from typing import Any

from slime_ext.tools.convert.block import Block, Reading, band, native, reject

FORMER, TODAY = "a release until Autumn 2026", "today's release"
OWN = {  # release -> the keys and the types that only this release has
    FORMER: (("kl_tau", "dppo_mask_low", "dppo_mask_high", "ipo_threshold", "teacher_tau"), ("default",)),
    TODAY: (
        ("max_importance_ratio", "ratio_low", "ratio_high", "score_centering"),
        ("icepop", "cispo", "ppo"),
    ),
}
KEYS = ("type", *OWN[FORMER][0], *OWN[TODAY][0], "eps", "adv_tau")
TYPES = ("default", "ipo", "icepop", "cispo", "ppo")
FIELDS = {  # type -> the keys that not every type has
    "default": ("dppo_mask_low", "dppo_mask_high", "kl_tau"),
    "ipo": ("eps", "ipo_threshold", "kl_tau", "max_importance_ratio", "score_centering"),
    "icepop": ("ratio_low", "ratio_high"),
    "cispo": ("ratio_low", "ratio_high"),
    "ppo": ("ratio_low", "ratio_high", "max_importance_ratio"),
}
TOKEN = {"reweight": {"level": "token"}}
HEAD = 128  # tokens that center reads if the host does not record the sampler's support
OVER_MASK = (
    "prime-rl centers over its sampling mask: set --rollout-top-p as in prime-rl, on a host that records "
    "which tokens it keeps (slime since v0.3.1); without such a record, center reads a head of "
    f"{HEAD} tokens and models the rest"
)
UNBOUNDED = (
    "nothing bounds the weights, as in prime-rl; to bound them, add truncate: {high: 2.0} after reweight"
)


def read(block: Block) -> Reading:
    """Reads REINFORCE with weights target / sampler, which drops tokens that moved too far.

    Raises:
        ConfigError: the block has keys of two releases or of none, or a key that its type does not have, or
            no correction here has a part of its loss.
    """
    signs = {release: _evidence(block, *keys_and_types) for release, keys_and_types in OWN.items()}
    if all(signs.values()):
        key, other = signs[TODAY][0], signs[FORMER][0]
        why = f"{other} belongs to {FORMER}"
        block.refuse(key, f"keys of one release of prime-rl, {FORMER} or {TODAY}", why)
    if not any(signs.values()):
        why = "with kl_tau the loss adds a squared log-ratio, with max_importance_ratio it caps weights"
        block.refuse("kl_tau", "this key or max_importance_ratio, which tell the releases apart", why)
    is_dppo = block.has("dppo_mask_low") or block.has("dppo_mask_high")
    kind = block.choice("type", TYPES, "default" if is_dppo else "")
    if not kind:
        block.refuse("type", "a value", "prime-rl's default was default and is ipo now")
    for key in (key for key in block.values if key in KEYS[1:-1] and block.has(key)):
        if key not in (*FIELDS[kind], "teacher_tau"):
            block.refuse(key, f"a key of type {kind}", "prime-rl refuses it there")
    _forbid_factors(block)
    return _with_term(block, kind) if signs[FORMER] else _of_today(block, kind)


def _evidence(block: Block, keys: tuple[str, ...], types: tuple[str, ...]) -> list[str]:
    """Returns the keys that tell a block's release.

    Only it has the key, or the value of ``type``. No other release has the key, or its value of type.
    """
    return [key for key in keys if block.has(key)] + ["type"] * (block.values.get("type") in types)


def _forbid_factors(block: Block) -> None:
    """Refuses parts of the loss that no correction has."""
    if block.number("adv_tau", 1.0) not in (1, None):
        block.refuse("adv_tau", "1", "it scales the advantages; no correction here does that")
    if block.number("teacher_tau", 0.0) not in (0, None):
        block.refuse("teacher_tau", "0", "no correction here has a teacher's term")


def _with_term(block: Block, kind: str) -> Reading:
    if kind == "ipo":
        if block.has("eps") and block.has("ipo_threshold"):
            block.refuse("eps", "eps or ipo_threshold", "they are one setting in two releases")
        far = block.positive("ipo_threshold" if block.has("ipo_threshold") else "eps", 0.1)
        mask = [reject("token", "sum", None, far, statistic="tv")]
    else:
        low, high = (block.positive(f"dppo_mask_{end}", 0.2) or 0.2 for end in ("low", "high"))
        by_sign = {"outward": high} if low == high else {"outward_positive": high, "outward_negative": low}
        mask = [reject("token", "sum", None, at, statistic="tv", when=when) for when, at in by_sign.items()]
    tau = block.number("kl_tau", 1e-3, least=0)
    terms = {"terms": [{"squared_log_ratio": {"coefficient": tau}}]} if tau else {}
    return native([TOKEN, *mask], (UNBOUNDED,), numerator="target", surrogate="reinforce", **terms)


def _of_today(block: Block, kind: str) -> Reading:
    steps: list[dict[str, Any]] = [TOKEN]
    if kind == "ipo":
        steps.append({"truncate": {"high": block.given("max_importance_ratio", 1e4, least=1)}})
        steps.append(reject("token", "sum", None, block.positive("eps", 0.3), statistic="tv"))
        if block.flag("score_centering"):
            return native(steps, (OVER_MASK,), "target", "reinforce", center={"top_k": HEAD})
        return native(steps, numerator="target", surrogate="reinforce")
    if kind == "ppo":
        return _ppo(block)
    low = block.given("ratio_low", 0.0 if kind == "cispo" else 0.2, least=0)
    low, high = block.interval("ratio_low", low, block.given("ratio_high", 5.0))
    if kind == "icepop":
        return native([TOKEN, band("token", low, high)], (UNBOUNDED,), "target", "reinforce")
    steps.append({"clip": {"low": low, "high": high}} if low > 0 else {"truncate": {"high": high}})
    return native(steps, numerator="target", surrogate="reinforce")


def _ppo(block: Block) -> Reading:
    """Reads PPO over the ratio to the sampler, capped where PPO does not clip it.

    Where the clip acts, a token's gradient is 0; elsewhere the gradient of -A r is -A min(r, cap) grad log p.
    So the loss is REINFORCE with capped weights. It drops tokens with A > 0 and r > high, or with A < 0 and
    r < low.
    """
    low, high = block.interval("ratio_low", block.given("ratio_low", 0.8), block.given("ratio_high", 1.2))
    cap = block.given("max_importance_ratio", 1e4)
    if cap < high:
        block.refuse("max_importance_ratio", f"at least ratio_high, {high:g}", "prime-rl refuses it")
    clipped = [
        reject("token", "sum", None, high, when="positive_advantage"),
        reject("token", "sum", low, None, when="negative_advantage"),
    ]
    return native([TOKEN, {"truncate": {"high": cap}}, *clipped], numerator="target", surrogate="reinforce")
