"""One correction, one loss: in every layout of every real host, whichever way the target's log-probs arrive.

``HOSTS=path/to/hosts pytest tests/downstream``, a folder of checkouts, or SLIME_DIR, MILES_DIR.
``python -m tests.downstream.layouts`` prints the same as a table.

Bound: the hosts compute in float32 and sum about 40 terms of size 1, in an order that the layout decides.
"""

from __future__ import annotations

import math

import pytest

from tests.downstream.host_loss import MASKED_OUT, ROLLOUT_IDS, VALID_AT, WITH_NAN, samples
from tests.downstream.layouts import (
    HOOKS,
    MEASURED_ONLY,
    PER_TOKEN_LAYOUTS,
    apart,
    distance,
    jobs_of,
    layouts_of,
    patched,
    patched_jobs,
    run_all,
)

BOUND = 1e-6
pytestmark = [pytest.mark.slow]


def test_the_same_loss_and_gradient_in_every_layout(host, measured):
    found = apart({key: measured[key] for key in jobs_of(host.name, host.folder)})
    assert len(found) == len(layouts_of(host.name, host.folder)) + len(PER_TOKEN_LAYOUTS) >= 11
    assert max(found.values()) < BOUND, found


def test_a_patched_host_gives_the_same_numbers(host, measured, tmp_path):
    found = run_all(host.name, patched(host.name, host.folder, tmp_path), patched_jobs())
    assert all(distance(measured["1 process"], one) < BOUND for one in found.values())


def test_corrections_differ_from_each_other_and_from_none(measured):
    losses = [round(one["loss"], 3) for one in (*measured["no hook"], *measured["1 process"])]
    assert len(set(losses)) == len(losses)


def test_metrics_alone_leave_the_loss_bitwise_as_it_is(measured):
    (without,) = measured["no hook, CP2"]
    for preset, found in zip(MEASURED_ONLY, measured["metrics alone"], strict=True):
        assert (found["loss"], found["gradient"]) == (without["loss"], without["gradient"]), preset
        assert "off_policy/host/ratio" in found["metrics"], preset


def test_a_nan_of_the_behavior_policy_costs_one_token(measured):
    for hook in HOOKS:
        for key in (f"nan, {hook}", f"nan, {hook}, CP2"):
            clean, masked, valid = measured[key]
            assert (masked["loss"], masked["gradient"]) == (clean["loss"], clean["gradient"]), key
            assert math.isfinite(valid["loss"]) and math.isfinite(valid["gradient"]), key
            assert valid["loss"] != clean["loss"], key
            assert _counted(valid, hook) - _counted(clean, hook) == pytest.approx(1, abs=1e-4), key


def _counted(found, hook):
    """Tokens that the host's channel reports as lost: it averages over the sample, then over rollouts."""
    key = "off_policy/host/rejected" if hook == "correct" else "nonfinite_fraction"
    return found["metrics"][key] * len(set(ROLLOUT_IDS)) * float(samples()[WITH_NAN].mask_sum)


def test_a_nan_of_the_proximal_policy_stops_with_sample_and_position(measured):
    (found,) = measured["nan of the proximal policy"]
    assert found["error"].startswith("NonFiniteError: train_log_probs, sequence 2 of 8, response token 1:")
    assert (WITH_NAN, VALID_AT) == (2, 1) and MASKED_OUT != WITH_NAN


def test_without_init_a_correction_that_needs_the_target_names_the_flag(measured):
    (found,) = measured["without init"]
    assert "expected cur_log_probs" in found["error"]
    assert "--custom-megatron-init-path slime_ext.host.init" in found["error"]
