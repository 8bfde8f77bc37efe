"""The wrapper around a host's train_one_step: what it measures, when it does nothing, what guards do."""

from __future__ import annotations

import gc
import json
import math
import sys
import weakref
from types import ModuleType, SimpleNamespace

import pytest
import torch

from slime_ext import presets, tis
from slime_ext.core.metrics.layout import MetricsLayout
from slime_ext.core.metrics.names import scalars
from slime_ext.errors import ConfigError, GuardError, NonFiniteError
from slime_ext.host import step_metrics, train_step, wrapping
from slime_ext.host.step_metrics import STEP, NonFiniteTracker
from slime_ext.hosts import code, contract
from slime_ext.ops.segments import Segments
from tests import oracle
from tests.core.metrics.test_statistics import accumulated, one_long
from tests.test_tis import arguments, as_slime_calls

K3 = "off_policy/k3_kl"


def host(batches, hook=tis.correct, calls=1):
    """A module with slime's train_one_step, which calls the hook once (or more often) per micro-batch."""
    module = ModuleType("host.model")

    def train_one_step(
        args, rollout_id, step_id, data_iterator, model, optimizer, scheduler, num_microbatches
    ):
        for batch in batches:
            given = as_slime_calls(batch)
            for _ in range(calls):
                module.returned = (given, hook(args, **given))
        return {"loss": 1.0}, 0.5

    return wrapped(module, train_one_step)


def wrapped(module, function):
    module.train_one_step = function
    wrapping.wrap(module, code.STEP, train_step._measured)
    return module


def trained(module, args, role="actor", step_id=0):
    model = [SimpleNamespace(role=role)]
    losses, grad_norm = module.train_one_step(args, 3, step_id, None, model, None, None, num_microbatches=1)
    assert grad_norm == 0.5 and losses["loss"] == 1.0
    return losses


def args_of(config, path="slime_ext.tis.correct", **more):
    return arguments(slime_ext=config, custom_tis_function_path=path, **more)


def test_the_metrics_of_the_step_are_among_the_losses():
    batches = [oracle.random_batch(seed) for seed in (1, 2, 3)]
    losses = trained(host(batches), args_of({"preset": "geo_rs"}))
    whole = scalars(accumulated(presets.get("geo_rs"), [s for b in batches for s in b]))
    assert {k: v for k, v in losses.items() if k != "loss"} == pytest.approx(whole, rel=1e-12)


def test_a_loss_that_is_recomputed_is_counted_once():
    batches, args = [oracle.random_batch(seed) for seed in (1, 2)], args_of({"preset": "geo_rs"})
    assert trained(host(batches, calls=2), args) == trained(host(batches), args)


def test_nothing_outlives_the_step():
    module, args = host([oracle.random_batch(1)]), args_of({"preset": "geo_rs"})
    held = []
    add = step_metrics.OptimizerStep.add

    def adding(step, result):
        held.extend(weakref.ref(tensor) for tensor in result.measured)
        return add(step, result)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_metrics.OptimizerStep, "add", adding)
        trained(module, args)
    gc.collect()
    assert held and not any(reference() is not None for reference in held)
    assert STEP.value is None


def test_a_micro_batch_does_not_stay_for_its_masks():
    """Its images, which slime and miles put into the batch, go with it."""
    step, images = step_metrics.OptimizerStep(), []
    with step_metrics.under_way(step):
        for _ in range(3):
            pixels = torch.zeros(4)
            images.append(weakref.ref(pixels))
            batch = {"loss_masks": [torch.ones(3)], "multimodal_train_inputs": {"pixel_values": pixels}}
            lists = ([], [], batch["loss_masks"], [5], [3])
            call = contract.HookCall(SimpleNamespace(), torch.zeros(3), *lists, batch=batch)
            assert step.count_once(call)
            assert not step.count_once(call)  # recomputed
            del pixels, batch, call
        gc.collect()
        assert not any(reference() is not None for reference in images)


WEIGHED = {"numerator": "target", "steps": ["reweight", "truncate"]}


@pytest.mark.parametrize(("config", "use_tis"), [(WEIGHED, False), ({"preset": "off_policy_is"}, True)])
def test_later_steps_of_a_rollout_are_fine_where_no_ratio_counts_twice(config, use_tis):
    args = args_of(config, use_tis=use_tis, get_mismatch_metrics=True)
    trained(host([], hook=None), args, step_id=1)


