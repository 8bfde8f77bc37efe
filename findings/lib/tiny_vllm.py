"""Runs vLLM on a random Llama, with or without LoRA adapters, and computes log-probs with transformers."""

import json
import os
from pathlib import Path

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

VOCABULARY, RANK, PREFIX = 256, 8, "base_model.model."


def write_model(folder: str) -> None:
    """Writes a random model, the same one each time."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, bos_token_id=1,
        eos_token_id=2, pad_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.lm_head.weight.data.normal_(0, 0.2)
    model.save_pretrained(folder)


def write_adapter(folder: str, model: str, seed: int) -> None:
    """Writes a random LoRA adapter for a model, in the place of another one if the folder has one."""
    weights, draw = {}, torch.Generator().manual_seed(seed)
    for name, module in AutoModelForCausalLM.from_pretrained(model).named_modules():
        if name.endswith(("q_proj", "v_proj", "down_proj")):
            down = torch.randn(RANK, module.in_features, generator=draw) / module.in_features**0.5
            up = 0.2 * torch.randn(module.out_features, RANK, generator=draw)
            weights |= {f"{PREFIX}{name}.lora_A.weight": down, f"{PREFIX}{name}.lora_B.weight": up}
    Path(folder).mkdir(exist_ok=True)
    save_file(weights, Path(folder, "adapter_model.safetensors"))
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "bias": "none"}
    config |= {"target_modules": ["q_proj", "v_proj", "down_proj"], "base_model_name_or_path": model}
    Path(folder, "adapter_config.json").write_text(json.dumps(config))


class Engine:
    """Samples with vLLM from 16 prompts at temperature 1 in float32."""

    def __init__(self, model: str, prompt_length: int, **options: object) -> None:
        draw = torch.Generator().manual_seed(0)
        self._prompts = torch.randint(3, VOCABULARY, (16, prompt_length), generator=draw).tolist()
        self.llm = LLM(
            model, dtype="float32", enforce_eager=True, max_model_len=512, seed=0, skip_tokenizer_init=True,
            max_logprobs=1, **options,
        )  # fmt: skip

    def answers(self, adapter: LoRARequest | None = None, **sampling: object) -> list[tuple]:
        """Returns prompt, tokens and recorded log-probs of each answer of 32 tokens."""
        parameters = SamplingParams(max_tokens=32, ignore_eos=True, logprobs=0, detokenize=False, **sampling)
        inputs = [{"prompt_token_ids": prompt} for prompt in self._prompts]
        replies = self.llm.generate(inputs, parameters, use_tqdm=False, lora_request=adapter)
        return [_answer(p, reply.outputs[0]) for p, reply in zip(self._prompts, replies, strict=True)]


def _answer(prompt: list[int], reply: object) -> tuple:
    steps = zip(reply.logprobs, reply.token_ids, strict=True)
    return prompt, list(reply.token_ids), torch.tensor([step[token].logprob for step, token in steps])


class Scorer:
    """Computes the log-probs of a model with an adapter."""

    def __init__(self, model: str, adapter: str | None = None) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        factors = load_file(Path(adapter, "adapter_model.safetensors")) if adapter else {}
        for name in self._model.state_dict():
            module = f"{PREFIX}{name.removesuffix('.weight')}"
            if f"{module}.lora_A.weight" in factors:
                change = factors[f"{module}.lora_B.weight"] @ factors[f"{module}.lora_A.weight"]
                self._model.get_parameter(name).data += change

    @torch.no_grad()
    def of_all_tokens(self, prompt: list[int], tokens: list[int]) -> torch.Tensor:
        """Returns [tokens, VOCABULARY] log-probs at the positions of an answer's tokens."""
        logits = self._model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        return logits.log_softmax(-1)

    def distance(self, answers: list[tuple]) -> float:
        """Returns the mean |recorded log-prob - this model's| over all tokens, in nats."""
        each = [
            (recorded - self.of_all_tokens(prompt, tokens).gather(1, torch.tensor(tokens)[:, None])[:, 0])
            for prompt, tokens, recorded in answers
        ]
        return torch.cat(each).abs().mean().item()
