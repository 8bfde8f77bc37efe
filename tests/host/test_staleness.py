"""Ages of samples in weight versions: where both numbers come from, what a bound on them does and refuses."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch

from slime_ext import host, load_config, tis
from slime_ext.core.correction import Correction
from slime_ext.core.steps import Reject
from slime_ext.core.tokens import Tokens
from slime_ext.errors import ConfigError
from slime_ext.host import certify, published, rollout_log, staleness, step_metrics
from slime_ext.host.rollout_data import oldest_of
from slime_ext.hosts import running
from slime_ext.ops.segments import Segments
from tests import oracle
from tests.batches import tokens
from tests.host import trees
from tests.host.pushed import pushed
from tests.host.test_train_step import args_of, wrapped
from tests.test_tis import arguments, as_slime_calls


def aged(versions=None, indices=(), rollout_id=0, correction=Correction()):  # noqa: B008
    """The ages of as many samples, with what the host's batch carries of them; None: nobody knows any."""
    return both_ages(versions, indices, rollout_id, correction)[0]


def both_ages(versions, indices=(), rollout_id=0, correction=Correction()):  # noqa: B008
    """Ages in weight versions and in optimizer steps, as ``aged``."""
    count = len(versions if versions is not None else indices)
    masks = [torch.ones(1) for _ in range(count)]
    batch = {"loss_masks": masks, "sample_indices": list(indices) or None, "weight_versions": versions}
    packed = Tokens(Segments.whole([1] * count, torch.ones(count)), torch.zeros(count), torch.zeros(count))
    found = staleness.with_ages(packed, masks, correction, staleness.samples_of(batch, rollout_id))
    return found.ages, found.age_steps


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
        (None, math.nan),
    ],
)
def test_an_age_counts_from_the_oldest_weights(spans, age):
    pushed(7)
    torch.testing.assert_close(aged([spans]), torch.tensor([age]).double(), equal_nan=True)


def test_without_either_number_there_is_no_age():
    assert aged([["1"]]) is None
    pushed(3)
    assert aged(indices=[5]) is None


def test_without_a_host_there_is_nothing_to_note(monkeypatch):
    monkeypatch.setattr(running, "current", lambda: None)
    certify.install()
    assert certify.pushes().version is None


def test_the_hosts_pushing_object_says_the_version(monkeypatch):
    class Updater:
        __module__ = "host.actor"

        def __init__(self, args):
            self.weight_version = args

        def update_weights(self):
            self.weight_version += 1

    class Actor:
        __module__ = "host.actor"

        def __init__(self):
            self.weight_version = -1

    actor = ModuleType("host.actor")
    actor.Updater, actor.Actor, actor.Mode = Updater, Actor, "delta"
    monkeypatch.setitem(sys.modules, "host.actor", actor)
    monkeypatch.setattr(running, "current", lambda: running.Host(actor, None))
    certify.install()
    certify.install()
    assert certify.pushes().version is None

    class Delta(Updater):  # of a module that hosts import later
        def update_weights(self):
            self.weight_version += 1

    for cls in (Updater, Delta):
        pushing, other = cls(4), Actor()
        assert certify.pushes().version == 4 != other.weight_version
        pushing.update_weights()
        assert certify.pushes().version == 5


class Pusher:
    """Of a host, as far as pushes go."""

    __module__ = "host.actor"

    def __init__(self):
        self.weight_version = 0

    def update_weights(self):
        self.weight_version += 1