def test_a_second_step_that_the_flags_did_not_tell_is_refused_where_a_ratio_would_count_twice():
    module, args = host([]), args_of(WEIGHED)
    trained(module, args)
    with pytest.raises(ConfigError, match=r"expected one optimizer step per rollout .*, got step 2"):
        trained(module, args, step_id=1)


def test_two_steps_do_not_mix():
    module, args = host([oracle.random_batch(1)]), args_of({"preset": "token_tis"})
    assert trained(module, args) == trained(module, args)


@pytest.mark.parametrize(
    "args",
    [
        args_of({"preset": "geo_rs", "metrics": {"enabled": False}}),
        args_of({"metrics": {"enabled": False}}, path="other.hook"),
    ],
)
def test_nothing_is_measured_where_metrics_are_off(args):
    assert trained(host([oracle.random_batch(1)], hook=lambda args, **given: None), args) == {"loss": 1.0}


def test_a_critic_is_left_alone():
    assert trained(host([]), args_of({"preset": "geo_rs"}), role="critic") == {"loss": 1.0}


@pytest.mark.parametrize("name", contract.SLIME_FUNCTIONS)
def test_functions_with_a_formula_of_their_own_are_measured_too(name):
    hook, args = getattr(tis, name), args_of(None, path=f"slime_ext.tis.{name}")
    losses = trained(host([oracle.random_batch(1)], hook=hook), args)
    assert losses["off_policy/tokens"] > 0 and 0 < losses["off_policy/kept_fraction"] <= 1


def test_metrics_only_is_measured(monkeypatch):
    args = args_of({"preset": "metrics_only"}, use_tis=False, get_mismatch_metrics=True)
    assert trained(host([oracle.random_batch(1)]), args)["off_policy/kept_fraction"] > 0


def test_the_file_has_a_line_per_step_with_the_curves_if_asked(tmp_path):
    for options, has_curves in ({}, False), ({"curves": "file"}, True):
        args = args_of({"preset": "geo_rs", "metrics": options}, save=str(tmp_path))
        module = host([oracle.random_batch(1)])
        losses = [trained(module, args, step_id=step) for step in (0, 1)]
        rows = [json.loads(line) for line in (tmp_path / train_step.FILE).read_text().splitlines()]
        assert [(row["rollout_id"], row["step_id"]) for row in rows] == [(3, 0), (3, 1)]
        assert rows[0][K3] == losses[0][K3]
        assert any("by_position" in name for name in rows[0]) is has_curves
        assert not any("by_position" in name for name in losses[0])


def test_curves_without_a_file_to_go_to_are_said_once(caplog):
    args = args_of({"preset": "geo_rs", "metrics": {"curves": "file"}})
    trained(host([oracle.random_batch(1)]), args)
    assert [record.getMessage() for record in caplog.records if "curves" in record.getMessage()] == [
        train_step.NO_FILE
    ]


def steps_in(file):
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [(row["rollout_id"], row["step_id"]) for row in rows if "rollout_id" in row]


def test_one_of_miles_replicas_writes_the_file(tmp_path, monkeypatch):
    """The release that PyPI has, miles-rl 0.0.2, knows no replicas."""
    parallel = ModuleType("miles.anywhere")
    exec("def get_parallel_state(): pass", vars(parallel))
    monkeypatch.setitem(sys.modules, parallel.__name__, parallel)
    first, second = ({"indep_dp": SimpleNamespace(rank=rank, size=2)} for rank in (0, 1))
    for name, replicas, writes in (("none", {}, True), ("first", first, True), ("second", second, False)):
        parallel._parallel_state = SimpleNamespace(**replicas)
        folder = tmp_path / name
        folder.mkdir()
        trained(host([oracle.random_batch(1)]), args_of({"preset": "geo_rs"}, save=str(folder)))
        assert (folder / train_step.FILE).exists() is writes, name


def test_another_runs_arguments_at_the_same_address_get_a_file_of_their_own(tmp_path):
    module = host([oracle.random_batch(1)])
    for name in "abcdef":  # an object that is gone leaves its address to the next
        args = args_of({"preset": "geo_rs"}, save=str(tmp_path / name))
        trained(module, args)
        del args
        assert len(steps_in(tmp_path / name / train_step.FILE)) == 1


