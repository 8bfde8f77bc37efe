"""Bias and variance of corrections at 64 to 1,024 tokens, sampled: where sequence methods separate.

A Markov policy over 8 tokens has one row of logits per last token, 64 parameters. The advantage of a response
is its reward, a sum over its tokens, less the sampler's mean of it, both exact. The true gradient of its mean
under the target is exact, too: dynamic programming over the distribution of the last token, and autograd.
What a correction makes of it is a mean over sampled responses, printed with its standard error. The exact
means of advantage times how often each pair of tokens occurs take most of the noise away (control variates):
of a correction with token weights alone, all of it.
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
from slime_ext.core.state import Head, Tokens
from slime_ext.ops.segments import Segments

VOCABULARY = 8
LENGTHS = {64: 4096, 1024: 1024}  # tokens of a response -> responses
MISMATCHES = {"mismatch": 0.05, "stale": 0.15, "far": 0.83}  # of the sampler's logits, standard deviations
STEP = 64  # responses of an optimizer step, over which a coupled step computes its number


@dataclass(frozen=True)
class Chain:
    """Two policies as logits [last token, token], a reward per token, and sampled responses."""

    behavior: Tensor  # [8, 8]
    target: Tensor  # [8, 8], the proximal policy, too
    rewards: Tensor  # [8]
    responses: Tensor  # [N, L] token ids
    last: Tensor  # [N, L] the token before each; 0 at the first

    @classmethod
    def of(cls, mismatch: float, length: int, responses: int, seed: int = 0) -> Chain:
        """Seeded random policies and responses; ``mismatch`` is how far the sampler's logits are off."""
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
        """Probability, and probability times reward, of all responses under a table [last token, token]."""
        mass, earned = torch.eye(VOCABULARY, dtype=torch.float64)[0], table.new_zeros(VOCABULARY)
        for _ in range(self.responses.shape[1]):
            mass = mass @ table
            earned = earned @ table + mass * self.rewards
        return mass.sum(), earned.sum() / math.sqrt(self.responses.shape[1])

    def expected_reward(self, logits: Tensor) -> Tensor:
        """[] of a response under a policy: the sum of its tokens' rewards over the root of its length."""
        return self.sums_over_paths(logits.softmax(-1))[1]

    @cached_property
    def ratios(self) -> Tensor:
        """[8, 8] target / behavior of every pair of last token and token."""
        return (self.target.log_softmax(-1) - self.behavior.log_softmax(-1)).exp()

    @cached_property
    def k3(self) -> float:
        """E_behavior[rho - 1 - log rho], nats per token, exact."""
        table = self.behavior.softmax(-1)
        mass = visited = torch.eye(VOCABULARY, dtype=torch.float64)[0]
        for _ in range(self.responses.shape[1] - 1):
            mass = mass @ table
            visited = visited + mass
        each = (table * (self.ratios - 1 - self.ratios.log())).sum(1)
        return float(visited @ each / self.responses.shape[1])

    @cached_property
    def true_gradient(self) -> Tensor:
        """[64] of the expected reward under the target."""
        logits = self.target.clone().requires_grad_()
        return torch.autograd.grad(self.expected_reward(logits), logits)[0].flatten()

    @cached_property
    def advantages(self) -> Tensor:
        """[N] reward less the sampler's mean of it."""
        rewards = self.rewards[self.responses].sum(1) / math.sqrt(self.responses.shape[1])
        return rewards - self.expected_reward(self.behavior)

    @cached_property
    def ess_of_products(self) -> float:
        """1 / E[W^2] of the product W of ratios over a response, exact; E[W] is 1."""
        square = (2 * self.target.log_softmax(-1) - self.behavior.log_softmax(-1)).exp()
        return float(1 / self.sums_over_paths(square)[0])

    @cached_property
    def pairs(self) -> Tensor:
        """[N, 64] advantage times how often each token follows each other one."""
        codes = self.last * VOCABULARY + self.responses
        counts = torch.zeros(len(codes), VOCABULARY**2, dtype=torch.float64)
        counts.scatter_add_(1, codes, torch.ones(codes.shape, dtype=torch.float64))
        return counts * self.advantages[:, None]

    @cached_property
    def expected_pairs(self) -> Tensor:
        """[64] of that under the sampler, exact: the derivative of a sum over paths by a table's entry counts
        how often it occurs."""
        table = self.behavior.softmax(-1).requires_grad_()
        mass, reward = self.sums_over_paths(table)
        (of_mass,) = torch.autograd.grad(mass, table, retain_graph=True)
        (of_reward,) = torch.autograd.grad(reward, table)
        return (table * (of_reward - reward * of_mass)).detach().flatten()


