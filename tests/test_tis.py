"""The functions that a flag names: slime's call, the seeds' literal behaviour, refusals, metrics-only."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from slime_ext import presets, tis
from slime_ext.core.metrics.layout import MetricsLayout
from slime_ext.errors import ConfigError, DataError, NonFiniteError
from slime_ext.host import step_metrics
from slime_ext.host.configured import setup_for
from slime_ext.host.ranks import Parallel
from slime_ext.hosts.contract import METRICS, REQUIRED
from tests import oracle
from tests.batches import tokens

SEEDS = ("vanilla_tis_function", "icepop_function", "off_policy_is_function")
NAMES = (*SEEDS, *presets.PRESETS)


def arguments(**fields):
    defaults = {"use_tis": True, "tis_clip": 2.0, "tis_clip_low": 0.0, "eps_clip": 0.2, "eps_clip_high": 0.2}
    defaults["custom_generate_function_path"] = "slime_ext.host.generate"
    return SimpleNamespace(**defaults | fields)


def as_slime_calls(batch, **changes):
    """slime's keywords for an oracle batch, in float64."""
    lengths = [len(s["mask"]) for s in batch]
    packed, host_loss = tokens(batch)

    def split(values):
        return list(values.split(lengths))

    call = {
        "pg_loss": host_loss,
        "train_log_probs": split(packed.proximal),
        "rollout_log_probs": split(packed.behavior),
        "loss_masks": [torch.tensor(s["mask"], dtype=torch.int32) for s in batch],
        "total_lengths": [n + 5 for n in lengths],
        "response_lengths": lengths,
        "cur_log_probs": split(packed.target),
        "advantages": split(packed.advantages),
        "head": packed.head,
    }
    return call | changes


def column(seqs, key):
    return torch.tensor([x for s in seqs for x in s[key]], dtype=torch.float64)


