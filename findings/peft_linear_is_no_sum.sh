#!/usr/bin/env bash
# add_weighted_adapter adds adapters with the type "linear" if no other is named. It adds the factors and not their
# products, so that the weights 1 and 1 give another change than both adapters together. "cat" gives the sum.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" torch numpy==2.4.6 transformers==5.23.0 peft==0.21.2
run - <<'PYTHON'
import peft
import torch
from peft import LoraConfig, get_peft_model
from recorded import expect
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
CONFIG = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj"])
model = get_peft_model(LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=1)), CONFIG, adapter_name="a")
model.add_adapter("b", CONFIG)
for name, weight in model.named_parameters():
    if "lora_B" in name:
        torch.nn.init.normal_(weight, std=0.1)
model.add_weighted_adapter(["a", "b"], [1.0, 1.0], "default")
model.add_weighted_adapter(["a", "b"], [1.0, 1.0], "cat", combination_type="cat")
layer = next(module for name, module in model.named_modules() if name.endswith("q_proj"))
change = {name: layer.get_delta_weight(name).detach() for name in ("a", "b", "default", "cat")}
both = change["a"] + change["b"]


def error(name: str) -> float:
    """Returns the distance of a change from the sum, in norms of the sum."""
    return ((change[name] - both).norm() / both.norm()).item()


print("peft", peft.__version__, "distance from the sum of both adapters, in norms of the sum:")
print(f"  default {error('default'):.2f}, cat {error('cat'):.1e}")
expect("the default is off by more than a quarter", error("default") > 0.25)
expect("cat is the sum", error("cat") < 1e-5)
PYTHON
