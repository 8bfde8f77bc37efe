"""RLinf's block that weights advantages, and its PPO loss behind it."""

from __future__ import annotations

import ast
import functools
from types import SimpleNamespace
from typing import Any

import torch

from tests.peers.wheels import folder, take

# Its loss takes float32 alone.
NAME, VERSIONS, CLOSE = "rlinf", ("0.3.0",), 2e-5


def block(rng: Any, version: str) -> dict[str, Any]:
    values = {
        "importance_sampling_fix": rng.random() < 0.8,
        "importance_sampling_clip": rng.uniform(1.0, 4.0),
    }
    return {key: value for key, value in values.items() if key.endswith("clip") or rng.random() < 0.9}


@functools.cache
def package(version: str) -> SimpleNamespace:
    root = folder("rlinf", version) / "rlinf"
    means = take(root / "utils/utils.py", "masked_mean", torch=torch)
    names = ("compute_ppo_actor_loss",)
    functions = take(root / "algorithms/losses.py", *names, torch=torch, masked_mean=means.masked_mean)
    functions.masked_mean = means.masked_mean
    file = root / "workers/actor/fsdp_actor_worker.py"
    condition = "self.cfg.algorithm.get('importance_sampling_fix', False)"
    blocks = [n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.If)]
    weighted = next(n for n in blocks if ast.unparse(n.test) == condition and "torch.clamp" in ast.unparse(n))
    functions.weighted = compile(ast.Module([weighted], []), str(file), "exec")
    return functions


def loss(settings: dict[str, Any], batch: Any, version: str) -> torch.Tensor:
    functions = package(version)

    class Algorithm(SimpleNamespace):
        def get(self, key: str, default: Any = None) -> Any:
            return vars(self).get(key, default)

    rows = {"rollout_logprobs": batch.behavior, "recomputed_logprobs": batch.proximal}
    scope = {"self": SimpleNamespace(cfg=SimpleNamespace(algorithm=Algorithm(**settings))), "torch": torch}
    scope |= {"m_batch": rows, "advantages": batch.advantages}
    exec(functions.weighted, scope)
    return functions.compute_ppo_actor_loss(
        batch.target.float(),
        batch.proximal.float(),
        clip_ratio_low=0.2,
        clip_ratio_high=0.2,
        advantages=scope["advantages"].float(),
        loss_mask=batch.mask.bool(),
        loss_agg_func=functions.masked_mean,
    )[0]


def clamps_as_we_do(settings: dict[str, Any]) -> bool:
    """Whether ratios stay in float32; RLinf has no clamp."""
    return False


def per_token(settings: dict[str, Any]) -> bool:
    return True
