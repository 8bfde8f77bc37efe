#!/usr/bin/env bash
# generate_batch of transformers shares the keys and values of equal prefixes. With persistent_manager=True they
# outlive an update of the weights: later answers are drawn, and their log-probs recorded, with keys and values of
# the old weights. A later call without the argument still uses the kept manager once.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" torch numpy==2.4.6 transformers==5.23.0 psutil==7.2.2
run - <<'PYTHON' 2> errors
import torch
import transformers
from recorded import expect
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, max_position_embeddings=1024)
).eval()
model.lm_head.weight.data.normal_(0, 0.4)
prompts = torch.randint(3, 64, (4, 600)).tolist()
sampling = GenerationConfig(max_new_tokens=8, eos_token_id=-1, pad_token_id=0, do_sample=True, top_k=0)
batching = {"num_blocks": 64, "max_batch_tokens": 1024, "return_logprobs": True, "seed": 0}


def distance(**options: object) -> float:
    """Returns the mean |recorded log-prob - log-prob of one forward| of the tokens that a call draws."""
    replies = model.generate_batch(
        prompts, sampling, ContinuousBatchingConfig(**batching), warmup=False, **options
    ).values()
    tokens = torch.tensor([reply.generated_tokens for reply in replies])
    texts = torch.cat([torch.tensor([reply.prompt_ids for reply in replies]), tokens], 1)
    with torch.no_grad():
        logprobs = model(texts).logits[:, 599:-1].log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    return (torch.tensor([reply.logprobs for reply in replies]) - logprobs).abs().mean().item()


def update() -> None:
    for weight in model.model.layers.parameters():
        weight.data += 0.05 * torch.randn_like(weight)


distances = {"persistent, first call": distance(persistent_manager=True)}
update()
distances["persistent, after an update of the weights"] = distance(persistent_manager=True)
distances["not persistent, next call"] = distance()
update()
distances["not persistent, after another update"] = distance()
print("transformers", transformers.__version__, "mean |recorded log-prob - model's log-prob|, in nats:")
for name, value in distances.items():
    print(f"  {name}: {value:.1e}")
first, stale, next_call, fresh = distances.values()
expect("before an update the log-probs are the model's", first < 1e-4)
expect("after it they are not, by more than a nat", stale > 1)
expect("the next call has the old keys and values, too, without the argument", next_call > 1)
expect("the call after that is right", fresh < 1e-4)
PYTHON
