"""A hook call goes down through the rooms and never climbs back."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from slime_ext import tis
from slime_ext.config.load import load_config
from slime_ext.core.metrics.layout import MetricsLayout
from slime_ext.host import step_metrics
from slime_ext.host.hook import bounds_of
from tests import oracle
from tests.host import trees
from tests.test_layering import rank
from tests.test_tis import arguments, as_slime_calls

ROOT = Path(tis.__file__).parent
WEIGHTS = [{"reweight": {"level": "token"}}, {"truncate": {"high": 2.0}}]
STEPS = [
    {"reweight": {"level": "sequence"}},
    {"truncate": {"high": 2.0}},
    {"reject": {"unit": "sequence", "low": 0.999, "high": 1.001}},
    {"veto": {"low": 1.0e-4}},
]


def passed(call):
    """[(caller's file, file)] of every call of ours inside one call."""
    found = []

    def note(frame, event, _):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT):
            back = frame.f_back
            while back and not Path(back.f_code.co_filename).is_relative_to(ROOT):
                back = back.f_back
            found.append((back and back.f_code.co_filename, str(path)))

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.parametrize("steps", [WEIGHTS, STEPS], ids=["token_tis", "rejections"])
def test_a_hook_call_with_all_its_metrics_never_climbs(steps):
    mapping = {"steps": steps}
    args = arguments(slime_ext=mapping)
    layout = MetricsLayout.of(load_config(mapping))
    given = as_slime_calls(oracle.random_batch(1))
    given["cur_log_probs"] = given["advantages"] = None
    with step_metrics.under_way(step_metrics.OptimizerStep(layout)):
        tis.correct(args, **given)  # what is read once per run
    with step_metrics.under_way(step_metrics.OptimizerStep(layout)):
        found = passed(lambda: tis.correct(args, **given))
    uphill = {(caller, path) for caller, path in found if caller and rank(path) > rank(caller)}
    assert found and not uphill


# Functions of host/ and hosts/ that ask memory, context variables, Megatron or loaded modules.
AMBIENT = {"current", "current_step", "context_parallel", "parallel_state", "pushes", "ranks", "definers"}


@pytest.mark.parametrize(
    "steps", [WEIGHTS, ["reweight", "truncate", "normalize"]], ids=["token_tis", "planned"]
)
def test_what_runs_around_a_call_is_asked_once_and_handed_down(steps):
    mapping, asked = {"steps": steps}, []
    args, given = arguments(slime_ext=mapping), as_slime_calls(oracle.random_batch(1))

    def note(frame, event, _):
        code, caller = frame.f_code, frame.f_back.f_code
        if event == "call" and code.co_name in AMBIENT and "/slime_ext/host" in code.co_filename:
            asked.append((code.co_name, caller.co_name))

    tis.correct(args, **given)  # what is read once per run
    with step_metrics.under_way(step_metrics.OptimizerStep(MetricsLayout.of(load_config(mapping)))):
        sys.setprofile(note)
        try:
            tis.correct(args, **given)
        finally:
            sys.setprofile(None)
    assert asked == [("current", "function"), ("current_step", "current")]


ASKED = """
asked = []

def get_pg_loss_type(args):
    asked.append(args)
    return args.pg_loss_type
"""


def test_a_run_asks_its_host_once_which_loss_it_has(tmp_path, monkeypatch):
    loss = trees.made(tmp_path, monkeypatch, loss=trees.TARGET + trees.LOSS + ASKED).loss
    runs = [arguments(pg_loss_type=name) for name in ("reinforce", "ppo")]
    given = as_slime_calls(oracle.random_batch(1))
    for args in runs:
        for _ in range(3):
            tis.token_tis(args, **given)
        hook = tis.HOOKS.value["token_tis"][-1]
        assert bounds_of(args, hook).has_ratio == (args.pg_loss_type == "ppo")
    assert loss.asked == runs