@pytest.mark.parametrize(("interval", "ahead"), [(1, 0), (3, 0), (1, 1), (3, 1), (2, 2)])
def test_weights_that_are_pushed_seldom_age_by_optimizer_steps(monkeypatch, interval, ahead):
    """Two steps for each rollout, a push every ``interval`` rollouts (--update-weights-interval), rollouts
    that are sampled ``ahead`` of the one that is trained, as train_async.py does."""
    actor = ModuleType("host.actor")
    actor.Pusher = type("Pusher", (Pusher,), dict(vars(Pusher)))
    monkeypatch.setitem(sys.modules, "host.actor", actor)
    monkeypatch.setattr(running, "current", lambda: running.Host(actor, None))
    certify.install()
    monkeypatch.setattr(running, "current", lambda: None)
    pusher, seen = actor.Pusher(), []
    pusher.update_weights()

    def train_one_step(
        args, rollout_id, step_id, data_iterator, model, optimizer, scheduler, num_microbatches
    ):
        seen.append([float(age) for age in both_ages([[str(sampled[rollout_id])]])])
        return {}, 0.5

    module = wrapped(ModuleType("host.model"), train_one_step)
    args, model = args_of({"preset": "token_tis"}, use_tis=False), [SimpleNamespace(role="actor")]
    sampled, pushes = [], [(1, 0)]  # (version, optimizer steps before it)
    wanted = []
    for rollout in range(8):
        while len(sampled) <= rollout + ahead:
            sampled.append(pusher.weight_version)
        for step in range(2):
            taken = 2 * rollout + step
            version, before = next(push for push in pushes if push[0] == sampled[rollout])
            wanted.append([pushes[-1][0] - version, taken - before])
            module.train_one_step(args, rollout, step, None, model, None, None, num_microbatches=1)
        if (rollout + 1) % interval == 0:
            pusher.update_weights()
            pushes.append((pusher.weight_version, 2 * (rollout + 1)))
    assert seen == wanted
    assert any(steps > 2 * versions + 1 for versions, steps in seen) == (interval > 1)


def test_steps_since_weights_that_another_process_pushed_are_not_known():
    pushed(7)
    versions, steps = both_ages([["5"], ["7"], ["8"], []])
    torch.testing.assert_close(versions, torch.tensor([2.0, 0, math.nan, math.nan]).double(), equal_nan=True)
    torch.testing.assert_close(
        steps, torch.tensor([math.nan, 0, math.nan, math.nan]).double(), equal_nan=True
    )


def test_a_critics_step_is_none_of_the_policys():
    pushed(1)
    module = wrapped(
        ModuleType("host.model"), lambda args, rollout_id, step_id, data_iterator, model: ({}, 1)
    )
    module.train_one_step(args_of({"preset": "token_tis"}), 0, 0, None, [SimpleNamespace(role="critic")])
    assert certify.pushes().steps == 0


def test_a_step_drops_sequences_with_more_optimizer_steps_behind_them():
    packed, _ = tokens(oracle.random_batch(5, wild=False))
    count = packed.segments.count
    steps = torch.tensor([0.0, 4.0, 5.0, math.nan][:count] + [9.0] * (count - 4))
    aged_packed = replace(packed, ages=torch.zeros(count), age_steps=steps)
    found = Correction(steps=(Reject(max_staleness_steps=4),))(aged_packed)
    kept = packed.segments.mask & (torch.isin(packed.segments.ids, torch.tensor([0, 1, 3])))
    assert torch.equal(found.keep, kept)
    assert not Correction(steps=(Reject(max_staleness=4, max_staleness_steps=4),))(
        replace(aged_packed, ages=torch.full((count,), 5.0), age_steps=torch.zeros(count))
    ).keep.any()


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


def step_of(given, versions):
    """The optimizer step of a hook call's samples."""
    batch = {"loss_masks": given["loss_masks"], "weight_versions": versions}
    return step_metrics.OptimizerStep(samples=staleness.samples_of(batch))


def test_the_hook_drops_samples_that_are_older():
    batch = oracle.random_batch(5, wild=False)
    given = as_slime_calls(batch)
    pushed(9)
    with step_metrics.under_way(step_of(given, [["9"], ["7"]] + [["9"]] * (len(batch) - 2))):
        loss, _, _ = tis.correct(arguments(slime_ext=CONFIG), **given)
    lost = loss.split(given["response_lengths"])[1]
    assert not lost.any() and loss.any()


