#!/usr/bin/env bash
# numpy adds float32 in pairs along the last axis, and one after another along the first, where a sum of ones
# stops at 2**24. The mean of float16 is computed in float32, its sum and standard deviation are not.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" numpy==2.4.6
run - <<'PYTHON'
import numpy as np
from recorded import expect

many = 2**24 + 10
ones, half = np.ones((many, 2), np.float32), np.full(10**5, 300, np.float16)
with np.errstate(over="ignore"):
    half_sum, half_std = half.sum(), half.std()
print("numpy", np.__version__)
last, first = int(ones.T.copy().sum(-1)[0]), int(ones.sum(0)[0])
print(f"sum of {many} ones: along the last axis {last}, along the first {first}")
print("mean of ones by the first axis", ones.mean(0)[0])
print("float16, 100,000 times 300: mean", half.mean(), "sum", half_sum, "standard deviation", half_std)
expect("along the last axis the sum of ones is exact", last == many)
expect("along the first axis it stops at 2**24", first == 2**24)
expect("and the mean of ones is below 1", ones.mean(0)[0] < 1)
expect("the mean of float16 values is right", half.mean() == 300)
expect("their sum is infinite", np.isinf(half_sum))
expect("their standard deviation, which is 0, is infinite, too", np.isinf(half_std))
PYTHON
