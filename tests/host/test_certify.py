"""The certificate of a weight push, of engines that hold what was sent and of those that do not."""

from __future__ import annotations

import asyncio
import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest
import torch

from slime_ext import presets, tis
from slime_ext.config.load import read_config
from slime_ext.core.metrics import names
from slime_ext.errors import ConfigError, GuardError
from slime_ext.host import certify, staleness
from slime_ext.host.step_metrics import STEP
from slime_ext.hosts import running
from tests import oracle
from tests.core.metrics.test_statistics import accumulated
from tests.host.pushed import pushed
from tests.host.test_train_step import args_of, host

LAYERS = 3
NAMES = (
    "model.embed_tokens.weight",
    *(f"model.layers.{i}.{name}.weight" for i in range(LAYERS) for name in ("mlp.down_proj", "o_proj")),
    *(f"model.layers.{i}.input_layernorm.weight" for i in range(LAYERS)),
)
STEPPED = SimpleNamespace(param_groups=[{"lr": 1e-6}])


class Engine:
    """slime's engine actor, as far as checksums go: holds a number for each tensor."""

    def __init__(self):
        self.held = dict.fromkeys(NAMES, 0)
        self.check_weights = SimpleNamespace(remote=self.reply)

    def reply(self, action):
        assert action == "checksum"
        halves = [{name: f"{rank}/{value}" for name, value in self.held.items()} for rank in range(2)]
        ranks = [{"checksums": half | {"draft.x": "1"}, "parallelism_info": [{}]} for half in halves]
        return {"success": True, "message": "Success.", "ranks": ranks}


class Pusher:
    """slime's UpdateWeightFromDistributed: counts its pushes; ``arrives`` tells what each engine gets."""

    def __init__(self, engines, arrives=lambda name, version, engine: version):
        self.weight_version, self.rollout_engines, self.arrives = 0, engines, arrives

    def update_weights(self):
        self.send(self.rollout_engines)

    def send(self, engines):
        self.weight_version += 1
        for number, engine in enumerate(engines):
            for name in NAMES:
                found = self.arrives(name, self.weight_version, number)
                engine.held[name] = engine.held[name] if found is None else found


@pytest.fixture(autouse=True)
def run(monkeypatch):
    """A process of a host whose actor module has the class above."""
    actor = ModuleType("host.actor")
    actor.Updater = type("Updater", (Pusher,), {"__module__": "host.actor"})
    ray = SimpleNamespace(get=lambda replies, timeout: replies)
    monkeypatch.setitem(sys.modules, "host.actor", actor)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(running, "current", lambda: running.Host(actor, None))
    certify.install()
    certify.install()
    yield actor.Updater


def test_a_trainer_that_release_train_made_goes_on_counting(run):
    """slime sets the number after it made the updater, and trains before the first push."""

    class Resumed(run):
        args = SimpleNamespace(update_weight_start_version=7)

    run.__init__(Resumed.__new__(Resumed), [])
    assert certify.pushes().version == 7 and certify.pushes().steps_since(7) == 0


def test_engines_that_load_files_later_are_not_asked(run, capsys):
    """slime's full push by disk writes files; the driver reloads the engines after update_weights."""
    pusher = run([Engine()], arrives=lambda name, version, engine: None)
    pusher.args = SimpleNamespace(update_weight_transport="disk", update_weight_mode="full")
    said = pushes(pusher, capsys, scalars(), scalars())
    assert all("sound" in line and "NOT" not in line and "no checksums" in line for line, _ in said)
    pusher.args = SimpleNamespace(update_weight_transport="disk", update_weight_mode="delta")
    (_, (line, _)) = pushes(pusher, capsys, scalars(), scalars())
    assert "NOT sound: no tensor of the engine changed" in line


def scalars(noise=0.01, shift=0.0, age=0.0):
    """The metrics of a step whose log-ratios are noise around a shift."""
    g = torch.Generator().manual_seed(0)
    samples = oracle.random_batch(3, wild=False)
    for sample in samples:
        behavior = torch.tensor(sample["behavior"]).double()
        step = noise * torch.randn(behavior.shape, generator=g, dtype=torch.float64)
        sample["proximal"] = (behavior + shift + step).tolist()
    ages = None if age is None else [age] * len(samples)
    return names.scalars(accumulated(presets.get("metrics_only"), samples, ages=ages))


def pushes(pusher, capsys, *steps, optimizer=STEPPED):
    """A line and metrics for each push, with the metrics of the step that follows it."""
    said = []
    for step in steps:
        pusher.update_weights()
        certify.settle()
        found = certify.of_step(step, 0, is_first=True)
        assert certify.of_step(step, 1, is_first=True) == {}  # once per push
        certify.note_step(optimizer)
        said.append((capsys.readouterr().out, found))
    return said


