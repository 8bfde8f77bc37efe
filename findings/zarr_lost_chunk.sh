#!/usr/bin/env bash
# A zarr array whose chunk file is missing is read without an error, as zeros in that chunk, by zarr and by tensorstore.
# A partial copy of log-probs has the probability 1 there.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" numpy==2.4.6 zarr==3.1.6 tensorstore==0.1.86
run - <<'PYTHON' 2> errors
import os
from importlib.metadata import version

import numpy as np
import tensorstore
import zarr
from recorded import expect


def read(name: str) -> np.ndarray:
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": os.path.abspath(name)}}
    by_tensorstore = tensorstore.open(spec, open=True).result().read().result()
    by_zarr = zarr.open_array(name, mode="r")[:]
    expect(f"zarr and tensorstore read the same from {name}", np.array_equal(by_zarr, by_tensorstore, equal_nan=True))
    return by_zarr


print("zarr", version("zarr"), "tensorstore", version("tensorstore"))
seen = {}
for name, options in {"default": {}, "nan": {"fill_value": float("nan")}}.items():
    array = zarr.create_array(name, shape=(8, 4), chunks=(2, 4), dtype="float32", **options)
    array[:] = -np.arange(1.0, 33.0).reshape(8, 4)
    os.remove(f"{name}/c/2/0")
    seen[name] = read(name)
    print(f"  {name}, first column after a chunk was lost:", seen[name][:, 0].tolist())
expect("rows 4 and 5 are 0", not seen["default"][4:6].any() and seen["default"][[3, 6]].all())
expect("with the fill value NaN they are NaN", np.isnan(seen["nan"][4:6]).all() and not np.isnan(seen["nan"][:4]).any())
PYTHON
