"""Holds the result of reading a mapping."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from slime_ext.core.correction import Correction
from slime_ext.core.metrics import guards
from slime_ext.core.metrics.guards import Guard
from slime_ext.core.metrics.options import Options


@dataclass(frozen=True)
class Loaded:
    """What a mapping describes: the correction, its guards and metrics, and notes for the user."""

    correction: Correction
    notes: tuple[str, ...] = ()
    guards: Mapping[str, Guard] = field(default_factory=lambda: guards.DEFAULT)
    metrics: Options = field(default_factory=Options)
