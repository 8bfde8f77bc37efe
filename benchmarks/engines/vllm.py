"""Asks vLLM, which runs in an environment of its own: ``python -m benchmarks.engines vllm --python PATH``.

This file is also the program that runs there. It imports only the standard library, torch and vLLM.

    python -P vllm.py MODEL MODE ANSWERS.json < requests.json
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

MODES = ("raw_logprobs", "processed_logprobs")
RANK = 8  # the largest of the LoRA adapters


def main(folder: str, mode: str, out: str) -> None:
    """Answers {"vocabulary": V, "requests": {setting: request}}.

    A request is [prompts, prompts with all tokens, parameters, adapter]. The engine loads
    each LoRA adapter into the place of the one before, and keeps its prefix cache.
    """
    from vllm import LLM, SamplingParams, __version__
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import StructuredOutputsParams

    asked = json.load(sys.stdin)
    has_adapters = any(adapter for *_, adapter in asked["requests"].values())
    engine = LLM(
        folder, dtype="float32", enforce_eager=True, max_model_len=512, logprobs_mode=mode,
        max_logprobs=asked["vocabulary"], seed=0, enable_prefix_caching=has_adapters,
        enable_lora=has_adapters, max_lora_rank=RANK,
    )  # fmt: skip
    answers = {}
    for name, (prompts, whole, parameters, adapter) in asked["requests"].items():
        policy = None
        if adapter:
            current = Path(folder, "adapter")
            shutil.copytree(adapter, current, dirs_exist_ok=True)
            policy = LoRARequest("policy", 1, str(current), load_inplace=True)
        grammars = {name: parameters.pop(name) for name in ("regex", "json") if name in parameters}
        if "logit_bias" in parameters:
            parameters["logit_bias"] = {
                int(token): value for token, value in parameters["logit_bias"].items()
            }
        rows = []
        for texts, count in ((prompts, 0), (whole, asked["vocabulary"])):
            grammar = StructuredOutputsParams(**grammars) if grammars else None
            params = SamplingParams(**parameters, logprobs=count, structured_outputs=grammar)
            inputs = [{"prompt_token_ids": text} for text in texts]
            replies = engine.generate(inputs, params, use_tqdm=False, lora_request=policy)
            rows += [
                _row(text, reply.outputs[0], bool(count)) for text, reply in zip(texts, replies, strict=True)
            ]
        answers[name] = rows
    Path(out).write_text(json.dumps({"version": __version__, "answers": answers}))


def _row(prompt: list[int], reply: object, is_whole: bool) -> list:
    tokens = list(reply.token_ids)
    values = [{token: entry.logprob for token, entry in step.items()} for step in reply.logprobs]
    recorded = [step[token] for step, token in zip(values, tokens, strict=True)]
    return [prompt, tokens, recorded, values if is_whole else None]


def answers(python: Path, folder: Path, mode: str, requests: Mapping[str, object], vocabulary: int) -> dict:
    """Runs this file under another Python and returns the answers that it writes.

    Raises:
        CalledProcessError: vLLM has failed; its log is on stderr.
    """
    asked = json.dumps({"vocabulary": vocabulary, "requests": requests})
    variables = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    out = folder.with_name(f"{mode}.json")
    command = [str(python), "-P", __file__, str(folder), mode, str(out)]  # -P: this file is not the package
    subprocess.run(command, env=env, input=asked, stdout=sys.stderr, text=True, check=True)
    reply: dict = json.loads(out.read_text())
    return reply


if __name__ == "__main__":
    main(*sys.argv[1:])
