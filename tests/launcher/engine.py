"""A real SGLang server with tiny random weights, one per test process, for every folder that needs one.

Use it by importing the fixture into a conftest: `from tests.launcher.engine import sglang_engine`.
"""

from __future__ import annotations

import atexit
import functools
import os
import tempfile
from pathlib import Path

import pytest

from slime_ext.launcher.rollout.server import EngineProcess

ROOT = Path(__file__).parents[2]
VOCAB = 64
# What the shared server's tests are marked with; in one group they start it once.
SERVED = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.xdist_group("served")]


def sglang_python() -> Path | None:
    """Interpreter of the SGLang environment: SLIME_EXT_SGLANG_PYTHON, or .venv-sglang of this checkout."""
    path = Path(os.environ.get("SLIME_EXT_SGLANG_PYTHON", ROOT / ".venv-sglang/bin/python"))
    return path if path.exists() else None


def make_tiny_qwen3(directory: str | Path, seed: int = 0) -> Path:
    """Writes a Qwen3 of 2 layers with random weights and a tokenizer of 64 single characters."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        **heads,
    }
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = Qwen3Config(**sizes, **special, max_position_embeddings=512, tie_word_embeddings=False)
    model = Qwen3ForCausalLM(config).float()
    with torch.no_grad():
        model.lm_head.weight.normal_(0, 0.3)  # log-probs that differ from token to token
    model.save_pretrained(directory)
    names = {"<pad>": 0, "<bos>": 1, "<eos>": 2}
    words = models.WordLevel(names | {chr(48 + i): i for i in range(3, VOCAB)}, unk_token="<pad>")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    ).save_pretrained(directory)
    return Path(directory)


def tiny_engine(directory: Path, **options: object) -> EngineProcess:
    """A server for the tiny model, not started; weights and log are kept in `directory`."""
    python = sglang_python()
    if python is None:
        pytest.skip("no SGLang environment: set SLIME_EXT_SGLANG_PYTHON")
    sizes = {
        "context-length": 512,
        "max-total-tokens": 8192,
        "mem-fraction-static": 0.1,
        "random-seed": 0,
        "dtype": "float32",
    }
    model = directory / "model"
    if not model.exists():
        make_tiny_qwen3(model)
    return EngineProcess(model, python=python, log_path=directory / "sglang.log", flags=sizes, **options)


def started(engine: EngineProcess) -> EngineProcess:
    """Launches a server and waits until it answers.

    Raises:
        EngineError: it ended before.
    """
    engine.launch()
    while not engine.ready.wait(0.1):
        if engine.failure is not None:
            engine.stop()
            raise engine.failure
    return engine


@functools.cache
def shared_engine() -> EngineProcess:
    """The server that all tests of this process share; started at the first call, stopped at exit."""
    scratch = tempfile.TemporaryDirectory(prefix="slime-ext-test-")
    engine = tiny_engine(Path(scratch.name), max_restarts=10)
    atexit.register(scratch.cleanup)
    atexit.register(engine.stop)
    return started(engine)


@pytest.fixture
def sglang_engine() -> EngineProcess:
    """The shared server, running."""
    return shared_engine()
