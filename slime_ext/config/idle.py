"""Settings that can never act: an idle step, bound or guard is refused; a field without effect is noted."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from slime_ext.core.correction import Correction
from slime_ext.core.losses import DualClip, PpoClip
from slime_ext.core.metrics.guards import Guard
from slime_ext.core.metrics.names import CERTIFICATE, reach_of
from slime_ext.core.metrics.options import Options
from slime_ext.core.prefix_steps import PrefixBudget, PrefixReject
from slime_ext.core.scoped import CLAMPABLE, LARGEST_LOG, ZeroOutside
from slime_ext.core.state import Step, WeightRange, expect, weight_ranges
from slime_ext.core.steps import Clip, Normalize, Reject, SecondMoment, Truncate, Veto
from slime_ext.errors import ConfigError
from slime_ext.ops.divergences import LARGEST

ONCE = (Normalize, SecondMoment)  # a second of another number undoes the first, or is implied by it


def forbid_idle_steps(steps: Sequence[Step], names: Sequence[str], where: str) -> None:
    """Refuses steps that can never act.

    Args:
        names: name of each step, as in the configuration.
        where: prefix of a step's index in messages.

    Raises:
        ConfigError: at the first of them.
    """
    ranges = weight_ranges(steps)
    for i, (step, name) in enumerate(zip(steps, names, strict=True)):
        here = f"{where}[{i}].{name}"
        _forbid_second(steps, i, here)
        _forbid_idle_bound(step, ranges[i], ranges[i + 1], here)
        if isinstance(step, Reject | PrefixReject):
            _forbid_idle_rejection(step, here)
        if isinstance(step, Reject):
            _forbid_idle_scope(step, here)
        if isinstance(step, PrefixBudget):
            _forbid_idle_budget(step, here)
        if isinstance(step, Veto):
            low = step.low or 0.0
            expect(low >= 0, f"{here}.low", "a number > 0", step.low, "no ratio is below 0")
            acts = low > 0 or step.high is not None
            expect(acts, f"{here}.low", "a number > 0", step.low, "nothing would be vetoed")
        if getattr(step, "over", "response") == "kept":
            _forbid_idle_over(step, steps[:i], here)


def _forbid_second(steps: Sequence[Step], i: int, here: str) -> None:
    """Refuses a step that undoes or repeats an earlier one; a user's own step may be repeated."""
    step, before = steps[i], steps[:i]
    for j, earlier in enumerate(before):
        if step.sets_weights and earlier.sets_weights:
            raise ConfigError(
                f"{here}: expected one step that sets weights, got a second after steps[{j}]: it would undo "
                "the first"
            )
        is_again = step == earlier or (isinstance(step, ONCE) and type(step) is type(earlier))
        if is_again and type(step).__module__.startswith("slime_ext."):
            raise ConfigError(
                f"{here}: expected it once, got a second after steps[{j}]: one of them would never act"
            )


def _forbid_idle_bound(step: Step, before: WeightRange, after: WeightRange, here: str) -> None:
    if step.is_bound and not step.sets_weights and before.low == before.high:
        raise ConfigError(
            f"{here}: expected a reweight step before it, got none: weights are {before.low:g} there and it "
            "would never act"
        )
    if isinstance(step, Truncate | Clip) and before[:2] == after[:2]:
        raise ConfigError(
            f"{here}: expected bounds inside {_interval(*before[:2])}, got {_interval(*_bounds(step))}: the "
            "weights lie there already and it would never act"
        )
    if step.is_bound and after.low == after.high:
        raise ConfigError(f"{here}: expected low < high, got {after.low:g} twice: it would be every weight")
    if isinstance(step, ZeroOutside):
        bounds = [step.low, step.high]
        expect(step.low < step.high, here, "low < high", bounds, "every weight but 1 would be 0")


def _bounds(step: Truncate | Clip) -> tuple[float, float]:
    return getattr(step, "low", 0.0), step.high


def _forbid_idle_rejection(step: Reject | PrefixReject, here: str) -> None:
    """Refuses bounds that no value of the statistic reaches, and bounds that only one value passes."""
    if (step.low, step.high) == (None, None):  # a bound on ages alone
        return
    lowest, highest = reach(step)
    low = -math.inf if step.low is None else step.low
    high = math.inf if step.high is None else step.high
    bounds, why = [step.low, step.high], f"{step.statistic} is never below 0"
    has_place = step.statistic == "k1" or step.low is None or low >= 0
    expect(has_place, f"{here}.low", "a number >= 0", step.low, why)
    expect(
        low > lowest or high < highest,
        here,
        f"a bound inside {_interval(lowest, highest)}, where {step.statistic} lies",
        bounds,
        "nothing would be rejected",
    )
    expect(
        max(low, lowest) < min(high, highest),
        here,
        "low < high",
        bounds,
        "only what is exactly on-policy would be kept",
    )