def test_presets_through_the_hook_match_the_oracle():
    for name in presets.PRESETS:
        batch = oracle.random_batch(0) + oracle.random_batch(1)
        call = as_slime_calls(batch)
        loss, masks, metrics = getattr(tis, name)(arguments(), **call)
        expected = oracle.correct(oracle.SPECS[name], batch)
        assert all(a is b for a, b in zip(masks, call["loss_masks"], strict=True))
        assert list(metrics) == list(METRICS) and all(m.shape == loss.shape for m in metrics.values())
        rejected = torch.tensor(
            [bool(m) and not k for s in expected for m, k in zip(s["mask"], s["keep"], strict=True)]
        )
        assert torch.equal(metrics[METRICS[2]] > 0, rejected)
        if name == "metrics_only":
            assert loss is call["pg_loss"]
        else:
            torch.testing.assert_close(loss.detach(), column(expected, "loss"), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(("low", "high"), [(0.0, 2.0), (0.8, 1.1)])
def test_vanilla_clips_and_icepop_drops(low, high):
    batch = oracle.random_batch(2)
    args = arguments(tis_clip_low=low, tis_clip=high)
    clip = oracle.correct(oracle.spec(oracle.TOKEN, ("clip", low, high)), batch)
    band = oracle.correct(
        oracle.spec(oracle.TOKEN, ("reject", "token", "ratio", "-", low, high, "always")), batch
    )
    for name, expected in (("vanilla_tis_function", clip), ("icepop_function", band)):
        loss, _, metrics = getattr(tis, name)(args, **as_slime_calls(batch))
        torch.testing.assert_close(loss, column(expected, "loss"), rtol=1e-12, atol=1e-13)
        assert list(metrics) == ["tis", "tis_clipfrac", "tis_abs", "nonfinite_fraction"]


def test_both_ends_of_the_band_are_inside():
    batch = [
        {k: [-1.0] for k in ("proximal", "behavior", "target", "advantage")}
        | {"mask": [1], "host_loss": [3.0]}
    ]
    for low, high in ((1.0, 2.0), (0.5, 1.0)):
        args = arguments(tis_clip_low=low, tis_clip=high)
        assert tis.icepop_function(args, **as_slime_calls(batch))[0].tolist() == [3.0]


def test_the_seeds_metrics_are_slimes():
    batch = [{"proximal": [0.0] * 3, "behavior": [-1.0, 0.0, math.nan], "mask": [1, 1, 1]}]
    batch[0] |= {"target": [0.0] * 3, "advantage": [1.0] * 3, "host_loss": [1.0] * 3}
    _, _, metrics = tis.vanilla_tis_function(arguments(), **as_slime_calls(batch))
    assert metrics["tis"].tolist() == pytest.approx([math.e, 1.0, 0.0])
    assert metrics["tis_clipfrac"].tolist() == [1.0, 0.0, 0.0]
    assert metrics["tis_abs"].tolist() == pytest.approx([math.e - 1, 0.0, 0.0])
    assert metrics["nonfinite_fraction"].tolist() == [0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("name", "weights", "clipped"),
    [(SEEDS[0], [1, 2, 0.5], 2), (SEEDS[1], [1], 0), (SEEDS[2], [1, 2, 0.5], 2)],
)
def test_in_an_open_step_the_seeds_weights_are_measured(name, weights, clipped):
    """Ratios 1, 4, 1/4 and none in the band from 1/2 to 2."""
    log_probs = [0.0, math.log(4), -math.log(4), 0.0]
    batch = [{"behavior": [0.0, 0.0, 0.0, math.nan], "mask": [1] * 4}]
    batch[0] |= dict.fromkeys(("proximal", "target", "advantage", "host_loss"), log_probs)
    args = arguments(tis_clip_low=0.5, tis_clip=2.0, eps_clip=0.5, eps_clip_high=1.0)
    args.custom_tis_function_path = f"slime_ext.tis.{name}"
    layout = MetricsLayout.of(setup_for(args).hook_correction)
    with step_metrics.under_way(step_metrics.OptimizerStep(layout)) as step:
        getattr(tis, name)(args, **as_slime_calls(batch))
    found = step.reduce()[0]
    expected = {
        "weight_mean": sum(weights) / 4,
        "kept_fraction": len(weights) / 4,
        "clipped_fraction": clipped / 4,
    }
    assert {key: found[f"off_policy/{key}"] for key in expected} == pytest.approx(expected)


@pytest.mark.parametrize("name", [*SEEDS, "geo_rs"])
@pytest.mark.parametrize("rank", [0, 1])
def test_of_the_ranks_that_share_sequences_the_first_counts_them(name, rank):
    batch = oracle.random_batch(1)
    with step_metrics.under_way(step_metrics.OptimizerStep(MetricsLayout(), parallel=Parallel(rank))) as step:
        getattr(tis, name)(arguments(), **as_slime_calls(batch))
    counted = sum(any(s["mask"]) for s in batch)
    assert step.reduce()[0]["off_policy/sequences"] == (0 if rank else counted)


@pytest.mark.parametrize("name", NAMES)
def test_what_holds_of_every_function(name):
    call = as_slime_calls(oracle.random_batch(0) + oracle.random_batch(1))
    before = [m.clone() for m in call["loss_masks"]]
    args = arguments()
    loss, _, metrics = getattr(tis, name)(args, **call)
    # Finite whatever stands at masked positions; and slime's --recompute-loss-function calls twice.
    assert all(m.isfinite().all() and not m.requires_grad for m in metrics.values())
    assert all(torch.equal(a, b) for a, b in zip(before, call["loss_masks"], strict=True))
    again = getattr(tis, name)(args, **call)[0]
    torch.testing.assert_close(again, loss, rtol=0, atol=0, equal_nan=True)
    loss, masks, metrics = getattr(tis, name)(arguments(use_tis=False), **call)
    assert loss is call["pg_loss"] and masks is call["loss_masks"] and metrics
    loss, masks, _ = getattr(tis, name)(args, **as_slime_calls([]))
    assert loss.shape == (0,) and list(masks) == []


def test_metrics_are_finite_whatever_the_log_ratio():
    for name in NAMES:
        batch = [{key: [0.0, -1.0] for key in ("proximal", "target", "advantage", "host_loss")}]
        batch[0] |= {"behavior": [-100.0, -1.0], "mask": [1, 1]}
        call = as_slime_calls(batch)
        lists = ("train_log_probs", "rollout_log_probs", "cur_log_probs")
        call |= {key: [x.detach().float() for x in call[key]] for key in lists}
        loss, _, metrics = getattr(tis, name)(arguments(), **call | {"pg_loss": torch.full((2,), 2.0)})
        assert all(m.isfinite().all() for m in metrics.values()) and loss.isfinite().all()


def test_lists_of_floats_are_refused_in_one_line():
    for name in ["train_log_probs", "rollout_log_probs", "loss_masks", "cur_log_probs"]:
        call = as_slime_calls(oracle.random_batch(1))
        wrong = [x.tolist() for x in call[name]]
        with pytest.raises(
            DataError, match=f"{name}, sequence 0 of {len(wrong)}: expected a tensor, got list: turn"
        ):
            tis.pure_is(arguments(), **call | {name: wrong})


def test_a_loss_that_is_not_one_number_per_token_is_refused():
    for name in [*SEEDS, "geo_rs", "token_tis", "metrics_only"]:
        call = as_slime_calls(oracle.random_batch(1))
        held = len(call["pg_loss"])
        with pytest.raises(
            DataError,
            match=f"pg_loss: expected {held} tokens on this rank, got a tensor of shape .{held - 1}.",
        ):
            getattr(tis, name)(arguments(), **call | {"pg_loss": call["pg_loss"][1:]})


@pytest.mark.parametrize("key", ["pg_loss", *REQUIRED[2:5], "cur_log_probs", "advantages"])
def test_a_column_in_place_of_a_row_is_refused(key):
    """[R, 1] has the right number of tokens, and would make a loss of [R, R]."""
    call = as_slime_calls(oracle.random_batch(3))
    rows = call[key]
    call[key] = rows[:, None] if key == "pg_loss" else [row[:, None] for row in rows]
    with pytest.raises(
        DataError, match=f"^{key}.*: expected .*, got a tensor of shape .*, 1.: .*one number"
    ) as caught:
        tis.pure_is(arguments(), **call)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "flags"), [("vanilla_tis_function", "tis_clip"), ("off_policy_is_function", "eps_clip_high")]
)
def test_a_flag_that_changes_is_seen(name, flags):
    call, args = as_slime_calls(oracle.random_batch(3, wild=False)), arguments(**{flags: 1.001})
    narrow, _, _ = getattr(tis, name)(args, **call)
    setattr(args, flags, 7.0)
    wide, _, _ = getattr(tis, name)(args, **call)
    expected, _, _ = getattr(tis, name)(arguments(**{flags: 7.0}), **call)
    assert torch.equal(wide, expected) and not torch.equal(wide, narrow)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.float16])