@dataclass(frozen=True)
class Sampled:
    """What a correction does to the gradient, over the norm of the true one, with standard errors."""

    bias: float  # norm of the mean's distance from the true gradient, less what its own noise adds
    error: float  # standard error of the mean, the size of a bias that would not be seen
    cosine: float  # between the mean and the true gradient
    variance: float  # trace of the covariance of one response's estimate, over the true norm squared
    ess: float  # of the token weights, rejected ones as 0
    kept: float  # part of the tokens that stays


def evaluate(correction: Correction, chain: Chain) -> Sampled:
    """Gradients of ``STEP`` responses at a time, as optimizer steps; a coupled step sees its own."""
    found = [_estimates(correction, chain, rows) for rows in _steps(len(chain.responses))]
    estimates, weights, kept = (torch.cat(column) for column in zip(*found, strict=True))
    true, norm = chain.true_gradient, chain.true_gradient.norm()
    controls = chain.pairs - chain.expected_pairs
    # By singular values: a pair that never occurs makes the controls rank-deficient.
    centered = controls - controls.mean(0), estimates - estimates.mean(0)
    slopes = torch.linalg.lstsq(*centered, driver="gelsd").solution
    mean, left = estimates.mean(0) - controls.mean(0) @ slopes, estimates - controls @ slopes
    # The responses of a coupled step depend on each other: its mean is one estimate.
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
    """[step, 64] gradients to ascend, [step, L] weights and keep, of one optimizer step."""
    ids, last = chain.responses[rows], chain.last[rows]
    count, length = ids.shape
    flat, before = ids.flatten(), last.flatten()
    behavior, target = (p.log_softmax(-1)[before, flat] for p in (chain.behavior, chain.target))
    own, head, chosen = target.clone().requires_grad_(), None, None
    if correction.center is not None:
        chosen = chain.behavior.topk(correction.center.top_k).indices[before]
        sampler, trainer = (
            p.log_softmax(-1)[before].gather(1, chosen) for p in (chain.behavior, chain.target)
        )
        head = Head(sampler, trainer.requires_grad_())
    advantages = chain.advantages[rows].repeat_interleave(length)
    segments = Segments.whole([length] * count, torch.ones(count * length))
    tokens = Tokens(segments, target, behavior, own, advantages, head=head)
    outcome = correction(tokens)
    loss, _ = correction.loss(outcome, tokens, ppo(own, target, advantages), Bounds())
    slope, *of_head = torch.autograd.grad(loss.sum(), [own] if head is None else [own, head.trainer])
    # d loss / d log p of (response, last token, token), then of the logits: each row less p times its sum.
    slots = torch.arange(count).repeat_interleave(length) * VOCABULARY + before
    table = torch.zeros(count * VOCABULARY, VOCABULARY, dtype=torch.float64)
    table = table.index_put((slots, flat), slope, accumulate=True)
    for slopes in of_head:
        table = table.index_put((slots[:, None], chosen), slopes, accumulate=True)
    table = table.view(count, VOCABULARY, VOCABULARY)
    estimates = chain.target.softmax(-1) * table.sum(2, keepdim=True) - table
    return estimates.flatten(1), outcome.weights.view(count, length), outcome.keep.view(count, length)
