#!/usr/bin/env bash
# scaled_dot_product_attention gives zeros where a query may see no key; a plain softmax gives NaN there.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" torch numpy==2.4.6
run - <<'PYTHON'
import torch
from recorded import expect
from torch.nn.functional import scaled_dot_product_attention

torch.manual_seed(0)
query = torch.randn(1, 1, 2, 8, requires_grad=True)
seen = torch.tensor([[False, False], [True, False]])[None, None]
infinite = torch.where(seen, 0.0, float("-inf"))
lowest = torch.where(seen, 0.0, torch.finfo(torch.float32).min)


def by_hand(bias):
    return (query @ query.transpose(2, 3) / 8**0.5 + bias).softmax(-1) @ query


results = {
    "sdpa, boolean mask": scaled_dot_product_attention(query, query, query, attn_mask=seen),
    "sdpa, -inf": scaled_dot_product_attention(query, query, query, attn_mask=infinite),
    "sdpa, lowest float": scaled_dot_product_attention(query, query, query, attn_mask=lowest),
    "softmax, -inf": by_hand(infinite),
}
print("torch", torch.__version__.split("+")[0], "on a CPU, the output of a query that sees no key:")
for name, result in results.items():
    print(f"  {name:20} {[round(v, 3) for v in result[0, 0, 0, :3].tolist()]}")
gradient = torch.autograd.grad(results["sdpa, boolean mask"].sum(), query)[0]
expect("a boolean mask and -inf give zeros", not results["sdpa, boolean mask"][0, 0, 0].any()
       and not results["sdpa, -inf"][0, 0, 0].any())
expect("the gradient is finite", bool(gradient.isfinite().all()))
expect("the lowest float gives the mean of all values",
       results["sdpa, lowest float"][0, 0, 0].allclose(query[0, 0].mean(0)))
expect("a softmax by hand gives NaN", bool(results["softmax, -inf"][0, 0, 0].isnan().all()))
PYTHON
