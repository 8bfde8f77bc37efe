"""Two runs of a real host, the wheel of miles, with faults in them; ``real_faults`` has more."""

from __future__ import annotations

import pytest

from slime_ext.errors import ConfigError
from slime_ext.tools.without_cuda import driver
from tests.downstream.real_faults import FAULTS, ROLLOUTS, run, steps_of

pytestmark = [pytest.mark.slow]


@pytest.fixture(autouse=True)
def _needs_the_host_environment():
    try:
        driver.wheel_folder()
    except ConfigError as error:
        pytest.skip(str(error))


def ran(name, folder):
    """The log of a run that went as its fault says."""
    row = run(name, FAULTS[name], driver.WHEEL, folder)
    log = (row["folder"] / "log").read_text(errors="replace")
    assert not row["wrong"], f"{row}\n{log[-4000:]}"
    return row["folder"], log.splitlines()


def test_broken_log_probs_of_old_weights_are_rejected_and_said(tmp_path):
    """Sampled asynchronously, so that from the second rollout on the trainer is a version ahead."""
    folder, log = ran("nan, a version old", tmp_path)
    steps = steps_of(folder)
    assert [step["off_policy/staleness_mean"] for step in steps] == [0.0, *[1.0] * (ROLLOUTS - 1)]
    (begun,) = (line for line in log if " slime_ext: " in line and "; backend " in line)
    assert "token_tis: proximal / behavior" in begun
    assert "miles: init passes cur_log_probs and advantages" in begun
    certificates = [line for line in log if "slime_ext: certificate, weights " in line]
    assert "weights 1: sound" in certificates[0]
    assert "10 of 10 tensors changed with the push" in certificates[1]
    (warned,) = (
        line for line in log if "rollout_log_probs: expected finite ones, at most 0, got others" in line
    )
    assert "(rollout_id 0, step_id 0)" in warned
    shown = tensorboard_of(folder)
    for name in (name for name in steps[0] if name.startswith("off_policy/") and "by_" not in name):
        told = [step[name] for step in steps if name in step]  # a certificate is not of every step
        assert shown[f"train/{name}"] == pytest.approx(told, rel=1e-6), name


def test_a_guard_stops_the_run_and_its_line_is_the_last_on_the_screen(tmp_path):
    _, log = ran("guard", tmp_path)
    assert log[-1].startswith("slime_ext: off_policy/ratio_max: expected at most 0, got ")
    assert "(rollout_id 0, step_id 0): the run stops" in log[-1]


def tensorboard_of(folder):
    """The values of every scalar, in the order of the steps."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = {}
    for file in (folder / "tensorboard").rglob("events*"):
        events = EventAccumulator(str(file)).Reload()
        found |= {tag: [point.value for point in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    return found
