"""Asks SGLang, run on the CPU with the stand-ins of `slime_ext_cpu`."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.engines import model
from benchmarks.engines.model import Answer
from benchmarks.engines.settings import LONGEST, ORIGINAL, Setting
from slime_ext_cpu.driver import ENVIRONMENT, SITE
from slime_ext_cpu.processes import MARK, guarded

ROOT = Path(__file__).parents[2]
STARTS_S = 600
FLAGS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--disable-cuda-graph"),
    *("--max-total-tokens", "16384", "--context-length", "512", "--mem-fraction-static", "0.1"),
    *("--log-level", "warning", "--host", "127.0.0.1"),
)
LORA = (  # the default backend for adapters needs a GPU
    *("--enable-lora", "--lora-backend", "torch_native", "--max-lora-rank", str(model.RANK)),
    *("--lora-target-modules", *model.ADAPTED),
)
POLICY = "policy"  # the name of the adapter in the engine
LAUNCHES: Mapping[str, tuple[tuple[str, ...], Mapping[str, str]]] = {  # flags and environment
    "plain": ((), {}),
    "original": ((), ORIGINAL),
    "adapter": (LORA, {}),
}


@contextlib.contextmanager
def served(
    folder: Path, log: Path, flags: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Starts a server for the model in a folder, and yields its URL.

    Raises:
        RuntimeError: the server ended, or does not answer in STARTS_S.
    """
    port, mark, temporary = _free_port(), uuid.uuid4().hex, Path(tempfile.mkdtemp())
    paths = os.pathsep.join([str(SITE), str(ROOT)])
    # SGLang compiles its repetition penalty, for which torch asks the stand-in of CUDA more than it knows.
    plain = {"TORCHDYNAMO_DISABLE": "1"}
    variables = ENVIRONMENT | plain | {MARK: mark, "PYTHONPATH": paths} | dict(environment or {})
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(folder), "--port", str(port)]
    with guarded(mark, temporary), log.open("w") as output:
        server = subprocess.Popen(
            [*command, *FLAGS, *flags],
            env=os.environ | variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        url = f"http://127.0.0.1:{port}"
        try:
            _wait(url, server, log)
            yield url
        finally:
            server.kill()
            server.wait()


def _wait(url: str, server: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + STARTS_S
    while server.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health"):
            return
        time.sleep(1)
    raise RuntimeError(f"SGLang: expected an answer from {url}/health, got none: read {log}")


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def release() -> str:
    """Returns the engine's version."""
    return version("sglang")


def answers(url: str, setting: Setting) -> list[Answer]:
    """Samples the answers to all prompts, and one answer to each prompt with the log-probs of all tokens."""
    everything = model.prompts(model.REPEATS if setting.adapter else 1)
    return [
        *_generate(url, setting, everything),
        *_generate(url, setting, everything[:: model.ANSWERS], top_logprobs_num=model.VOCABULARY),
    ]


def sampled(url: str, setting: Setting) -> list[Answer]:
    """Samples the answers to all prompts."""
    return _generate(url, setting, model.prompts())


def load(url: str, adapter: Path) -> None:
    """Replaces the LoRA adapter that the engine knows as POLICY."""
    with contextlib.suppress(urllib.error.HTTPError):  # the first one replaces none
        _post(f"{url}/unload_lora_adapter", {"lora_name": POLICY})
    _post(f"{url}/load_lora_adapter", {"lora_name": POLICY, "lora_path": str(adapter)})


def _post(url: str, request: Mapping[str, object]) -> Any:
    body, kind = json.dumps(request).encode(), {"content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, body, kind)) as reply:
        return json.load(reply)


def _generate(url: str, setting: Setting, prompts: list[list[int]], **options: object) -> list[Answer]:
    parameters = {"temperature": 1.0, "max_new_tokens": LONGEST, "ignore_eos": True} | dict(
        setting.parameters
    )
    parameters |= {"min_new_tokens": setting.minimum} if setting.minimum else {}
    parameters |= {"regex": setting.regex} if setting.regex else {}
    parameters |= {"json_schema": setting.schema} if setting.schema else {}
    request = {"input_ids": prompts, "sampling_params": parameters, "return_logprob": True, **options}
    request |= {"lora_path": [POLICY] * len(prompts)} if setting.adapter else {}
    rows = _post(f"{url}/generate", request)
    return [_answer(prompt, row) for prompt, row in zip(prompts, rows, strict=True)]


def _answer(prompt: list[int], row: dict) -> Answer:
    details = row["meta_info"]
    recorded = [value for value, _, _ in details["output_token_logprobs"]]
    tops = details.get("output_top_logprobs")
    whole = [{token: value for value, token, _ in top} for top in tops] if tops else None
    return Answer(prompt, row["output_ids"], recorded, whole)
