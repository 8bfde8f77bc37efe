#!/usr/bin/env bash
# SumMetric adds in float32. A count of tokens stops at 2^24 if each call adds one, and is off by 17,952 after 20,000
# calls that add 8,191 each. MeanMetric leaves NaN out, with a warning.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" torch numpy==2.4.6 torchmetrics==1.9.0
run - <<'PYTHON' 2> errors
from importlib.metadata import version

import torch
from recorded import expect
from torchmetrics import MeanMetric, SumMetric


def summed(metric: SumMetric, value: int, times: int, start: int = 0) -> int:
    metric.update(start)
    for _ in range(times):
        metric.update(value)
    return int(metric.compute().item())


single = summed(SumMetric(), 1, 1000, 2**24)
packed = summed(SumMetric(), 8191, 20_000)
double = summed(SumMetric().set_dtype(torch.float64), 8191, 20_000)
with_nan = MeanMetric()
with_nan.update(torch.tensor([1.0, float("nan"), 3.0]))
print("torchmetrics", version("torchmetrics"))
print(f"  SumMetric of 2^24 and 1,000 ones: {single:,}; of 20,000 times 8,191: {packed:,}, in float64 {double:,}")
print("  MeanMetric of 1, NaN and 3:", with_nan.compute().item())
expect("the sum of 2^24 and 1,000 ones is 2^24", single == 2**24)
expect("20,000 times 8,191 is not 163,820,000", packed == 163_837_952)
expect("set_dtype(torch.float64) is exact", double == 163_820_000)
expect("a mean with NaN is the mean of the others", with_nan.compute() == 2)
PYTHON
