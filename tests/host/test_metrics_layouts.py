"""The metrics of an optimizer step are those of one process: real gloo processes in Megatron's groups."""

from __future__ import annotations

import math

import pytest
import torch

from slime_ext import tis
from slime_ext.core.metrics.layout import MetricsLayout
from slime_ext.errors import SlimeExtError
from slime_ext.host import staleness, step_metrics
from slime_ext.host.configured import setup_for
from slime_ext.host.ranks import ranks
from slime_ext.host.train_step import Reporter
from slime_ext.ops.segments import Segments
from tests import oracle
from tests.host.pushed import pushed
from tests.host.test_context_parallel import local
from tests.ranks import GROUP, run_ranks
from tests.test_tis import arguments, as_slime_calls

STEPS = [
    {"reject": {"unit": "sequence", "low": 0.9, "high": 1.1, "max_staleness": 2}},
    {"veto": {"low": 1.0e-4}},
    {"reweight": {"level": "sequence"}},
    {"truncate": {"high": 2.0}},
]
CONFIGS = {
    "sequence weights, two rejections": {"steps": STEPS},
    "the same without curves": {"steps": STEPS, "metrics": {"curves": "none"}},
    "token weights": {"preset": "token_tis"},
    "a surrogate of ours": {"preset": "cispo"},
}
LAYOUTS = {  # processes, tensor, context
    "cp2 dp2": (4, 1, 2),
    "tp2 cp2": (4, 2, 2),
    "cp4": (4, 1, 4),
}


def samples():
    return [s for seed in range(3) for s in oracle.random_batch(seed)]


def measured(config, size, cp_rank=0, cp_size=1, dp_rank=0, dp_size=1):
    """Scalars and curves of an optimizer step over this rank's samples, ``size`` per micro-batch."""
    pushed(5)
    args = arguments(slime_ext=config, custom_tis_function_path="slime_ext.tis.correct")
    batch = samples()
    versions = [[str(5 - i % 4), "5"] if i % 7 else [] for i in range(len(batch))]
    mine = range(dp_rank, len(batch), dp_size)
    parts = [mine[start : start + size] for start in range(0, len(mine), size)]
    given = [as_slime_calls([batch[i] for i in places]) for places in parts]
    masks = [mask for call in given for mask in call["loss_masks"]]
    known = staleness.samples_of({"loss_masks": masks, "weight_versions": [versions[i] for i in mine]})
    layout = MetricsLayout.of(setup_for(args).hook_correction, curves="metrics" not in config)
    with step_metrics.under_way(step_metrics.OptimizerStep(layout, known)) as step:
        for call in given:
            tis.correct(args, **local(call, cp_rank, cp_size))
        scalars, curves = step.reduce()
    pushed()
    return {**scalars, **curves}


def in_layout(tensor, context):
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(tensor, context_parallel_size=context)
    here = ranks()
    place = (here.context.rank, here.context.size, here.dp_rank, here.dp_size)
    found = {name: measured(config, 2, *place) for name, config in CONFIGS.items()}
    parallel_state.destroy_model_parallel()  # slime makes its groups anew between rollouts
    parallel_state.initialize_model_parallel(tensor, context_parallel_size=context)
    first = next(iter(CONFIGS))
    return {**found, "again": measured(CONFIGS[first], 3, *place)}


def differs(got, whole):
    return {
        name: (got.get(name), value)
        for name, value in whole.items()
        if not math.isclose(got.get(name, math.nan), value, rel_tol=1e-10, abs_tol=1e-12)
    }


@pytest.mark.slow
@pytest.mark.xdist_group(GROUP)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_gives_the_metrics_of_one_process(layout):
    size, tensor, context = LAYOUTS[layout]
    wholes = {name: measured(config, 100) for name, config in CONFIGS.items()}
    wholes["again"] = next(iter(wholes.values()))
    for found in run_ranks(in_layout, size, tensor, context):
        for name, got in found.items():
            whole = wholes[name]
            assert differs(got, whole) == {} and set(got) == set(whole), name


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("size", [1, 2, 5])
def test_any_number_of_micro_batches_gives_the_same(name, size):
    assert differs(measured(CONFIGS[name], size), measured(CONFIGS[name], 100)) == {}


def stops(stages=1):
    """What every rank says when one alone meets a NaN, and when a guard asks to stop."""
    from megatron.core import parallel_state

    rank = torch.distributed.get_rank()
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=stages)
    lines = []
    guards = {"tokens": {"min": 1e6, "action": "stop"}}
    args = arguments(
        slime_ext={"preset": "token_tis", "guards": guards}, custom_tis_function_path="slime_ext.tis.correct"
    )
    for value in (math.nan, 0.0):
        layout = MetricsLayout.of(setup_for(args).hook_correction, curves=False)
        with step_metrics.under_way(step_metrics.OptimizerStep(layout)) as step:
            call = as_slime_calls(oracle.random_batch(rank))
            values = torch.tensor([0.0, 0.0, value if rank == stages - 1 else 0.0])
            step.tracker.look({"cur_log_probs": values}, Segments.whole([1, 2], torch.ones(3)))
            if ranks().is_last_stage:
                tis.correct(args, **call)
            try:
                Reporter(args).report(step, {"rollout_id": 0, "step_id": 0})
            except SlimeExtError as error:
                lines.append(str(error))
    return lines


@pytest.mark.slow
@pytest.mark.xdist_group(GROUP)
def test_every_rank_stops():
    first, second = run_ranks(stops, 2)
    assert first[0].startswith("cur_log_probs, sequence 1 of 2 in micro-batch 0, response token 1: expected")
    assert second[0].startswith("cur_log_probs, data rank 0, micro-batch 0, token 2 of it: expected a finite")
    assert first[1] == second[1] and first[1].endswith("the run stops, because the guard's action is stop")


@pytest.mark.slow
@pytest.mark.xdist_group(GROUP)
def test_every_stage_of_a_pipeline_stops_and_says_why():
    first, last = run_ranks(stops, 2, 2)
    assert last[0].startswith("cur_log_probs, sequence 1") and last[1].endswith("guard's action is stop")
    assert first == last  # the first of them may be all that the user sees
