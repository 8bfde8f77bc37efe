"""Compares what a correction needs with what the place that runs it offers.

``Correction.needs`` and ``Step.needs`` say what is read. Each place has one constant that says what it
offers, and ``require`` refuses every other need.
"""

from __future__ import annotations

from collections.abc import Set
from enum import Enum

from slime_ext.errors import ConfigError


class Need(Enum):
    """What a correction reads or returns besides log-probs and the loss per token.

    The value names the part of a configuration that causes the need; messages show it.
    """

    TARGET = "part that reads the target's log-probs"
    ADVANTAGES = "part that reads advantages"
    WHOLE_STEP = "step coupled over the optimizer step"
    GROUPS = "group"
    KEPT_COUNT = "denominator: kept"
    MASKS = "mask_scope: all"
    AGES = "max_staleness"
    AGE_STEPS = "max_staleness_steps"
    HEAD = "center"


PLANNED = frozenset({Need.WHOLE_STEP, Need.GROUPS, Need.KEPT_COUNT})  # computed before the step is trained
ANY_AGE = frozenset({Need.AGES, Need.AGE_STEPS})


def lacking(needs: Set[Need], offers: Set[Need]) -> list[Need]:
    """Lists the needs that are not offered, in the order of ``Need``."""
    return [need for need in Need if need in needs and need not in offers]


def require(needs: Set[Need], offers: Set[Need], where: str, why: str) -> None:
    """Raises ConfigError if a correction needs something that a place does not offer.

    Args:
        needs: ``Correction.needs``.
        where: the name of the correction at that place, for the message.
        why: what the place lacks, or what to do.

    >>> from slime_ext import presets
    >>> require(presets.get("m2").needs, {Need.TARGET}, "slime_ext", "the loss sees one micro-batch")
    Traceback (most recent call last):
    slime_ext.errors.ConfigError: slime_ext: expected no step coupled over the optimizer step, got one: \
the loss sees one micro-batch
    """
    for need in lacking(needs, offers):
        raise ConfigError(f"{where}: expected no {need.value}, got one: {why}")
