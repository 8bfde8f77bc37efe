"""What couples samples, on real hosts: one loss in every layout and packing, where the host's own example has
two.

``HOSTS=path/to/hosts pytest tests/downstream/test_step_plan.py``

Bound: as in test_layouts.
"""

from __future__ import annotations

import pytest

from tests.downstream.host_loss import Case, Layout
from tests.downstream.layouts import COUPLED_LAYOUTS, PLANNED, distance, run_all

BOUND = 1e-6
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
EXAMPLE = "examples.train_infer_mismatch_helper.mis"
pytestmark = [pytest.mark.slow]


@pytest.fixture
def coupled(measured):
    """What couples samples, in every layout."""
    return {key: measured[f"coupled, {key}"] for key in (*COUPLED_LAYOUTS, "plain")}


def test_the_same_loss_and_gradient_in_every_layout(coupled):
    for key in COUPLED_LAYOUTS:
        alone = coupled["per token" if "per token" in key else "1 process"]
        assert distance(alone, coupled[key]) < BOUND, key


def test_every_one_of_them_acts(coupled):
    losses = [round(one["loss"], 4) for one in (*coupled["plain"], *coupled["1 process"])]
    # Before v0.3.0 the reduced masks divide, and then "kept" has nothing left to do.
    assert len(set(losses)) >= len(losses) - 2, losses


def test_slimes_own_example_depends_on_packing_and_ours_does_not(host):
    if "step_global_batch_size" not in host.module("slime.backends.megatron_utils.loss"):
        pytest.skip("an example of slime since v0.3.0")
    theirs = {**MIS, "custom_tis_function_path": f"{EXAMPLE}.compute_mis_weights_with_cp"}
    given = [Case(None, theirs, init=None), Case({"slime_mis": {"use_tis": True, **MIS}}, PLANNED)]
    found = run_all(host.name, host.folder, {n: (Layout(micro_batches=n), given) for n in (1, 2)})
    (mis, ours), (mis_cut, ours_cut) = found[1], found[2]
    figures = [f"{one['loss']:.4f}" for one in (mis, mis_cut, ours, ours_cut)]
    print("mis.py {}, in two micro-batches {}; slime_ext {}, {}".format(*figures))
    assert abs(mis["loss"] - mis_cut["loss"]) > 1e-3
    assert distance([ours], [ours_cut]) < BOUND
    assert abs(mis["loss"] - ours["loss"]) < BOUND
