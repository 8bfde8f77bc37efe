"""Tests four sentences of benchmarks/fidelity/RESULTS.md with runs.

    python -m benchmarks.evidence.sentences

This is plain torch without slime_ext. A softmax policy over 8 tokens with one row of logits per last token
learns by sampled policy gradient (SGD). The sampler's logits differ from the policy's by noise of 0.15 for
the whole run (*stale*). The reward of a response is the sum of its tokens' rewards / sqrt(number of tokens).
The expected reward is exact, by dynamic programming. Settings were fixed before the test seeds were run.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

import torch
from torch import Tensor

VOCABULARY, RESPONSES, STEPS, RATE = 8, 64, 60, 0.5
SPREAD, CAP = 0.15, 2.0
TEST, PILOT = range(8), range(100, 108)
Weights = Callable[[Tensor], Tensor]
ARMS: dict[str, tuple[Weights, bool]] = {  # arm -> weights of [.., L] log-ratios, and whether the arm centers
    "none": (torch.ones_like, False),
    "token": (lambda x: x.exp().clamp(max=CAP), False),
    "sequence": (lambda x: x.sum(-1, keepdim=True).exp().clamp(max=CAP).expand_as(x), False),
    "centered": (torch.ones_like, True),
    "token, centered": (lambda x: x.exp().clamp(max=CAP), True),
}
SENTENCES = {  # sentence -> length, error of the baseline, better arm, worse arm, whether they differ
    "Token weights capped at 2 learn more than none, at 1,024 tokens": (1024, 0.0, "token", "none", True),
    "Sequence weights capped at 2 learn less than none, at 1,024 tokens": (
        *(1024, 0.0, "none", "sequence", True),
    ),
    "With a baseline that is off by 1, centering learns more than none": (64, 1.0, "centered", "none", True),
    "Beside token weights capped at 2 centering adds nothing": (64, 1.0, "token, centered", "token", False),
}


class Task:
    """One policy for each seed, batched over seeds: logits [seeds, last token, token]."""

    def __init__(self, seeds: range, length: int) -> None:
        self.length = length
        self.draws = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.logits = self.noise(VOCABULARY, VOCABULARY).requires_grad_()
        self.offset = SPREAD * self.noise(VOCABULARY, VOCABULARY)
        self.rewards = self.noise(VOCABULARY)
        self.largest = 0.0  # largest token ratio that was sampled so far

    def noise(self, *size: int) -> Tensor:
        return torch.stack([torch.randn(*size, generator=draw, dtype=torch.float64) for draw in self.draws])

    def sample(self) -> tuple[Tensor, Tensor]:
        """Samples [seeds, responses, L] tokens. Returns them and the token before each, 0 at the first."""
        table = (self.logits.detach() + self.offset).softmax(-1).cumsum(-1)
        shape = RESPONSES, self.length
        uniform = torch.stack(
            [torch.rand(*shape, generator=draw, dtype=torch.float64) for draw in self.draws]
        )
        tokens = [torch.zeros(uniform.shape[:2], dtype=torch.int64)]
        rows = torch.arange(len(table))[:, None]
        for t in range(self.length):
            above = uniform[:, :, t, None] >= table[rows, tokens[-1]]
            tokens.append(above.sum(-1).clamp(max=VOCABULARY - 1))
        return torch.stack(tokens[1:], -1), torch.stack(tokens[:-1], -1)

    @torch.no_grad()
    def expected_reward(self) -> Tensor:
        """Returns [seeds] the exact expected reward."""
        table = self.logits.softmax(-1)
        mass = torch.zeros_like(self.rewards)
        mass[:, 0], total = 1, 0
        for _ in range(self.length):
            mass = torch.einsum("sv,svw->sw", mass, table)
            total = total + (mass * self.rewards).sum(1)
        return total / math.sqrt(self.length)

    def loss(self, weigh: Weights, centers: bool, off: float) -> Tensor:
        """Returns the sum over seeds of the mean loss of a response.

        The baseline is the mean reward of the batch - ``off``.
        """
        tokens, before = self.sample()
        of = torch.arange(len(tokens))[:, None, None], before
        log_p, log_q = (x.log_softmax(-1) for x in (self.logits, self.logits.detach() + self.offset))
        ratios = log_p.detach() - log_q  # [seeds, last, token]
        self.largest = max(self.largest, float(ratios[(*of, tokens)].max().exp()))
        reward = self.rewards[of[0], tokens].sum(-1) / math.sqrt(self.length)
        advantages = (reward - reward.mean(1, keepdim=True) + off)[..., None]
        total = -weigh(ratios[(*of, tokens)]) * log_p[(*of, tokens)]
        if centers:  # the head is the whole vocabulary, so there is no tail
            score = ((log_q.exp() * weigh(ratios) - log_p.detach().exp()) * log_p).sum(-1)
            total = total + score[of]
        return (advantages * total).sum(-1).mean(1).sum()


def gain(seeds: range, length: int, off: float, arm: str) -> tuple[Tensor, float]:
    """Returns [seeds] the growth of the expected reward, and the largest sampled token ratio."""
    task = Task(seeds, length)
    start = task.expected_reward()
    for _ in range(STEPS):
        (slope,) = torch.autograd.grad(task.loss(*ARMS[arm], off), task.logits)
        task.logits = (task.logits.detach() - RATE / math.sqrt(length) * slope).requires_grad_()
    return task.expected_reward() - start, task.largest


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.evidence.sentences")
    parser.add_argument("--pilot", action="store_true", help="use the seeds that chose the settings")
    seeds = PILOT if parser.parse_args().pilot else TEST
    torch.set_num_threads(1)
    known: dict[tuple[int, float, str], tuple[Tensor, float]] = {}
    print("| sentence | gain of each | difference ± error | seeds for it | answer |\n|---|---|---:|---:|---|")
    for sentence, (length, off, better, worse, differ) in SENTENCES.items():
        for arm in (better, worse):
            if (length, off, arm) not in known:
                known[length, off, arm] = gain(seeds, length, off, arm)
        gains, largest = zip(*(known[length, off, arm] for arm in (better, worse)), strict=True)
        apart = gains[0] - gains[1]
        mean, error = apart.mean(), apart.std() / math.sqrt(len(apart))
        holds = mean > 2 * error if differ else apart.abs().max() < 0.02 * gains[1].mean()
        of_each = f"{better} {gains[0].mean():.3f}, {worse} {gains[1].mean():.3f}"
        won = f"{int((apart > 0).sum())} of {len(apart)}" if differ else "-"
        answer = "holds" if holds else "does not hold"
        if not differ and max(largest) < CAP:
            reached = f"no ratio reached {CAP:g} (largest {max(largest):.2f})"
            answer = f"says nothing: {reached}, so both are one estimator"
        print(f"| {sentence} | {of_each} | {mean:+.3f} ± {error:.3f} | {won} | {answer} |")


if __name__ == "__main__":
    main()
