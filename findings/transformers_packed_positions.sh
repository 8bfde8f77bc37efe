#!/usr/bin/env bash
# Whether transformers separates sequences that are packed into one row, with positions that restart at 0,
# depends on two other arguments: use_cache and attention_mask.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" torch numpy==2.4.6 transformers==5.23.0
run - <<'PYTHON'
import torch
import transformers
from recorded import expect
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                     num_attention_heads=4, num_key_value_heads=2)
first, second = torch.arange(9)[None], torch.arange(20, 27)[None]
packed = torch.cat([first, second], 1)
positions = torch.cat([torch.arange(9), torch.arange(7)])[None]
ones = torch.ones_like(packed)
calls = {
    "defaults": {},
    "use_cache=False": {"use_cache": False},
    "attention_mask of ones": {"attention_mask": ones},
    "attention_mask of ones, use_cache=False": {"attention_mask": ones, "use_cache": False},
}
print("transformers", transformers.__version__, "the second sequence's logits, packed against alone:")
separate = set()
for attention in ("sdpa", "eager"):
    torch.manual_seed(0)
    model = LlamaForCausalLM._from_config(config, attn_implementation=attention).eval()
    with torch.no_grad():
        alone = model(second).logits[0]
        for name, options in calls.items():
            error = (model(packed, position_ids=positions, **options).logits[0, 9:] - alone).abs().max().item()
            print(f"  {attention:5} {name:40} largest difference {error:.1e}")
            if error < 1e-5:
                separate.add((attention, name))
expect("sequences are separate only without a mask and with use_cache=False",
       separate == {("sdpa", "use_cache=False"), ("eager", "use_cache=False")})
PYTHON