def test_reduced_masks_have_the_hosts_dtype(dtype):
    batch = oracle.random_batch(3)
    masks = [torch.tensor(s["mask"]).to(dtype) for s in batch]
    mapping = {"mask_scope": "all", "steps": [{"reject": {"high": 1.0}}]}
    _, reduced, _ = tis.correct(arguments(slime_ext=mapping), **as_slime_calls(batch, loss_masks=masks))
    assert {mask.dtype for mask in reduced} == {dtype}
    assert sum(int(mask.sum()) for mask in reduced) < sum(int(mask.sum()) for mask in masks)


def test_correct_reads_the_mapping_of_the_arguments_anew():
    call = as_slime_calls(oracle.random_batch(1))
    for name in ("icepop", "geo_rs", "icepop"):
        by_mapping = tis.correct(arguments(slime_ext={"preset": name}), **call)[0]
        assert torch.equal(by_mapping, getattr(tis, name)(arguments(), **call)[0])


def test_mask_scope_all_returns_reduced_masks():
    call = as_slime_calls(oracle.random_batch(1))
    args = arguments(slime_ext={"preset": "geo_rs", "mask_scope": "all"})
    _, masks, metrics = tis.correct(args, **call)
    kept = (torch.cat(call["loss_masks"]) > 0) & (metrics[METRICS[2]] == 0)
    assert torch.equal(torch.cat(masks) > 0, kept) and masks[0].dtype == torch.int32


def test_on_nonfinite_raise_names_the_token():
    batch = [{k: [-1.0, -1.0] for k in ("proximal", "target", "advantage", "host_loss")}]
    batch[0] |= {"behavior": [-1.0, math.nan], "mask": [1, 1]}
    args = arguments(slime_ext={"preset": "token_tis", "on_nonfinite": "raise"})
    with pytest.raises(
        NonFiniteError, match=r"rollout_log_probs, sequence 0 of 1, response token 1: .* got nan"
    ):
        tis.correct(args, **as_slime_calls(batch))


