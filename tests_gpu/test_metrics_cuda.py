"""The metrics on one CUDA device: the CPU's values, no wait before the reduction, and the stop at a NaN.

Counts, maxima and the histogram are exact; sums may differ by the order of float64 additions. On the device,
sums by bin, which curves are made of, have no fixed order.
"""

from __future__ import annotations

import math

import pytest
import torch

from slime_ext import tis
from slime_ext.core.metrics.layout import MetricsLayout
from slime_ext.errors import NonFiniteError
from slime_ext.host import staleness, step_metrics
from slime_ext.host.configured import setup_for
from tests import oracle
from tests.host.pushed import pushed
from tests.test_tis import arguments, as_slime_calls

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CONFIG = {
    "steps": [
        {"reject": {"unit": "sequence", "low": 0.5, "high": 2.0, "max_staleness": 2}},
        {"reweight": {"level": "token"}},
        {"truncate": {"high": 2.0}},
    ]
}


def on(device, value):
    if isinstance(value, torch.Tensor):
        return value.to(device)
    return [on(device, item) for item in value] if isinstance(value, list) else value


def calls(device, **changes):
    for seed in range(6):
        call = as_slime_calls(oracle.random_batch(seed, wild=False), **changes)
        yield {key: on(device, value) for key, value in call.items()}


def measured(device):
    pushed(5)
    args = arguments(slime_ext=CONFIG, custom_tis_function_path="slime_ext.tis.correct")
    given = list(calls(device))
    layout = MetricsLayout.of(setup_for(args).hook_correction, curves=True)
    masks = [mask for call in given for mask in call["loss_masks"]]
    versions = [[str(5 - i % 4)] for call in given for i in range(len(call["loss_masks"]))]
    known = staleness.samples_of({"loss_masks": masks, "weight_versions": versions})
    with step_metrics.under_way(step_metrics.OptimizerStep(layout, known)) as step:
        torch.cuda.set_sync_debug_mode("error" if device == "cuda" else "default")
        try:
            for call in given:
                tis.correct(args, **call)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        scalars_and_curves = step.reduce()
    pushed()
    return scalars_and_curves


def test_the_values_are_those_of_the_cpu_and_nothing_waits():
    for here, there in zip(measured("cuda"), measured("cpu"), strict=True):
        assert here == pytest.approx(there, rel=1e-10)


def test_scalars_have_the_same_bits_twice():
    (once, curves), (again, curves_again) = measured("cuda"), measured("cuda")
    assert once == again
    assert curves == pytest.approx(curves_again, rel=1e-13)


def test_a_nan_stops_when_the_step_is_reduced():
    args = arguments(slime_ext={"preset": "token_is"}, custom_tis_function_path="slime_ext.tis.correct")
    call = next(calls("cuda"))
    sequence = next(i for i, mask in enumerate(call["loss_masks"]) if mask.any())
    position = int(call["loss_masks"][sequence].int().argmax())
    call["cur_log_probs"][sequence] = call["cur_log_probs"][sequence].detach().clone()
    call["cur_log_probs"][sequence][position] = math.nan
    line = f"cur_log_probs, sequence {sequence} of .* in micro-batch 0, response token {position}:"
    layout = MetricsLayout.of(setup_for(args).hook_correction, curves=False)
    with step_metrics.under_way(step_metrics.OptimizerStep(layout)) as step:
        tis.correct(args, **call)
        with pytest.raises(NonFiniteError, match=line):
            step.reduce()
