#!/usr/bin/env bash
# With the initialisations PiSSA and OLoRA, peft takes the adapter's first value out of the frozen weights.
# disable_adapter leaves it out then, so reference log-probs are not those of the model that was loaded.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" torch numpy==2.4.6 transformers==5.23.0 peft==0.21.2
run - <<'PYTHON' 2> errors
import peft
import torch
from recorded import expect
from transformers import LlamaConfig, LlamaForCausalLM

TOKENS = torch.arange(32)[None]


@torch.no_grad()
def log_probs(model: torch.nn.Module) -> torch.Tensor:
    return model(TOKENS).logits.log_softmax(-1)


def distances(how: object) -> tuple[float, float]:
    """Returns mean distances from the loaded model's log-probs, with the new adapter and with it disabled."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
                    num_key_value_heads=2, initializer_range=0.2)
    ).eval()
    loaded = log_probs(model)
    adapted = peft.get_peft_model(model, peft.LoraConfig(
        r=8, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"], init_lora_weights=how))
    enabled = log_probs(adapted)
    with adapted.disable_adapter():
        disabled = log_probs(adapted)
    return (enabled - loaded).abs().mean().item(), (disabled - loaded).abs().mean().item()


print("peft", peft.__version__, "mean distance from the loaded model's log-probs before any training, in nats:")
seen = {}
for how in (True, "gaussian", "pissa", "olora"):
    seen[how] = distances(how)
    print("  init_lora_weights={!r}: with the adapter {:.1e}, with disable_adapter {:.1e}".format(how, *seen[how]))
expect("with the adapter all start as the loaded model", all(enabled < 1e-4 for enabled, _ in seen.values()))
expect("disabled, the default and gaussian are the loaded model", seen[True][1] == seen["gaussian"][1] == 0)
expect("disabled, PiSSA and OLoRA are not", seen["pissa"][1] > 0.05 and seen["olora"][1] > 0.05)
PYTHON
