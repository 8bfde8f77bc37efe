#!/usr/bin/env bash
# PEFT loads an adapter whose names do not match the model's without an error: no weight changes.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" torch numpy==2.4.6 transformers==5.23.0 peft==0.21.2
run - <<'PYTHON'
import peft
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from recorded import expect
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4)
model = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=4, target_modules=["q_proj"]))
adapter = {name: torch.ones_like(value) for name, value in get_peft_model_state_dict(model).items()}
renamed = {name.replace("base_model.model.model.", "module."): value for name, value in adapter.items()}
result = set_peft_model_state_dict(model, renamed)
sums = {"other names": sum(value.sum().item() for name, value in model.named_parameters() if "lora_B" in name)}
set_peft_model_state_dict(model, adapter)
sums["right names"] = sum(value.sum().item() for name, value in model.named_parameters() if "lora_B" in name)
print("peft", peft.__version__, "an adapter of ones, loaded into one of zeros (lora_B):")
print("  sent", next(iter(renamed)), "for", next(iter(adapter)))
for name, value in sums.items():
    print(f"  {name}: sum of lora_B {value}")
expect("with other names nothing is loaded, and nothing is raised", sums["other names"] == 0)
expect("only the returned value names them", len(result.unexpected_keys) == len(renamed))
expect("with the right names it is loaded", sums["right names"] > 0)
PYTHON
