"""A run of a real host, the wheel of miles, with faults in it; ``real_faults`` has more."""

from __future__ import annotations

import pytest

from slime_ext.errors import ConfigError
from slime_ext_cpu import driver
from tests import host_server
from tests.downstream.real_faults import FAULTS, ROLLOUTS, run, steps_of
from tests.ranks import GROUP

pytestmark = [pytest.mark.slow, pytest.mark.host, pytest.mark.xdist_group(GROUP)]


@pytest.fixture(autouse=True)
def _needs_the_host_environment():
    try:
        driver.wheel_folder()
    except ConfigError as error:
        pytest.skip(str(error))


def test_broken_log_probs_of_old_weights_are_rejected_and_said_until_a_guard_stops_the_run(
    tmp_path, monkeypatch
):
    """Sampled asynchronously, so that from the second rollout on the trainer is a version ahead."""
    for variable, value in host_server.shared().items():
        monkeypatch.setenv(variable, value)
    name = "nan, a version old, guarded"
    row = run(name, FAULTS[name], driver.WHEEL, tmp_path)
    folder, text = row["folder"], (row["folder"] / "log").read_text(errors="replace")
    assert not row["wrong"], f"{row}\n{text[-4000:]}"
    steps, log = steps_of(folder), text.splitlines()
    assert [step["off_policy/staleness_mean"] for step in steps] == [0.0, *[1.0] * (ROLLOUTS - 1)]
    (begun,) = (line for line in log if " slime_ext: " in line and "passes cur_log_probs" in line)
    assert "token_tis: proximal / behavior" in begun
    assert "miles: init passes cur_log_probs and advantages" in begun
    certificates = [line for line in log if "slime_ext: certificate, weights " in line]
    assert "weights 1: sound" in certificates[0]
    assert "10 of 10 tensors changed with the push" in certificates[1]
    (warned,) = (
        line
        for line in log
        if "rollout_log_probs: expected log-probs above -1000 and at most 0, got other values" in line
    )
    assert "(rollout_id 0, step_id 0)" in warned
    assert log[-1].startswith("slime_ext: off_policy/staleness_max: expected at most 0, got 1 ")
    assert f"(rollout_id {ROLLOUTS - 1}, step_id 0): the run stops" in log[-1]
    shown, logged = tensorboard_of(folder), steps[:-1]  # the host logs a step when it has ended
    for name in (name for name in steps[0] if name.startswith("off_policy/") and "by_" not in name):
        told = [step[name] for step in logged if name in step]  # a certificate is not of every step
        assert shown[f"train/{name}"] == pytest.approx(told, rel=1e-6), name


def tensorboard_of(folder):
    """The values of every scalar, in the order of the steps."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = {}
    for file in (folder / "tensorboard").rglob("events*"):
        events = EventAccumulator(str(file)).Reload()
        found |= {tag: [point.value for point in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    return found
