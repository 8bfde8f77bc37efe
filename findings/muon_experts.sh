#!/usr/bin/env bash
# The Muon of pytorch-optimizer takes the weight of all experts, [experts, out, in], as one matrix with a row for each
# expert, so the update of no expert is orthogonal. torch's Muon refuses such a weight.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" torch numpy==2.4.6 pytorch-optimizer==4.1.0
run - <<'PYTHON' 2> errors
from importlib.metadata import version

import torch
from pytorch_optimizer import Muon
from recorded import expect

EXPERTS, OUT, IN = 4, 16, 8


def update(*shape: int) -> torch.Tensor:
    """Returns the first update of a weight by a random gradient."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.zeros(shape))
    weight.grad = torch.randn(shape)
    Muon([{"params": [weight], "use_muon": True}], lr=1.0).step()
    return weight.detach()


def spread(matrix: torch.Tensor) -> float:
    """Returns the largest singular value divided by the smallest."""
    singular = torch.linalg.svdvals(matrix)
    return (singular.max() / singular.min()).item()


single, experts = update(OUT, IN), update(EXPERTS, OUT, IN)
of_each = [spread(expert) for expert in experts]
as_one = spread(experts.flatten(1))
print("pytorch-optimizer", version("pytorch-optimizer"), "largest singular value of an update / smallest:")
print(f"  one matrix {spread(single):.1f}; each of 4 experts", *(f"{ratio:.1f}" for ratio in of_each),
      f"; [experts, out x in] {as_one:.1f}")
expect("the update of a matrix is nearly orthogonal", spread(single) < 2)
expect("that of each expert is not", min(of_each) > 2.5)
expect("the matrix with a row per expert is", as_one < 2)
weight = torch.nn.Parameter(torch.zeros(EXPERTS, OUT, IN))
try:
    torch.optim.Muon([weight])
    refused = False
except ValueError:
    refused = True
expect("torch's Muon refuses the weight of all experts", refused)
PYTHON
