"""What couples samples, on real hosts: one loss in every layout and packing, where the host's own example has
two.

``SLIME_GIT=path/to/repository MILES_DIR=path/to/miles pytest tests/downstream/test_step_plan.py``

Bound: as in test_layouts.
"""

from __future__ import annotations

import pytest

from slime_ext.errors import ConfigError
from slime_ext.host import rollout_data_postprocess
from tests.downstream.checkouts import REPOSITORIES, extract, folder_of, named
from tests.downstream.host_loss import Case, Layout
from tests.downstream.layouts import distance, run
from tests.host import slime_rollouts

BOUND = 1e-6
PLANNED = {
    "rollout_data_postprocess_path": "slime_ext.host.rollout_data_postprocess",
    "get_mismatch_metrics": True,
}
STEPS = [
    "reweight",
    {"truncate": {"high": 1.2}},
    "normalize",
    {"reject": {"low": 0.7, "high": 1.6}},
    {"reject": {"unit": "sequence", "aggregate": "mean", "low": 0.9, "high": 1.15}},
]
CORRECTIONS = {
    "normalize": {"steps": STEPS[:3]},
    "second moment": {"steps": [{"second_moment": {"threshold": 0.04}}]},
    "kept": {"steps": STEPS, "denominator": "kept"},
    "kept, masks all": {"steps": STEPS, "denominator": "kept", "mask_scope": "all"},
    "atomic": {"steps": STEPS, "group": "atomic"},
    "atomic, kept": {"steps": STEPS, "denominator": "kept", "group": "atomic"},
}
PER_TOKEN = {"calculate_per_token_loss": True}
LAYOUTS = {
    "two micro-batches": Layout(micro_batches=2),
    "CP2": Layout(cp=2),
    "TP2": Layout(tp=2),
    "DP2": Layout(dp=2),
    "DP2 x CP2": Layout(dp=2, cp=2),
    "PP2": Layout(pp=2),
    "DP2, two micro-batches": Layout(dp=2, micro_batches=2),
    "recompute": Layout(micro_batches=2, flags={"recompute_loss_function": True}),
    "per token, DP2": Layout(dp=2, flags=PER_TOKEN),
    "per token, CP2": Layout(cp=2, flags=PER_TOKEN),
}
# slime's examples/train_infer_mismatch_helper/mis.yaml.
MIS = {
    "use_rs": True,
    "tis_level": "token",
    "rs_level": "token",
    "tis_mode": "truncate",
    "tis_lower_bound": 0.5,
    "tis_upper_bound": 2.0,
    "rs_lower_bound": None,
    "rs_upper_bound": None,
    "rs_veto_threshold": 1.0e-4,
    "tis_batch_normalize": True,
}
EXAMPLE = "examples/train_infer_mismatch_helper"
pytestmark = [pytest.mark.slow]


def cases():
    return [Case(mapping, PLANNED) for mapping in CORRECTIONS.values()]


@pytest.fixture(scope="module", params=named())
def host(request, tmp_path_factory):
    """(name, folder) of a checkout that hands the rollout's data out."""
    name, release = request.param
    if name == "miles" or release == "v0.2.0":
        pytest.skip("this release calls the function with its arguments alone")
    return name, folder_of(request.param, tmp_path_factory.mktemp("host"))


@pytest.fixture(scope="module")
def alone(host):
    """Every correction on one process, and the same with a loss per token."""
    return {key: run(*host, Layout(flags=PER_TOKEN if key else {}), cases()) for key in (False, True)}


@pytest.mark.parametrize("key", LAYOUTS)
def test_the_same_loss_and_gradient_in_every_layout(host, alone, key):
    assert distance(alone["per token" in key], run(*host, LAYOUTS[key], cases())) < BOUND


def test_every_one_of_them_acts(host, alone):
    plain = run(*host, Layout(), [Case({"steps": steps}) for steps in (STEPS[:2], STEPS[:2] + STEPS[3:])])
    losses = [round(one["loss"], 4) for one in (*plain, *alone[False])]
    # Before v0.3.0 the reduced masks divide, and then "kept" has nothing left to do.
    assert len(set(losses)) >= len(losses) - 2, losses


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """slime's newest release with its own example of a correction."""
    if not REPOSITORIES["slime"]:
        pytest.skip("SLIME_GIT names no repository")
    return "slime", extract("slime", "HEAD", tmp_path_factory.mktemp("example"), EXAMPLE)


def test_slimes_own_example_depends_on_packing_and_ours_does_not(example):
    theirs = {
        **MIS,
        "custom_tis_function_path": f"{EXAMPLE.replace('/', '.')}.mis.compute_mis_weights_with_cp",
    }
    given = [Case(None, theirs, init=None), Case({"slime_mis": {"use_tis": True, **MIS}}, PLANNED)]
    (mis, ours), (mis_cut, ours_cut) = (run(*example, Layout(micro_batches=n), given) for n in (1, 2))
    print(
        f"mis.py {mis['loss']:.6f} {mis_cut['loss']:.6f}; slime_ext {ours['loss']:.6f} {ours_cut['loss']:.6f}"
    )
    assert abs(mis["loss"] - mis_cut["loss"]) > 1e-3
    assert distance([ours], [ours_cut]) < BOUND
    assert abs(mis["loss"] - ours["loss"]) < BOUND


def test_a_release_without_the_data_is_refused():
    args = slime_rollouts.arguments(CORRECTIONS["kept"])
    with pytest.raises(ConfigError, match=r"needs slime v0\.2\.4 or newer; miles does not"):
        rollout_data_postprocess(args)
