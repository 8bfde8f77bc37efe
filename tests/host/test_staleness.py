"""Ages of samples in weight versions: where both numbers come from, what a bound on them does and refuses."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch

from slime_ext import host, load_config, tis
from slime_ext.core.correction import Correction
from slime_ext.core.steps import Reject
from slime_ext.errors import ConfigError
from slime_ext.host import hosts, staleness, startup
from tests import oracle
from tests.batches import tokens
from tests.host.pushes import trainer_at
from tests.test_tis import arguments, as_slime_calls


@pytest.fixture(autouse=True)
def _nobody_says_the_version(monkeypatch):
    monkeypatch.setattr(staleness, "_pusher", None)


def made_by(versions):
    return SimpleNamespace(weight_versions=versions, response_length=0, rollout_log_probs=None)


def call(versions):
    return SimpleNamespace(weight_versions=versions, pg_loss=torch.zeros(1))


@pytest.mark.parametrize(
    ("spans", "age"),
    [
        (["7"], 0),
        (["5", "7"], 2),
        (["6", "6"], 1),
        (["8"], math.nan),
        ([], math.nan),
        (["default"], math.nan),
        (["default", "7"], math.nan),
        ("5", 2),
        (5, 2),
        ("17", math.nan),
        (["\u00b2"], math.nan),
        (torch.tensor(5), math.nan),
        (None, math.nan),
    ],
)
def test_an_age_counts_from_the_oldest_weights(spans, age):
    trainer_at(7)
    torch.testing.assert_close(staleness.ages_of(call([spans])), torch.tensor([age]).double(), equal_nan=True)


def test_without_either_number_there_is_no_age():
    assert staleness.ages_of(call([["1"]])) is None
    trainer_at(3)
    assert staleness.ages_of(call(None)) is None


def test_without_a_host_there_is_nothing_to_note(monkeypatch):
    monkeypatch.setattr(hosts, "current", lambda: None)
    staleness.install()
    assert staleness.current() is None


def test_the_hosts_pushing_object_says_the_version(monkeypatch):
    class UpdateWeightFromTensor:
        def __init__(self, args):
            self.weight_version = args

    class UpdateWeightDelta(UpdateWeightFromTensor):
        pass

    class Actor:
        def __init__(self):
            self.weight_version = -1

    actor = ModuleType("host.actor")
    actor.UpdateWeightFromTensor, actor.Actor, actor.UpdateWeightMode = UpdateWeightFromTensor, Actor, "delta"
    monkeypatch.setitem(sys.modules, "host.actor", actor)
    monkeypatch.setattr(hosts, "current", lambda: hosts.Host("host", (), "", ("",), "host.actor", ""))
    staleness.install()
    staleness.install()
    assert staleness.current() is None
    pushing = UpdateWeightDelta(4)
    other = Actor()
    assert staleness.current() == 4 != other.weight_version
    pushing.weight_version += 1
    assert staleness.current() == 5
    del pushing
    assert staleness.current() is None


def test_a_step_drops_sequences_that_are_older():
    packed, _ = tokens(oracle.random_batch(5, wild=False))
    count = packed.segments.count
    found = Correction(steps=(Reject(max_staleness=1),))(
        replace(packed, ages=torch.tensor([0.0, 1.0, 2.0, math.nan][:count] + [3.0] * (count - 4)))
    )
    kept = packed.segments.mask & (torch.isin(packed.segments.ids, torch.tensor([0, 1, 3])))
    assert torch.equal(found.keep, kept)


def test_it_stands_beside_bounds_of_the_ratio():
    packed, _ = tokens(oracle.random_batch(5, wild=False))
    plain, bounded = Reject("token", high=1.01), Reject("token", high=1.01, max_staleness=0)
    fresh = replace(packed, ages=torch.zeros(packed.segments.count))
    stale = replace(packed, ages=torch.ones(packed.segments.count))
    assert torch.equal(Correction(steps=(bounded,))(fresh).keep, Correction(steps=(plain,))(packed).keep)
    assert not Correction(steps=(bounded,))(stale).keep.any()


CONFIG = {"steps": [{"reject": {"max_staleness": 1}}]}


def test_the_hook_reads_the_versions_that_a_patched_host_passes():
    batch = oracle.random_batch(5, wild=False)
    given = as_slime_calls(batch, weight_versions=[["9"], ["7"]] + [["9"]] * (len(batch) - 2))
    trainer_at(9)
    loss, _, _ = tis.correct(arguments(slime_ext=CONFIG), **given)
    lost = loss.split(given["response_lengths"])[1]
    assert not lost.any() and loss.any()


@pytest.mark.parametrize(
    ("more", "version", "line"),
    [
        ({}, 9, "expected weight_versions in the hook call, got none: apply the patch"),
        ({"weight_versions": [["1"]] * 6}, None, "expected the trainer's weight version, got none"),
    ],
)
def test_a_bound_on_ages_that_nobody_knows_is_refused(more, version, line):
    trainer_at(version)
    with pytest.raises(ConfigError, match=line):
        tis.correct(arguments(slime_ext=CONFIG), **as_slime_calls(oracle.random_batch(5), **more))


def test_a_host_that_drops_the_versions_is_refused_at_start_up(monkeypatch):
    slime = hosts.Host("slime", (), "", ("slime.loss",), "", "")
    monkeypatch.setattr(hosts.Host, "source", lambda self, module: "tis_kwargs = {}")
    with pytest.raises(ConfigError, match="apply the patch"):
        staleness.require_host(slime)
    monkeypatch.setattr(hosts.Host, "source", lambda self, module: '"weight_versions": batch.get(...)')
    staleness.require_host(slime)
    staleness.require_host(None)


def test_a_guard_on_ages_that_nobody_would_know_is_refused_at_start_up(monkeypatch):
    monkeypatch.setattr(hosts, "current", lambda: hosts.Host("slime", (), "", ("slime.loss",), "", ""))
    monkeypatch.setattr(hosts.Host, "source", lambda self, module: "tis_kwargs = {}")
    config = {"preset": "geo_rs", "guards": {"staleness_max": {"max": 3}}}
    args = arguments(slime_ext=config, custom_tis_function_path="slime_ext.tis.correct")
    with pytest.raises(ConfigError, match=r"slime_ext\.guards\.staleness_max: expected a slime that hands"):
        startup._check_correction(args, load_config(config))
    args.custom_rollout_log_function_path = "slime_ext.host.log_rollout"
    startup._check_correction(args, load_config(config))


def test_ages_of_a_rollout_count_to_the_version_that_trains_on_it(monkeypatch):
    """The rollout manager samples the next rollout while the trainer pushes a version: each is one old."""
    stored = {}
    store = SimpleNamespace(
        _internal_kv_initialized=lambda: True,
        _internal_kv_put=lambda key, value, namespace: stored.update({(namespace, key): value}),
        _internal_kv_get=lambda key, namespace: stored.get((namespace, key)),
    )
    ray = SimpleNamespace(get_runtime_context=lambda: SimpleNamespace(get_job_id=lambda: "01000000"))
    monkeypatch.setattr(staleness, "_published", {})
    host.log_rollout(0, None, [], {})  # no Ray: nobody to leave them for
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.experimental.internal_kv", store)
    for rollout_id in range(30):
        sampled = [str(max(rollout_id, 1))]
        made = [made_by(versions) for versions in (sampled, sampled, ["1"], [])]
        host.log_rollout(rollout_id, None, made, {})
        trainer_at(rollout_id + 1 if rollout_id else 1)
        found, old = staleness.of_rollout(rollout_id), rollout_id
        known = {"staleness_max": max(old, 0), "staleness_known_fraction": 0.75}
        mean = 0 if not old else (1 + 1 + old) / 3
        assert found == pytest.approx(known | {"staleness_mean": mean}), rollout_id
    assert staleness.of_rollout(31) == {} == staleness.of_rollout(0)  # not sampled yet; trained long ago
    assert len(json.loads(next(iter(stored.values())))) == staleness.WAITING
    trainer_at(20)  # rollout 29 says version 29: another run's, as with --load-debug-rollout-data
    assert staleness.of_rollout(29) == {
        "staleness_mean": 19,
        "staleness_max": 19,
        "staleness_known_fraction": 0.25,
    }
    trainer_at(None)
    assert staleness.of_rollout(29) == {}