@pytest.mark.parametrize(
    ("versions", "version", "line"),
    [
        (None, 9, "got none from the samples: .*--custom-rollout-log-function-path"),
        ([["1"]] * 6, None, "got none from the trainer"),
    ],
)
def test_a_bound_on_ages_that_nobody_knows_is_refused(versions, version, line):
    pushed(version)
    given = as_slime_calls(oracle.random_batch(5))
    with step_metrics.under_way(step_of(given, versions)), pytest.raises(ConfigError, match=line):
        tis.correct(arguments(slime_ext=CONFIG), **given)


@pytest.mark.parametrize("who", ["max_staleness", r"slime_ext\.guards\.staleness_max"])
def test_ages_that_nobody_would_know_are_refused_at_start_up(who, tmp_path, monkeypatch):
    trees.made(tmp_path, monkeypatch)
    guards = {"guards": {"staleness_max": {"max": 3}}}
    args = arguments(
        slime_ext={"preset": "geo_rs", **guards} if "guards" in who else CONFIG,
        custom_tis_function_path="slime_ext.tis.correct",
    )
    with pytest.raises(ConfigError, match=f"^{who}: expected the samples' weight versions, got a slime that"):
        host.init(args)
    args.custom_rollout_log_function_path = "slime_ext.host.log_rollout"
    host.init(args)
    args.custom_rollout_log_function_path = None
    (tmp_path / "slime/manager.py").write_text('train_data["weight_versions"] = []\n')
    host.init(args)


@pytest.fixture
def store(monkeypatch):
    """Ray's key-value store."""
    stored = {}
    store = SimpleNamespace(
        _internal_kv_initialized=lambda: True,
        _internal_kv_put=lambda key, value, namespace: stored.update({(namespace, key): value}),
        _internal_kv_get=lambda key, namespace: stored.get((namespace, key)),
    )
    ray = SimpleNamespace(get_runtime_context=lambda: SimpleNamespace(get_job_id=lambda: "01000000"))
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.experimental.internal_kv", store)
    return stored


def sampled(index, versions):
    return SimpleNamespace(index=index, weight_versions=versions, response_length=0, rollout_log_probs=None)


def test_the_trainer_finds_its_samples_versions_by_their_index(store):
    made = [sampled(7, ["3", "4"]), sampled(8, ["2"]), sampled(8, ["1"]), sampled(9, []), sampled(5, ["9"])]
    made += [sampled(6, ["default", "4"])]  # of an engine before its first push, too
    host.log_rollout(2, None, made, {})
    assert store and not published.PUBLISHED.value  # the trainer is another process
    pushed(4)
    ages = aged(indices=[9, 8, 7, 5, 6], rollout_id=2)
    assert ages[1:3].tolist() == [3, 1] and ages.isnan().tolist() == [True, False, False, True, True]
    assert aged(indices=[8], rollout_id=3) is None  # not logged
    with pytest.raises(ConfigError, match="got none from the samples"):
        aged(indices=[8], rollout_id=3, correction=load_config(CONFIG))


def test_rollouts_that_were_trained_long_ago_are_forgotten(store):
    for rollout_id in range(30):
        host.log_rollout(rollout_id, None, [sampled(1, ["1"])], {})
    assert len(store) == published.WAITING[published.VERSIONS]
    assert [published.fetch_for_trainer("weight_versions", i) for i in (29, 3)] == [b'{"1": 1}', None]


class Call:
    """An engine call, as newer miles keeps it in a sample."""

    def __init__(self, *versions):
        self.versions = versions

    def to_dicts(self):
        return [{"version": v, "abs_start": i, "abs_end": i + 1} for i, v in enumerate(self.versions)]


def test_versions_of_newer_miles_are_read_from_its_calls_and_from_its_train_data():
    calls = [Call("3"), Call("4", "5")]
    sample = SimpleNamespace(weight_versions=calls)
    assert rollout_log._versions(sample) == [3, 4, 5] and oldest_of(calls) == 3
    batch = {
        "tokens": [None] * 3,
        "sample_indices": [7, 8, 9],
        "weight_versions": [[call.to_dicts() for call in calls], [[{"version": "default"}]], ["6", "7"]],
    }
    assert staleness.samples_of(batch).versions == [3, None, 6]
