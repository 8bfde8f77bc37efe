"""Reads typed values from another system's block. Refuses unknown keys, and names the full key in errors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from slime_ext.config.numbers import as_number
from slime_ext.core.fields import FLOAT32, is_float32
from slime_ext.errors import ConfigError, check_known, quoted

KEPT = "on-policy data (ratio 1) must be kept"
SAFE = 20.0  # these systems clamp log-ratios to [-20, 20] before the exponential
LARGEST = 3e38  # no bound, in a step that must have one; the largest float32 is 3.4e38
SHRINK = "below 1 it would shrink on-policy tokens"


def is_interpolated(value: Any) -> bool:
    """Whether OmegaConf would replace a value, as for ``${trainer.level}`` or ``${oc.env:NAME}``."""
    items = value if isinstance(value, list | tuple) else [value]
    return any(isinstance(item, str) and "${" in item for item in items)


def forbid_interpolation(where: str, value: Any) -> None:
    """Raises ConfigError for an interpolation, because only the system that wrote it can resolve it."""
    if is_interpolated(value):
        raise ConfigError(
            f"{where}: expected a value, got an interpolation: write the value that it stands for"
        )


@dataclass(frozen=True)
class Reading:
    """The translation of a block.

    Args:
        mapping: native keys, as under ``slime_ext:``.
        notes: one line for each surprising meaning.
        args: dest name -> value of the host's arguments without which the meaning would change.
    """

    mapping: dict[str, Any]
    notes: tuple[str, ...] = ()
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Block:
    """Another system's mapping, the path that leads to it, and what a reader has read of it so far.

    A reader reads a key only where the system does. ``unread`` then names the settings that the system
    ignores, so that no reader has to list them.

    Args:
        where: the path, for messages.
        values: the mapping.
        defaults: every key that the system has here, with the system's own default.
    """

    where: str
    values: Mapping[str, Any]
    defaults: Mapping[str, Any]
    _read: set[str] = field(default_factory=set, compare=False)
    _parts: dict[str, Block] = field(default_factory=dict, compare=False)

    @classmethod
    def closed(cls, where: str, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> Block:
        """Builds a block. Raises ConfigError for a key that the system lacks, or for an interpolation."""
        for key, value in values.items():
            check_known(where, "key", key, list(defaults))
            inside = value.items() if isinstance(value, Mapping) else ()
            for path, each in ((key, value), *((f"{key}.{inner}", each) for inner, each in inside)):
                forbid_interpolation(f"{where}.{path}", each)
        return cls(where, values, defaults)

    def unread(self) -> list[str]:
        """Returns the keys, dotted, that nothing has read and whose values are not the system's defaults."""
        keys = [key for key in self.values if key not in self._read and self.differs(key)]
        for name, part in self._parts.items():
            keys += [f"{name}.{key}" for key in part.unread()]
        return keys

    def differs(self, key: str) -> bool:
        """Whether a key has another value than the system's default. Null is no value."""
        return self.has(key) and not _is_same(self.values[key], self.defaults[key])

    def has(self, key: str) -> bool:
        """Whether the block has the key with a value other than null. This does not count as reading it."""
        return self.values.get(key) is not None

    def get(self, key: str) -> Any:
        """Returns a value of any kind; the system's default if the key is absent."""
        self._read.add(key)
        return self.values.get(key, self.defaults[key])

    def part(self, key: str, defaults: Mapping[str, Any], *, among_others: bool = False) -> Block:
        """Returns a nested mapping as a block; null is an empty one. Its unread keys are this block's.

        Args:
            defaults: the keys of the mapping, with the system's defaults.
            among_others: whether the mapping has keys of other parts of the system, too.
        """
        nested = self.get(key)
        if not isinstance(nested, Mapping | None):
            self.refuse(key, "a mapping")
        if among_others:
            nested = {name: value for name, value in (nested or {}).items() if name in defaults}
        return self._parts.setdefault(key, Block.closed(f"{self.where}.{key}", nested or {}, defaults))

    def number(self, key: str, *, least: float | None = None) -> float | None:
        """Returns a number of at least ``least``. It may be a text, because YAML 1.1 reads 1e-4 as text."""
        value = self.get(key)
        if value is None:
            return None
        number = as_number(value)
        if number is None:
            self.refuse(key, "a finite number")
        if not is_float32(number):
            self.refuse(key, FLOAT32)
        if least is not None and number < least:
            self.refuse(key, f"a number >= {least:g}", SHRINK if least == 1 else "")
        return number

    def required_number(self, key: str, *, least: float | None = None) -> float:
        """Returns a number that may not be null."""
        number = self.number(key, least=least)
        if number is None:
            self.refuse(key, "a number")
        return number

    def positive(self, key: str) -> float | None:
        """Returns a number above 0."""
        number = self.number(key)
        if number is not None and number <= 0:
            self.refuse(key, "a number > 0")
        return number

    def temperature(self, key: str) -> float:
        """Returns a temperature of SAPO, whose weights are undefined at 0."""
        self.positive(key)
        return self.required_number(key)

    def choice(self, key: str, allowed: Sequence[str]) -> Any:
        """Returns one of the allowed words; the system's default if the key is absent or null."""
        value = self.get(key)
        if value is None:
            return self.defaults[key]
        check_known(f"{self.where}.{key}", "value", value, [*allowed, "null"])
        return str(value)

    def flag(self, key: str) -> bool:
        """Returns true or false."""
        value = self.get(key)
        if not isinstance(value, bool):
            self.refuse(key, "true or false")
        return value

    def required(self, key: str, why: str) -> None:
        """Raises ConfigError if the key is absent or null."""
        if not self.has(key):
            self.refuse(key, "a value", why)

    def refuse(self, key: str, expected: str, why: str = "") -> NoReturn:
        """Raises ConfigError with one line about a key."""
        got = quoted(self.values[key]) if key in self.values else "nothing"
        raise ConfigError(f"{self.where}.{key}: expected {expected}, got {got}{': ' if why else ''}{why}")

    def interval(self, key: str, low: float, high: float) -> tuple[float, float]:
        """Returns the bounds of a ratio, which must contain 1. Errors name ``key``."""
        if low > high:
            self.refuse(key, f"low <= high, but low is {low:g} and high is {high:g}")
        if not low <= 1 <= high:
            self.refuse(key, f"bounds around 1, but they are {low:g} and {high:g}", KEPT)
        return low, high


