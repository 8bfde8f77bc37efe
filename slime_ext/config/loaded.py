"""What a mapping was read into."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slime_ext.core.correction import Correction
from slime_ext.core.metrics import guards
from slime_ext.core.metrics.guards import Guard
from slime_ext.core.metrics.options import Options


@dataclass(frozen=True)
class Loaded:
    """A mapping that was read: what runs, and what its reader should know."""

    correction: Correction
    notes: tuple[str, ...] = ()
    args: Mapping[str, Any] = field(default_factory=dict)  # what the host's arguments must say
    guards: Mapping[str, Guard] = field(default_factory=lambda: guards.DEFAULT)
    metrics: Options = field(default_factory=Options)
    backend: str = "eager"