def test_micro_batches_that_share_a_mask_are_counted_each(monkeypatch):
    shared = torch.ones(3, dtype=torch.int32)
    batch = [s for s in oracle.random_batch(1) if len(s["mask"]) > 2][:1]
    batch = [{key: values[:3] for key, values in batch[0].items()} | {"mask": [1, 1, 1]}]
    calls = [as_slime_calls(batch, loss_masks=[shared]) for _ in range(2)]
    layout = MetricsLayout.of(presets.get("token_tis"))
    with step_metrics.under_way(step_metrics.OptimizerStep(layout)) as step:
        for call in (*calls, calls[0]):  # the last is one that is recomputed
            tis.correct(args_of({"preset": "token_tis"}), **call)
    assert step.reduce()[0]["off_policy/tokens"] == 6


def test_a_file_that_cannot_be_written_stops_nobody(tmp_path, caplog):
    blocked = tmp_path / "a"
    blocked.write_text("no folder")
    module = host([oracle.random_batch(1, wild=False)])
    args = args_of({"preset": "geo_rs"}, save=str(blocked / "b"))
    assert K3 in trained(module, args) and K3 in trained(module, args, step_id=1)
    (line,) = caplog.messages
    assert (
        "off_policy.jsonl: expected a file that can be written, got Not a directory: make it writable" in line
    )
    blocked.unlink()
    trained(module, args, step_id=2)
    assert steps_in(blocked / "b" / train_step.FILE) == [(3, 2)]


def test_unequal_log_probs_are_counted_when_asked_or_guarded():
    module = host([oracle.random_batch(1, wild=False)])
    name, guard = "off_policy/differing_fraction", {"differing_fraction": {"max": 0, "action": "stop"}}
    losses = trained(module, args_of({"preset": "geo_rs"}))
    assert name not in losses and losses["off_policy/log_ratio_max"] > 0
    assert trained(module, args_of({"preset": "geo_rs", "metrics": {"differing": True}}))[name] == 1
    with pytest.raises(
        GuardError, match="differing_fraction: expected at most 0, got 1 in one optimizer step"
    ):
        trained(module, args_of({"preset": "geo_rs", "guards": guard}))
    equal = [sequence | {"behavior": sequence["proximal"]} for sequence in oracle.random_batch(1, wild=False)]
    losses = trained(host([equal]), args_of({"preset": "geo_rs", "guards": guard}))
    assert losses[name] == losses["off_policy/log_ratio_max"] == 0


def test_curves_go_to_the_log_when_asked():
    losses = trained(
        host([oracle.random_batch(1)]), args_of({"preset": "geo_rs", "metrics": {"curves": "log"}})
    )
    assert any(name.startswith("off_policy/by_probability/") for name in losses)


def test_infinite_numbers_are_null_in_the_file(tmp_path):
    module = host([one_long([500.0, 500.0])])
    trained(module, args_of({"preset": "metrics_only"}, save=str(tmp_path)))
    row = json.loads((tmp_path / train_step.FILE).read_text())
    assert row["off_policy/chi2_sequence"] is None


ALL_OUT = [one_long([3.0] * 4)]


def guarded(action, steps=2):
    guards = {"kept_fraction": {"min": 0.5, "steps": steps, "action": action}}
    return args_of({"steps": [{"reject": {"unit": "token", "high": 2.0}}], "guards": guards})


def test_a_guard_warns(caplog):
    module, args = host(ALL_OUT), guarded("warn")
    trained(module, args)
    assert not caplog.messages
    trained(module, args, step_id=1)
    assert caplog.messages[-1].startswith(
        "off_policy/kept_fraction: expected at least 0.5, got 0 for 2 optimizer steps"
    )


def test_a_guard_stops():
    with pytest.raises(GuardError, match="the run stops"):
        trained(host(ALL_OUT), guarded("stop", steps=1))


def test_a_guard_makes_it_metrics_only(caplog):
    module, args = host(ALL_OUT), guarded("metrics_only", steps=1)
    trained(module, args)
    given, (loss, masks, _) = module.returned
    assert loss is not given["pg_loss"] and caplog.messages[-1].endswith("only metrics are computed")
    trained(module, args)
    given, (loss, masks, _) = module.returned
    assert loss is given["pg_loss"] and masks is given["loss_masks"]


def test_a_step_without_response_tokens_is_not_judged(caplog):
    masked = [s | {"mask": [0] * 4} for s in one_long([0.1] * 4)]
    losses = trained(host([masked]), guarded("stop", steps=1))
    assert losses == {"loss": 1.0, "off_policy/tokens": 0.0, "off_policy/sequences": 0.0}
    assert not caplog.messages


def test_a_loss_that_never_calls_the_hook_is_named(caplog):
    trained(host([]), guarded("stop", steps=1))
    (line,) = caplog.messages
    assert line.startswith("--custom-tis-function-path: expected a call of the function in every optimizer")