@pytest.mark.parametrize("missing", ["cur_log_probs", "advantages"])
def test_a_surrogate_of_ours_says_what_it_lacks(missing):
    call = as_slime_calls(oracle.random_batch(0), **{missing: None})
    with pytest.raises(ConfigError, match=f"expected {missing}"):
        tis.pure_is(arguments(), **call)


@pytest.mark.parametrize(
    ("eps_c", "host", "floor"), [(None, None, 3.0), (None, 10.0, 10.0), (5.0, 10.0, 5.0), (5.0, None, 5.0)]
)
def test_the_floor_of_dual_clip_is_its_own_the_hosts_or_3(eps_c, host, floor):
    sample = {"proximal": [0.0], "behavior": [0.0], "target": [2.5], "advantage": [-1.0], "mask": [1]}
    surrogate = {"dual_clip": {"eps_c": eps_c}} if eps_c else "dual_clip"
    args = arguments(slime_ext={"surrogate": surrogate}, eps_clip_c=host)
    loss, _, _ = tis.correct(args, **as_slime_calls([sample | {"host_loss": [0.0]}]))
    assert loss.tolist() == [pytest.approx(min(math.exp(2.5), floor), rel=1e-12)]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_opsm": True}, "--use-opsm: expected off, got on: its mask would be discarded"),
        ({"advantage_estimator": "gspo"}, "--advantage-estimator: expected another, got gspo"),
        ({"slime_ext": {"preset": "icepop"}}, "slime_ext.preset: expected pure_is .* got icepop"),
    ],
)
def test_settings_whose_work_would_be_lost_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        tis.pure_is(arguments(**fields), **as_slime_calls(oracle.random_batch(0)))


def test_weights_on_a_loss_that_clips_against_behavior_are_refused():
    call = as_slime_calls(oracle.random_batch(0))
    args = arguments(use_rollout_logprobs=True)
    with pytest.raises(ConfigError, match="--use-rollout-logprobs: expected off beside --use-tis"):
        tis.token_tis(args, **call)
    tis.geo_rs(args, **call)
    tis.pure_is(args, **call)


def test_a_coupled_step_without_a_plan_says_once_that_it_is_alone(caplog):
    for _ in range(2):
        tis.m2(arguments(), **as_slime_calls(oracle.random_batch(0)))
    assert len([r for r in caplog.records if "as a whole step" in r.getMessage()]) == 1


def test_a_host_that_passes_less_than_slime_is_a_type_error():
    with pytest.raises(TypeError, match="total_lengths"):
        call = as_slime_calls([])
        tis.token_tis(arguments(), **{k: call[k] for k in REQUIRED[1:] if k != "total_lengths"})


def test_the_hosts_log_counts_the_tokens_that_the_surrogate_clipped():
    """Of ratio 1.5 with advantages of both signs, and of ratio 1, PPO clips the first."""
    log_probs = {"proximal": [0.0] * 3, "behavior": [0.0] * 3, "target": [math.log(1.5)] * 2 + [0.0]}
    batch = [{"mask": [1] * 3, "host_loss": [0.0] * 3, "advantage": [1.0, -1.0, 1.0], **log_probs}]
    args = arguments(slime_ext={"surrogate": "ppo_clip", "steps": ["reweight"]})
    _, _, metrics = tis.correct(args, **as_slime_calls(batch))
    assert metrics["off_policy/host/clipped"].tolist() == [1.0, 0.0, 0.0]


def test_no_gradient_reaches_the_hosts_advantages():
    args = arguments(slime_ext={"surrogate": "reinforce", "steps": ["reweight"]})
    call = as_slime_calls(oracle.random_batch(1, wild=False))
    call["advantages"] = [values.requires_grad_() for values in call["advantages"]]
    call["cur_log_probs"] = [values.detach().requires_grad_() for values in call["cur_log_probs"]]
    loss, _, _ = tis.correct(args, **call)
    loss.sum().backward()
    assert all(values.grad is None for values in call["advantages"])
    assert any(values.grad.abs().sum() > 0 for values in call["cur_log_probs"])
