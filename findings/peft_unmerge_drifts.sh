#!/usr/bin/env bash
# merge_adapter and unmerge_adapter in turns, as a trainer does that sends merged weights to an engine, do not bring
# bfloat16 weights back: each turn rounds twice, so the frozen weights walk away, and with them the reference policy
# that disable_adapter gives.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" torch numpy==2.4.6 transformers==5.23.0 peft==0.21.2
run - <<'PYTHON' 2> errors
import peft
import torch
from recorded import expect
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(vocab_size=256, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=2)
tokens = torch.randint(0, 256, (4, 64), generator=torch.Generator().manual_seed(0))


def walk(dtype: torch.dtype, turns: tuple[int, ...]) -> list[tuple[float, float, float]]:
    """Returns share of changed weights, relative change, and mean change of the reference log-probs."""
    torch.manual_seed(0)
    lora = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"])
    model = peft.get_peft_model(LlamaForCausalLM(config).to(dtype), lora)
    parts = dict(model.named_parameters())
    frozen = [weight for name, weight in parts.items() if "base_layer" in name]
    adapter = [weight for name, weight in parts.items() if "lora_" in name]

    def look() -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad(), model.disable_adapter():
            logprobs = model(tokens).logits.float().log_softmax(-1)
        return torch.cat([weight.detach().double().flatten() for weight in frozen]), logprobs

    (first, logprobs), seen = look(), []
    for turn in range(1, turns[-1] + 1):
        for weight in adapter:
            weight.data += 0.001 * torch.randn_like(weight)
        model.merge_adapter()
        model.unmerge_adapter()
        if turn in turns:
            weights, now = look()
            change = (weights - first).norm() / first.norm()
            seen.append(((weights != first).double().mean().item(), change.item(), (now - logprobs).abs().mean().item()))
    return seen


turns = (1, 10, 100, 200)
bfloat16, float32 = walk(torch.bfloat16, turns), walk(torch.float32, turns)
print("peft", peft.__version__, "torch", torch.__version__, "frozen weights after merging and unmerging, bfloat16:")
for turn, (share, change, nats) in zip(turns, bfloat16):
    print(f"  {turn:3} times: {share:.0%} differ, by {change:.1e} of their norm; reference log-probs by {nats:.1e} nats")
print(f"  200 times in float32: by {float32[-1][1]:.1e} of their norm")
expect("after 200 turns more than half of the frozen weights differ", bfloat16[-1][0] > 0.5)
expect("the change grows on and on", [change for _, change, _ in bfloat16] == sorted(c for _, c, _ in bfloat16)
       and bfloat16[-1][1] > 15 * bfloat16[0][1])
expect("the reference policy moves", bfloat16[-1][2] > 1e-3)
expect("in float32 all this is 1,000 times smaller", float32[-1][1] < 1e-3 * bfloat16[-1][1])
PYTHON