def test_the_default_guard_speaks_in_the_third_step(caplog):
    module = host(ALL_OUT)
    args = args_of({"steps": [{"reject": {"unit": "token", "high": 2.0}}]})
    said = []
    for step in range(3):
        trained(module, args, step_id=step)
        said.append(len(caplog.messages))
    assert said == [0, 0, 1]


# ---- non-finite log-probs on a device that must not be waited for ----


def tracked(values, mask=(1, 1, 1, 1)):
    tracker = NonFiniteTracker()
    segments = Segments.whole([1, 3], torch.tensor(mask))
    fine = torch.zeros(4)
    tracker.look({"train_log_probs": fine}, segments)
    tracker.look({"train_log_probs": fine, "cur_log_probs": torch.tensor(values)}, segments)
    return tracker


def test_the_first_non_finite_log_prob_is_named():
    tracker = tracked([0.0, 0.0, math.nan, math.inf])
    with pytest.raises(
        NonFiniteError, match="cur_log_probs, sequence 1 of 2 in micro-batch 1, response token 1"
    ):
        tracker.check([tracker.vector().tolist()], 0)


def test_a_note_that_nobody_would_read_is_refused():
    packed = SimpleNamespace(
        segments=SimpleNamespace(mask=SimpleNamespace(device=torch.device("cuda"))),
        proximal=None,
        target=None,
        behavior=torch.zeros(1),
    )
    outside = step_metrics.current_step()
    outside.check_finite(packed, None, behavior=False, is_counted=False)
    with pytest.raises(ConfigError, match=r"slime_ext\.on_nonfinite: expected --custom-megatron-init-path"):
        outside.check_finite(packed, None, behavior=True, is_counted=False)


def test_other_ranks_stop_too():
    tracker, fine = tracked([0.0, 0.0, math.nan, 0.0]), tracked([0.0] * 4)
    with pytest.raises(NonFiniteError, match="cur_log_probs, data rank 1, micro-batch 1, token 2 of it"):
        fine.check([fine.vector().tolist(), tracker.vector().tolist()], 0)


def test_masked_and_later_ones_do_not_matter():
    tracker = tracked([0.0, math.nan, 0.0, 0.0], mask=(1, 0, 1, 1))
    tracker.check([tracker.vector().tolist()], 0)
    tracker = tracked([math.nan, 0.0, 0.0, 0.0])
    whole = Segments.whole([1, 3], torch.ones(4))
    tracker.look({"cur_log_probs": torch.tensor([0.0, math.nan, 0.0, 0.0])}, whole)
    with pytest.raises(NonFiniteError, match="sequence 0 of 2 in micro-batch 1"):
        tracker.check([tracker.vector().tolist()], 0)


def test_a_step_that_breaks_off_says_why():
    module = ModuleType("host.model")

    def train_one_step(args, rollout_id, step_id, data_iterator, model):
        values = {"cur_log_probs": torch.tensor([0.0, math.nan])}
        call = SimpleNamespace(loss_masks=[torch.ones(2)], rollout_log_probs=[], batch=None)
        step = step_metrics.current_step()
        for _ in range(2):  # a loss that is recomputed
            if step.count_once(call):
                step.tracker.look(values, Segments.whole([2], torch.ones(2)))
        assert len(STEP.value.tracker.calls) == 1
        raise RuntimeError("found NaN in local grad norm")

    wrapped(module, train_one_step)
    with pytest.raises(NonFiniteError, match="sequence 0 of 1 in micro-batch 0, response token 1") as caught:
        module.train_one_step(args_of({"preset": "geo_rs"}), 0, 0, None, [SimpleNamespace()])
    assert "NaN in local grad norm" in str(caught.value.__cause__)


def test_broken_log_probs_are_warned_of_once(caplog):
    """They are rejected and counted; a run in which they are many must not go on without a word."""
    batch = [{"proximal": [-1.0] * 4, "behavior": [-1.0, math.nan, 0.7, -2.0], "mask": [1] * 4}]
    batch[0] |= {"advantage": [1.0] * 4, "host_loss": [1.0] * 4, "target": [-1.0] * 4}
    module, args = host([batch]), args_of({"preset": "token_tis"})
    assert trained(module, args)["off_policy/nonfinite_fraction"] == 0.5
    trained(module, args)
    (line,) = (message for message in caplog.messages if "got other values" in message)
    assert line.startswith(
        "rollout_log_probs: expected log-probs above -1000 and at most 0, got other values at 50.00%"
    )
    assert "(rollout_id 3, step_id 0)" in line
