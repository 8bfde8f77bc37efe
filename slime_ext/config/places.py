"""Lists where each of our keys belongs.

Messages say this when a key has lost its indentation under ``slime_ext:``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import Any

from slime_ext.config.load import KEYS, KNOWN_STEPS
from slime_ext.core.losses import SURROGATES
from slime_ext.core.metrics.guards import Guard
from slime_ext.core.metrics.names import EXACT, METRICS, STALENESS, STALENESS_STEPS
from slime_ext.core.metrics.options import Options
from slime_ext.core.terms import TERMS


def _keys() -> Iterator[tuple[str, Iterable[str]]]:
    yield "under slime_ext", KEYS
    yield "in a step's place under slime_ext.steps", KNOWN_STEPS
    yield "as a field of a step under slime_ext.steps", _fields(*KNOWN_STEPS.values())
    yield "in a term's place under slime_ext.terms", TERMS
    yield "under slime_ext.surrogate", [name for name, cls in SURROGATES.items() if fields(cls)]
    yield "as a field under slime_ext.surrogate", _fields(*SURROGATES.values())
    yield "as a field of a metric under slime_ext.guards", _fields(Guard)
    yield "under slime_ext.metrics", _fields(Options)
    yield "under slime_ext.guards", (*METRICS, *STALENESS, *STALENESS_STEPS, *EXACT)


def _fields(*classes: Any) -> list[str]:
    return [field.name for cls in classes for field in fields(cls)]


# If a key belongs to several places, this has the first one.
PLACES = {key: place for place, keys in reversed([*_keys()]) for key in keys}
