#!/usr/bin/env bash
# Converting to float8_e4m3fn turns everything above 448 into 448, infinity included.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" torch numpy==2.4.6
run - <<'PYTHON'
import torch
from recorded import expect

values = torch.tensor([448.0, 464.0, 465.0, 1000.0, float("inf"), float("-inf"), float("nan")])
print("torch", torch.__version__.split("+")[0])
print("values       ", values.tolist())
kept = {name: values.to(getattr(torch, name)).float() for name in ("float8_e4m3fn", "float8_e5m2")}
for name, result in kept.items():
    print(f"{name:13}", result.tolist())
largest = torch.tensor([448.0] * 5 + [-448.0])
expect("float8_e4m3fn clamps to 448, and infinity becomes finite", kept["float8_e4m3fn"][:6].equal(largest))
expect("NaN stays NaN", bool(kept["float8_e4m3fn"][6].isnan()))
expect("float8_e5m2 keeps infinity", bool(kept["float8_e5m2"][4].isinf()))
PYTHON