def reach(step: Reject | PrefixReject) -> tuple[float, float]:
    """The smallest and largest possible value of a rejection's statistic.

    >>> reach(Reject("sequence", "tv", "mean", high=0.2)), reach(Reject("sequence", "tv", "sum", high=3.0))
    ((0.0, 1.0), (0.0, inf))
    """
    name = step.statistic
    clamp: float | None = getattr(step, "clamp", None)
    is_summed = step.unit != "token" and step.aggregate == "sum"
    if not is_summed and name not in CLAMPABLE:
        return 0.0, LARGEST[name]
    if is_summed or clamp is None:
        return (-math.inf if name == "k1" else 0.0), math.inf
    clamp = min(clamp, LARGEST_LOG)
    most = math.exp(clamp)
    return {
        "ratio": (1 / most, most),
        "k1": (-clamp, clamp),
        "k2": (0.0, clamp**2 / 2),
        "k3": (0.0, most - 1 - clamp),
    }[name]


def _forbid_idle_budget(step: PrefixBudget, here: str) -> None:
    most = LARGEST.get(step.statistic, math.inf)
    bounds, wanted = [step.high, step.budget], f"high or budget below {most:g}, the largest {step.statistic}"
    expect(min(bounds) < most, here, wanted, bounds, "nothing would be rejected")


def _forbid_idle_scope(step: Reject, here: str) -> None:
    """Refuses fields about the ratio in a step that reads only the sample's age."""
    if (step.low, step.high) != (None, None):
        return
    for name, idle in {"statistic": "ratio", "when": "always", "clamp": None, "over": "response"}.items():
        value = getattr(step, name, idle)
        why = "a bound on staleness alone looks at no token"
        expect(value == idle, f"{here}.{name}", "low or high beside it", value, why)


def _forbid_idle_over(step: Step, before: Sequence[Step], here: str) -> None:
    expect(step.unit != "token", f"{here}.over", "response at tokens", "kept", "nothing is added up there")
    rejects = any(earlier.rejects for earlier in before)
    expect(rejects, f"{here}.over", "a step that rejects before it", "none", "every token is kept there")


def forbid_idle_guards(
    found: Mapping[str, Guard], correction: Correction, options: Options, where: str
) -> None:
    """Refuses guards that could never act, or would act in every step.

    Raises:
        ConfigError: at the first of them.
    """
    steps, surrogate = correction.steps, correction.surrogate
    constant = {  # metric -> why it is always 0, or never there
        "clipped_fraction": not any(step.is_bound for step in steps) and "no step bounds weights",
        "surrogate_clipped_fraction": not isinstance(surrogate, PpoClip | DualClip)
        and "this surrogate clips nothing",
        **dict.fromkeys(CERTIFICATE, not options.certify and "metrics.certify is false"),
    }
    for name, guard in found.items():
        here = f"{where}.{name}"
        if why := constant.get(name):
            raise ConfigError(f"{here}: expected no guard, got one: {why}")
        low, high = reach_of(name)
        inside = f"the metric lies in {_interval(low, high)}"
        wanted = f"a number above {low:g}, at most {high:g}", f"a number from {low:g}, below {high:g}"
        expect(guard.min is None or low < guard.min <= high, f"{here}.min", wanted[0], guard.min, inside)
        expect(guard.max is None or low <= guard.max < high, f"{here}.max", wanted[1], guard.max, inside)
        expect(
            guard.action != "metrics_only" or not correction.is_identity,
            f"{here}.action",
            "warn or stop without a correction",
            guard.action,
            "only metrics are computed already",
        )


def notes_of(mapping: Mapping[str, Any], correction: Correction) -> Iterator[str]:
    """One line for each part of a native mapping that has no effect."""
    for i, step in enumerate(correction.steps):
        if not isinstance(step, Reject | ZeroOutside):
            continue
        usual = "mean" if isinstance(step, Reject) else "sum"
        if step.unit == "token" and step.aggregate != usual:
            yield f"steps[{i}]: aggregate: {step.aggregate} changes nothing at unit token"
    rejects = any(step.rejects for step in correction.steps)
    for key, idle in {"mask_scope": "policy", "denominator": "host", "group": "ignore"}.items():
        if not rejects and mapping.get(key, idle) != idle:
            yield (
                f"{key}: {mapping[key]} acts only on tokens without a finite behavior log-prob, for no step "
                "rejects any"
            )
    if "preset" in mapping and "steps" in mapping and not mapping["steps"]:
        yield f"steps: [] takes out those of preset: {mapping['preset']}"


def _interval(low: float, high: float) -> str:
    return f"{low:g} .. {high:g}"
