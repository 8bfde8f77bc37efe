"""From scored samples to what the trainer needs of them: group-relative advantages and the masks' sums.

Pure Python: every rank computes the same from the broadcast samples.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from slime_ext.launcher.rollout.sample import RolloutSample


@dataclass
class TrainSample(RolloutSample):
    """A sample of the rollout as the trainer sees it; one that was removed has an empty mask.

    Attributes:
        position: index in the rollout, the key of everything that is kept per sample.
        relative_reward: group-relative, before whitening: what advantages are made of; NaN for a removed one.
        advantage: of every response token, dimensionless.
        mask_sum: response tokens of all samples of its `rollout_id`, the sample's denominator.
    """

    position: int = 0
    relative_reward: float = math.nan
    advantage: float = 0.0
    mask_sum: float = 0.0

    @property
    def total_length(self) -> int:
        """Prompt and response tokens."""
        return len(self.tokens)

    @property
    def raw_reward(self) -> float:
        """As the reward function gave it; NaN for a removed sample."""
        return math.nan if self.remove_sample or self.reward is None else self.reward

    @property
    def versions(self) -> list[int]:
        """[R] optimizer steps at which the sampling weights were pushed; empty where one is unknown."""
        numbers = self.token_weight_versions
        return [int(v) for v in numbers] if all(v.isdigit() for v in numbers) else []


def needs_proximal_forward(args: argparse.Namespace) -> bool:
    """Whether proximal log-probs are recomputed before the first step.

    One step per rollout trains exactly the policy that would be recomputed, so its own forward serves (as in
    slime since v0.3.0); the bypass anchors at the behavior policy and needs none. Metrics want the recomputed
    ones, and so do several minibatches (fw-ai PR 169: always prox_forward).
    """
    drifts = args.num_steps_per_rollout > 1 or args.ppo_n_minibatches > 1
    return args.get_mismatch_metrics or (drifts and not args.use_rollout_logprobs)


def train_samples(args: argparse.Namespace, samples: Sequence[RolloutSample]) -> list[TrainSample]:
    """The rollout in the order of ``samples``, with its advantages and denominators."""
    raw = [None if s.remove_sample else s.reward for s in samples]
    rewards = advantages = group_advantages(
        raw,
        args.n_samples_per_prompt,
        normalize=args.rewards_normalization,
        by_std=args.grpo_std_normalization,
    )
    masks = [[0] * s.response_length if s.remove_sample else list(s.loss_mask or ()) for s in samples]
    if args.normalize_advantages:
        advantages = whiten(advantages, [sum(mask) for mask in masks])
    rollout_ids = [i if s.rollout_id is None else s.rollout_id for i, s in enumerate(samples)]
    sums: Counter[int] = Counter()
    for rollout_id, mask in zip(rollout_ids, masks, strict=True):
        sums[rollout_id] += sum(mask)
    return [
        TrainSample(
            **{**vars(s), "loss_mask": mask, "rollout_id": rollout_id},
            position=i,
            relative_reward=math.nan if raw[i] is None else rewards[i],
            advantage=advantages[i],
            mask_sum=float(sums[rollout_id]),
        )
        for i, (s, mask, rollout_id) in enumerate(zip(samples, masks, rollout_ids, strict=True))
    ]


def group_advantages(
    rewards: Sequence[float | None], group_size: int, *, normalize: bool = True, by_std: bool = True
) -> list[float]:
    """GRPO: A_i = (r_i - mean_G r) / (std_G r + 1e-6) over the group G of the same prompt, unbiased std.

    Args:
        rewards: group by group; None for a dropped sample, which neither gets an advantage nor counts.
        group_size: samples per prompt.
        normalize: False: A_i = r_i.
        by_std: False: no division (slime's --disable-grpo-std-normalization).

    Source: Shao et al. 2024, https://arxiv.org/abs/2402.03300; epsilon and estimator as slime.

    >>> group_advantages([0.0, 1.0, None, 2.0], 4, by_std=False)
    [-1.0, 0.0, 0.0, 1.0]
    """
    if not normalize:
        return [0.0 if r is None else float(r) for r in rewards]
    groups = (rewards[start : start + group_size] for start in range(0, len(rewards), group_size))
    return [a for group in groups for a in _centered(group, by_std)]


def _centered(group: Sequence[float | None], by_std: bool) -> list[float]:
    present = [r for r in group if r is not None]
    mean = statistics.fmean(present) if present else 0.0
    divides = by_std and len(present) > 1
    scale = 1.0 / (statistics.stdev(present) + 1e-6) if divides else 1.0
    return [0.0 if r is None else (r - mean) * scale for r in group]


def whiten(advantages: Sequence[float], counts: Sequence[int]) -> list[float]:
    """(A - mean) / sqrt(var + 1e-8) over response tokens, unbiased variance (``--normalize-advantages``).

    Source: slime, slime/utils/distributed_utils.py, distributed_masked_whiten.

    >>> [round(a, 6) for a in whiten([1.0, -1.0], [1, 1])]
    [0.707107, -0.707107]
    """
    total = max(sum(counts), 1)
    mean = sum(a * n for a, n in zip(advantages, counts, strict=True)) / total
    squares = sum((a - mean) ** 2 * n for a, n in zip(advantages, counts, strict=True))
    scale = 1 / math.sqrt(squares / max(total - 1, 1) + 1e-8)
    return [(a - mean) * scale for a in advantages]
