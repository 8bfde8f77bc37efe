"""SkyRL's policy losses, behind the function that scales its advantages."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import torch

from tests.peers.wheels import folder, take

# Its ratios are float32 whatever it is given, and a ratio multiplies an advantage of up to 2.
NAME, VERSIONS, CLOSE = "skyrl", ("0.4.0",), 2e-5
DEFAULTS: dict[str, Any] = {
    **{"tis_ratio_type": None, "token_tis_ratio_clip_high": 2.0, "sequence_tis_ratio_clip_high": 5.0},
    **{"sequence_mask_metric": None, "geo_mask_low": 0.99, "geo_mask_high": 1.01},
    **{"product_mask_low": 0.5, "product_mask_high": 2.0},
    **dict.fromkeys(("outlier_token_is_threshold_low", "outlier_token_is_threshold_high")),
    **dict.fromkeys(("token_mask_is_threshold_low", "token_mask_is_threshold_high")),
}
NESTED = {
    **{"off_policy_correction": DEFAULTS, "sapo": {"tau_pos": 1.0, "tau_neg": 1.05}},
    **{"dppo": {"dppo_type": "binary_tv", "delta_low": 0.2, "delta_high": 0.2}},
    "cispo": {"cispo_eps_clip_low": 1.0, "cispo_eps_clip_high": 4.0, "cispo_anchor": "old"},
}
FUNCTIONS = {
    **{"regular": "ppo_policy_loss", "dual_clip": "ppo_policy_loss", "gspo": "gspo_policy_loss"},
    **{"cispo": "compute_policy_loss_cispo", "sapo": "sapo_policy_loss", "dppo": "dppo_policy_loss"},
    **{"rollout_is": "rollout_is_policy_loss", "importance_sampling": "importance_sampling_loss"},
}


def block(rng: Any, version: str) -> dict[str, Any]:
    nested: dict[str, Any] = {
        "tis_ratio_type": rng.choice((None, "token", "sequence")),
        "token_tis_ratio_clip_high": rng.uniform(1.0, 3.0),
        "sequence_tis_ratio_clip_high": rng.uniform(1.0, 6.0),
        "sequence_mask_metric": rng.choice((None, None, "geometric", "product")),
        "geo_mask_low": rng.uniform(0.7, 0.99),
        "geo_mask_high": rng.uniform(1.01, 1.3),
        "product_mask_low": rng.uniform(0.1, 0.9),
        "product_mask_high": rng.uniform(1.1, 5.0),
        "outlier_token_is_threshold_low": rng.choice((None, None, rng.uniform(1e-3, 0.6))),
        "outlier_token_is_threshold_high": rng.choice((None, None, rng.uniform(1.5, 20.0))),
    }
    if rng.random() < 0.3:
        nested["token_mask_is_threshold_low"] = rng.uniform(0.3, 0.95)
        nested["token_mask_is_threshold_high"] = rng.uniform(1.05, 3.0)
    loss_type = rng.choice((*FUNCTIONS, *["regular"] * 6))
    if loss_type in ("dppo", "rollout_is") and rng.random() < 0.9:
        for key in [key for key in nested if key.endswith(("type", "metric")) or "is_threshold" in key]:
            del nested[key]
    composed = {
        "policy_loss_type": loss_type,
        "clip_ratio_c": rng.uniform(1.5, 4.0),
        "sapo": {"tau_pos": rng.uniform(0.5, 2.0), "tau_neg": rng.uniform(0.5, 2.0)},
        "dppo": {
            "dppo_type": "binary_tv",
            "delta_low": rng.uniform(0, 0.3),
            "delta_high": rng.uniform(0, 0.3),
        },
        "cispo": {
            **{"cispo_eps_clip_low": rng.uniform(0.1, 1.0), "cispo_eps_clip_high": rng.uniform(0.1, 4.0)},
            "cispo_anchor": rng.choice(("old", "rollout")),
        },
        "off_policy_correction": {k: v for k, v in nested.items() if rng.random() < 0.8},
    }
    if composed["cispo"]["cispo_anchor"] == "rollout" and loss_type == "cispo":
        composed["off_policy_correction"] = {}
    if loss_type == "rollout_is":
        composed |= {"eps_clip_low": rng.uniform(0.1, 0.9), "eps_clip_high": rng.uniform(0.1, 3.0)}
    kept = ("policy_loss_type", "off_policy_correction")
    return {k: v for k, v in composed.items() if k in kept or k == loss_type or rng.random() < 0.7}


@functools.cache
def package(version: str) -> SimpleNamespace:
    path = folder("skyrl", version) / "skyrl/backends/skyrl_train/utils"
    torch_utils = take(path / "torch_utils.py", "masked_mean", "safe_exp_delta", torch=torch)
    names = ("off_policy_correction_enabled", "compute_tis_ratio", "compute_outlier_token_mask")
    names = (*names, "compute_token_mask", "compute_sequence_mask", "compute_off_policy_correction")
    scope = {"torch": torch, **vars(torch_utils)}
    corrections = take(
        path / "off_policy_correction_utils.py", *names, "apply_off_policy_correction", **scope
    )
    scope["apply_off_policy_correction"] = corrections.apply_off_policy_correction
    names = (
        *dict.fromkeys(FUNCTIONS.values()),
        "reduce_loss",
        "apply_loss_reduction_to_advantages_minibatch",
    )
    return take(path / "ppo_utils.py", *names, **scope)


def loss(settings: dict[str, Any], batch: Any, version: str) -> torch.Tensor:
    functions, kind = package(version), settings["policy_loss_type"]
    config = SimpleNamespace(
        policy_loss_type=kind,
        loss_reduction="sequence_mean",  # silences a warning; advantages are scaled below
        eps_clip_low=settings.get("eps_clip_low", 0.2),
        eps_clip_high=settings.get("eps_clip_high", 0.2),
        clip_ratio_c=settings.get("clip_ratio_c", 3.0),
        off_policy_correction=SimpleNamespace(**DEFAULTS | settings["off_policy_correction"]),
        sapo=SimpleNamespace(**{"tau_pos": 1.0, "tau_neg": 1.05} | settings.get("sapo", {})),
        dppo=SimpleNamespace(**settings.get("dppo", {})),
        cispo=SimpleNamespace(**settings.get("cispo", {})),
    )
    scale = functions.apply_loss_reduction_to_advantages_minibatch
    advantages = scale(batch.advantages, batch.mask, "token_mean", len(batch.mask), 1)
    rows = batch.target, batch.proximal, advantages
    call = getattr(functions, FUNCTIONS[kind])
    return call(*rows, config=config, loss_mask=batch.mask, rollout_logprobs=batch.behavior)[0]


def per_token(settings: dict[str, Any]) -> bool:
    return True


def clamps_as_we_do(settings: dict[str, Any]) -> bool:
    """Whether a ratio beyond e^20 has our gradient; in DPPO and PPO the clamped ratio itself has none."""
    return settings["policy_loss_type"] not in ("dppo", "importance_sampling")


def has_our_value(settings: dict[str, Any]) -> bool:
    """Whether the loss itself is ours, and not only its gradient: that of DPPO is the ratio times A."""
    return settings["policy_loss_type"] != "dppo"
