#!/usr/bin/env bash
# torchao quantises a head that is tied to the embedding, and unties it: the embedding keeps the old values, and a
# weight that is written into it later does not reach the head.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" torch numpy==2.4.6 transformers==5.23.0 torchao==0.18.0
run - 2>errors <<'PYTHON' || { tail -3 errors; exit 1; }
import torch
import torchao
from recorded import expect
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, tie_word_embeddings=True, **sizes)).bfloat16().eval()
hidden, embedding = torch.randn(1, 64).bfloat16(), model.model.embed_tokens.weight


@torch.no_grad()
def doubled() -> float:
    """Doubles the embedding and returns by which factor the head's logits grow."""
    before = model.lm_head(hidden)
    embedding.mul_(2)
    return (model.lm_head(hidden).norm() / before.norm()).item()


was_tied, factor_before = model.lm_head.weight is embedding, doubled()
quantize_(model, Int8WeightOnlyConfig())
kept, factor = model.model.embed_tokens.weight is embedding, doubled()
print("torchao", torchao.__version__, "torch", torch.__version__)
print("head:", type(model.lm_head.weight).__name__, "embedding:", type(model.model.embed_tokens.weight).__name__)
print(f"twice the embedding makes the head's logits {factor_before:.2f} times as large before, {factor:.2f} after")
expect("the head was tied", was_tied and abs(factor_before - 2) < 1e-2)
expect("the embedding stays as it is", kept)
expect("the head does not follow it any more", factor == 1)
expect("nothing in the config says so", model.config.tie_word_embeddings)
PYTHON
