"""Every layout trains the same model: losses, first gradients and weights against one process, in float64.

The bound 1e-10 is far above float64's reduction noise over ten AdamW steps (about 1e-12) and far below any
error of scale, mask or gradient.
"""

from __future__ import annotations

import functools

import pytest

from tests.launcher.distributed import run_ranks
from tests.launcher.megatron import tiny_model as tiny
from tests.launcher.megatron.tiny_rollout import largest_difference, train

BOUND = 1e-10
LAYOUTS = ["tp2", "pp2", "cp2", "dp2", "tp2pp2"]
pytestmark = pytest.mark.slow


def run(layout, more):
    return run_ranks(_train, tiny.LAYOUTS[layout][0], layout, more)[0]


def _train(layout, more):
    return train(layout, **more)


@functools.cache
def alone(more=()):
    return run("one", dict(more))


def differences(result, reference):
    losses = [
        abs(a[k] - b[k])
        for a, b in zip(result["steps"], reference["steps"], strict=True)
        for k in b
        if k[:5] == "train"
    ]
    return {
        "metrics": max(losses),
        "gradients": largest_difference(result["gradients"], reference["gradients"]),
        "weights": largest_difference(result["weights"], reference["weights"]),
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ten_steps_equal_one_process(layout):
    ten = {"rollouts": 10}
    found = differences(run(layout, ten), alone(tuple(ten.items())))
    assert max(found.values()) < BOUND, found


VARIANTS = {
    "decoupled": {"num_steps_per_rollout": 2, "global_batch_size": 4},
    "minibatches": {"ppo_n_minibatches": 2, "micro_batch_size": 1},
    "gspo": {"advantage_estimator": "gspo", "num_steps_per_rollout": 2, "global_batch_size": 4},
    "cispo": {"advantage_estimator": "cispo"},
    "per_token": {"calculate_per_token_loss": True},
    "recompute": {"recompute_loss_function": True},
    "bypass": {"use_rollout_logprobs": True, "use_tis": False},
    "is": {"custom_tis_function_path": "slime_ext.tis.off_policy_is_function"},
    "whole": {"micro_batch_size": 8},
}

# What couples samples: the same host function as in slime, on every layout. The tiny rollout's log-ratios are
# several nats, so the bounds are wide: they reject three sequences of eight, and a token of another.
PLANNED = {
    "rollout_data_postprocess_path": "slime_ext.host.rollout_data_postprocess",
    "custom_tis_function_path": "slime_ext.tis.correct",
    "get_mismatch_metrics": True,
    "slime_ext": {
        "steps": [
            "reweight",
            {"truncate": {"high": 2.0}},
            "normalize",
            {"reject": {"low": 0.0135, "high": 1e2}},
            {"reject": {"unit": "sequence", "aggregate": "mean", "low": 0.07, "high": 5.0}},
        ],
        "denominator": "kept",
        "group": "atomic",
    },
}
GROUPS = {"n_samples_per_prompt": 2}
PLANS = {
    "atomic": PLANNED | GROUPS,
    "rebaseline": PLANNED | GROUPS | {"slime_ext": PLANNED["slime_ext"] | {"group": "rebaseline"}},
    "per_token": PLANNED | GROUPS | {"calculate_per_token_loss": True},
    "two_steps": PLANNED | GROUPS | {"num_steps_per_rollout": 2, "global_batch_size": 4},
}


@functools.cache
def planned(layout, plan):
    return run(layout, {"rollouts": 2, **PLANS[plan]})


CELLS = [(layout, "atomic") for layout in LAYOUTS] + [(x, plan) for x in ("cp2", "dp2") for plan in PLANS]


@pytest.mark.parametrize(("layout", "plan"), sorted(set(CELLS)))
def test_what_couples_samples_equals_one_process(layout, plan):
    found = differences(planned(layout, plan), planned("one", plan))
    assert max(found.values()) < BOUND, found


def test_packing_changes_nothing_that_couples_samples():
    whole = run("one", {"rollouts": 2, **PLANS["atomic"], "micro_batch_size": 8})
    found = differences(planned("one", "atomic"), whole)
    assert max(found.values()) < BOUND, found


@pytest.mark.parametrize("key", ["denominator", "group"])
def test_what_couples_samples_acts(key):
    without = {k: v for k, v in PLANNED["slime_ext"].items() if k != key}
    both = [run("one", PLANS["atomic"] | {"slime_ext": m}) for m in (PLANNED["slime_ext"], without)]
    assert differences(*both)["gradients"] > 1e-4


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("layout", ["cp2", "dp2"])
def test_every_kind_of_step_equals_one_process(layout, variant):
    more = {"rollouts": 2, **VARIANTS[variant]}
    if variant == "whole" and layout == "dp2":
        more["micro_batch_size"] = 4
    found = differences(run(layout, more), alone(tuple(({"rollouts": 2} | VARIANTS[variant]).items())))
    assert max(found.values()) < BOUND, found


@pytest.mark.parametrize("variant", ["recompute", "whole", "minibatches"])
@pytest.mark.parametrize("per_token", [False, True])
def test_how_the_step_is_cut_changes_nothing(variant, per_token):
    base = {"rollouts": 2, "calculate_per_token_loss": per_token}
    found = differences(alone(tuple((base | VARIANTS[variant]).items())), alone(tuple(base.items())))
    assert max(found.values()) < BOUND, found


def test_control_one_scaled_parameter_is_seen():
    ten = {"rollouts": 10}
    found = differences(run("tp2", {**ten, "scale_one": 1.001}), alone(tuple(ten.items())))
    assert min(found.values()) > 1e3 * BOUND, found
