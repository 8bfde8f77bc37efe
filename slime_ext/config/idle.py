"""Refuses guards that can never act, and notes fields without effect.

``Correction`` itself refuses steps that change nothing (``slime_ext.core.idle``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from slime_ext.core.correction import Correction
from slime_ext.core.losses import DualClip, PpoClip
from slime_ext.core.metrics.guards import Guard
from slime_ext.core.metrics.names import CERTIFICATE, reach_of
from slime_ext.core.metrics.options import Options
from slime_ext.core.scoped import ZeroOutside
from slime_ext.core.state import Effect
from slime_ext.core.steps import Reject
from slime_ext.errors import ConfigError, expect


def forbid_idle_guards(
    watched: Mapping[str, Guard], correction: Correction, options: Options, where: str
) -> None:
    """Refuses guards that could never act, or would act in every step.

    Raises:
        ConfigError: at the first such guard.
    """
    steps, surrogate = correction.steps, correction.surrogate
    constant = {  # metric -> why it is always 0 or never computed
        "clipped_fraction": not any(Effect.BOUND in step.effects for step in steps)
        and "no step bounds weights",
        "surrogate_clipped_fraction": not isinstance(surrogate, PpoClip | DualClip)
        and "this surrogate clips nothing",
        **dict.fromkeys(CERTIFICATE, not options.certify and "metrics.certify is false"),
    }
    for name, guard in watched.items():
        here = f"{where}.{name}"
        if why := constant.get(name):
            raise ConfigError(f"{here}: expected no guard, got one: remove it, because {why}")
        low, high = reach_of(name)
        inside = f"the metric is always between {low:g} and {high:g}"
        wanted = f"a number > {low:g} and <= {high:g}", f"a number >= {low:g} and < {high:g}"
        expect(guard.min is None or low < guard.min <= high, f"{here}.min", wanted[0], guard.min, inside)
        expect(guard.max is None or low <= guard.max < high, f"{here}.max", wanted[1], guard.max, inside)
        expect(
            guard.action != "metrics_only" or not correction.is_identity,
            f"{here}.action",
            "warn or stop without a correction",
            guard.action,
            "only metrics are computed anyway",
        )


def notes_of(mapping: Mapping[str, Any], correction: Correction) -> Iterator[str]:
    """Yields a line for each part of a native mapping that has no effect."""
    for i, step in enumerate(correction.steps):
        if not isinstance(step, Reject | ZeroOutside):
            continue
        usual = "mean" if isinstance(step, Reject) else "sum"
        if step.unit == "token" and step.aggregate != usual:
            yield f"steps[{i}]: aggregate: {step.aggregate} changes nothing at unit token"
    rejects = any(Effect.REJECT in step.effects for step in correction.steps)
    for key, idle in {"mask_scope": "policy", "denominator": "host", "group": "ignore"}.items():
        if not rejects and mapping.get(key, idle) != idle:
            yield (
                f"{key}: {mapping[key]} acts only on tokens without a finite behavior log-prob, because no "
                "step rejects tokens"
            )
    if "preset" in mapping and "steps" in mapping and not mapping["steps"]:
        yield f"steps: [] removes the steps of preset: {mapping['preset']}"
