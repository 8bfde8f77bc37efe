"""--hf-checkpoint against the flags of the model and of its split. Reads JSON only."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from slime_ext.errors import ConfigError
from slime_ext.launcher.validation.numbers import flag_of

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
# Megatron's dest: key of config.json
SIZES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "kv_channels": "head_dim",
    "norm_epsilon": "rms_norm_eps",
    "vocab_size": "vocab_size",
    "padded_vocab_size": "vocab_size",
    "rotary_base": "rope_theta",
}
SPLIT_BY_TENSOR = ("num_attention_heads", "num_query_groups", "vocab_size", "ffn_hidden_size")


def check_model(args: argparse.Namespace) -> None:
    """The directory is a Qwen3 with a tokenizer, the flags agree with it, and the ranks divide it.

    Fills the size flags that were not given.
    """
    config = read_config(args.hf_checkpoint)
    _check_tokenizer(Path(args.hf_checkpoint))
    for dest, key in SIZES.items():
        _agree(args, dest, key, config[key])
    if args.untie_embeddings_and_output_weights and config["tie_word_embeddings"]:
        raise ConfigError(
            "--untie-embeddings-and-output-weights: expected what config.json says (tied), got untied"
        )
    args.untie_embeddings_and_output_weights = not config["tie_word_embeddings"]
    _check_split(args)


def read_config(directory: str) -> dict[str, Any]:
    """config.json with the defaults that Qwen3 has.

    Raises:
        ConfigError: no such file, another architecture, a size missing.
    """
    path = Path(directory) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--hf-checkpoint {directory}: expected config.json in it, got none") from error
    except ValueError as error:
        raise ConfigError(f"{path}: expected JSON, got a syntax error") from error
    if config.get("model_type") != "qwen3":
        kind = config.get("model_type")
        raise ConfigError(f"{path}: expected model_type qwen3, got {kind}: this launcher builds only that")
    rope = config.get("rope_parameters") or {}
    config.setdefault("rope_theta", rope.get("rope_theta", 10000.0))
    config.setdefault("tie_word_embeddings", False)
    config.setdefault("rms_norm_eps", 1e-6)
    config.setdefault("head_dim", 128)
    missing = sorted({*SIZES.values(), "max_position_embeddings"} - set(config))
    if missing:
        raise ConfigError(f"{path}: expected the key {missing[0]}, got none")
    return config


def _check_tokenizer(directory: Path) -> None:
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(
            f"--hf-checkpoint {directory}: expected a tokenizer in it ({TOKENIZER_FILES[0]}), got none"
        )


def _agree(args: argparse.Namespace, dest: str, key: str, value: Any) -> None:
    given = getattr(args, dest)
    if given is not None and given != value:
        raise ConfigError(f"{flag_of(dest)}: expected {value} ({key} of config.json), got {given}")
    setattr(args, dest, value)


def _check_split(args: argparse.Namespace) -> None:
    tensor, pipeline = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    for dest in SPLIT_BY_TENSOR:
        size = getattr(args, dest)
        if size % tensor:
            what = dest.replace("_", " ")
            raise ConfigError(
                f"--tensor-model-parallel-size: expected a divisor of {what} {size}, got {tensor}"
            )
    if args.num_layers % pipeline:
        raise ConfigError(
            f"--pipeline-model-parallel-size: expected a divisor of layers {args.num_layers}, got {pipeline}"
        )
