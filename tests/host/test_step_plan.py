"""What couples samples is the same over the whole optimizer step however a rollout is cut; by an oracle."""

from __future__ import annotations

import math

import pytest
import torch

from slime_ext import tis
from slime_ext.config.load import read_config
from slime_ext.errors import ConfigError, DataError, NonFiniteError
from slime_ext.host import rollout_data, rollout_data_postprocess, step_metrics
from slime_ext.host.ranks import ranks
from slime_ext.host.rollout_data import read_ahead
from slime_ext.host.step_plan import compute_plan
from tests.host import slime_rollouts as slime
from tests.host.pushed import pushed

GEO = {"reject": {"unit": "sequence", "aggregate": "mean", "low": 0.97, "high": 1.03}}
BAND = {"reject": {"low": 0.8, "high": 1.25}}
GEO_ORACLE = ("reject", "sequence", "ratio", "mean", 0.97, 1.03, "always")
BAND_ORACLE = ("reject", "token", "ratio", "-", 0.8, 1.25, "always")
TIS = ["reweight", {"truncate": {"high": 1.1}}]
TIS_ORACLE = (("reweight", "token"), ("truncate", 1.1))
KEPT = {"denominator": "kept"}
CASES = {  # name -> native keys, the oracle's steps, how the oracle divides
    "normalize": ({"steps": [*TIS, "normalize"]}, (*TIS_ORACLE, ("normalize", "token")), {}),
    "second_moment": (
        {"steps": [{"second_moment": {"threshold": 0.002}}]},
        (("second_moment", 0.002),),
        {},
    ),
    "kept": ({"steps": [BAND], **KEPT}, (BAND_ORACLE,), {"kept": True}),
    "kept_all": (
        {"steps": [GEO, BAND], **KEPT, "mask_scope": "all"},
        (GEO_ORACLE, BAND_ORACLE),
        {"kept": True},
    ),
    "atomic": ({"steps": [GEO], "group": "atomic"}, (GEO_ORACLE,), {"group": "atomic"}),
    "rebaseline": ({"steps": [GEO], "group": "rebaseline"}, (GEO_ORACLE,), {"group": "rebaseline"}),
    "everything": (
        {"steps": [*TIS, "normalize", BAND, GEO], **KEPT, "group": "atomic"},
        (*TIS_ORACLE, ("normalize", "token"), BAND_ORACLE, GEO_ORACLE),
        {"kept": True, "group": "atomic"},
    ),
}


def samples(name, seed):
    """A rollout with a split sample, but where advantages are computed again: there slime's are not a
    prompt's."""
    return slime.samples(seed, split=name != "rebaseline")


def close(found, expected):
    return found == pytest.approx(expected, rel=1e-6, abs=1e-9)


def spec(name):
    return {"steps": CASES[name][1], "numerator": "proximal", "loss": ("host",)}


def by_position(rollout, shares, release="head"):
    """The ranks' shares of each sample's loss, added up."""
    total = dict.fromkeys(range(len(rollout)), 0.0)
    for positions, losses in shares:
        for position, loss in zip(positions, losses, strict=True):
            total[position] += loss
    return [total[position] for position in range(len(rollout))]


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_every_sample_contributes_what_the_oracle_says(name, per_token):
    mapping, _, how = CASES[name]
    for seed in range(3):
        rollout = samples(name, seed)
        data = slime.data_of(rollout)
        args = slime.arguments(mapping, calculate_per_token_loss=per_token)
        found = by_position(rollout, [(data["partition"], slime.train(args, data))])
        assert close(found, slime.expected(rollout, spec(name), per_token=per_token, **how)), seed


@pytest.mark.parametrize("name", CASES)
def test_neither_packing_nor_order_changes_anything(name):
    rollout = samples(name, 1)
    args = slime.arguments(CASES[name][0])
    found = []
    for cut in ({}, {"batch": 1}, {"batch": 100}, {"batch": 4, "seed": 1}, {"seed": 2}):
        data = slime.data_of(rollout, **cut)
        found.append(by_position(rollout, [(data["partition"], slime.train(args, data))]))
        assert found[-1] == pytest.approx(found[0], rel=1e-12, abs=1e-14), cut


@pytest.mark.parametrize("name", CASES)
def test_releases_name_the_same_things_differently(name):
    rollout = samples(name, 0)
    positions = slime.data_of(rollout)["partition"]
    for release in ("v0.3.0", "v0.3.1"):
        data = slime.data_of(rollout, release=release)
        found = by_position(rollout, [(positions, slime.train(slime.arguments(CASES[name][0]), data))])
        assert close(found, slime.expected(rollout, spec(name), **CASES[name][2])), release


