"""slime's own rollout log with our function: its default log goes on, with our values in it.

``HOSTS=path/to/hosts pytest tests/downstream/test_rollout_log.py``
"""

from __future__ import annotations

import importlib
from argparse import Namespace

import pytest

from tests.downstream.host_loss import enter
from tests.ranks import run_ranks

MODULE = "slime.observability.rollout_metrics"
pytestmark = [pytest.mark.slow]


def stand_in(module, name, function):
    """Puts a function in place of a module's, by which the module stays its definer."""
    function.__module__ = module.__name__
    setattr(module, name, function)
    return function


def logged(folder, function, extra):
    """What reaches slime's logger for one rollout of two real samples."""
    enter(folder, ("slime.utils", "slime.observability"), ("ray", "wandb"))
    room = importlib.import_module(MODULE)
    sample = importlib.import_module("slime.utils.types").Sample
    out = []
    stand_in(room.logging_utils, "log", lambda args, metrics, step_key: out.append(metrics))
    room.compute_metrics_from_samples = room.compute_perf_metrics_from_samples = lambda *given: {}
    steps = importlib.import_module("slime.observability.metric_utils")
    room.compute_rollout_step = stand_in(steps, "compute_rollout_step", lambda args, rollout_id: rollout_id)
    samples = [sample(weight_versions=versions, response_length=2) for versions in (["3"], ["4", "5"])]
    args = Namespace(custom_rollout_log_function_path=function, load_debug_rollout_data=None)
    room.log_rollout_data(7, args, samples, extra, 2.5)
    return out


def test_slime_logs_our_values(host):
    if not host.module(MODULE):
        pytest.skip("this release keeps its log in a module that imports Ray and SGLang")
    name = "slime_ext.host.log_rollout"
    ((metrics,),) = run_ranks(logged, 1, str(host.folder), name, {"rollout/dropped": 1})
    assert metrics["rollout/dropped"] == 1 and metrics["rollout/step"] == 7
    # A rollout function that returns no metrics of its own: ours go to the same logger, at the same step.
    ((ours, theirs),) = run_ranks(logged, 1, str(host.folder), name, None)
    assert ours["rollout/step"] == theirs["rollout/step"] == 7
    for found in (metrics, ours):
        assert found["rollout/off_policy/versions"] == 3
        assert found["rollout/off_policy/mixed"] == 0.5
        assert found["rollout/off_policy/no_log_probs"] == 1.0
