#!/usr/bin/env bash
# TensorDict.to(torch.bfloat16) casts integers and masks, too, so neighbouring token ids become equal. A Module's
# .to casts floating tensors only.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" torch numpy==2.4.6 tensordict==0.15.3
run - <<'PYTHON'
import tensordict
import torch
from recorded import expect
from tensordict import TensorDict

tokens, values = torch.tensor([[50001, 50002]]), torch.zeros(1, 2)
batch = TensorDict({"input_ids": tokens, "mask": tokens > 0, "log_probs": values}, batch_size=[1])
cast = batch.to(torch.bfloat16)
module = torch.nn.Module()
module.register_buffer("input_ids", tokens.clone())
module.to(torch.bfloat16)
print("tensordict", tensordict.__version__, "torch", torch.__version__)
print("tokens", tokens.tolist(), "after .to(torch.bfloat16)", cast["input_ids"].tolist())
expect("token ids are bfloat16", cast["input_ids"].dtype == torch.bfloat16)
expect("two different ones are equal", cast["input_ids"].unique().numel() == 1)
expect("back as integers they are other tokens", not torch.equal(cast["input_ids"].long(), tokens))
expect("the mask is bfloat16", cast["mask"].dtype == torch.bfloat16)
expect("a Module's integers stay", torch.equal(module.input_ids, tokens))
PYTHON
