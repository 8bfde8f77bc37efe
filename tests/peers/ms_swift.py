"""ms-swift's GRPOTrainer: its whole loss, with the weights inside."""

from __future__ import annotations

import functools
from collections import defaultdict
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch

from tests.peers.wheels import folder, take

NAME, VERSIONS, CLOSE = "ms_swift", ("4.6.0",), 1e-8
SAMPLER = "rollout_importance_sampling"
METHODS = (
    *("_compute_loss_and_metrics", "_apply_rollout_importance_sampling", "_compute_sequence_level_ratios"),
    *(
        "_compute_off_policy_sequence_mask",
        "_get_rollout_is_correction",
        "_undo_gradient_accumulation_scaling",
    ),
)


def block(rng: Any, version: str) -> dict[str, Any]:
    values = {
        f"{SAMPLER}_mode": f"{rng.choice(('token', 'sequence'))}_{rng.choice(('truncate', 'mask'))}",
        f"{SAMPLER}_threshold": rng.uniform(1.0, 3.0),
        "off_policy_sequence_mask_delta": rng.uniform(0.01, 0.3),
        "loss_type": rng.choice(("grpo", "bnpo", "dapo", "cispo", "sapo")),
        "tau_pos": rng.uniform(0.5, 2.0),
        "tau_neg": rng.uniform(0.5, 2.0),
        "epsilon": 0.2,
        "beta": rng.choice((0.0, 0.04)),
    }
    del values[
        rng.choice((f"{SAMPLER}_mode", "off_policy_sequence_mask_delta", "off_policy_sequence_mask_delta"))
    ]
    if f"{SAMPLER}_mode" in values and rng.random() < 0.9:
        values.pop("off_policy_sequence_mask_delta", None)
    kept = {key: value for key, value in values.items() if rng.random() < 0.85}
    if kept.get("loss_type") == "cispo":
        kept["epsilon_high"] = rng.uniform(1.0, 5.0)
    return kept


@functools.cache
def package(version: str) -> SimpleNamespace:
    file = folder("ms-swift", version) / "swift/rlhf_trainers/grpo_trainer.py"
    scope = {"torch": torch, "gather_object": lambda x: x, "logger": MagicMock(), "gather": lambda x: x}
    scope |= {
        "nanmax": torch.max,
        "nanmin": torch.min,
        "WINDOW_NORMALIZED_LOSS_TYPES": ("cispo", "dapo", "fipo"),
    }
    return take(file, *METHODS, **scope)


def loss(settings: dict[str, Any], batch: Any, version: str) -> torch.Tensor:
    functions = package(version)
    epsilon_high = settings.get("epsilon_high")
    trainer = MagicMock()
    vars(trainer).update(
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(
            delta=None, top_entropy_quantile=1.0, log_entropy=False, gradient_accumulation_steps=1
        ),
        accelerator=SimpleNamespace(num_processes=1, gather_for_metrics=lambda x: x),
        beta=0.0,  # a note says that the weights multiply the KL to the reference model
        compute_entropy=False, overlong_filter=False, kl_in_reward=False, chord_sft_iterator=None,
        disable_rollout_importance_sampling=False, log_rollout_offpolicy_metrics=False, _has_teacher=False,
        rollout_importance_sampling_mode=settings.get(f"{SAMPLER}_mode"),
        rollout_importance_sampling_threshold=settings.get(f"{SAMPLER}_threshold", 2.0),
        off_policy_sequence_mask_delta=settings.get("off_policy_sequence_mask_delta"),
        importance_sampling_level="token",
        loss_type=settings.get("loss_type", "grpo"),
        epsilon_low=0.2, epsilon_high=0.2 if epsilon_high is None else epsilon_high,
        tau_pos=settings.get("tau_pos", 1.0), tau_neg=settings.get("tau_neg", 1.05),
        sdar_loss_coef=0, model_accepts_loss_kwargs=False, compute_loss_func=None,
        current_gradient_accumulation_steps=1, _metrics=defaultdict(lambda: defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *_, **__: (batch.target, None),
        _compute_rollout_offpolicy_metrics=lambda *_: {},
        _compute_is_correction_metrics=lambda *_: {},
    )  # fmt: skip
    for name in METHODS[1:]:
        vars(trainer)[name] = functools.partial(getattr(functions, name), trainer)
    rows = SimpleNamespace(
        completion_mask=batch.mask.bool(),
        truncated_mask=torch.zeros(len(batch.mask), dtype=torch.bool),
        advantages=batch.advantages,
        old_per_token_logps=batch.proximal,
        rollout_per_token_logps=batch.behavior,
        num_items_in_batch=batch.mask.sum(),
        teacher_per_token_logps=None,
        ref_per_token_logps=None,
    )
    return functions._compute_loss_and_metrics(trainer, None, {}, rows)[0]


def per_token(settings: dict[str, Any]) -> bool:
    return settings.get("loss_type", "grpo") in ("bnpo", "dapo", "cispo")
