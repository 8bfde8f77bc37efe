"""--hf-checkpoint against the flags of the model and of its split. Reads JSON only."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from slime_ext.errors import ConfigError, shown
from slime_ext.launcher.arguments.flags import Count, Positive, wanted

SPLIT_BY_TENSOR = ("num_attention_heads", "num_query_groups", "vocab_size", "ffn_hidden_size")


class Qwen3(BaseModel):
    """config.json of a Qwen3, its sizes under Megatron's names; what is not built here is refused, what is no
    argument of Megatron's is excluded."""

    model_config = ConfigDict(strict=True)

    model_type: Literal["qwen3"] = Field(exclude=True)
    num_layers: Count = Field(alias="num_hidden_layers")
    hidden_size: Count
    ffn_hidden_size: Count = Field(alias="intermediate_size")
    num_attention_heads: Count
    num_query_groups: Count = Field(alias="num_key_value_heads")
    kv_channels: Count = Field(128, alias="head_dim")
    norm_epsilon: Positive = Field(1e-6, alias="rms_norm_eps")
    vocab_size: Count
    rotary_base: Positive = Field(10000.0, alias="rope_theta")
    max_position_embeddings: Count
    tie_word_embeddings: bool = Field(False, exclude=True)
    hidden_act: Literal["silu"] = Field("silu", exclude=True)
    attention_bias: Literal[False] = Field(False, exclude=True)
    use_sliding_window: Literal[False] | None = Field(False, exclude=True)
    rope_type: Literal["default"] = Field("default", exclude=True)


class Qwen3Moe(Qwen3):
    """config.json of a Qwen3-MoE in which every layer is a mixture of experts."""

    model_type: Literal["qwen3_moe"] = Field(exclude=True)
    num_experts: Count
    moe_router_topk: Count = Field(alias="num_experts_per_tok")
    moe_ffn_hidden_size: Count = Field(alias="moe_intermediate_size")
    norm_topk_prob: bool = False
    decoder_sparse_step: Literal[1] = Field(1, exclude=True)
    mlp_only_layers: list[int] | None = Field(None, max_length=0, exclude=True)


LAYOUT = {
    "tensor": "tensor_model_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "context": "context_parallel_size",
    "data": "data_parallel_size",
}
NO_SIZE_OF_A_WEIGHT = "max_position_embeddings"
MODEL = [
    *(n for n, field in Qwen3Moe.model_fields.items() if not field.exclude and n != NO_SIZE_OF_A_WEIGHT),
    *("untie_embeddings_and_output_weights", "params_dtype"),
]


def sizes_of(args: argparse.Namespace) -> dict[str, Any]:
    """What a run must share with a checkpoint to load it: the layout and the architecture."""
    layout = {name: getattr(args, dest) for name, dest in LAYOUT.items()}
    return {**layout, **{name: getattr(args, name, None) for name in MODEL}}


def check_model(args: argparse.Namespace) -> None:
    """The directory is a Qwen3 with a tokenizer, and the ranks divide it. Fills Megatron's arguments."""
    directory = Path(args.hf_checkpoint)
    config = read_config(directory)
    _check_weights(directory)
    if config.num_attention_heads % config.num_query_groups:
        raise ConfigError(
            f"{directory / 'config.json'}: num_key_value_heads: expected a divisor of "
            f"{config.num_attention_heads} heads, got {config.num_query_groups}"
        )
    vars(args).update(config.model_dump())
    args.untie_embeddings_and_output_weights = not config.tie_word_embeddings
    _check_engine_limits(args)
    _check_split(args)


def read_config(directory: Path) -> Qwen3:
    """config.json.

    Raises:
        ConfigError: no such file, another architecture, a size missing.
    """
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--hf-checkpoint {directory}: expected config.json in it, got none") from error
    except ValueError as error:
        raise ConfigError(f"{path}: expected JSON, got a syntax error") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: expected a JSON object, got a {type(config).__name__}")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    of = Qwen3Moe if config.get("model_type") == "qwen3_moe" else Qwen3
    try:
        return of.model_validate({"rope_theta": rope.get("rope_theta", 1e4), "rope_type": kind} | config)
    except ValidationError as error:
        raise ConfigError(f"{path}: {_said(error.errors()[0])}") from None


def _said(error: Any) -> str:
    (key, *_), found = error["loc"], error["input"]
    if error["type"] == "missing":
        return f"expected the key {key}, got none"
    expected = "an empty list" if error["type"] == "too_long" else wanted(error["msg"])
    return f"{key}: expected {expected}, got {shown(found)}: another model is not implemented"


def _check_weights(directory: Path) -> None:
    """Every safetensors file is at least as long as its own header says."""
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= path.stat().st_size - 8:
            raise ConfigError(f"{path}: expected safetensors weights, got a damaged file: copy it again")


def _check_engine_limits(args: argparse.Namespace) -> None:
    positions, vocabulary = args.max_position_embeddings, args.vocab_size
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
    paths = (directory / name for name in ("tokenizer_config.json", "special_tokens_map.json"))
    return any(path.is_file() and '"eos_token"' in path.read_text(encoding="utf-8") for path in paths)


def _check_split(args: argparse.Namespace) -> None:
    tensor, pipeline = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    if hasattr(args, "num_experts") and tensor > 1:
        raise ConfigError(
            f"--tensor-model-parallel-size: expected 1 with a mixture of experts, got {tensor}: Megatron "
            "trains one with sequence parallelism only, which is not implemented"
        )
    sizes = [("--tensor-model-parallel-size", tensor, dest) for dest in SPLIT_BY_TENSOR]
    for flag, parts, dest in [*sizes, ("--pipeline-model-parallel-size", pipeline, "num_layers")]:
        if (size := getattr(args, dest)) % parts:
            what = dest.removeprefix("num_").replace("_", " ")
            raise ConfigError(f"{flag}: expected a divisor of {what} {size}, got {parts}")
