#!/usr/bin/env bash
# numpy adds bfloat16 of ml_dtypes one after another in bfloat16, so a sum of ones stops at 256, and their mean is
# 0.256. A dot product is exact. torch adds in float32. Saved with np.save, the dtype is lost.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" ml_dtypes==0.6.0 numpy==2.4.6
run - <<'PYTHON'
from importlib.metadata import version

import ml_dtypes
import numpy as np
from recorded import expect

ones = np.ones(1000, ml_dtypes.bfloat16)
large = np.array([1000.0, np.inf], np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
ordered = np.sort(np.array([3, np.nan, 1], ml_dtypes.bfloat16)).astype(np.float32)
np.save("ones.npy", ones)
print("ml_dtypes", version("ml_dtypes"), "numpy", np.__version__)
print("1,000 ones: sum", ones.sum(), "mean", ones.mean(), "standard deviation", ones.std(), "dot", np.dot(ones, ones))
print("1000 and infinity in float8_e4m3fn", large.tolist(), "; 3, NaN, 1 sorted", ordered.tolist())
expect("the sum of 1,000 ones is 256", float(ones.sum()) == 256)
expect("their mean is 0.256", abs(float(ones.mean()) - 0.256) < 1e-3)
expect("their standard deviation is 0.5 instead of 0", abs(float(ones.std()) - 0.5) < 1e-2)
expect("their dot product is 1,000", float(np.dot(ones, ones)) == 1000)
expect("1000 becomes NaN in float8_e4m3fn, where torch makes 448 of it", np.isnan(large).all())
expect("np.load gives bytes without a number type", np.load("ones.npy").dtype == np.dtype("V2"))
PYTHON
