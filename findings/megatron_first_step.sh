#!/usr/bin/env bash
# With a warm-up Megatron-LM's first optimizer step has learning rate 0, so it changes no weight.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" torch megatron-core==0.16.1
run - <<'PYTHON' 2> errors
import megatron.core
import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from recorded import expect

weight = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([{"params": [weight], "max_lr": 1.0, "min_lr": 0.1}], lr=1.0)
scheduler = OptimizerParamScheduler(
    optimizer, init_lr=0.0, max_lr=1.0, min_lr=0.1, lr_warmup_steps=40, lr_decay_steps=100, lr_decay_style="linear",
    start_wd=0.0, end_wd=0.0, wd_incr_steps=100, wd_incr_style="constant",
)
rates, moved = [], []
for _ in range(6):
    before = weight.item()
    weight.grad = torch.ones(1)
    optimizer.step()
    rates.append(optimizer.param_groups[0]["lr"])
    moved.append(weight.item() != before)
    scheduler.step(increment=10)
print("megatron-core", megatron.core.__version__, "warm-up over 4 steps to a rate of 1:")
print("  learning rates    ", rates)
print("  a weight has moved", moved)
expect("the first step's rate is 0 and moves nothing", rates[0] == 0 and not moved[0])
expect("the full rate is reached in the fifth step", rates[4] == 1)
PYTHON
