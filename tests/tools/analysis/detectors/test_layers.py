"""Outputs of both sides' layers over one text, and distances that no rounding makes."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest

from slime_ext.tools.analysis.detectors import prefix_mismatch
from slime_ext.tools.analysis.detectors.shared.healthy import is_healthy
from slime_ext.tools.analysis.findings import examine
from slime_ext.tools.analysis.measures.layer_outputs import LayerDistance
from tests.tools.analysis.detectors.toys import Policy, diagnosed, edited, findings, run

ROUNDOFF = 2**-8  # of bfloat16


def layers(*roundings):
    """Layer distances, each in roundings of bfloat16 times the root of the number of layers."""
    sizes = enumerate(roundings)
    return tuple(LayerDistance(i, n * ROUNDOFF * math.sqrt(i + 1), ROUNDOFF) for i, n in sizes)


@cache
def rounded(noise):
    policy = Policy()
    return diagnosed(run(policy=policy, sampler=policy.table + noise * policy.normal(60, 60)))


def found_in(d, outputs):
    return {finding.name: finding for finding in examine(replace(d, layers=outputs))[0]}


@pytest.mark.parametrize(
    ("noise", "roundings", "first", "others"),
    [
        (0.25, (1.2, 80), 1, ()),
        (0.25, (5, 80), 1, ()),
        (0.25, (1.2, 5), 1, ("quantised",)),
        (0.25, (1.2, 44), 1, ("quantised",)),  # as weights in 4 bits make it
        (0.01, (1.2, 80), 1, ()),
    ],
)
def test_the_first_layer_beyond_rounding_is_named_and_what_rounded_weights_may_make(
    noise, roundings, first, others
):
    found = found_in(rounded(noise), layers(*roundings))
    assert set(found) == {"layer"} and found["layer"].or_else == others
    assert f"ayer {first} is the first" in found["layer"].title
    assert found["layer"].severity == ("warning" if others else "error")


@pytest.mark.parametrize(("noise", "roundings"), [(0.01, (5, 6)), (0.01, (1.2, 1.3)), (0.25, (1.2, 1.3))])
def test_outputs_within_rounding_are_no_finding(noise, roundings):
    """Five roundings are what rounded weights make, which is no fault while all numbers are healthy."""
    assert "layer" not in found_in(rounded(noise), layers(*roundings))


@pytest.mark.parametrize(("roundings", "is_named"), [((1.1, 1.2), True), ((1.1, 5.0), False)])
def test_another_text_is_ruled_out_where_outputs_over_the_same_text_differ(roundings, is_named):
    """The first tokens of each response are far off, as without sinks, whose share is largest there."""
    far = edited(
        run(), lambda r: {"proximal": r.proximal - 0.8 * (r.segments.within < 8) * (r.tokens % 3 - 1)}
    )
    d = diagnosed(far)
    d.layers = layers(*roundings)
    assert (prefix_mismatch.look(d) is not None) is is_named


@pytest.mark.parametrize(("falls", "is_named"), [(1.0, False), (0.95, True)])
def test_a_distance_that_falls_along_the_response_is_no_rounding(falls, is_named):
    """k3 is healthy, and another prompt would leave the layers over one text as they are."""
    policy = Policy()
    sampler = policy.table + 0.1 * policy.normal(60, 60)

    def faded(r):
        log_ratio = (r.proximal - r.behavior) * falls**r.segments.within
        return {"proximal": r.behavior + log_ratio}

    d = diagnosed(edited(run(8, policy=policy, sampler=sampler), faded))
    assert is_healthy(d)
    assert ("layer" in found_in(d, layers(1.2, 6))) is is_named


def test_what_rounding_cannot_make_is_another_policy_or_other_arithmetic():
    policy = Policy(moves=0.05)
    found = findings(run(4, policy=policy, sampler=policy.table + 8.0 * policy.normal(60, 60)))
    assert set(found) == {"another_policy"} and found["another_policy"].or_else == ("layer",)
    assert "further off than rounding makes" in found["another_policy"].title


def test_log_probs_of_other_tokens_are_no_other_policy():
    """They lie on both sides, so the mean ratio is far above 1."""
    policy = Policy()
    loud = run(4, policy=policy, sampler=policy.table + 8.0 * policy.normal(60, 60))
    swapped = edited(loud, lambda r: {"behavior": r.proximal, "proximal": r.behavior})
    assert "another_policy" not in findings(swapped)
