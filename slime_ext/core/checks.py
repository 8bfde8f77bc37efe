"""Which combinations a correction refuses: what would count a ratio twice, or could not act."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from slime_ext.core.centering import Center, check_center
from slime_ext.core.losses import Reinforce, Surrogate
from slime_ext.core.state import Step, expect, weight_ranges
from slime_ext.core.steps import EssTruncate, Normalize
from slime_ext.core.terms import Term


class Parts(Protocol):
    """What a correction is put together from; its fields, and two properties."""

    numerator: str
    surrogate: Surrogate
    steps: Sequence[Step]
    denominator: str
    group: str
    is_identity: bool
    sets_weights: bool
    mask_scope: str
    terms: Sequence[Term]
    center: Center | None


def check(correction: Parts) -> None:
    """Raises ConfigError unless the parts of a correction fit each other."""
    _forbid_double_count(correction)
    _check_relations(correction)
    _check_added(correction)
    for i, step in enumerate(correction.steps):
        if step.is_coupled:
            _check_coupled(correction, i)


def _check_coupled(correction: Parts, i: int) -> None:
    """Whether the number of the coupled step with this index can be known, and is wanted once."""
    step, before = correction.steps[i], correction.steps[:i]
    expect(step not in before, f"steps[{i}]", "a coupled step once", step, "it computes one number")
    expect(
        correction.numerator == "proximal",
        "numerator",
        f"proximal with {step}",
        correction.numerator,
        "a number for the whole optimizer step must be known before it begins",
    )
    low, high, _ = weight_ranges(before)[-1]
    expect(
        low < high < math.inf or not isinstance(step, Normalize),
        f"steps[{i}].normalize",
        "a truncate or clip step before it",
        "none",
        "an unbounded weight would decide the mean alone",
    )


def _check_added(correction: Parts) -> None:
    """Whether what is added to the loss of a token can act, and reaches rejected ones."""
    for name, is_there in {"terms": correction.terms, "center": correction.center}.items():
        if not is_there:
            continue
        for key, idle in {"mask_scope": "policy", "denominator": "host"}.items():
            value = getattr(correction, key)
            expect(value == idle, key, f"{idle} beside {name}", value, "it is added at rejected tokens, too")
    has_cap = any(isinstance(step, EssTruncate) for step in correction.steps)
    for i, term in enumerate(correction.terms):
        why = "its cap is the effective sample size that the term reads"
        expect(has_cap or not term.reads_ess, f"terms[{i}]", "the step ess_truncate beside it", "none", why)
    if correction.center is not None:
        surrogate = type(correction.surrogate).__name__
        why = "what is centered is the score, grad log p of the policy being trained"
        is_score = isinstance(correction.surrogate, Reinforce)
        expect(is_score, "surrogate", "reinforce beside center", surrogate, why)
        expect(
            correction.numerator == "target", "numerator", "target beside center", correction.numerator, why
        )
        check_center(correction.steps)


def _check_relations(correction: Parts) -> None:
    """Whether what relates samples can be known before the optimizer step, and can act."""
    keys = ("denominator", correction.denominator, "host"), ("group", correction.group, "ignore")
    for key, value, idle in keys:
        if value == idle:
            continue
        expect(not correction.is_identity, key, f"{idle} without steps", value, "nothing would be rejected")
        expect(
            correction.numerator == "proximal",
            "numerator",
            f"proximal with {key}: {value}",
            correction.numerator,
            "what is rejected must be known before the optimizer step begins",
        )
    reading = any(step.reads_advantages for step in correction.steps)
    expect(
        correction.group != "rebaseline" or not reading,
        "group",
        "ignore or atomic beside a step that reads advantages",
        correction.group,
        "what is rejected would depend on the advantages that it changes",
    )


def _forbid_double_count(correction: Parts) -> None:
    anchor = getattr(correction.surrogate, "anchor", None)
    if anchor is None or not correction.sets_weights:
        return
    expect(
        anchor != "behavior",
        "surrogate.anchor",
        "proximal beside a step that sets weights",
        anchor,
        "this surrogate divides by the behavior policy already; drop the step, or surrogate: reinforce",
    )
    expect(
        correction.numerator != "target",
        "numerator",
        "proximal with this surrogate",
        correction.numerator,
        "target / proximal would be counted twice; use numerator: proximal, or surrogate: reinforce",
    )
