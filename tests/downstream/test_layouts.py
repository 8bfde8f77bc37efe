"""One correction, one loss: in every layout of every real host, whichever way the target's log-probs arrive.

``SLIME_GIT=path/to/repository MILES_DIR=path/to/miles pytest tests/downstream/test_layouts.py``; SLIME_DIR
names one checkout instead. ``python -m tests.downstream.layouts`` prints the same as a table.

Bound: the hosts compute in float32 and sum about 40 terms of size 1, in an order that the layout decides.
"""

from __future__ import annotations

import math

import pytest

from tests.downstream.checkouts import folder_of, named
from tests.downstream.host_loss import MASKED_OUT, ROLLOUT_IDS, VALID_AT, WITH_NAN, Case, Layout, samples
from tests.downstream.layouts import (
    LAYOUTS,
    PER_TOKEN_LAYOUTS,
    cases,
    distance,
    layouts_of,
    patched,
    run,
)

BOUND = 1e-6
TOKEN = {"preset": "token_is"}
pytestmark = [pytest.mark.slow]


@pytest.fixture(scope="module", params=named())
def host(request, tmp_path_factory):
    """(name, folder) of a checkout."""
    return request.param[0], folder_of(request.param, tmp_path_factory.mktemp("host"))


@pytest.fixture(scope="module")
def alone(host):
    """Every correction on one process, and the same with a loss per token."""
    return {key: run(*host, layouts, cases()) for key, layouts in _references().items()}


def _references():
    return {False: LAYOUTS["1 process"], True: PER_TOKEN_LAYOUTS["per token"]}


@pytest.mark.parametrize("key", [*list(LAYOUTS)[1:], *list(PER_TOKEN_LAYOUTS)[1:]])
def test_the_same_loss_and_gradient_in_every_layout(host, alone, key):
    layout = {**layouts_of(*host), **PER_TOKEN_LAYOUTS}.get(key)
    if layout is None:
        pytest.skip("this release has no such layout")
    assert distance(alone["per token" in key], run(*host, layout, cases())) < BOUND


@pytest.mark.parametrize("init", [None, "slime_ext.host.init"])
def test_a_patched_host_gives_the_same_numbers(host, alone, init, tmp_path):
    assert distance(alone[False], run(host[0], patched(*host, tmp_path), Layout(cp=2), cases(init))) < BOUND


def test_corrections_differ_from_each_other_and_from_none(host, alone):
    (none,) = run(
        *host, Layout(), [Case(flags={"use_tis": False, "custom_tis_function_path": None}, init=None)]
    )
    losses = [round(one["loss"], 3) for one in (none, *alone[False])]
    assert len(set(losses)) == len(losses)


@pytest.mark.parametrize("preset", ["token_is", "geo_rs", "off_policy_is"])
def test_metrics_alone_leave_the_loss_bitwise_as_it_is(host, preset):
    off = {"use_tis": False, "get_mismatch_metrics": True}
    cut = [
        Case({"preset": preset}, off),
        Case(flags={"use_tis": False, "custom_tis_function_path": None}, init=None),
    ]
    with_hook, without = run(*host, Layout(cp=2), cut)
    assert (with_hook["loss"], with_hook["gradient"]) == (without["loss"], without["gradient"])
    assert "off_policy/host/ratio" in with_hook["metrics"]


@pytest.mark.parametrize(
    "path", ["correct", "vanilla_tis_function", "icepop_function", "off_policy_is_function"]
)
@pytest.mark.parametrize("layout", ["1 process", "CP2"])
def test_a_nan_of_the_behavior_policy_costs_one_token(host, path, layout):
    flags = {"custom_tis_function_path": f"slime_ext.tis.{path}", "tis_clip_low": 0.2}
    given = TOKEN if path == "correct" else None
    cut = [Case(given, flags, nan) for nan in (None, ("behavior", "masked"), ("behavior", "valid"))]
    clean, masked, valid = run(*host, LAYOUTS[layout], cut)
    assert (masked["loss"], masked["gradient"]) == (clean["loss"], clean["gradient"])
    assert math.isfinite(valid["loss"]) and math.isfinite(valid["gradient"])
    assert valid["loss"] != clean["loss"]
    assert _counted(valid, path) - _counted(clean, path) == pytest.approx(1, abs=1e-4)


def _counted(found, path):
    """Tokens that the host's channel reports as lost: it averages over the sample, then over rollouts."""
    key = "off_policy/host/rejected" if path == "correct" else "nonfinite_fraction"
    return found["metrics"][key] * len(set(ROLLOUT_IDS)) * float(samples()[WITH_NAN].mask_sum)


def test_a_nan_of_the_proximal_policy_stops_with_sample_and_position(host):
    (found,) = run(*host, Layout(), [Case(TOKEN, nan=("proximal", "valid"))])
    assert found["error"].startswith("NonFiniteError: train_log_probs, sequence 2 of 8, response token 1:")
    assert (WITH_NAN, VALID_AT) == (2, 1) and MASKED_OUT != WITH_NAN


def test_without_init_a_correction_that_needs_the_target_names_the_flag(host):
    (found,) = run(*host, Layout(), [Case({"preset": "off_policy_is"}, init=None)])
    assert found["error"].startswith("ConfigError: numerator: target: expected cur_log_probs")
    assert "--custom-megatron-init-path slime_ext.host.init" in found["error"]