@pytest.mark.parametrize("name", CASES)
def test_before_v030_a_sample_divides_by_its_own_returned_mask(name):
    rollout = slime.samples(0, split=False)
    data = slime.data_of(rollout, release="v0.2.4")
    found = by_position(rollout, [(range(len(rollout)), slime.train(slime.arguments(CASES[name][0]), data))])
    assert close(found, slime.expected(rollout, spec(name), own=True, **CASES[name][2]))


def opened(name, data, **more):
    """The first optimizer step, with its plan."""
    args = slime.arguments(CASES[name][0], **more)
    return slime.step_of(args, data, slime.DataIterator(data), slime.schedule(data, 3)[0])


@pytest.mark.parametrize("leaves_loss_alone", [False, True])  # whether a guard asked for metrics only
def test_what_does_not_act_leaves_the_advantages_alone(leaves_loss_alone):
    more = {} if leaves_loss_alone else {"use_tis": False, "get_mismatch_metrics": True}
    data = slime.data_of(samples("rebaseline", 0))
    before = list(data["advantages"])
    args, iterator = slime.arguments(CASES["rebaseline"][0], **more), slime.DataIterator(data)
    slime.step_of(args, data, iterator, slime.schedule(data, 3)[0], leaves_loss_alone=leaves_loss_alone)
    assert all(was is now for was, now in zip(before, data["advantages"], strict=True))


def test_reading_ahead_leaves_the_iterator_where_it_is():
    for release in ("head", "v0.2.4"):
        data = slime.data_of(samples("normalize", 0), release=release)
        iterator = slime.DataIterator(data)
        iterator.get_next(["loss_masks"])
        at = iterator.offset
        first = read_ahead(iterator, 2)["loss_masks"]
        assert iterator.offset == at and iterator.get_next(["loss_masks"])["loss_masks"][0] is first[0]


def listed(values):
    if isinstance(values, list):
        return [each.tolist() for each in values]
    return None if values is None else values.tolist()


def test_a_step_that_is_trained_again_has_the_same_plan():
    """A new baseline is made of the rewards, not of the advantages that it replaces."""
    for name in ("everything", "rebaseline"):
        data = slime.data_of(samples(name, 1))
        found = []
        for _ in range(2):
            _, plan = opened(name, data).plan
            found.append([listed(each) for each in (plan.scale, plan.keep, data["advantages"])])
        assert found[0] == found[1]


@pytest.mark.parametrize("name", ["atomic", "rebaseline"])
def test_a_group_that_several_steps_train_has_one_fate(name):
    """Six samples in the first step of a rank: a group of four, and half of another."""
    rollout = samples(name, 1)
    data = slime.data_of(rollout)
    order = [i for batch in data["micro_batch_indices"] for i in batch]
    cuts = [order[:6], order[6:]]
    data["micro_batch_indices"], data["num_microbatches"] = cuts, [1, 1]
    found = by_position(rollout, [(data["partition"], slime.train(slime.arguments(CASES[name][0]), data))])
    assert close(found, slime.expected(rollout, spec(name), **CASES[name][2]))


def test_a_group_over_several_steps_beside_a_number_for_one_step_is_refused():
    data = slime.data_of(samples("everything", 1))
    data["num_microbatches"] = [1, 5]
    with pytest.raises(ConfigError, match="in one optimizer step beside normalize, got them in several"):
        opened("everything", data)


def test_a_baseline_over_split_rollouts_is_refused():
    with pytest.raises(ConfigError, match=r"group: expected 16 samples .* got 17"):
        opened("rebaseline", slime.data_of(slime.samples(0)))


@pytest.mark.parametrize("unknown", ["raw_reward", "rollout_batch_size"])
def test_what_cannot_be_counted_is_not_refused(unknown):
    data = slime.data_of(slime.samples(0))
    data.pop(unknown, None)
    opened("rebaseline", data, **({unknown: None} if unknown == "rollout_batch_size" else {}))


@pytest.mark.parametrize(
    ("name", "flag", "default"),
    [("rebaseline", "grpo_std_normalization", True), ("kept", "calculate_per_token_loss", False)],
)
def test_a_flag_that_a_host_lacks_has_its_default(name, flag, default):
    correction = read_config(CASES[name][0]).correction
    found = []
    for given in ({flag: default}, {}, {flag: not default}):
        args, data = slime.arguments(CASES[name][0]), slime.data_of(samples(name, 1))
        delattr(args, flag)
        vars(args).update(given)
        batch = read_ahead(slime.DataIterator(data), sum(slime.schedule(data, 3)))
        scale = compute_plan(correction, args, batch, ranks(), data).scale
        found.append([listed(scale), listed(data["advantages"])])
    assert found[0] == found[1] != found[2]


