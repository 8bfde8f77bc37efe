"""Estimates bias and variance of corrections at 64 to 1,024 tokens, where sequence methods separate.

A Markov policy over 8 tokens has one row of logits per last token, so 64 parameters. The reward of a response
is a sum over its tokens. The advantage is the reward minus the sampler's exact mean reward. The true gradient
of the expected reward under the target is exact, by dynamic programming over the last token and autograd.

A correction's gradient is a mean over sampled responses, printed with its standard error. Control variates
remove most of the noise. They are advantage x how often each pair of tokens occurs, and their means are known
exactly. They remove all noise of a correction that has only token weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from benchmarks.fidelity.exact import ppo
from slime_ext.core.correction import Correction
from slime_ext.core.losses import Bounds
from slime_ext.core.needs import Need
from slime_ext.core.tokens import Head, Tokens
from slime_ext.ops.segments import Segments

VOCABULARY = 8
LENGTHS = {64: 4096, 1024: 1024}  # tokens of a response -> responses
MISMATCHES = {"mismatch": 0.05, "stale": 0.15, "far": 0.83}  # standard deviation of the logits
STEP = 64  # responses of an optimizer step, over which steps that couple samples compute their statistic


@dataclass(frozen=True)
class Chain:
    """Two policies as logits [last token, token], a reward for each token, and sampled responses."""

    behavior: Tensor  # [8, 8]
    target: Tensor  # [8, 8], also the proximal policy
    rewards: Tensor  # [8]
    responses: Tensor  # [N, L] token ids
    last: Tensor  # [N, L] the token before each; 0 at the first

    @classmethod
    def of(cls, mismatch: float, length: int, responses: int, seed: int = 0) -> Chain:
        """Draws random policies and responses.

        Args:
            mismatch: standard deviation of the noise of the sampler's logits.
        """
        generator = torch.Generator().manual_seed(seed)

        def noise(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator, dtype=torch.float64)

        target = noise(VOCABULARY, VOCABULARY)
        behavior, rewards = target + mismatch * noise(VOCABULARY, VOCABULARY), noise(VOCABULARY)
        drawn = [torch.zeros(responses, dtype=torch.int64)]
        for _ in range(length):
            rows = behavior.softmax(-1)[drawn[-1]]
            drawn.append(rows.multinomial(1, generator=generator)[:, 0])
        return cls(behavior, target, rewards, torch.stack(drawn[1:], 1), torch.stack(drawn[:-1], 1))

    def sums_over_paths(self, table: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the sums, over all responses, of probability and of probability x reward.

        Args:
            table: [last token, token], the factor of each token.
        """
        mass, earned = torch.eye(VOCABULARY, dtype=torch.float64)[0], table.new_zeros(VOCABULARY)
        for _ in range(self.responses.shape[1]):
            mass = mass @ table
            earned = earned @ table + mass * self.rewards
        return mass.sum(), earned.sum() / math.sqrt(self.responses.shape[1])

    def expected_reward(self, logits: Tensor) -> Tensor:
        """Returns [] the expected reward under a policy: the sum of token rewards / sqrt(length)."""
        return self.sums_over_paths(logits.softmax(-1))[1]

    @cached_property
    def ratios(self) -> Tensor:
        """Returns [8, 8] the ratio target / behavior of each pair of tokens."""
        return (self.target.log_softmax(-1) - self.behavior.log_softmax(-1)).exp()

    @cached_property
    def k3(self) -> float:
        """Returns E_behavior[rho - 1 - log rho] in nats per token, exact."""
        table = self.behavior.softmax(-1)
        mass = visited = torch.eye(VOCABULARY, dtype=torch.float64)[0]
        for _ in range(self.responses.shape[1] - 1):
            mass = mass @ table
            visited = visited + mass
        each = (table * (self.ratios - 1 - self.ratios.log())).sum(1)
        return float(visited @ each / self.responses.shape[1])

    @cached_property
    def true_gradient(self) -> Tensor:
        """Returns [64] the gradient of the expected reward under the target."""
        logits = self.target.clone().requires_grad_()
        return torch.autograd.grad(self.expected_reward(logits), logits)[0].flatten()

    @cached_property
    def advantages(self) -> Tensor:
        """Returns [N] each reward minus the sampler's mean reward."""
        rewards = self.rewards[self.responses].sum(1) / math.sqrt(self.responses.shape[1])
        return rewards - self.expected_reward(self.behavior)

    @cached_property
    def ess_of_products(self) -> float:
        """Returns 1 / E[W^2], exact. W is the product of ratios over a response, and E[W] is 1."""
        square = (2 * self.target.log_softmax(-1) - self.behavior.log_softmax(-1)).exp()
        return float(1 / self.sums_over_paths(square)[0])

    @cached_property
    def pairs(self) -> Tensor:
        """Returns [N, 64] advantage x how often each pair of tokens occurs."""
        codes = self.last * VOCABULARY + self.responses
        counts = torch.zeros(len(codes), VOCABULARY**2, dtype=torch.float64)
        counts.scatter_add_(1, codes, torch.ones(codes.shape, dtype=torch.float64))
        return counts * self.advantages[:, None]

    @cached_property
    def expected_pairs(self) -> Tensor:
        """Returns [64] the exact mean of ``pairs`` under the sampler.

        The derivative of a sum over paths by an entry of the table counts how often that entry occurs.
        """
        table = self.behavior.softmax(-1).requires_grad_()
        mass, reward = self.sums_over_paths(table)
        (of_mass,) = torch.autograd.grad(mass, table, retain_graph=True)
        (of_reward,) = torch.autograd.grad(reward, table)
        return (table * (of_reward - reward * of_mass)).detach().flatten()


