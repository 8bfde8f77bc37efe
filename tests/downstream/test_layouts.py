"""One correction, one loss, in every layout of every real host, whichever way the target's log-probs arrive.

``init`` alone measures beside whatever else corrects, and the host's loss is what it was.

``HOSTS=path/to/hosts pytest tests/downstream``, a folder of checkouts, or SLIME_DIR, MILES_DIR.
``python -m tests.downstream.layouts`` prints the same as a table.
"""

from __future__ import annotations

import math

import pytest

from slime_ext import presets
from slime_ext.core.metrics.names import scalars
from tests.core.metrics.test_statistics import accumulated
from tests.downstream.checkouts import patch_of
from tests.downstream.host_loss import MASKED_OUT, ROLLOUT_IDS, VALID_AT, WITH_NAN, samples
from tests.downstream.layouts import (
    BOUND,
    DOORS,
    HOOKS,
    MEASURED_ONLY,
    VARIANT_LAYOUTS,
    apart,
    distance,
    fits,
    layouts_of,
    measured_patched,
    others,
)

pytestmark = [pytest.mark.slow]


@pytest.mark.parametrize("door", DOORS)
def test_every_door_fits(measured, door):
    assert fits(found := DOORS[door](measured)), (found, apart(measured, "corrections"))


def test_as_much_ran_as_this_release_has(host, measured):
    assert len(apart(measured, "corrections")) == len(layouts_of(host)) - 2 >= 9
    assert len(apart(measured, "coupled")) == 12
    for layout in VARIANT_LAYOUTS:
        assert len(measured[f"beside, {layout}"]) == 1 + 2 * len(others(host)) >= 7


def test_what_init_measures_is_written_out_in_float64(measured):
    columns = ("proximal", "behavior", "mask", "advantage")
    batch = [{key: getattr(s, key).tolist() for key in columns} for s in samples()]
    batch = [one | {"target": one["proximal"], "host_loss": one["advantage"]} for one in batch]
    wanted = scalars(accumulated(presets.get("metrics_only"), batch))
    for layout in VARIANT_LAYOUTS:
        for seen in measured[f"beside, {layout}"][2::2]:
            assert seen["ours"] == pytest.approx(wanted, rel=1e-5, abs=1e-7)


def test_a_patched_host_gives_the_same_numbers(host, measured, tmp_path):
    if not patch_of(host.folder).is_file():
        pytest.skip("patches/ has none for this tree")
    for found in measured_patched(host, tmp_path).values():
        assert distance(measured["corrections, 1 process"], found) < BOUND


def test_corrections_differ_from_each_other_and_from_none(measured):
    found = (*measured["no hook, 1 process"], *measured["corrections, 1 process"])
    assert len({round(one["loss"], 3) for one in found}) == len(found)


def test_metrics_alone_leave_the_loss_bitwise_as_it_is(measured):
    (without,) = measured["no hook, CP2"]
    for preset, found in zip(MEASURED_ONLY, measured["metrics alone"], strict=True):
        assert (found["loss"], found["gradient"]) == (without["loss"], without["gradient"]), preset
        assert "off_policy/host/ratio" in found["metrics"], preset


def test_a_nan_of_the_behavior_policy_costs_one_token(measured):
    for hook in HOOKS:
        for key in (f"nan, {hook}, 1 process", f"nan, {hook}, CP2"):
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
    assert "--custom-megatron-init-path: expected slime_ext.host.init" in found["error"]
    assert "reads cur_log_probs" in found["error"]


def test_every_step_that_couples_samples_acts(measured):
    found = (*measured["coupled alone"], *measured["coupled, 1 process"])
    # Before v0.3.0 the reduced masks divide, and then "kept" has nothing left to do.
    assert len({round(one["loss"], 4) for one in found}) >= len(found) - 2


def test_slimes_own_example_depends_on_packing_and_ours_does_not(measured):
    if "mis.py, 1" not in measured:
        pytest.skip("an example of slime since v0.3.0")
    (mis, ours), (mis_cut, ours_cut) = measured["mis.py, 1"], measured["mis.py, 2"]
    assert abs(mis["loss"] - mis_cut["loss"]) > 1e-3
    assert distance([ours], [ours_cut]) < BOUND
    assert abs(mis["loss"] - ours["loss"]) < BOUND
