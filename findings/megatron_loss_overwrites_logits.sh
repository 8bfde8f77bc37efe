#!/usr/bin/env bash
# Megatron's cross entropy overwrites float32 logits with their softmax. bfloat16 logits stay as they are. An
# entropy that is computed from the same logits afterwards is another one.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" torch numpy==2.4.6 megatron-core==0.16.1
run - 2>errors <<'PYTHON' || { tail -3 errors; exit 1; }
import os
from importlib.metadata import version

import torch
from megatron.core import parallel_state, tensor_parallel
from recorded import expect

os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
torch.distributed.init_process_group("gloo", rank=0, world_size=1)
parallel_state.initialize_model_parallel()


def entropy(logits: torch.Tensor) -> float:
    values = logits.float().log_softmax(-1)
    return -(values.exp() * values).sum(-1).mean().item()


torch.manual_seed(0)
targets, logits = torch.zeros(5, 1, dtype=torch.long), 3 * torch.randn(5, 1, 64)
before = {dtype: logits.to(dtype, copy=True) for dtype in (torch.float32, torch.bfloat16)}
after = {dtype: value.clone() for dtype, value in before.items()}
for value in after.values():
    tensor_parallel.vocab_parallel_cross_entropy(value, targets)
was, became = (entropy(each[torch.float32]) for each in (before, after))
print("megatron-core", version("megatron-core"), "torch", torch.__version__)
print(f"entropy of float32 logits: {was:.2f} before the loss, {became:.2f} after it")
expect("float32 logits are their softmax afterwards",
       torch.allclose(after[torch.float32], before[torch.float32].softmax(-1), atol=1e-6))
expect("so their entropy is another one", became > was + 0.5)
expect("bfloat16 logits are unchanged", torch.equal(after[torch.bfloat16], before[torch.bfloat16]))
PYTHON