def _is_same(value: Any, default: Any) -> bool:
    """Whether a value is the default, if a number may be a text."""
    return value == default or (as_number(value) is not None and as_number(value) == as_number(default))


def native(
    steps: list[dict[str, Any]],
    notes: Sequence[str] = (),
    numerator: str = "proximal",
    surrogate: str | Mapping[str, Any] = "host",
    **more: Any,
) -> Reading:
    """Returns a whole correction with these steps; ``more`` are other native keys."""
    mapping = {"numerator": numerator, "surrogate": surrogate, **more, "steps": steps}
    return Reading(mapping, tuple(notes))


def capped(level: str, high: float, **more: Any) -> list[dict[str, Any]]:
    """Returns the native steps that weight by min(ratio at a level, high)."""
    return [{"reweight": {"level": level, **more}}, {"truncate": {"high": high}}]


def bounded(level: str, how: str, low: float | None, high: float | None) -> list[dict[str, Any]]:
    """Returns the native steps that weight by the ratio at a level, inside [low, high].

    Args:
        level: token, sequence or geometric.
        how: ``truncate`` clips a weight to the bounds, ``mask`` makes it 0 beyond them.
        low: the lower bound; None or at most 0 for no bound.
        high: the upper bound; None for no bound.
    """
    weigh = {"reweight": {"level": level}}
    if low is None or low <= 0:
        if high is None:
            return [weigh]
        return capped(level, high) if how == "truncate" else inside(level, 0.0, high)
    high = LARGEST if high is None else high
    return inside(level, low, high) if how == "mask" else [weigh, {"clip": {"low": low, "high": high}}]


def inside(level: str, low: float, high: float, **more: Any) -> list[dict[str, Any]]:
    """Returns the native steps that weight by the ratio inside [low, high], else by 0."""
    unit = {"unit": level} if level == "token" else {"unit": level, "aggregate": "sum"}
    weigh = {"reweight": {"level": level, **more}}
    return [weigh, {"zero_outside": {**unit, "low": low, "high": high}}]


def reject(unit: str, aggregate: str, low: float | None, high: float | None, **more: Any) -> dict[str, Any]:
    """Returns the native step that drops units whose statistic leaves [low, high]."""
    how = {} if unit == "token" else {"aggregate": aggregate}
    bounds = {k: v for k, v in {"low": low, "high": high}.items() if v is not None}
    return {"reject": {"unit": unit, "statistic": "ratio", **how, **bounds, **more}}


def band(level: str, low: float, high: float) -> dict[str, Any]:
    """Returns the native step that drops units whose ratio leaves [low, high].

    Args:
        level: token, turn, sequence or geometric.
        low, high: the bounds of the ratio.
    """
    unit, aggregate = ("sequence", "mean") if level == "geometric" else (level, "sum")
    return reject(unit, aggregate, low, high)


def veto(block: Block, key: str) -> list[dict[str, Any]]:
    """Returns the native step that drops sequences with a token ratio below a threshold.

    Returns no step if the block has no threshold under ``key``.
    """
    low = block.positive(key)
    if low is None:
        return []
    block.interval(key, low, math.inf)
    return [{"veto": {"low": low}}]
