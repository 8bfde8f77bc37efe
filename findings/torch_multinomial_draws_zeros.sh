#!/usr/bin/env bash
# torch.multinomial without replacement returns indices of weight 0 when too few others are left. With
# replacement it never does, and numpy raises an error.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" torch numpy==2.4.6
run - <<'PYTHON'
import numpy
import torch
from recorded import expect

torch.manual_seed(0)
weights = torch.tensor([0.0, 0.7, 0.0, 0.3, 0.0, 0.0])  # of prompts: two may be drawn
drawn = [torch.multinomial(weights, 3).tolist() for _ in range(1000)]
zeros = sum(any(weights[i] == 0 for i in row) for row in drawn)
batches = torch.multinomial(torch.tensor([[0.0, 1, 0, 0], [0.25, 0.25, 0.25, 0.25]]), 2)
again = torch.multinomial(weights, 3000, replacement=True)
try:
    numpy.random.default_rng(0).choice(6, 3, replace=False, p=weights.double().numpy() / weights.double().sum().item())
    refused = ""
except ValueError as error:
    refused = str(error)
print("torch", torch.__version__, "weights", [round(w, 1) for w in weights.tolist()])
print("  three of them without replacement:", *drawn[:4], "- with an index of weight 0:", zeros, "of 1000")
print("  numpy", numpy.__version__, "says:", refused)
expect("each draw of three has an index of weight 0", zeros == 1000)
expect("so has a row of a batch whose other row has enough", 1 in batches[0] and len(set(batches[0].tolist())) == 2)
expect("with replacement none has", set(again.tolist()) == {1, 3})
expect("numpy refuses", "Fewer non-zero entries" in refused)
PYTHON
