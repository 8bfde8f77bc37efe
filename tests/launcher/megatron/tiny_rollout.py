"""A ragged, scored rollout and its training on any layout: what the parity tests compare."""

from __future__ import annotations

import random
from typing import Any

import torch

from slime_ext.launcher.megatron.optimizer import build_optimizer
from slime_ext.launcher.megatron.step import Trainer
from slime_ext.launcher.megatron.weights import gather_hf_state
from slime_ext.launcher.postprocess import postprocess
from slime_ext.launcher.training_data import TrainSample, needs_proximal_forward
from tests.launcher.megatron import tiny_model as tiny

DEFAULTS = {
    "lr": 1e-2,
    "clip_grad": 1.0,
    "weight_decay": 0.01,
    "lr_decay_style": "constant",
    "eps_clip": 0.2,
    "eps_clip_high": 0.28,
    "eps_clip_c": None,
    "advantage_estimator": "grpo",
    "entropy_coef": 0.01,
    "rollout_temperature": 0.7,
    "calculate_per_token_loss": False,
    "recompute_loss_function": False,
    "use_tis": True,
    "get_mismatch_metrics": False,
    "use_rollout_logprobs": False,
    "custom_tis_function_path": "slime_ext.tis.vanilla_tis_function",
    "tis_clip": 2.0,
    "tis_clip_low": 0.0,
    "slime_ext": None,
    "global_batch_size": 8,
    "num_steps_per_rollout": 1,
    "micro_batch_size": 2,
    "ppo_n_minibatches": 1,
    "keep_old_actor": False,
    "rollout_data_postprocess_path": None,
    "n_samples_per_prompt": 4,
}


def arguments(layout: str = "one", **more: Any):
    """Arguments of a layout with every flag that a step reads."""
    return tiny.tiny_args(*tiny.LAYOUTS[layout][1:], **{**DEFAULTS, **more})


def rollout(count: int = 8, seed: int = 0) -> list[TrainSample]:
    """Ragged samples: one response of length 1, one masked out, tool tokens, noisy behavior log-probs."""
    draw = random.Random(seed)
    out = []
    for i in range(count):
        response = 1 if i == 1 else draw.randint(2, 9)
        tokens = [draw.randrange(1, 48) for _ in range(draw.randint(1, 6) + response)]
        mask = [0] * response if i == 3 else [1] * response
        if response > 5:
            mask[2] = 0
        sample = TrainSample(
            position=i,
            rollout_id=i,
            tokens=tokens,
            response_length=response,
            loss_mask=mask,
            rollout_log_probs=[draw.uniform(-5, -0.5) for _ in mask],
        )
        sample.advantage, sample.mask_sum = draw.uniform(-2, 2), float(sum(mask))
        sample.reward = sample.relative_reward = sample.advantage
        out.append(sample)
    return out


def train(layout: str, rollouts: int = 1, scale_one: float = 1.0, **more: Any) -> dict[str, Any] | None:
    """On one rank of a real layout: metrics of every step, first gradients and final weights (rank 0)."""
    args = arguments(layout, **more)
    chunks = tiny.start(layout, **{k: v for k, v in vars(args).items() if k in DEFAULTS})
    if scale_one != 1.0:
        next(iter(chunks[0].parameters())).data.mul_(scale_one)
    trainer = Trainer(args, chunks, build_optimizer(args, chunks))
    gradients: list[Any] = []
    _record_first_gradients(trainer, gradients)
    steps: list[dict[str, float]] = []
    for index in range(rollouts):
        samples = rollout(seed=index)
        cut = trainer.cut(samples)
        proximal = trainer.proximal(cut) if needs_proximal_forward(args) else {}
        postprocess(args, index, cut, proximal, samples)
        for step in cut:
            metrics, _ = trainer.train_step(step, proximal, len(steps))
            steps.append(metrics)
    weights = gather_hf_state(chunks, tiny.tiny_config())
    return None if weights is None else {"steps": steps, "gradients": gradients[0], "weights": weights}


def _record_first_gradients(trainer: Trainer, into: list[Any]) -> None:
    """The reduced gradients of the first step by Hugging Face name, taken just before the optimizer acts."""
    apply = trainer.optimizer.step

    def step():
        if not into:
            parameters = list(trainer.chunks[0].parameters())
            held = [p.data for p in parameters]
            for p in parameters:
                p.data = p.main_grad.clone().view_as(p)
            into.append(gather_hf_state(trainer.chunks, tiny.tiny_config()))
            for p, data in zip(parameters, held, strict=True):
                p.data = data
        return apply()

    trainer.optimizer.step = step


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """max |a - b| over all tensors of the same names."""
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)