def verdict(line):
    return line.partition(": certificate, weights ")[2].split(": ")[1]


def test_engines_that_hold_what_was_sent_are_sound(run, capsys):
    said = pushes(run([Engine(), Engine()]), capsys, *[scalars()] * 3)
    assert [verdict(line) for line, _ in said] == ["sound"] * 3
    assert "7 tensors in the engine" in said[0][0] and "7 of 7 tensors changed with the push" in said[1][0]
    k3 = scalars()["off_policy/k3_kl"]
    assert [found for _, found in said] == [
        {"off_policy/certified": 1.0, "off_policy/certified_k3_kl": k3}
    ] * 3
    assert "weights 3" in said[2][0] and f"k3 {k3:.2g} nats" in said[2][0] and said[2][0].count("\n") == 1


def test_what_is_wrong_is_named(run, capsys):
    far = scalars(noise=0.05)
    cases = {
        "no tensor of the engine changed": (lambda name, version, engine: 1, scalars()),
        "layer 1 did not change": (lambda n, v, e: None if ".1." in n else v, far),
        "model.embed_tokens.weight, layer 2 did not": (
            lambda n, v, e: None if v > 2 and (".2." in n or "embed" in n) else v,
            scalars(),
        ),
        "engines differ from each other in layer 0": (
            lambda n, v, e: None if e and ".0." in n else v,
            scalars(),
        ),
        "engine and trainer differ: other weights, another temperature": (lambda n, v, e: v, far),
    }
    for words, (arrives, step) in cases.items():
        pushed()
        said = pushes(run([Engine(), Engine()], arrives), capsys, scalars(), scalars(), step)
        line, found = said[-1]
        assert verdict(line) == "NOT sound" and words in line, line
        assert found["off_policy/certified"] == 0.0


def test_what_cannot_be_known_is_said_to_be_so(run, capsys):
    for age, words in ((1.0, "up to 1 pushes old"), (None, "of unknown versions")):
        pushed()
        ((line, found),) = pushes(run([Engine()]), capsys, scalars(age=age))
        assert verdict(line) == "not known" and words in line and found == {}
    pushed()
    said = pushes(run([Engine()], lambda n, v, e: 1), capsys, *[scalars(age=1.0)] * 2)
    assert verdict(said[1][0]) == "NOT sound" and said[1][1] == {"off_policy/certified": 0.0}


def test_weights_that_were_not_trained_need_not_change(run, capsys):
    still = SimpleNamespace(param_groups=[{"lr": 0.0}])
    said = pushes(run([Engine()], lambda n, v, e: 1), capsys, scalars(), scalars(), optimizer=still)
    assert [verdict(line) for line, _ in said] == ["sound", "sound"]


def test_frozen_layers_are_a_remark(run, capsys):
    said = pushes(run([Engine()], lambda n, v, e: None if ".0." in n else v), capsys, *[scalars()] * 3)
    assert (
        verdict(said[2][0]) == "sound" and "5 of 7 tensors changed with the push, not layer 0" in said[2][0]
    )


def test_the_answers_are_shared_once_per_push_on_stages_that_judge_none_too(run, monkeypatch):
    """Each time is a collective of all ranks: one more on the first stages would leave them waiting."""
    shared = []
    monkeypatch.setattr(certify, "_arrival", lambda asked: shared.append(asked) or certify.Arrival(""))
    pusher = run([Engine()])
    for times in (1, 2):
        pusher.update_weights()
        for _ in range(2):  # optimizer steps
            certify.settle()
        assert len(shared) == times


def test_an_engine_that_tells_nothing_costs_no_run(run, capsys):
    silent, broken = Engine(), Engine()
    silent.check_weights.remote = lambda action: {"success": False, "message": "Unsupported action"}
    del broken.check_weights
    for engine, words in (
        (silent, "no checksums: this engine reports none"),
        (broken, "no checksums: asking the engines failed with AttributeError"),
    ):
        pushed()
        ((line, _),) = pushes(run([engine]), capsys, scalars())
        assert verdict(line) == "sound" and words in line


class Client(Engine):
    """Later miles' client of an engine: a coroutine asks the server."""

    def __init__(self):
        super().__init__()

        async def check_weights(action):
            await asyncio.sleep(0)
            return self.reply(action)

        self.check_weights = check_weights


class LaterPusher(Pusher):
    """Later miles' WeightUpdater: its protocol holds the engines, and can skip a push."""

    def __init__(self, engines, arrives=lambda name, version, engine: version, begins=lambda: True):
        self.weight_version, self.arrives, self.begins = 0, arrives, begins
        self.protocol = SimpleNamespace(rollout_engines=engines)

    def update_weights(self):
        if self.begins():
            self.send(self.protocol.rollout_engines)


