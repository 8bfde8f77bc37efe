"""How often SGLang routes a token to other experts than the trainer, and how far apart log-probs are then.

    python -m benchmarks.routing runs/moe/weights/version_240 --engines float32 bfloat16 bfloat16:fp8_e4m3

Per engine (its number format, after a colon that of its KV cache): answers to the prompts of configs/tiny are
sampled with log-probs and routed experts; transformers computes both again from the same weights in float32,
which the launcher's Megatron equals (tests/launcher/megatron/test_model.py). A token of the answer is flipped
where a layer chose another set of experts for the position whose logits are of that token.
"""

from __future__ import annotations

import argparse
import base64
import json
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from slime_ext.launcher.rollout.server import EngineProcess
from slime_ext.launcher.validation.places import default_python

ROOT = Path(__file__).parents[1]
SIZES = {"context-length": 64, "max-total-tokens": 16384, "mem-fraction-static": 0.1, "random-seed": 1}
COLUMNS = ("engine", "tokens", "flipped", "same |log-ratio|", "flipped |log-ratio|", "largest", "k3")


def main() -> None:
    """Reads the command line and prints a row per engine."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("weights", type=Path, help="a mixture of experts in Hugging Face's format")
    parser.add_argument("--engines", nargs="+", default=["float32", "bfloat16", "bfloat16:fp8_e4m3"])
    parser.add_argument("--samples", type=int, default=2048)
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    model = AutoModelForCausalLM.from_pretrained(given.weights, dtype=torch.float32).eval()
    prompts = read_prompts(given.weights, given.samples)
    table = Table(*COLUMNS, title=str(given.weights))
    for engine in given.engines:
        dtype, _, cache = engine.partition(":")
        answers = sampled(given.weights, dtype, cache or "auto", prompts)
        compared = [compare(model, ids, answer) for ids, answer in zip(prompts, answers, strict=True)]
        table.add_row(engine, *summary(*map(torch.cat, zip(*compared, strict=True))))
    Console(width=140).print(table)


def read_prompts(weights: Path, count: int) -> list[list[int]]:
    """The ids of the first prompts, as often as it takes."""
    tokenizer = AutoTokenizer.from_pretrained(weights)
    lines = (ROOT / "configs/tiny/train.jsonl").read_text().splitlines()[:count]
    texts = [json.loads(line)["input"] for line in lines]
    return [tokenizer.encode(texts[i % len(texts)], add_special_tokens=False) for i in range(count)]


def sampled(weights: Path, dtype: str, cache: str, prompts: Sequence[list[int]]) -> list[dict[str, Any]]:
    """SGLang's answers to the prompts, five tokens at most."""
    switches = ["--enable-return-routed-experts", "--skip-server-warmup", "--log-level", "warning"]
    flags = {**SIZES, "dtype": dtype, "kv-cache-dtype": cache}
    server = EngineProcess(
        weights, python=default_python(), log_path="/dev/null", flags=flags, switches=switches
    )
    with server.launch() as engine:
        while not engine.ready.wait(0.1):
            if engine.failure:
                raise engine.failure
        body = {
            "input_ids": list(prompts),
            "sampling_params": {"max_new_tokens": 5, "temperature": 1.0},
            "return_logprob": True,
            "return_routed_experts": True,
        }
        return httpx.post(f"{engine.url}/generate", json=body, timeout=300).json()


@torch.no_grad()
def compare(model: PreTrainedModel, ids: list[int], answer: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Of each token of an answer [R]: log trainer - log sampler, and whether a layer chose other experts."""
    meta, response = answer["meta_info"], torch.tensor(answer["output_ids"])
    out = model(torch.tensor([ids + answer["output_ids"]]), output_router_logits=True)
    rows = slice(len(ids) - 1, len(ids) - 1 + len(response))
    log_probs = out.logits[0, rows].log_softmax(-1).gather(1, response[:, None])[:, 0]
    behavior = torch.tensor([entry[0] for entry in meta["output_token_logprobs"]])
    active = model.config.num_experts_per_tok
    mine = torch.stack([logits.topk(active).indices for logits in out.router_logits], 1)[rows]
    words = bytearray(base64.b64decode(meta["routed_experts"]))
    theirs = torch.frombuffer(words, dtype=torch.int32).view(-1, *mine.shape[1:])[rows]
    flipped = (mine.sort().values != theirs.sort().values).any(-1).any(-1)
    return log_probs - behavior, flipped


def summary(log_ratio: Tensor, flipped: Tensor) -> Iterator[str]:
    """The cells of a row, after its name."""
    log_ratio, size = log_ratio.double(), log_ratio.abs()
    yield f"{len(size)}"
    yield f"{flipped.double().mean():.3%}"
    yield from (f"{size[which].mean():.2e}" if which.any() else "" for which in (~flipped, flipped))
    yield f"{size.max():.2e}"
    yield f"{(log_ratio.expm1() - log_ratio).mean():.2e}"


if __name__ == "__main__":
    main()
