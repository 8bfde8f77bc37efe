"""The spread of weight versions, by hand; and that slime's own log goes on with it."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from slime_ext import host
from slime_ext.errors import DataError
from slime_ext.host.rollout_log import version_metrics


def sample(*versions, length=2, log_probs=True, **more):
    values = [-1.0] * length if log_probs else None
    return SimpleNamespace(
        weight_versions=list(versions), response_length=length, rollout_log_probs=values, **more
    )


def test_by_hand():
    found = version_metrics(
        [sample("5", length=1), sample("3", "4", length=3), sample("5", log_probs=False, length=4)]
    )
    assert found == {
        "versions": 3,
        "mixed": pytest.approx(1 / 3),
        "no_log_probs": pytest.approx(1 / 3),
    }


@pytest.mark.parametrize(("recorded", "lacks"), [(torch.zeros(2), 0), (torch.zeros(0), 1)])
def test_log_probs_may_be_an_array(recorded, lacks):
    made = SimpleNamespace(weight_versions=None, response_length=2, rollout_log_probs=recorded)
    assert version_metrics([made])["no_log_probs"] == lacks


@pytest.mark.parametrize("versions", ["12", 12])
def test_a_single_version_is_no_list_of_digits(versions):
    made = SimpleNamespace(weight_versions=versions, response_length=2, rollout_log_probs=[-1.0, -1.0])
    assert version_metrics([made, sample("12")])["versions"] == 1


@pytest.mark.parametrize("samples", [[], [sample("default")], [sample()]])
def test_no_version_at_all(samples):
    found = version_metrics(samples)
    assert found["versions"] == found["mixed"] == 0


def test_the_hosts_log_goes_on_with_our_values():
    metrics = {"rollout/raw_reward": 1.0}
    assert host.log_rollout(0, None, [sample("1"), sample("2")], metrics, 1.5) is False
    assert metrics["rollout/raw_reward"] == 1.0
    assert metrics["rollout/off_policy/versions"] == 2.0


def test_groups_of_samples_count_as_samples():
    metrics = {}
    host.log_rollout(0, None, [[sample("1")], [sample("2", "3"), sample("2")]], metrics, 1.5)
    assert metrics["rollout/off_policy/mixed"] == pytest.approx(1 / 3)


def test_samples_without_log_probs_stop_a_run_that_needs_them():
    mixed, whole = (
        [sample("1"), sample("1", log_probs=False), sample("1", log_probs=False, length=0)],
        [sample()],
    )
    used, unused = SimpleNamespace(use_tis=True), SimpleNamespace(use_tis=False)
    own = SimpleNamespace(use_tis=True, custom_convert_samples_to_train_data_path="a.b")
    for args, samples in ((used, whole), (unused, mixed), (own, mixed)):
        assert host.log_rollout(0, args, samples, {}) is False
    with pytest.raises(DataError, match="got none in 1 of 3 samples, such as number 1: fill Sample"):
        host.log_rollout(0, used, mixed, {})


def test_a_line_where_the_host_has_no_metrics(caplog):
    with caplog.at_level(logging.INFO, "slime_ext"):
        host.log_rollout(7, None, [sample("1")], None, 1.5)
    assert "rollout 7: weight versions: versions 1" in caplog.text


def test_the_page_names_every_value():
    page = (Path(__file__).parents[2] / "docs/slime.md").read_text()
    assert all(f"`{name}`" in page for name in version_metrics([]))