def test_a_sample_without_a_reward_is_in_no_baseline():
    rows = [
        rollout_data.SampleRow(i, 0, 0, 5, 5 * (i != 3), 5, r)
        for i, r in enumerate([1.0, math.nan, 3.0, 9.0])
    ]
    assert rollout_data.rebaselined(rows, by_std=False) == [-1.0, 0.0, 1.0, 0.0]


def test_a_group_without_rejected_samples_keeps_its_advantages():
    data = slime.data_of(samples("rebaseline", 0))
    before = list(data["advantages"])
    slime.train(slime.arguments(CASES["rebaseline"][0]), data)
    same = [was is now for was, now in zip(before, data["advantages"], strict=True)]
    assert any(same) and not all(same)


def without(key):
    return lambda data: data.pop(key)


def renumbered(data):
    """slime numbers samples on from where the run before ended: 2 is no multiple of 4."""
    data["sample_indices"] = [index + 2 for index in data["sample_indices"]]


def empty(data):
    data["micro_batch_indices"] = [[] for _ in data["micro_batch_indices"]]


def broken(data):
    data["log_probs"][0][data["loss_masks"][0].argmax()] = math.nan


REFUSED = {
    "no proximal": (without("log_probs"), "normalize", "expected the proximal policy's log-probs.*--get-mis"),
    "other groups": (renumbered, "atomic", r"group: expected 4 groups of 4 samples .*, got 5: set the"),
    "other groups, rebaseline": (renumbered, "rebaseline", r"group: expected 4 groups of 4 samples"),
    "no samples": (empty, "normalize", "expected a sample on every data parallel rank, got none on rank 0"),
    "NaN": (broken, "normalize", "log_probs, sequence 0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_planned_is_refused_in_one_line(name):
    harm, case, message = REFUSED[name]
    data = slime.data_of(samples("rebaseline", 1))
    harm(data)
    with pytest.raises((ConfigError, DataError, NonFiniteError), match=message):
        opened(case, data)


def test_the_plan_knows_the_samples_ages():
    """Group 0 has one sample of five versions ago: all of its tokens are out, and with it the group."""
    data = slime.data_of(slime.samples(0, split=False))
    versions = [["3" if s == 0 else "8"] for s in data["sample_indices"]]
    mapping = {"steps": [{"reject": {"unit": "sequence", "max_staleness": 2}}], "group": "atomic"}
    data["weight_versions"] = versions
    pushed(8)
    batch = read_ahead(slime.DataIterator(data), 3)
    args, correction = slime.arguments(mapping), read_config(mapping).correction
    keep = compute_plan(correction, args, batch, ranks(), data).keep.tolist()
    assert keep == [index // slime.GROUP != 0 for index in batch["sample_indices"]] and not all(keep)


def hook_call(data):
    keys = ("loss_masks", "total_lengths", "response_lengths", "rollout_log_probs")
    return {key: data[key] for key in keys} | {
        "train_log_probs": data["log_probs"],
        "pg_loss": torch.cat(data["host_loss"]),
    }


def test_a_call_without_a_plan_is_a_step_of_its_own_and_says_so(caplog):
    rollout = slime.samples(0, split=False)[:8]
    data = slime.data_of(rollout)
    loss, _, _ = tis.correct(slime.arguments(CASES["kept"][0]), **hook_call(data))
    tis.correct(slime.arguments(CASES["kept"][0]), **hook_call(data))
    sums = torch.tensor([float(part.sum()) for part in loss.split(data["response_lengths"])])
    for s in rollout:
        s["normalised"] = 1.0
    wanted = slime.expected(rollout, spec("kept"), kept=True)
    assert close((sums / data["rollout_mask_sums"].clamp_min(1)).tolist(), wanted)
    assert len([r for r in caplog.records if "got a hook call without one" in r.message]) == 1


@pytest.mark.parametrize("other", [None, "normalize"])
def test_a_group_without_a_plan_of_its_own_is_refused(other):
    data = slime.data_of(slime.samples(0))
    step = opened(other, data) if other else step_metrics.OptimizerStep()
    with (
        step_metrics.under_way(step),
        pytest.raises(ConfigError, match="group: expected --custom-megatron-init-path"),
    ):
        tis.correct(slime.arguments(CASES["atomic"][0]), **hook_call(data))


def test_the_former_flags_name_does_nothing_and_says_so_once(caplog):
    for given in (("args",), ("args", 0, {}), ("args",)):
        assert rollout_data_postprocess(*given) is None
    assert len(caplog.messages) == 1 and "remove the flag" in caplog.messages[0]
