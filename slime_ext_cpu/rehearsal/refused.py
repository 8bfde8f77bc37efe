"""Applies the host's rules to flags that a rehearsal replaces. The host's parser never sees those.

The rules are in slime 624b824, slime/utils/arguments.py:1749-2036 and
slime/backends/megatron_utils/arguments.py:97-148. miles 31f1ca9 and miles-rl 0.0.2 have them, too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slime_ext.tools.launch.launch import Launch

NEEDS = (  # a flag, and the flags of which it needs at least one
    ("--save-interval", ("--save",)),
    ("--release-train", ("--save",)),
    ("--eval-interval", ("--eval-prompt-data", "--eval-config")),
    ("--use-dynamic-batch-size", ("--max-tokens-per-gpu",)),
)
ORDERED = (  # a flag, the flag that it may not exceed, and by how much it must be less
    ("--rollout-batch-size", "--over-sampling-batch-size", 0),
    ("--rollout-max-prompt-len", "--rollout-max-context-len", 1),
)
OF_THE_MODEL = {  # a flag: the key of a checkpoint's config.json with the same meaning
    "--num-layers": "num_hidden_layers",
    "--hidden-size": "hidden_size",
    "--num-attention-heads": "num_attention_heads",
    "--ffn-hidden-size": "intermediate_size",
    "--moe-ffn-hidden-size": "moe_intermediate_size",
    "--norm-epsilon": "rms_norm_eps",
    "--rotary-base": "rope_theta",
}
UNTIED = "--untie-embeddings-and-output-weights"
EXPERTS = ("moe_intermediate_size", "num_experts", "n_routed_experts", "num_local_experts")
REFUSED = "the host refuses that"


def refusals(launch: Launch) -> Iterator[str]:
    """Yields a line for each rule that the launch breaks."""
    yield from _needs(launch)
    yield from _ordered(launch)
    yield from _evaluations(launch)
    yield from _model(launch)


def _needs(launch: Launch) -> Iterator[str]:
    if launch.flags and launch.lacks("--num-rollout", "--num-epoch"):
        yield (
            f"{Path(launch.script).name}: expected --num-rollout or --num-epoch in the launch, got neither: "
            f"{REFUSED}"
        )
    for name, others in NEEDS:
        if (flag := launch.flag(name)) and launch.lacks(*others):
            yield f"{flag.where}: {name}: expected {' or '.join(others)} beside it, got none: {REFUSED}"


def _ordered(launch: Launch) -> Iterator[str]:
    for low, high, less in ORDERED:
        smaller, flag, larger = launch.known_number(low), launch.flag(high), launch.known_number(high)
        if flag and smaller is not None and larger is not None and smaller > larger - less:
            condition = f"{low} {'less than' if less else 'at most'} it, got {smaller:g}"
            yield f"{flag.where}: {high} {flag.values[0]}: expected {condition}: {REFUSED}"


def _evaluations(launch: Launch) -> Iterator[str]:
    """Yields a line if evaluations are not pairs of a name and a file. A single word is a file."""
    flag = launch.flag("--eval-prompt-data")
    if flag and launch.lacks("--eval-config") and len(flag.values) > 1 and len(flag.values) % 2:
        words = " ".join(flag.values)
        yield f"{flag.where}: {flag.name}: expected pairs of a name and a file, got '{words}': {REFUSED}"


def _model(launch: Launch) -> Iterator[str]:
    """Yields a line if the checkpoint's config.json differs from the launch's flags."""
    flag = launch.flag("--hf-checkpoint")
    if not flag or not flag.values or launch.value("--train-backend") == "fsdp":
        return
    if differences := list(_unlike(launch, _config_of(Path(flag.values[0])))):
        yield (
            f"{flag.where}: {flag.name}: expected the model of the launch's flags in {flag.values[0]}, got "
            f"another: {', '.join(differences)}: give the flags of that model"
        )


def _unlike(launch: Launch, config: Mapping[str, Any]) -> Iterator[str]:
    is_mixture = any(key in config for key in EXPERTS)  # it may have no dense layers
    for name, key in OF_THE_MODEL.items():
        of_launch, of_model = launch.known_number(name), config.get(key)
        is_compared = isinstance(of_model, int | float) and not (is_mixture and name == "--ffn-hidden-size")
        if is_compared and of_launch is not None and of_launch != of_model:
            yield f"{name} {launch.value(name)} where its {key} is {of_model}"
    tied = config.get("tie_word_embeddings")
    if launch.flag("--num-layers") and launch.is_known(UNTIED) and tied is bool(launch.flag(UNTIED)):
        yield f"{UNTIED} {'' if tied else 'not '}set where its tie_word_embeddings is {str(tied).lower()}"


def _config_of(folder: Path) -> Mapping[str, Any]:
    """Returns the language model's keys in a config.json, or {} if it cannot be read."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
        config = config.get("text_config") or config
        return config | (config.get("rope_parameters") or {})  # the hosts prefer the rope_theta in here
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
