"""What couples samples is the same over the whole optimizer step however a rollout is cut; by an oracle."""

from __future__ import annotations

import math

import pytest
import torch

from slime_ext import tis
from slime_ext.config.load import read_config
from slime_ext.errors import ConfigError, DataError, NonFiniteError, warn_once
from slime_ext.host import rollout_data, rollout_data_postprocess, step_metrics, step_plan
from slime_ext.host.hosts import ranks
from slime_ext.host.step_plan import compute_plan
from tests.host import slime_rollouts as slime
from tests.host.pushes import trainer_at

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


def test_metrics_alone_leave_advantages_and_loss_alone():
    data = slime.data_of(slime.samples(0))
    before = data["advantages"]
    args = slime.arguments(CASES["rebaseline"][0], use_tis=False, get_mismatch_metrics=True)
    rollout_data_postprocess(args, 0, data)
    assert data["advantages"] is before


def test_a_baseline_over_split_rollouts_is_refused():
    args, data = slime.arguments(CASES["rebaseline"][0]), slime.data_of(slime.samples(0))
    with pytest.raises(ConfigError, match=r"group: expected 16 samples .* got 17"):
        rollout_data_postprocess(args, 0, data)


@pytest.mark.parametrize("unknown", ["raw_reward", "rollout_batch_size"])
def test_what_cannot_be_counted_is_not_refused(unknown):
    args, data = slime.arguments(CASES["rebaseline"][0]), slime.data_of(slime.samples(0))
    data.pop(unknown, None)
    vars(args).pop(unknown, None)
    rollout_data_postprocess(args, 0, data)


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
        plan = compute_plan(correction, args, data, ranks())
        found.append((plan.scale, [advantage.tolist() for advantage in data["advantages"]]))
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
    rollout_data_postprocess(slime.arguments(CASES["rebaseline"][0]), 0, data)
    same = [was is now for was, now in zip(before, data["advantages"], strict=True)]
    assert any(same) and not all(same)


@pytest.mark.parametrize(
    ("args", "data", "message"),
    [
        ({}, None, "expected a call with the rollout's data, got one with the arguments alone: normalize"),
        (
            {},
            {"log_probs": False},
            "normalize.*: expected the proximal policy's log-probs.*--get-mismatch-metrics",
        ),
        ({"n_samples_per_prompt": 1}, {}, "group: expected ignore with --n-samples-per-prompt 1"),
        ({"custom_pg_loss_reducer_function_path": "a.b"}, {}, "denominator: expected host beside"),
    ],
)
def test_what_cannot_be_planned_is_refused(args, data, message):
    given = slime.arguments(CASES["everything"][0], **args)
    rollout_data = None if data is None else slime.data_of(slime.samples(0), **data)
    with pytest.raises(ConfigError, match=message):
        rollout_data_postprocess(given, 0, rollout_data)


@pytest.mark.parametrize("name", ["atomic", "rebaseline"])
def test_groups_that_a_run_began_with_another_size_are_refused(name):
    """slime numbers samples on from where the run before ended: 2 is no multiple of 4."""
    data = slime.data_of(slime.samples(1, split=False))
    data["sample_indices"] = [index + 2 for index in data["sample_indices"]]
    with pytest.raises(
        ConfigError, match=r"slime_ext\.group: expected 4 groups of 4 samples .*, got 5: the run"
    ):
        rollout_data_postprocess(slime.arguments(CASES[name][0]), 0, data)


@pytest.mark.parametrize("masks", [{"loss_masks": []}, {}], ids=["empty", "absent"])
def test_a_rank_without_samples_is_refused_where_others_would_wait_for_it(masks):
    with pytest.raises(DataError, match="expected a sample on every data parallel rank, got none on rank 0"):
        rollout_data_postprocess(slime.arguments(CASES["normalize"][0]), 0, masks)
    rollout_data_postprocess(slime.arguments({"preset": "token_tis"}), 0, masks)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("advantage_estimator", "reinforce_plus_plus"),
        ("rewards_normalization", False),
        ("normalize_advantages", True),
        ("use_opd", True),
        ("custom_advantage_function_path", "a.b"),
        ("custom_reward_post_process_path", "a.b"),
    ],
)
def test_a_baseline_that_is_not_known_is_refused(flag, value):
    args = slime.arguments(CASES["rebaseline"][0], **{flag: value})
    with pytest.raises(ConfigError, match="group: expected ignore or atomic with"):
        rollout_data_postprocess(args, 0, slime.data_of(slime.samples(0)))