@pytest.fixture
def later(run, monkeypatch):
    """The same class in later miles, whose background thread runs coroutines."""
    actor, loop = sys.modules["host.actor"], asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def get_async_loop():
        return SimpleNamespace(loop=loop)

    get_async_loop.__module__ = "host.actor"
    monkeypatch.setattr(actor, "get_async_loop", get_async_loop, raising=False)
    actor.Later = type("Later", (LaterPusher,), {"__module__": "host.actor"})
    certify.install()
    yield actor.Later
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.mark.parametrize("engine", [Engine, Client])
def test_later_miles_engines_are_asked_through_its_protocol(later, capsys, engine):
    said = pushes(later([engine(), engine()]), capsys, *[scalars()] * 2)
    assert [verdict(line) for line, _ in said] == ["sound", "sound"]
    assert "7 of 7 tensors changed with the push" in said[1][0]
    pushed()
    said = pushes(later([engine()], arrives=lambda name, version, engine: 1), capsys, *[scalars()] * 2)
    assert "NOT sound: no tensor of the engine changed" in said[1][0]


def test_a_push_that_the_host_skips_is_none(later, capsys):
    """Its return would otherwise count as a push of the same version, and rejuvenate its responses."""
    begins = [True, False]
    pusher = later([Client()], begins=lambda: begins.pop(0))
    ((line, _),) = pushes(pusher, capsys, scalars())
    assert verdict(line) == "sound"
    certify.count_step()
    pusher.update_weights()
    certify.settle()
    assert certify.pushes().steps_since(1) == 1
    assert certify.of_step(scalars(), 0, is_first=True) == {}


def test_clients_without_a_loop_of_the_host_cost_no_run(later, capsys, monkeypatch):
    monkeypatch.delattr(sys.modules["host.actor"], "get_async_loop")
    ((line, _),) = pushes(later([Client()]), capsys, scalars())
    assert verdict(line) == "sound" and "no checksums: asking the engines failed with LookupError" in line


def test_the_step_after_a_push_prints_it_and_a_guard_stops_the_run(run, capsys, monkeypatch):
    monkeypatch.setattr(running, "current", lambda: None)
    batch = oracle.random_batch(1, wild=False)
    for sample in batch:
        sample["proximal"] = [value - 0.5 for value in sample["behavior"]]

    def hook(args, **given):
        known = {"loss_masks": given["loss_masks"], "weight_versions": [["1"]] * len(batch)}
        STEP.value.samples = staleness.samples_of(known)
        return tis.correct(args, **given)

    module = host([batch], hook=hook)
    guard = {"certified": {"min": 1, "action": "stop"}}
    args = args_of({"preset": "geo_rs", "guards": guard})

    def train():
        return module.train_one_step(args, 0, 0, None, [SimpleNamespace(role="actor")], STEPPED, None, 1)[0]

    assert "off_policy/certified" not in train()  # nothing was pushed: no engine, no certificate
    run([Engine()]).update_weights()
    with pytest.raises(GuardError, match=r"off_policy/certified: expected at least 1, got 0"):
        train()
    assert "certificate, weights 1: NOT sound" in capsys.readouterr().out


def test_it_can_be_switched_off_and_its_names_are_known(run, capsys, monkeypatch):
    monkeypatch.setattr(running, "current", lambda: None)
    args = args_of({"preset": "geo_rs", "metrics": {"certify": False}})
    run([Engine()]).update_weights()
    module = host([oracle.random_batch(1, wild=False)], hook=tis.correct)
    module.train_one_step(args, 0, 0, None, [SimpleNamespace(role="actor")], STEPPED, None, 1)
    assert capsys.readouterr().out == ""
    loaded = read_config({"preset": "token_tis", "guards": {"certified_k3_kl": {"max": 1e-3}}})
    assert loaded.guards["certified_k3_kl"].max == 1e-3
    with pytest.raises(ConfigError, match=r"expected a known metric, got 'certfied'.*certified"):
        read_config({"preset": "token_tis", "guards": {"certfied": {"min": 1}}})


def test_a_class_that_calls_its_parents_push_is_one_push(run, capsys):
    class Twice(run):
        __module__ = "host.actor"

        def update_weights(self):
            super().update_weights()

    sys.modules["host.actor"].Twice = Twice
    certify.install()
    said = pushes(Twice([Engine()]), capsys, *[scalars()] * 2)
    assert [verdict(line) for line, _ in said] == ["sound", "sound"]
