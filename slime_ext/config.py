"""Mapping -> Correction: typed, closed, and with one-line errors that carry the full key.

The mapping is what stands under the YAML key ``slime_ext:``. A step is ``{name: {field: value}}``, or just
its name; a surrogate likewise. ``preset`` fills what the mapping does not say itself. Instead of native keys
it may hold one dialect key, whose value is that system's own block (see ``slime_ext.dialects``).
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

from pydantic import ConfigDict, ValidationError, create_model

from slime_ext import dialects, presets, rails
from slime_ext.correction import WEIGHTS, Correction
from slime_ext.dialects.scoped import FORMS, ZeroOutside
from slime_ext.errors import ConfigError, did_you_mean
from slime_ext.facts import Step
from slime_ext.metrics.names import known_names
from slime_ext.metrics.options import Options
from slime_ext.objectives import SURROGATES, Host
from slime_ext.rails import Guard
from slime_ext.steps import STEPS, Clip, Truncate

ROOT = "slime_ext"
CLOSED = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
PLAIN = ("numerator", "mask_scope", "denominator", "group", "on_nonfinite")
KEYS = ("preset", "surrogate", "steps", *PLAIN, "guards", "metrics")
KNOWN_STEPS: dict[str, Any] = {**STEPS, **FORMS}
log = logging.getLogger("slime_ext")


@dataclass(frozen=True)
class Loaded:
    """A mapping that was read: what runs, and what its reader should know."""

    correction: Correction
    notes: tuple[str, ...] = ()
    args: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # what the host's arguments must say
    guards: Mapping[str, Guard] = dataclasses.field(default_factory=lambda: rails.DEFAULT)
    metrics: Options = dataclasses.field(default_factory=Options)


def load_config(mapping: Mapping[str, Any], args: Any = None) -> Correction:
    """The correction that a mapping describes; says once what could surprise about it.

    >>> load_config({"steps": ["reweight", {"truncate": {"high": 3.0}}]}).steps
    (Reweight(level='token'), Truncate(high=3.0))

    Args:
        mapping: native keys, or one of ``verl``, ``skyrl``, ``fireworks``, ``slime_mis`` with that system's
            block.
        args: the host's arguments; with them the rules between both are checked too.

    Raises:
        ConfigError: one line with the full key, what was expected, what was found and the nearest known name.
    """
    loaded = read_config(mapping)
    for note in loaded.notes:
        _say_once(note)
    if args is not None:
        check_args(loaded, args)
    return loaded.correction


def read_config(mapping: Mapping[str, Any]) -> Loaded:
    """As ``load_config``, with the notes handed back. Raises ConfigError as it does."""
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"{ROOT}: expected a mapping, got {mapping!r}: see the files in configs/")
    systems = [key for key in mapping if key in dialects.DIALECTS]
    if not systems:
        correction = _native(mapping)
        guards = _guards(mapping.get("guards"), correction)
        return Loaded(correction, guards=guards, metrics=_options(mapping.get("metrics")))
    if len(mapping) > 1:
        others = ", ".join(str(key) for key in mapping if key != systems[0])
        raise ConfigError(
            f"{ROOT}.{systems[0]}: expected no key beside it, got {others}: another system's block is read "
            "whole; slime-ext convert turns it into native keys that can be changed"
        )
    reading = dialects.read(systems[0], mapping[systems[0]], ROOT)
    return Loaded(_native(reading.mapping), reading.notes, reading.args)


def check_args(loaded: Loaded, args: Any) -> None:
    """Rules between a correction and the host's arguments (slime's names; absent ones are not checked).

    Raises:
        ConfigError: a ratio would be counted twice, a surrogate's work would be discarded, or a dialect's
            block contradicts the arguments.
    """
    correction = loaded.correction
    for key, value in loaded.args.items():
        _same_as_args(key, value, args)
    own_loss = not isinstance(correction.surrogate, Host)
    weighs = any(isinstance(step, WEIGHTS) for step in correction.steps)
    if weighs and correction.numerator == "target" and not own_loss:
        _forbid_double_count(args)
    if (
        correction.sets_weights
        and not own_loss
        and _on(args, "use_tis")
        and _on(args, "use_rollout_logprobs")
    ):
        why = "the host's loss divides by the behavior policy already; keep rejections only"
        _refuse_flag("--use-rollout-logprobs", "off beside a step that sets weights", "on", why)
    if own_loss and _on(args, "use_opsm"):
        _refuse_flag("--use-opsm", "off beside a surrogate of slime_ext", "on", "its mask would be discarded")
    if own_loss and getattr(args, "advantage_estimator", None) == "gspo":
        why = "its sequence ratio would be discarded; use surrogate: host"
        _refuse_flag("--advantage-estimator", "another beside a surrogate of slime_ext", "gspo", why)


def _on(args: Any, flag: str) -> bool:
    return bool(getattr(args, flag, False))


def to_mapping(correction: Correction) -> dict[str, Any]:
    """A correction as native keys; ``load_config`` turns them back into the same one.

    >>> to_mapping(load_config({"preset": "token_tis"}))["steps"]
    [{'reweight': {'level': 'token'}}, {'truncate': {'high': 2.0}}]
    """
    names = {cls: name for table in (STEPS, FORMS, SURROGATES) for name, cls in table.items()}

    def described(thing: Any) -> dict[str, Any]:
        values = {f.name: getattr(thing, f.name) for f in dataclasses.fields(thing)}
        return {names[type(thing)]: {key: value for key, value in values.items() if value is not None}}

    surrogate = described(correction.surrogate)
    return {
        "numerator": correction.numerator,
        "surrogate": surrogate if any(surrogate.values()) else next(iter(surrogate)),
        "steps": [described(step) for step in correction.steps],
        "mask_scope": correction.mask_scope,
        "denominator": correction.denominator,
        "group": correction.group,
        "on_nonfinite": correction.on_nonfinite,
    }


def _native(mapping: Mapping[str, Any]) -> Correction:
    for key in mapping:
        if key not in KEYS:
            raise ConfigError(_unknown(ROOT, "key", key, (*KEYS, *dialects.DIALECTS)))
    fields = {}
    if "preset" in mapping:
        base = _preset(mapping["preset"])
        fields = {f.name: getattr(base, f.name) for f in dataclasses.fields(base)}
    fields |= _checked(ROOT, Correction, {key: mapping[key] for key in PLAIN if key in mapping}, PLAIN)
    if "surrogate" in mapping:
        fields["surrogate"] = _named(f"{ROOT}.surrogate", "surrogate", mapping["surrogate"], SURROGATES)
    if "steps" in mapping:
        fields["steps"] = _steps(mapping["steps"])
    return _built(ROOT, Correction, fields)


def _options(mapping: Any) -> Options:
    where, allowed = f"{ROOT}.metrics", tuple(f.name for f in dataclasses.fields(Options))
    return _built(ROOT, Options, _checked(where, Options, _mapping(where, mapping), allowed))


def _guards(mapping: Any, correction: Correction) -> dict[str, Guard]:
    """The default guards and those of the mapping; None takes one away."""
    where = f"{ROOT}.guards"
    allowed = tuple(f.name for f in dataclasses.fields(Guard))
    guards = dict(rails.DEFAULT)
    for name, fields in _mapping(where, mapping).items():
        guards.pop(name, None)
        if fields is not None:
            at = f"{where}.{name}"
            checked = _checked(at, Guard, _mapping(at, fields), allowed)
            guards[name] = _built(f"{ROOT}.guards.{name}", Guard, checked)
    for name in (*_mapping(where, mapping), *guards):
        if name not in (known := known_names(correction)):
            raise ConfigError(
                f"{where}: unknown metric '{name}'{did_you_mean(name, known)} (see docs/metrics.md)"
            )
    return guards


def _mapping(where: str, value: Any) -> Mapping[str, Any]:
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"{where}: expected a mapping, got {value!r}")
    return value or {}


def _preset(name: Any) -> Correction:
    if not isinstance(name, str):
        raise ConfigError(f"{ROOT}.preset: expected a name, got {name!r}")
    try:
        return presets.get(name)
    except ConfigError as error:
        raise ConfigError(f"{ROOT}.{error}") from None


def _steps(listed: Any) -> tuple:
    if not isinstance(listed, list | tuple):
        raise ConfigError(
            f"{ROOT}.steps: expected a list of steps, got {listed!r}: each step is its name with its fields"
        )
    steps = [_named(f"{ROOT}.steps[{i}]", "step", entry, KNOWN_STEPS) for i, entry in enumerate(listed)]
    _forbid_idle(steps)
    return tuple(step.plain() if hasattr(step, "plain") else step for step in steps)


def _forbid_idle(steps: list[Step]) -> None:
    """Steps that could not act: a bound with no weight before it, a weight that a later step sets anew."""
    setter = None
    for i, step in enumerate(steps):
        name = next(key for key, cls in KNOWN_STEPS.items() if isinstance(step, cls))
        if isinstance(step, WEIGHTS):
            if setter is not None:
                raise ConfigError(
                    f"{ROOT}.steps[{i}].{name}: expected one step that sets weights, got a second after "
                    f"steps[{setter}]: it would undo the first"
                )
            setter = i
        if isinstance(step, Truncate | Clip | ZeroOutside) and setter is None:
            raise ConfigError(
                f"{ROOT}.steps[{i}].{name}: expected a reweight step before it, got none: "
                "weights are 1 there and it would never act"
            )


def _named(where: str, kind: str, entry: Any, known: Mapping[str, type]) -> Any:
    if isinstance(entry, str):
        entry = {entry: {}}
    if not isinstance(entry, Mapping) or len(entry) != 1:
        raise ConfigError(
            f"{where}: expected one {kind} with its fields, got {entry!r}: write {{name: {{field: value}}}}"
        )
    ((name, fields),) = entry.items()
    if name not in known:
        raise ConfigError(_unknown(where, kind, name, known))
    fields = {} if fields is None else fields
    if not isinstance(fields, Mapping):
        raise ConfigError(f"{where}.{name}: expected a mapping of its fields, got {fields!r}")
    cls = known[name]
    allowed = tuple(f.name for f in dataclasses.fields(cls))
    return _built(where, cls, _checked(f"{where}.{name}", cls, fields, allowed))


def _checked(where: str, cls: type, values: Mapping[str, Any], allowed: tuple[str, ...]) -> dict[str, Any]:
    """Values against the types of a dataclass: closed, and without conversions that would hide a mistake."""
    try:
        return _model(cls, allowed).model_validate(dict(values)).model_dump(exclude_unset=True)
    except ValidationError as error:
        raise ConfigError(_one_line(where, error, allowed)) from None


@functools.cache
def _model(cls: type, allowed: tuple[str, ...]) -> Any:
    hints = get_type_hints(cls)
    return create_model(cls.__name__, __config__=CLOSED, **{name: (hints[name], None) for name in allowed})


def _built(where: str, cls: type, fields: Mapping[str, Any]) -> Any:
    try:
        return cls(**fields)
    except ConfigError as error:
        raise ConfigError(f"{where}.{error}") from None


def _one_line(where: str, error: ValidationError, allowed: tuple[str, ...]) -> str:
    first = error.errors()[0]
    key = str(first["loc"][0])
    if first["type"] == "extra_forbidden":
        return _unknown(where, "key", key, allowed)
    expected = first["msg"].removeprefix("Input should be ").replace("a valid ", "a ")
    return f"{where}.{key}: expected {expected}, got {first['input']!r}{_advice(first['input'])}"


def _advice(value: Any) -> str:
    """What a text that looks like a number was meant to be."""
    try:
        number = float(value) if isinstance(value, str) else None
    except ValueError:
        return ""
    if number is None:
        return ""
    return (
        f": YAML 1.1 reads it as text; write {number:.1e}"
        if "e" in value.lower()
        else ": take off the quotes"
    )


def _unknown(where: str, kind: str, name: Any, known: Any) -> str:
    names = ", ".join(sorted(known))
    return f"{where}: unknown {kind} '{name}'{did_you_mean(str(name), known)} (known: {names})"


@functools.cache
def _say_once(note: str) -> None:
    log.warning("%s: %s", ROOT, note)


def _same_as_args(key: str, value: float, args: Any) -> None:
    host = getattr(args, key, None)
    host = getattr(args, "eps_clip", None) if host is None else host
    if host is not None and abs(host - value) > 1e-12:
        flag = f"--{key.replace('_', '-')}"
        raise ConfigError(
            f"{ROOT}.fireworks.{key}: expected {host:g}, the {flag} of this run, got {value:g}: "
            "the host clips by its flag; make them agree"
        )


def _forbid_double_count(args: Any) -> None:
    steps, kept = getattr(args, "num_steps_per_rollout", None) or 1, getattr(args, "keep_old_actor", False)
    if steps > 1 or kept:
        why = "its loss counts target / proximal already; use surrogate: reinforce"
        raise ConfigError(
            f"{ROOT}.numerator: expected proximal beside the host's surrogate with "
            f"{'--keep-old-actor' if kept else f'--num-steps-per-rollout {steps}'}, got target: {why}"
        )


def _refuse_flag(flag: str, expected: str, got: str, why: str) -> None:
    raise ConfigError(f"{flag}: expected {expected}, got {got}: {why}")
