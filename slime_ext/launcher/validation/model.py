"""--hf-checkpoint against the flags of the model and of its split. Reads JSON only."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from slime_ext.errors import ConfigError

# Megatron's argument: key of config.json
SIZES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "kv_channels": "head_dim",
    "norm_epsilon": "rms_norm_eps",
    "vocab_size": "vocab_size",
    "rotary_base": "rope_theta",
}
# config.json's key: the only value that the model here has
BUILT_IN = {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False}
SPLIT_BY_TENSOR = ("num_attention_heads", "num_query_groups", "vocab_size", "ffn_hidden_size")


def check_model(args: argparse.Namespace) -> None:
    """The directory is a Qwen3 with a tokenizer, and the ranks divide it. Fills Megatron's arguments."""
    directory = Path(args.hf_checkpoint)
    config = read_config(args.hf_checkpoint)
    _check_weights(directory)
    _check_shape(directory / "config.json", config)
    _check_engine_limits(args, config)
    vars(args).update({dest: config[key] for dest, key in SIZES.items()})
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
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: expected a JSON object, got a {type(config).__name__}")
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


def _check_shape(path: Path, config: dict[str, Any]) -> None:
    """Sizes are whole numbers above 0, and nothing is asked for that the model here does not have."""
    for key in (*SIZES.values(), "max_position_embeddings"):
        kind = int | float if key in ("rms_norm_eps", "rope_theta") else int
        if not isinstance(config[key], kind) or isinstance(config[key], bool) or config[key] <= 0:
            raise ConfigError(f"{path}: {key}: expected a number above 0, got {config[key]!r}")
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    if heads % groups:
        raise ConfigError(f"{path}: num_key_value_heads: expected a divisor of {heads} heads, got {groups}")
    for key, built_in in BUILT_IN.items():
        if config.get(key, built_in) not in (built_in, None):
            raise ConfigError(f"{path}: {key}: expected {built_in!r}, got {config[key]!r}: not implemented")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if (kind := rope.get("rope_type", rope.get("type", "default"))) != "default":
        raise ConfigError(f"{path}: rope_type: expected 'default', got {kind!r}: not implemented")


def _check_weights(directory: Path) -> None:
    """Every safetensors file is at least as long as its own header says."""
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= path.stat().st_size - 8:
            raise ConfigError(f"{path}: expected safetensors weights, got a damaged file: copy it again")


def _check_engine_limits(args: argparse.Namespace, config: dict[str, Any]) -> None:
    positions, vocabulary = config["max_position_embeddings"], config["vocab_size"]
    if (args.sglang_context_length or 0) > positions:
        raise ConfigError(
            f"--sglang-context-length: expected at most {positions} (max_position_embeddings), "
            f"got {args.sglang_context_length}"
        )
    for token in args.rollout_stop_token_ids:
        if not 0 <= token < vocabulary:
            raise ConfigError(f"--rollout-stop-token-ids: expected ids in [0, {vocabulary}), got {token}")
    if not args.rollout_stop_token_ids and not _has_end(Path(args.hf_checkpoint)):
        raise ConfigError(
            f"--hf-checkpoint {args.hf_checkpoint}: expected eos_token in tokenizer_config.json, got none: "
            "name the tokens that end a response with --rollout-stop-token-ids"
        )


def _has_end(directory: Path) -> bool:
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        path = directory / name
        if path.is_file() and '"eos_token"' in path.read_text(encoding="utf-8"):
            return True
    return False


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
