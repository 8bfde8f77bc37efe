"""A correction in one line, for the log of a run and the tables of the commands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slime_ext.host.contract import CARRY, PLAN, PLAN_FLAG
from slime_ext.optional_args import steps_per_rollout

if TYPE_CHECKING:
    from slime_ext.correction import Correction


FORMULAS = {  # functions with a formula of their own
    "vanilla_tis_function": "clip(proximal / behavior, {tis_clip_low}, {tis_clip})",
    "icepop_function": "proximal / behavior inside [{tis_clip_low}, {tis_clip}], else 0,",
    "off_policy_is_function": "clip(target / behavior, 1 - {eps_clip}, 1 + {eps_clip_high})",
}


def flags_of(name: str, correction: Correction) -> str:
    """The flags, all slime's own, that make a launch use the preset ``name``."""
    switch = "--use-tis" if correction.steps or correction.needs_target else "--get-mismatch-metrics"
    plan = f" --get-mismatch-metrics {PLAN_FLAG} {PLAN}" if correction.needs_plan else ""
    return f"{switch} --custom-tis-function-path slime_ext.tis.{name} {CARRY}{plan}"


def formula(name: str, args: Mapping[str, Any]) -> str:
    """What a function with a formula of its own does; the flag where the arguments do not say its number.

    >>> formula("vanilla_tis_function", {"tis_clip": 2.0})
    'weight clip(proximal / behavior, --tis-clip-low, 2) per token'
    """
    words = {dest: "--" + dest.replace("_", "-") for dest in ("tis_clip_low", "tis_clip", "eps_clip")}
    words |= {dest: f"{args[dest]:g}" for dest in words if args.get(dest) is not None}
    high = args.get("eps_clip_high")
    words["eps_clip_high"] = words["eps_clip"] if high is None else f"{high:g}"
    return f"weight {FORMULAS[name].format(**words)} per token"


def double_count(args: Any) -> str:
    """Where off_policy_is_function counts target / proximal twice, the line that says so; else empty."""
    steps, kept = steps_per_rollout(args), getattr(args, "keep_old_actor", False)
    plain = getattr(args, "policy_loss", None) == "reinforce"  # a loss of the embedded launcher
    if plain or not (steps > 1 or kept):
        return ""
    expected, got = ("one optimizer step per rollout", steps) if steps > 1 else ("no --keep-old-actor", "it")
    return (
        f"off_policy_is_function: expected {expected}, got {got}: the host's loss carries target / proximal "
        "already, so that ratio is counted twice; use slime_ext.tis.off_policy_is"
    )


def brief(steps: Sequence[Mapping[str, Any]]) -> str:
    """Steps in one line: name(field value, ...)."""
    return " > ".join(f"{name}({_fields(fields)})" for step in steps for name, fields in step.items()) or "-"


def one_line(keys: Mapping[str, Any]) -> str:
    """A correction's native keys in one line: the ratio, the loss, the steps with their numbers.

    >>> one_line({"numerator": "proximal", "surrogate": "host", "mask_scope": "policy",
    ...           "steps": [{"reweight": {"level": "token"}}, {"truncate": {"high": 2.0}}]})
    'proximal / behavior, loss host, reweight(token) > truncate(high 2), masks policy'
    """
    surrogate = keys["surrogate"]
    loss = surrogate if isinstance(surrogate, str) else brief([surrogate])
    steps = brief(keys["steps"]) if keys["steps"] else "no steps"
    more = [f"{key} {keys[key]}" for key in ("denominator", "group") if _says_something(keys.get(key))]
    parts = (f"{keys['numerator']} / behavior", f"loss {loss}", steps, f"masks {keys['mask_scope']}", *more)
    return ", ".join(parts)


def _says_something(value: Any) -> bool:
    return value not in (None, "host", "ignore")


def _fields(fields: Mapping[str, Any]) -> str:
    return ", ".join(_value(key, value) for key, value in fields.items())


def _value(key: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    return f"{key} {value:.6g}" if isinstance(value, float) else f"{key} {value}"
