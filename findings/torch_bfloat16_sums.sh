#!/usr/bin/env bash
# Of the ways to add bfloat16 numbers by index, some accumulate in float32, and others stop at 256.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" torch numpy==2.4.6
run - <<'PYTHON'
import torch
from recorded import expect

ones, zero = torch.ones(1000, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.bfloat16)
first = torch.zeros(1000, dtype=torch.long)
lengths = torch.tensor([1000])
embedding = torch.nn.Embedding(1, 1, dtype=torch.bfloat16)
embedding(first).sum().backward()
sums = {
    "sum": ones.sum(),
    "cumsum": ones.cumsum(0)[-1],
    "scatter_add": zero.scatter_add(0, first, ones),
    "index_add": zero.index_add(0, first, ones),
    "index_put with accumulate": zero.index_put((first,), ones, accumulate=True),
    "segment_reduce, sum": torch.segment_reduce(ones, "sum", lengths=lengths),
    "gradient of an embedding": embedding.weight.grad,
}
mean = torch.segment_reduce(ones, "mean", lengths=lengths).item()
print("torch", torch.__version__.split("+")[0], "on a CPU, 1,000 times 1.0 in bfloat16:")
for name, value in sums.items():
    print(f"  {name:26} {value.item()}")
print(f"  {'segment_reduce, mean':26} {mean}")
right = {name for name, value in sums.items() if value.item() == 1000}
expect("sum, cumsum and scatter_add give 1000", right == {"sum", "cumsum", "scatter_add"})
expect("the others give 256", all(sums[name].item() == 256 for name in sums.keys() - right))
expect("the mean of ones by segment_reduce is 0.256", abs(mean - 0.256) < 1e-3)
PYTHON
