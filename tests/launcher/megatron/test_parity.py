"""Every layout trains the same model: losses, first gradients and weights against one process, in float64.

The bound 1e-10 is far above float64's reduction noise over ten AdamW steps (about 1e-12) and far below any
error of scale, mask or gradient.
"""

from __future__ import annotations

import functools

import pytest

from tests.launcher.distributed import each, run_ranks
from tests.launcher.megatron import tiny_model as tiny
from tests.launcher.megatron.tiny_rollout import largest_difference, train

BOUND = 1e-10
LAYOUTS = ["tp2", "pp2", "cp2", "dp2", "tp2pp2"]
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("parity")]


def _train(layout, more):
    return train(layout, **more)


def run(layout, *cases):
    """What each case gives on rank 0 of a layout, all in one start."""
    return run_ranks(each, tiny.LAYOUTS[layout][0], _train, [(layout, more) for more in cases])[0]


@functools.cache
def alone():
    """Every case that other layouts are held against, on one process."""
    cases = {"ten": TEN, **VARIANTS, **PLANS, "per token": PER_TOKEN}
    cases |= {f"per token, {name}": PER_TOKEN | VARIANTS[name] for name in CUTS}
    return dict(zip(cases, run("one", *cases.values()), strict=True))


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


TEN, TWO = {"rollouts": 10}, {"rollouts": 2}
PER_TOKEN = TWO | {"calculate_per_token_loss": True}
CUTS = ("recompute", "whole", "minibatches")
VARIANTS = {
    "plain": TWO,
    "decoupled": TWO | {"num_steps_per_rollout": 2, "global_batch_size": 4},
    "minibatches": TWO | {"ppo_n_minibatches": 2, "micro_batch_size": 1},
    "gspo": TWO | {"advantage_estimator": "gspo", "num_steps_per_rollout": 2, "global_batch_size": 4},
    "cispo": TWO | {"advantage_estimator": "cispo"},
    "per_token": PER_TOKEN,
    "recompute": TWO | {"recompute_loss_function": True},
    "bypass": TWO | {"use_rollout_logprobs": True, "use_tis": False},
    "is": TWO | {"custom_tis_function_path": "slime_ext.tis.off_policy_is_function"},
    "whole": TWO | {"micro_batch_size": 8},
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
    "atomic": TWO | PLANNED | GROUPS,
    "rebaseline": TWO | PLANNED | GROUPS | {"slime_ext": PLANNED["slime_ext"] | {"group": "rebaseline"}},
    "atomic per token": PER_TOKEN | PLANNED | GROUPS,
    "two steps": TWO | PLANNED | GROUPS | {"num_steps_per_rollout": 2, "global_batch_size": 4},
}
# Ten plain steps and the coupled samples on every layout; every kind of step where ranks share samples.
CASES = {layout: ["ten", "atomic"] for layout in LAYOUTS}
CASES |= {layout: ["ten", *VARIANTS, *PLANS] for layout in ("cp2", "dp2")}


def flags_of(layout, case):
    flags = {"ten": TEN, **VARIANTS, **PLANS}[case]
    return flags | {"micro_batch_size": 4} if (layout, case) == ("dp2", "whole") else flags


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_equals_one_process(layout):
    results = run(layout, *(flags_of(layout, case) for case in CASES[layout]))
    for case, result in zip(CASES[layout], results, strict=True):
        found = differences(result, alone()[case])
        assert max(found.values()) < BOUND, (case, found)


def test_how_a_step_is_cut_changes_nothing():
    (whole,) = run("one", PLANS["atomic"] | {"micro_batch_size": 8})
    pairs = {"coupled samples": (whole, alone()["atomic"])}
    pairs |= {cut: (alone()[cut], alone()["plain"]) for cut in CUTS}
    pairs |= {f"per token, {cut}": (alone()[f"per token, {cut}"], alone()["per token"]) for cut in CUTS}
    for name, pair in pairs.items():
        found = differences(*pair)
        assert max(found.values()) < BOUND, (name, found)


def test_controls_are_seen():
    """One parameter scaled by 1.001, and each part of what couples samples left out."""
    (scaled,) = run("tp2", TEN | {"scale_one": 1.001})
    found = differences(scaled, alone()["ten"])
    assert min(found.values()) > 1e3 * BOUND, found
    keys = ("denominator", "group")
    less = [{k: v for k, v in PLANNED["slime_ext"].items() if k != key} for key in keys]
    for key, result in zip(
        keys, run("one", *(PLANS["atomic"] | {"slime_ext": m} for m in less)), strict=True
    ):
        assert differences(alone()["atomic"], result)["gradients"] > 1e-4, key
