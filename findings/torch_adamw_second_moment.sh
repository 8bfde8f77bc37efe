#!/usr/bin/env bash
# With bfloat16 parameters AdamW's second moment rises far above the variance of the gradient, with the fused
# kernel less than with the other, so steps are shorter than they should be.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" torch numpy==2.4.6
run - <<'PYTHON'
import torch
from recorded import expect


def second_moment(dtype, **kernel):
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.zeros(2000, dtype=dtype))
    optimizer = torch.optim.AdamW([weight], lr=1e-4, weight_decay=0, betas=(0.9, 0.999), **kernel)
    for _ in range(5000):
        weight.grad = torch.randn(2000).to(dtype)
        optimizer.step()
    return optimizer.state[weight]["exp_avg_sq"].float().mean().item()


print("torch", torch.__version__.split("+")[0], "AdamW, beta2 0.999, gradients of variance 1, 5,000 steps")
moments = {
    "float32": second_moment(torch.float32, foreach=True),
    "bfloat16, foreach": second_moment(torch.bfloat16, foreach=True),
    "bfloat16, fused": second_moment(torch.bfloat16, fused=True),
}
for name, value in moments.items():
    print(f"  {name:18} mean second moment {value:.3f}, steps {value**-0.5:.2f} times as long as they should be")
expect("float32 estimates 1", abs(moments["float32"] - 1) < 0.05)
expect("foreach in bfloat16 estimates more than 1.8", moments["bfloat16, foreach"] > 1.8)
expect("fused in bfloat16 estimates 1.3 to 1.8", 1.3 < moments["bfloat16, fused"] < 1.8)
PYTHON
