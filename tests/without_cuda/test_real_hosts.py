"""The plugin in real hosts, end to end: three launches, with everything that a cluster's run has but CUDA."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import slime_ext
from benchmarks import real_hosts, tiny_host
from slime_ext.errors import ConfigError
from slime_ext.without_cuda import driver, tiny

ROOT = Path(slime_ext.__file__).parents[1]
SLIME = Path(os.environ.get("HOSTS", "absent"), "slime-624b824")
pytestmark = [pytest.mark.slow, pytest.mark.host]
BF16 = 0.02  # of a layout against another, in bfloat16


@pytest.fixture(scope="module", autouse=True)
def environment():
    try:
        driver.host_python()
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """Model, rollouts and the plugin's files."""
    folder = tmp_path_factory.mktemp("hosts")
    real_hosts.prepare(folder)
    return folder


def trained(row):
    assert row["status"] == 0, row["error"]
    return row


def test_slime_trains_the_same_over_context_parallel_ranks_with_metrics_as_alone_without(out):
    if not SLIME.exists():
        pytest.skip("needs the folder HOSTS")
    alone = trained(real_hosts.run("slime/1/off", SLIME, out))
    both = trained(real_hosts.run("slime/cp2/metrics_only", SLIME, out))
    assert len(alone["loss"]) == 4 and both["grad_norm"] == pytest.approx(alone["grad_norm"], rel=BF16)
    assert both["loss"] == pytest.approx(alone["loss"], abs=0.003)
    assert alone["start_up_lines"] == 0 and both["start_up_lines"] == 1
    assert 0 < both["off_policy"]["train/off_policy/k3_kl"] < 0.1


def test_miles_samples_trains_with_a_cap_that_acts_and_pushes_its_weights(out):
    flags = [*tiny.cpu_flags(), *tiny_host.model_flags(), *tiny_host.algorithm_flags(), *tiny.engine_flags()]
    flags += [*tiny_host.task_flags(out / "tiny"), "--actor-num-gpus-per-node", "1"]
    flags += ["--custom-config-path", f"{out}/capped.yaml"]
    assert driver.run_host(driver.WHEEL, flags, out / "full", timeout=600) == 0
    row = real_hosts.read_log(out / "full/log", 0.0)
    assert len(row["loss"]) == 4 and row["start_up_lines"] == 1
    first_of_second_rollout = real_hosts.read_steps(out / "full/log")[2]
    assert first_of_second_rollout["train/train_rollout_logprob_abs_diff"] < 0.01  # the push arrived
    assert first_of_second_rollout["train/off_policy/clipped_fraction"] > 0.25
