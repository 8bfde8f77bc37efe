"""Measures what correct engines give each other: k3 by dtype, attention, batch shape and length.

    python -m benchmarks.engines.healthy [--record]

SGLang samples from SmolLM2-135M-Instruct in bfloat16 and in float32, in the environment of `make train`.
transformers computes the log-probs of the same tokens with the same weights, as a trainer would. The table is
printed, and with --record it is written to healthy.yaml, from which docs/engines.md has it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from benchmarks.engines import sglang

RECORDED = Path(__file__).with_name("healthy.yaml")
LENGTH, PARTS = 64, {"1 to 4": slice(0, 4), "5 to 16": slice(4, 16), "17 to 64": slice(16, 64)}
QUESTIONS = (
    "Explain why the sky is blue.",
    "Write a short story about a lighthouse keeper and a whale.",
    "What is 17 + 26?",
    "List three uses of copper, with a reason for each of them.",
    "How does a bicycle stay upright?",
    "Summarise the plot of a play in which nobody speaks.",
    "Give advice to somebody who starts to learn the piano at forty.",
    "Why do leaves fall in autumn?",
)
EACH = 4  # answers to a question


@dataclass(frozen=True)
class Scorer:
    """A way in which a trainer computes log-probs.

    Args:
        batch: "single" rows, rows padded on the "left" or on the "right", or "packed" into one row.
    """

    dtype: str = "bfloat16"
    attention: str = "sdpa"
    batch: str = "single"

    def __str__(self) -> str:
        return f"{self.dtype}, {self.attention}, {self.batch}"


BASE = Scorer()
SCORERS = (
    BASE,
    Scorer(attention="eager"),
    Scorer(batch="right"),
    Scorer(batch="left"),
    Scorer(batch="packed"),
    Scorer(dtype="float32"),
)
PAIRS = (
    *(("SGLang bfloat16", str(scorer)) for scorer in SCORERS),
    ("SGLang float32", str(Scorer(dtype="float32"))),
    ("SGLang float32", str(BASE)),
    (str(BASE), str(Scorer(dtype="float32"))),
    (str(BASE), str(Scorer(attention="eager"))),
)


def scores(folder: Path, scorer: Scorer, texts: Sequence[list[int]], sizes: Sequence[int]) -> Tensor:
    """Returns [answers, LENGTH] log-probs of the last LENGTH tokens of each text.

    Args:
        sizes: number of prompt tokens of each text.
    """
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, scorer.dtype)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=scorer.attention)
    model.eval()
    with torch.no_grad():
        rows = _logits(model, scorer.batch, texts)
    picked = []
    for text, size, logits in zip(texts, sizes, rows, strict=True):
        values = logits[size - 1 : -1].float().log_softmax(-1)
        picked.append(values.gather(1, torch.tensor(text[size:])[:, None])[:, 0])
    return torch.stack(picked)


def _logits(model: Any, batch: str, texts: Sequence[list[int]]) -> list[Tensor]:
    """Returns [tokens, V] logits of each text."""
    if batch == "single":
        return [model(torch.tensor([text])).logits[0] for text in texts]
    rows = []
    for start in range(0, len(texts), 8):
        rows += _together(model, batch, texts[start : start + 8])
    return rows


def _together(model: Any, batch: str, texts: Sequence[list[int]]) -> list[Tensor]:
    lengths = [len(text) for text in texts]
    if batch == "packed":
        ids = torch.tensor([[token for text in texts for token in text]])
        places = torch.cat([torch.arange(length) for length in lengths])[None]
        logits = model(ids, position_ids=places, use_cache=False).logits[0]
        return list(logits.split(lengths))
    longest = max(lengths)
    ids, mask = torch.zeros(2, len(texts), longest, dtype=torch.long)
    spans = [slice(longest - n, longest) if batch == "left" else slice(0, n) for n in lengths]
    for row, (text, span) in enumerate(zip(texts, spans, strict=True)):
        ids[row, span], mask[row, span] = torch.tensor(text), 1
    places = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(ids, attention_mask=mask, position_ids=places, use_cache=False).logits
    return [row[span] for row, span in zip(logits, spans, strict=True)]


def sampled(
    folder: Path, dtype: str, log: Path, questions: Sequence[list[int]]
) -> tuple[list[list[int]], Tensor]:
    """Returns SGLang's answers to each question, EACH one after another, and [answers, LENGTH] log-probs."""
    parameters = {"temperature": 1.0, "max_new_tokens": LENGTH, "ignore_eos": True}
    prompts = [question for question in questions for _ in range(EACH)]
    request = {"input_ids": prompts, "sampling_params": parameters, "return_logprob": True}
    with sglang.served(folder, log, ("--dtype", dtype)) as url:
        body, kind = json.dumps(request).encode(), {"content-type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(f"{url}/generate", body, kind)) as reply:
            rows = json.load(reply)
    values = [[value for value, _, _ in row["meta_info"]["output_token_logprobs"]] for row in rows]
    texts = [prompt + row["output_ids"] for prompt, row in zip(prompts, rows, strict=True)]
    return texts, torch.tensor(values)


def measure() -> list[dict[str, Any]]:
    """Runs both engines and returns a row per pair."""
    from transformers import AutoTokenizer

    from slime_ext_cpu.tasks import sums

    folder = sums.model()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    questions = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in QUESTIONS
    ]
    sizes = [len(question) for question in questions for _ in range(EACH)]
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        for dtype in ("bfloat16", "float32"):
            sampler = f"SGLang {dtype}"
            texts, values = sampled(folder, dtype, Path(temporary, "log"), questions)
            of = {sampler: values}
            for scorer in SCORERS:
                if any(str(scorer) in pair and (sampler in pair or dtype == "bfloat16") for pair in PAIRS):
                    of[str(scorer)] = scores(folder, scorer, texts, sizes)
            for first, second in PAIRS:
                is_of_this = first == sampler or (dtype == "bfloat16" and not first.startswith("SGLang"))
                if is_of_this:
                    rows.append({"sampler": first, "trainer": second} | _figures(of[second] - of[first]))
    return rows


def _figures(log_ratio: Tensor) -> dict[str, float]:
    k3 = log_ratio.expm1() - log_ratio
    figures = {"mean_absolute": log_ratio.abs().mean().item(), "k3": k3.mean().item()}
    figures |= {f"k3 of tokens {name}": k3[:, part].mean().item() for name, part in PARTS.items()}
    return {name: float(f"{value:.2g}") for name, value in figures.items()}


def read() -> list[dict[str, Any]]:
    """Returns the recorded rows."""
    rows: list[dict[str, Any]] = yaml.safe_load(RECORDED.read_text())
    return rows


def table(rows: Sequence[Mapping[str, Any]], with_parts: bool = True) -> str:
    """Returns the rows as a table in Markdown, with or without k3 of each part of the answers."""
    parts = [f"k3, tokens {name}" for name in PARTS] if with_parts else []
    head = ("recorded by", "computed by", "mean abs(log-ratio)", "k3", *parts)
    lines = [head, ("---",) * len(head)]
    for row in rows:
        cells = [value if isinstance(value, str) else f"{value:.1e}" for value in row.values()]
        lines.append(tuple(cells[: len(head)]))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engines.healthy", description=__doc__)
    parser.add_argument("--record", action="store_true", help="write healthy.yaml")
    record, rows = parser.parse_args().record, measure()
    print(table(rows))
    if record:
        RECORDED.write_text(yaml.safe_dump(rows, sort_keys=False))


if __name__ == "__main__":
    main()
