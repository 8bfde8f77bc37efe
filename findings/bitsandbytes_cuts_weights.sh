#!/usr/bin/env bash
# A quantised 8-bit layer of bitsandbytes takes new weights by load_state_dict or copy_ without an error: it cuts
# them to whole numbers and keeps the scales of the old ones, so nearly all become 0. A 4-bit layer refuses them.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" torch numpy==2.4.6 bitsandbytes==0.50.2
run - <<'PYTHON' 2> errors
import bitsandbytes
import torch
from bitsandbytes.nn import Linear4bit, Linear8bitLt
from recorded import expect

torch.manual_seed(0)
OLD, NEW, X = torch.randn(64, 64) / 8, torch.randn(64, 64) / 8, torch.randn(16, 64)


def layer(kind: type) -> torch.nn.Module:
    options = {"has_fp16_weights": False} if kind is Linear8bitLt else {"compute_dtype": torch.float32}
    made = kind(64, 64, bias=False, **options)
    made.load_state_dict({"weight": OLD.clone()})
    return made.to("cpu")


def error(made: torch.nn.Module, weight: torch.Tensor) -> float:
    with torch.no_grad():
        return ((made(X) - X @ weight.T).norm() / (X @ weight.T).norm()).item()


def updated(kind: type, way: str) -> str:
    """Returns the error of the outputs after an update, or the name of the exception."""
    made = layer(kind)
    error(made, OLD)
    try:
        if way == "load_state_dict":
            made.load_state_dict({"weight": NEW.clone()})
        else:
            made.weight.data.copy_(NEW)
    except RuntimeError as refused:
        return type(refused).__name__
    zeros = (made.weight == 0).float().mean()
    return f"error {error(made, NEW):.2f}, {zeros:.0%} of the weights are 0"


print("bitsandbytes", bitsandbytes.__version__, "outputs of a layer before and after an update of its weight:")
before = {kind.__name__: error(layer(kind), OLD) for kind in (Linear8bitLt, Linear4bit)}
WAYS = ("load_state_dict", "copy_")
after = {(kind.__name__, way): updated(kind, way) for kind in (Linear8bitLt, Linear4bit) for way in WAYS}
for name, value in before.items():
    print(f"  {name} before: error {value:.3f}")
for (name, way), text in after.items():
    print(f"  {name} after {way}: {text}")
expect("both are near the old weights before", before["Linear8bitLt"] < 0.02 and before["Linear4bit"] < 0.2)
expect("8 bits: all weights are 0 afterwards, and so are the outputs", all(
    after["Linear8bitLt", way] == "error 1.00, 100% of the weights are 0" for way in WAYS))
expect("4 bits: an error is raised", all(after["Linear4bit", way] == "RuntimeError" for way in WAYS))
PYTHON