@dataclass(frozen=True)
class Sampled:
    """The effect of a correction on the gradient, over the norm of the true gradient."""

    bias: float  # norm of (mean - true gradient), minus what the noise of the mean adds to it
    error: float  # standard error of the mean; a bias of this size would not be seen
    cosine: float  # cosine of the mean and the true gradient
    variance: float  # trace of the covariance of one response's estimate, over the true norm squared
    ess: float  # effective sample size of the token weights, with 0 for rejected tokens
    kept: float  # share of the tokens that are not rejected


def evaluate(correction: Correction, chain: Chain) -> Sampled:
    """Estimates a correction's effect, ``STEP`` responses at a time as separate optimizer steps."""
    of_steps = [_estimates(correction, chain, rows) for rows in _steps(len(chain.responses))]
    estimates, weights, kept = (torch.cat(column) for column in zip(*of_steps, strict=True))
    true, norm = chain.true_gradient, chain.true_gradient.norm()
    controls = chain.pairs - chain.expected_pairs
    # Use singular values, because a pair that never occurs makes the controls rank-deficient.
    centered = controls - controls.mean(0), estimates - estimates.mean(0)
    slopes = torch.linalg.lstsq(*centered, driver="gelsd").solution
    mean, left = estimates.mean(0) - controls.mean(0) @ slopes, estimates - controls @ slopes
    # The responses of a coupled step depend on each other, so the step's mean is one estimate.
    scale = STEP if Need.WHOLE_STEP in correction.needs else 1
    spread, noise = (x.view(-1, scale, x.shape[1]).mean(1).var(0).sum() * scale for x in (estimates, left))
    noise = noise / (len(estimates) - controls.shape[1])
    ess = weights.mean().square() / weights.square().mean().clamp_min(1e-300)
    off = ((mean - true).square().sum() - noise).clamp_min(0).sqrt()
    return Sampled(
        float(off / norm),
        float(noise.sqrt() / norm),
        float(mean @ true / (mean.norm() * norm).clamp_min(1e-300)),
        float(spread / norm.square()),
        float(ess),
        float(kept.double().mean()),
    )


def _steps(responses: int) -> Iterator[slice]:
    for at in range(0, responses, STEP):
        yield slice(at, at + STEP)


def _estimates(correction: Correction, chain: Chain, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
    """Returns gradients [step, 64], and weights and keep [step, L], of one optimizer step."""
    ids, last = chain.responses[rows], chain.last[rows]
    count, length = ids.shape
    flat, before = ids.flatten(), last.flatten()
    behavior, target = (p.log_softmax(-1)[before, flat] for p in (chain.behavior, chain.target))
    trained, head, chosen = target.clone().requires_grad_(), None, None
    if correction.center is not None:
        chosen = chain.behavior.topk(correction.center.top_k).indices[before]
        sampler, trainer = (
            p.log_softmax(-1)[before].gather(1, chosen) for p in (chain.behavior, chain.target)
        )
        head = Head(sampler, trainer.requires_grad_())
    advantages = chain.advantages[rows].repeat_interleave(length)
    segments = Segments.whole([length] * count, torch.ones(count * length))
    tokens = Tokens(segments, target, behavior, trained, advantages, head=head)
    outcome = correction(tokens)
    loss, _ = correction.loss(outcome, tokens, ppo(trained, target, advantages), Bounds())
    slope, *of_head = torch.autograd.grad(loss.sum(), [trained] if head is None else [trained, head.trainer])
    # d loss / d log p of (response, last token, token), then of the logits: each row - p * its sum.
    slots = torch.arange(count).repeat_interleave(length) * VOCABULARY + before
    table = torch.zeros(count * VOCABULARY, VOCABULARY, dtype=torch.float64)
    table = table.index_put((slots, flat), slope, accumulate=True)
    for slopes in of_head:
        table = table.index_put((slots[:, None], chosen), slopes, accumulate=True)
    table = table.view(count, VOCABULARY, VOCABULARY)
    estimates = chain.target.softmax(-1) * table.sum(2, keepdim=True) - table
    return estimates.flatten(1), outcome.weights.view(count, length), outcome.keep.view(count, length)