def test_no_key_is_added_that_slimes_log_would_stumble_over():
    data = slime.data_of(samples("rebaseline", 0))
    before = {key: type(value) for key, value in data.items()}
    rollout_data_postprocess(slime.arguments(CASES["rebaseline"][0]), 0, data)
    assert {key: type(value) for key, value in data.items()} == before


def test_a_guard_that_gave_up_leaves_the_advantages_alone():
    data = slime.data_of(samples("rebaseline", 0))
    before = data["advantages"]
    step_metrics.current.leaves_loss_alone = True
    try:
        rollout_data_postprocess(slime.arguments(CASES["rebaseline"][0]), 0, data)
    finally:
        step_metrics.current.leaves_loss_alone = False
    assert data["advantages"] is before


def test_the_plan_knows_the_samples_ages():
    """Group 0 has one sample of five versions ago: all of its tokens are out, and with it the group."""
    rollout = slime.samples(0, split=False)
    data = slime.data_of(rollout)
    data["weight_versions"] = [["3" if s == 0 else "8"] for s in data["sample_indices"]]
    mapping = {"steps": [{"reject": {"unit": "sequence", "max_staleness": 2}}], "group": "atomic"}
    trainer_at(8)
    try:
        rollout_data_postprocess(slime.arguments(mapping), 0, data)
    finally:
        trainer_at(None)
    assert step_plan._current.keep == [index // slime.GROUP != 0 for index in data["sample_indices"]]


def test_a_broken_proximal_log_prob_is_named():
    data = slime.data_of(slime.samples(0))
    data["log_probs"][0][data["loss_masks"][0].argmax()] = math.nan
    with pytest.raises(NonFiniteError, match="log_probs, sequence 0"):
        rollout_data_postprocess(slime.arguments(CASES["normalize"][0]), 0, data)


def hook_call(data):
    keys = ("loss_masks", "total_lengths", "response_lengths", "rollout_log_probs")
    return {key: data[key] for key in keys} | {
        "train_log_probs": data["log_probs"],
        "pg_loss": torch.cat(data["host_loss"]),
    }


def test_a_call_without_a_plan_is_a_step_of_its_own_and_says_so(caplog):
    warn_once.cache_clear()
    rollout = slime.samples(0, split=False)[:8]
    data = slime.data_of(rollout)
    step_plan.forget()
    loss, _, _ = tis.correct(slime.arguments(CASES["kept"][0]), **hook_call(data))
    tis.correct(slime.arguments(CASES["kept"][0]), **hook_call(data))
    sums = torch.tensor([float(part.sum()) for part in loss.split(data["response_lengths"])])
    for s in rollout:
        s["normalised"] = 1.0
    wanted = slime.expected(rollout, spec("kept"), kept=True)
    assert close((sums / data["rollout_mask_sums"].clamp_min(1)).tolist(), wanted)
    assert len([r for r in caplog.records if "got a hook call alone" in r.message]) == 1


def test_a_group_without_a_plan_is_refused():
    step_plan.forget()
    with pytest.raises(ConfigError, match="group: expected --rollout-data-postprocess-path"):
        tis.correct(slime.arguments(CASES["atomic"][0]), **hook_call(slime.data_of(slime.samples(0))))


def test_another_corrections_plan_is_not_taken():
    data = slime.data_of(slime.samples(0))
    rollout_data_postprocess(slime.arguments(CASES["normalize"][0]), 0, data)
    with pytest.raises(ConfigError, match="group: expected --rollout-data"):
        tis.correct(slime.arguments(CASES["atomic"][0]), **hook_call(data))
