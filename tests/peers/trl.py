"""TRL's GRPOTrainer: the ratio of its generation step, and its whole loss."""

from __future__ import annotations

import ast
import functools
import math
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch

from tests.peers.wheels import folder, take

# SAPO makes float32 of its temperatures.
NAME, VERSIONS, CLOSE = "trl", ("1.16.0",), 1e-6
VLLM = "vllm_importance_sampling"


def block(rng: Any, version: str) -> dict[str, Any]:
    values = {
        f"{VLLM}_correction": rng.random() < 0.85,
        f"{VLLM}_mode": f"{rng.choice(('token', 'sequence'))}_{rng.choice(('truncate', 'mask'))}",
        f"{VLLM}_clip_min": rng.choice((None, rng.uniform(0.2, 0.9))),
        f"{VLLM}_clip_max": rng.choice((rng.uniform(1.1, 4.0), 3.0)),
        f"{VLLM}_cap": rng.choice((None, None, rng.uniform(1.1, 4.0))),
        "loss_type": rng.choice(("grpo", "dapo", "bnpo", "cispo", "sapo")),
        "epsilon": 0.2,
        "sapo_temperature_pos": rng.uniform(0.5, 2.0),
        "sapo_temperature_neg": rng.uniform(0.5, 2.0),
    }
    kept = {key: value for key, value in values.items() if rng.random() < 0.8}
    if kept.get(f"{VLLM}_correction") is False and rng.random() < 0.7:
        kept["off_policy_mask_threshold"] = rng.uniform(0.01, 0.3)
    if kept.get("loss_type") == "cispo":
        kept["epsilon_high"] = rng.uniform(1.0, 5.0)
    return {"use_vllm": rng.random() < 0.95, **kept}


@functools.cache
def package(version: str) -> SimpleNamespace:
    """Returns the loss of the trainer, and the block of its generation step that computes the ratio."""
    file = folder("trl", version) / "trl/trainer/grpo_trainer.py"
    scope = {"torch": torch, "math": math, "nanmax": torch.max, "nanmin": torch.min}
    functions = take(file, "_compute_loss", "get_off_policy_mask", **scope)
    condition = "self.use_vllm and self.vllm_importance_sampling_correction"
    blocks = [
        n
        for n in ast.walk(ast.parse(file.read_text()))
        if isinstance(n, ast.If) and ast.unparse(n.test) == condition
    ]
    ratio = next(node for node in blocks if "per_token_logps_diff" in ast.unparse(node))
    functions.ratio = compile(ast.Module([ratio], []), str(file), "exec")
    return functions


def loss(settings: dict[str, Any], batch: Any, version: str) -> torch.Tensor:
    functions = package(version)
    high = settings.get(f"{VLLM}_cap") or settings.get(f"{VLLM}_clip_max", 3.0)
    epsilon_high = settings.get("epsilon_high")
    args = SimpleNamespace(
        delta=None, use_bias_correction_kl=False, steps_per_generation=1, gradient_accumulation_steps=1,
        sapo_temperature_pos=settings.get("sapo_temperature_pos", 1.0),
        sapo_temperature_neg=settings.get("sapo_temperature_neg", 1.05),
    )  # fmt: skip
    trainer = SimpleNamespace(
        args=args,
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(gather=lambda x: x, reduce=lambda x, **_: x, num_processes=1),
        use_vllm=settings["use_vllm"],
        vllm_importance_sampling_correction=settings.get(f"{VLLM}_correction", True),
        vllm_importance_sampling_mode=settings.get(f"{VLLM}_mode", "sequence_mask"),
        vllm_importance_sampling_clip_min=settings.get(f"{VLLM}_clip_min"),
        vllm_importance_sampling_clip_max=high,
        off_policy_mask_threshold=settings.get("off_policy_mask_threshold"),
        loss_type=settings.get("loss_type", "dapo"),
        importance_sampling_level="token",
        epsilon_low=0.2,
        epsilon_high=0.2 if epsilon_high is None else epsilon_high,
        current_gradient_accumulation_steps=1,
        top_entropy_quantile=1.0,
        beta=0.0,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        get_off_policy_mask=functions.get_off_policy_mask,
        _get_per_token_logps_and_entropies=lambda *_, **__: (
            batch.target,
            torch.zeros_like(batch.mask),
            None,
        ),
    )
    scope = {"self": trainer, "torch": torch, "math": math, "tool_mask": None, "completion_mask": batch.mask}
    scope |= {"old_per_token_logps": batch.proximal, "sampling_per_token_logps": batch.behavior}
    exec(functions.ratio, scope)
    inputs = {
        "prompt_ids": torch.zeros(len(batch.mask), 1), "prompt_mask": torch.ones(len(batch.mask), 1),
        "completion_ids": torch.zeros_like(batch.mask), "completion_mask": batch.mask,
        "advantages": batch.advantages.sum(1) / batch.mask.sum(1),
        "old_per_token_logps": batch.proximal, "sampling_per_token_logps": batch.behavior,
        "importance_sampling_ratio": scope.get("vllm_importance_sampling_ratio"),
        "num_items_in_batch": batch.mask.sum(),
    }  # fmt: skip
    return functions._compute_loss(trainer, None, inputs)


def clamps_as_we_do(settings: dict[str, Any]) -> bool:
    """Whether ratios stay in float32; TRL has no clamp."""
    return False


def per_token(settings: dict[str, Any]) -> bool:
    return settings.get("loss_type", "dapo") in ("dapo", "bnpo", "cispo")
