"""Writes a correction's native keys as one line of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def brief(steps: Sequence[Mapping[str, Any]]) -> str:
    """Writes steps in one line: name(field value, ...)."""
    named = [
        f"{name}({', '.join(_value(*field) for field in fields.items())})"
        for step in steps
        for name, fields in step.items()
    ]
    return " > ".join(named) or "-"


def one_line(keys: Mapping[str, Any]) -> str:
    """Writes a correction's native keys in one line: ratio, loss, and steps with their numbers.

    >>> one_line({"numerator": "proximal", "surrogate": "host", "mask_scope": "policy",
    ...           "steps": [{"reweight": {"level": "token"}}, {"truncate": {"high": 2.0}}]})
    'proximal / behavior, loss host, reweight(token) > truncate(high 2), masks policy'
    """
    surrogate = keys["surrogate"]
    loss = surrogate if isinstance(surrogate, str) else brief([surrogate])
    steps = brief(keys["steps"]) if keys["steps"] else "no steps"
    added = [f"plus {brief(keys['terms'])}"] if keys.get("terms") else []
    added += [f"centered over the {keys['center']['top_k']} likeliest"] if keys.get("center") else []
    more = [
        f"{key} {keys[key]}"
        for key in ("denominator", "group")
        if keys.get(key) not in (None, "host", "ignore")
    ]
    scope = f"masks {keys['mask_scope']}"
    return ", ".join((f"{keys['numerator']} / behavior", f"loss {loss}", steps, *added, scope, *more))


def _value(key: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    return f"{key} {value:.6g}" if isinstance(value, float) else f"{key} {value}"
