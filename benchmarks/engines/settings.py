"""The sampling settings that the engines are asked about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

BIASED = 101  # the token id that logit_bias raises
ENDS = tuple(range(100, 140))  # token ids that end an answer, in the model's generation_config.json
ORIGINAL = {"SGLANG_RETURN_ORIGINAL_LOGPROB": "1"}
ADAPTERS = ("first", "second")  # LoRA adapters, of which the second replaces the first
FROM_MODEL = "end tokens of generation_config.json"
LONGEST = 32  # tokens of an answer
REGEX = "[a-z ]+"
SCHEMA = '{"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}'
NOTHING: Mapping[str, object] = MappingProxyType({})


@dataclass(frozen=True)
class Setting:
    """Sampling parameters under the names that SGLang's /generate and vLLM's SamplingParams share.

    Args:
        text: what the table calls the setting.
        parameters: sampling parameters beside temperature 1.
        minimum: answers have at least so many tokens, if they end at ENDS; SGLang's and vLLM's names differ.
        regex: grammar of the answers; SGLang's and vLLM's names differ.
        schema: JSON schema of the answers; SGLang's and vLLM's names differ.
        original: whether SGLang runs with SGLANG_RETURN_ORIGINAL_LOGPROB=1. vLLM has no such variable.
        adapter: the LoRA adapter of engine and trainer, one of ADAPTERS. The engine loads it from the files
            and under the name of the one before, whose prompts are in its prefix cache.
    """

    text: str
    parameters: Mapping[str, object] = field(default_factory=dict)
    minimum: int = 0
    regex: str = ""
    schema: str = ""
    original: bool = False
    adapter: str = ""

    @property
    def is_sglangs(self) -> bool:
        """Whether only SGLang is asked."""
        return self.original or self.text == FROM_MODEL

    @property
    def temperature(self) -> float:
        """The temperature that the trainer divides logits by. Greedy answers are compared at 1."""
        return float(self.parameters.get("temperature", 1.0)) or 1.0

    @property
    def launch(self) -> str:
        """The launch of an engine that this setting needs; others with the same value share it."""
        return "original" if self.original else "adapter" if self.adapter else "plain"


SETTINGS = {
    "plain": Setting("temperature 1"),
    "temperature": Setting("temperature 0.7", {"temperature": 0.7}),
    "greedy": Setting("temperature 0", {"temperature": 0.0}),
    "top_p": Setting("top-p 0.8", {"top_p": 0.8}),
    "top_k": Setting("top-k 20", {"top_k": 20}),
    "min_p": Setting("min-p 0.1", {"min_p": 0.1}),
    "repetition_penalty": Setting("repetition penalty 1.2", {"repetition_penalty": 1.2}),
    "frequency_penalty": Setting("frequency penalty 0.5", {"frequency_penalty": 0.5}),
    "presence_penalty": Setting("presence penalty 0.5", {"presence_penalty": 0.5}),
    "logit_bias": Setting("logit bias of 3 for one token", {"logit_bias": {str(BIASED): 3.0}}),
    "minimum": Setting(
        "minimum length", {"stop_token_ids": list(ENDS), "ignore_eos": False}, minimum=LONGEST
    ),
    "regex": Setting("grammar (regular expression)", regex=REGEX),
    "schema": Setting("grammar (JSON schema)", schema=SCHEMA),
    "ends": Setting(FROM_MODEL, {"ignore_eos": False}),
    "original": Setting(
        "temperature 0.7, top-k 20, SGLANG_RETURN_ORIGINAL_LOGPROB=1",
        {"temperature": 0.7, "top_k": 20},
        original=True,
    ),
    "original_penalty": Setting(
        "presence penalty 0.5, SGLANG_RETURN_ORIGINAL_LOGPROB=1", {"presence_penalty": 0.5}, original=True
    ),
    "adapter": Setting("LoRA adapter", adapter="first"),
    "adapter_again": Setting("LoRA adapter, loaded again with other weights", adapter="second"),
}
