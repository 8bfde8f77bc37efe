#!/usr/bin/env bash
# On a CPU, the mean of cross_entropy is the sum in the dtype of the logits, divided by the number of tokens. In
# float16 it is NaN for 100,000 tokens, because the sum is infinite; in bfloat16 it is off by more than one rounding.
# The mean of the losses per token is right in both.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" torch numpy==2.4.6
run - <<'PYTHON'
import torch
from recorded import expect
from torch.nn.functional import cross_entropy

torch.manual_seed(0)
targets, logits = torch.randint(0, 8, (1_000_000,)), torch.randn(1_000_000, 8)


def means(dtype: torch.dtype, count: int) -> tuple[float, float, float]:
    """Returns the mean, the mean of the losses per token, and the mean of the same logits in float32."""
    x, y = logits[:count].to(dtype), targets[:count]
    per_token = cross_entropy(x, y, reduction="none").mean()
    return tuple(value.item() for value in (cross_entropy(x, y), per_token, cross_entropy(x.float(), y)))


half, brain = means(torch.float16, 100_000), means(torch.bfloat16, 1_000_000)
print("torch", torch.__version__, "mean, mean of the losses per token, in float32:")
print("  float16, 100,000 tokens: {:.4f} {:.4f} {:.4f}".format(*half))
print("  bfloat16, 1,000,000 tokens: {:.4f} {:.4f} {:.4f}".format(*brain))
expect("in float16 the mean is not finite", not abs(half[0]) < float("inf"))
expect("the mean of the losses per token is right", abs(half[1] - half[2]) < 2e-3 * half[2])
expect("with few tokens the mean is right", abs((few := means(torch.float16, 1000))[0] - few[2]) < 2e-3 * few[2])
expect("in bfloat16 it is off by more than half a per cent", abs(brain[0] - brain[2]) > 5e-3 * brain[2])
expect("the mean of the losses per token is not", abs(brain[1] - brain[2]) < 4e-3 * brain[2])
PYTHON
