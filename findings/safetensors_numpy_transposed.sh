#!/usr/bin/env bash
# safetensors.numpy writes a transposed array in the order of its memory, so it is read with other contents.
# safetensors.torch refuses such a tensor.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" safetensors==0.8.0 numpy==2.4.6
run - <<'PYTHON'
from importlib.metadata import version

import numpy as np
from recorded import expect
from safetensors.numpy import load_file, save_file

weight = np.arange(6, dtype=np.float32).reshape(2, 3)
saved = {"transposed": weight.T, "copied": np.ascontiguousarray(weight.T), "columns": weight[:, :2]}
save_file(saved, "weights.safetensors")
read = load_file("weights.safetensors")
print("safetensors", version("safetensors"), "numpy", np.__version__)
print("saved", weight.T.tolist(), "read", read["transposed"].tolist())
expect("a transposed array is saved without an error", read["transposed"].shape == (3, 2))
expect("and has other contents when it is read", not np.array_equal(read["transposed"], weight.T))
expect("namely those of its memory", np.array_equal(read["transposed"].ravel(), weight.ravel()))
expect("a contiguous copy of it is read as it was", np.array_equal(read["copied"], weight.T))
expect("two of three columns have other contents, too", not np.array_equal(read["columns"], weight[:, :2]))
PYTHON
