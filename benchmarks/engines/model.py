"""A random Llama with a tokenizer of bytes, and the log-probs that a trainer computes with it."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

SPECIAL = ("<pad>", "<bos>", "<eos>")
VOCABULARY = len(SPECIAL) + 256
PROMPTS, ANSWERS, PROMPT_LENGTH = 16, 8, 12
LETTERS = range(40, 120)  # ids of which prompts consist
REPEATS = 12  # of a prompt that must fill a block of a prefix cache: 128 tokens with vLLM on a CPU
RANK, ALPHA = 8, 16  # of a LoRA adapter
ADAPTED = ("q_proj", "v_proj", "down_proj")
PREFIX = "base_model.model."  # of the names in peft's format


@dataclass(frozen=True)
class Answer:
    """What an engine returns for a prompt.

    Args:
        recorded: a log-prob per token.
        whole: for each position, token id -> recorded log-prob of all tokens; None if not asked for.
    """

    prompt: list[int]
    tokens: list[int]
    recorded: list[float]
    whole: list[dict[int, float]] | None = None


def write(folder: Path, ends: Sequence[int] = ()) -> None:
    """Writes the model and its tokenizer in Hugging Face's format.

    Args:
        ends: token ids beside <eos> that end an answer, in the model's generation_config.json.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from transformers.utils import logging

    logging.disable_progress_bar()
    names = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    text = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    text.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    text.decoder = decoders.ByteLevel()
    pad, bos, eos = SPECIAL
    PreTrainedTokenizerFast(
        tokenizer_object=text, pad_token=pad, bos_token=bos, eos_token=eos
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.generation_config.eos_token_id = [2, *ends]
    model.lm_head.weight.data.normal_(0, 0.2)  # logits have a standard deviation of 2.3
    model.save_pretrained(folder)


def write_adapter(folder: Path, base: Path, seed: int) -> None:
    """Writes a random LoRA adapter for the model in ``base``, in peft's format."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    weights, draw = {}, torch.Generator().manual_seed(seed)
    for name, module in AutoModelForCausalLM.from_pretrained(base).named_modules():
        if name.endswith(ADAPTED):
            down = torch.randn(RANK, module.in_features, generator=draw) / module.in_features**0.5
            up = torch.randn(module.out_features, RANK, generator=draw)
            weights |= {
                f"{PREFIX}{name}.lora_A.weight": 0.3 * down,
                f"{PREFIX}{name}.lora_B.weight": 0.3 * up,
            }
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA}
    config |= {"target_modules": ADAPTED, "bias": "none", "base_model_name_or_path": str(base)}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def prompts(repeats: int = 1) -> list[list[int]]:
    """Returns PROMPTS x ANSWERS prompts, the answers to a prompt one after another."""
    draw = random.Random(0)
    different = [draw.choices(LETTERS, k=PROMPT_LENGTH) for _ in range(PROMPTS)]
    return [prompt * repeats for prompt in different for _ in range(ANSWERS)]


class Trainer:
    """Computes log-probs as the trainer of an RL run would: softmax in float32 of logits in ``dtype``."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32, adapter: Path | None = None) -> None:
        from safetensors.torch import load_file
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        factors = load_file(adapter / "adapter_model.safetensors") if adapter else {}
        for name in self._model.state_dict():
            module = f"{PREFIX}{name.removesuffix('.weight')}"
            if f"{module}.lora_A.weight" in factors:
                change = factors[f"{module}.lora_B.weight"] @ factors[f"{module}.lora_A.weight"]
                self._model.get_parameter(name).data += ALPHA / RANK * change

    @torch.no_grad()
    def log_probs(self, answer: Answer, temperature: float) -> Tensor:
        """Returns [tokens, VOCABULARY] log-probs at the positions of an answer's tokens."""
        ids = torch.tensor([answer.prompt + answer.tokens])
        logits = self._model(ids).logits[0, len(answer.prompt) - 1 : -1]
        return (logits.float() / temperature).log_softmax(-1)
