#!/usr/bin/env bash
# With the RoPE types longrope (Phi-3, Phi-4-mini) and dynamic, transformers chooses the frequencies by the length of
# the text. When an answer passes the original length, the log-probs of its earlier tokens in one forward are not
# those that they were sampled with.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" torch numpy==2.4.6 transformers==5.23.0
run - <<'PYTHON' 2> errors
import torch
import transformers
from recorded import expect
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

PROMPT, ORIGINAL, LENGTH = 40, 64, 104
sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
# Half of the frequencies become a quarter of what they were.
longrope = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 4 + [4.0] * 4}
longrope |= {"factor": 4.0, "rope_theta": 10_000.0, "original_max_position_embeddings": ORIGINAL}
dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10_000.0, "original_max_position_embeddings": ORIGINAL}


def differences(model: torch.nn.Module) -> tuple[float, float]:
    """Returns the mean |sampled log-prob - log-prob of one forward| before and after the original length."""
    torch.manual_seed(1)
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.normal_(0, 0.1)
    prompt = torch.randint(1, 64, (16, PROMPT))
    reply = model.eval().generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=True, max_length=LENGTH, top_k=0, eos_token_id=None,
        output_logits=True, return_dict_in_generate=True,
    )
    tokens = reply.sequences[:, PROMPT:, None]
    sampled = torch.stack(reply.logits, 1).log_softmax(-1).gather(-1, tokens)
    with torch.no_grad():
        trained = model(reply.sequences, use_cache=False).logits[:, PROMPT - 1 : -1].log_softmax(-1).gather(-1, tokens)
    each = (sampled - trained).abs()[..., 0]
    return each[:, : ORIGINAL - PROMPT].mean().item(), each[:, ORIGINAL - PROMPT + 1 :].mean().item()


models = {
    "Phi-3, longrope": Phi3ForCausalLM(
        Phi3Config(**sizes, max_position_embeddings=256, original_max_position_embeddings=ORIGINAL,
                   rope_parameters=longrope)
    ),
    "Llama, longrope": LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=256, rope_parameters=longrope)),
    "Llama, dynamic": LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=64, rope_parameters=dynamic)),
    "Llama, yarn": LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=256, rope_parameters=yarn)),
}
print("transformers", transformers.__version__, f"sampled to {LENGTH} tokens with an original length of {ORIGINAL};")
print("mean |sampled log-prob - log-prob of one forward|, in nats, of random models:")
seen = {}
for name, model in models.items():
    seen[name] = before, after = differences(model)
    print(f"  {name}: {before:.1e} before the original length, {after:.1e} after it")
moved = {name for name, (before, _) in seen.items() if before > 1e-2}
expect("tokens before the original length have other log-probs with longrope and dynamic",
       moved == {"Phi-3, longrope", "Llama, longrope", "Llama, dynamic"})
expect("with yarn they have the same", seen["Llama, yarn"][0] < 1e-4)
expect("later tokens agree for Phi-3, which computes its cache again", seen["Phi-3, longrope"][1] < 1e-4)
expect("and differ for Llama, whose cache keeps the old keys",
       seen["Llama, longrope"][1] > 1e-2 and seen["Llama, dynamic"][1] > 1e-2)
PYTHON
