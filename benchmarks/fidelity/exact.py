"""Computes exact bias and variance of every correction, on a policy small enough to enumerate.

A softmax policy over 3 tokens and 4 steps has 81 sequences and one row of logits per prefix. Advantages A(y)
are fixed, and losses are summed over tokens, so the true gradient is that of E_target[A(y)]. An estimator's
mean and variance under the behavior policy are sums over the 81 sequences (over all pairs of them for steps
that couple samples). Score centering reads the sampler's head, its K most likely of the 3 tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations_with_replacement, product

import torch
from rich.table import Table
from torch import Tensor

from slime_ext import presets
from slime_ext.core.centering import Center
from slime_ext.core.correction import Correction, Outcome, Tokens
from slime_ext.core.losses import Bounds, Reinforce
from slime_ext.core.needs import Need
from slime_ext.core.state import Step
from slime_ext.core.steps import Reject, Reweight, Truncate
from slime_ext.core.tokens import Head
from slime_ext.ops import surrogates
from slime_ext.ops.segments import Segments

VOCABULARY, STEPS = 3, 4
# Noise of the behavior policy's and of the target policy's logits around the proximal's, standard deviations.
MISMATCHES = {
    "on-policy": (0.0, 0.0),
    "mismatch": (0.05, 0.0),
    "stale": (0.4, 0.0),
    "stale + drift": (0.4, 0.2),
    "far": (1.35, 0.0),  # k3 is about 0.3, as with the lag and the INT4 weights of docs/evidence.md
}
HostLoss = Callable[[Tensor, Tensor, Tensor], Tensor]
WEIGHTS: dict[str, tuple[Step, ...]] = {  # name -> the weights that are centered: slime's modes
    "f = 1": (),
    "truncated at 2": (Reweight(), Truncate(2.0)),
    "IcePop 0.5 to 2": (Reweight(), Reject("token", "ratio", low=0.5, high=2.0)),
}


def centerings(heads: Iterable[int], vocabulary: int = VOCABULARY) -> dict[str, Correction]:
    """Returns REINFORCE with each of ``WEIGHTS``, uncentered and centered over each head.

    A head as large as the vocabulary has all tokens.
    """
    corrections = {}
    for name, steps in WEIGHTS.items():
        corrections[f"reinforce, {name}"] = Correction("target", Reinforce(), steps)
        for k in heads:
            of = "all tokens" if k == vocabulary else f"head {k}"
            corrections[f"centered, {name}, {of}"] = Correction(
                "target", Reinforce(), steps, center=Center(k)
            )
    return corrections


def ppo(target: Tensor, proximal: Tensor, advantages: Tensor) -> Tensor:
    """Returns [T] the host's usual loss: PPO-clip around the proximal policy with range 0.2."""
    return surrogates.ppo_clip(target - proximal, advantages, 0.2, 0.2)[0]


@dataclass(frozen=True)
class World:
    """Three policies as logits [prefixes, 3], and an advantage of each of the 81 sequences."""

    behavior: Tensor
    proximal: Tensor
    target: Tensor
    advantages: Tensor

    @classmethod
    def of(cls, mismatch: str, seed: int = 0, offset: float = 0.0) -> World:
        """Draws random policies.

        Args:
            mismatch: a name of ``MISMATCHES``.
            offset: added to every advantage, like a wrong baseline. It does not change the true gradient.
        """
        stale, drift = MISMATCHES[mismatch]
        generator = torch.Generator().manual_seed(seed)
        shape = (sum(VOCABULARY**t for t in range(STEPS)), VOCABULARY)

        def noise(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator, dtype=torch.float64)

        proximal = noise(*shape)
        behavior, target = proximal + stale * noise(*shape), proximal + drift * noise(*shape)
        return cls(behavior, proximal, target, noise(VOCABULARY**STEPS) + offset)

    @cached_property
    def ratios(self) -> Tensor:
        """Returns [81, 4] the ratio proximal / behavior of every token of every sequence."""
        return (self.log_probs(self.proximal) - self.log_probs(self.behavior)).exp()

    @cached_property
    def k3(self) -> float:
        """Returns E_behavior[rho - 1 - log rho] in nats per token, which ``off_policy/k3_kl`` estimates."""
        probability = self.log_probs(self.behavior).sum(1).exp()
        return float(probability @ (self.ratios - 1 - self.ratios.log()).mean(1))

    @cached_property
    def score(self) -> Tensor:
        """Returns [81, 4, parameters] the gradient of each token's log target by the target's logits."""
        one_hot = torch.nn.functional.one_hot(TOKENS, VOCABULARY).double()
        gap = one_hot - self.target.softmax(-1)[PREFIXES]
        rows = torch.nn.functional.one_hot(PREFIXES, len(self.target)).double()
        return torch.einsum("stp,stv->stpv", rows, gap).flatten(2)

    def log_probs(self, logits: Tensor) -> Tensor:
        """Returns [81, 4] the log-prob of every token of every sequence."""
        return logits.log_softmax(-1)[PREFIXES, TOKENS]

    @cached_property
    def head_score(self) -> Tensor:
        """Returns [prefixes, 3, parameters] the score of every possible token at every prefix."""
        gap = torch.eye(VOCABULARY, dtype=torch.float64) - self.target.softmax(-1)[:, None]
        return torch.einsum("rs,rvw->rvsw", torch.eye(len(self.target), dtype=torch.float64), gap).flatten(2)

    def head(self, k: int, rows: Tensor) -> tuple[Head, Tensor]:
        """Returns the sampler's ``k`` likeliest tokens at prefixes ``rows`` [T], and their ids [T, k]."""
        ids = self.behavior.topk(k).indices[rows]
        sampler, trainer = (p.log_softmax(-1)[rows].gather(1, ids) for p in (self.behavior, self.target))
        return Head(sampler, trainer.requires_grad_()), ids

    @cached_property
    def true_gradient(self) -> Tensor:
        """Returns [parameters] the gradient of E_target[A(y)]."""
        probability = self.log_probs(self.target).sum(1).exp()
        return torch.einsum("s,stp->p", probability * self.advantages, self.score)


@dataclass(frozen=True)
class Fidelity:
    """The effect of a correction on the gradient under one mismatch."""

    mean: Tensor  # [parameters] E[estimate]
    bias: float  # norm of E[estimate] - true gradient
    true: float  # norm of the true gradient
    cosine: float  # cosine of E[estimate] and the true gradient; 0 if E[estimate] is 0
    variance: float  # trace of the covariance of the estimate, times the number of sequences that it averages
    ess: float  # (E w)^2 / E w^2 over tokens, with weight 0 for rejected tokens
    kept: float  # expected share of the tokens that are not rejected


def evaluate(correction: Correction, world: World, *, host_loss: HostLoss = ppo, batch: int = 1) -> Fidelity:
    """Enumerates the estimator, which is minus the gradient of the loss.

    The loss is a sum over the tokens of a sequence, and a mean over ``batch`` sequences.

    Args:
        host_loss: the loss that the weights multiply if the correction's surrogate is ``host``.
        batch: sequences per optimizer step, 1 or 2. It matters only to steps that couple samples.
    """
    if batch == 1 and Need.WHOLE_STEP not in correction.needs:
        estimates, weights, keep = _estimates(correction, world, range(len(TOKENS)), host_loss)
        probability = world.log_probs(world.behavior).sum(1).exp()
        return _summary(world, probability, estimates, weights, keep, 1)
    return _enumerate(correction, world, host_loss, batch)


def _enumerate(correction: Correction, world: World, host_loss: HostLoss, batch: int) -> Fidelity:
    """Evaluates all multisets of ``batch`` sequences, each as a separate optimizer step."""
    probability = world.log_probs(world.behavior).sum(1).exp()
    rows = []
    for group in combinations_with_replacement(range(len(TOKENS)), batch):
        estimates, weights, keep = _estimates(correction, world, group, host_loss)
        orders = 2.0 if len(set(group)) == 2 else 1.0
        rows.append(
            (orders * probability[list(group)].prod(), estimates.mean(0), weights.flatten(), keep.flatten())
        )
    return _summary(world, *(torch.stack(column) for column in zip(*rows, strict=True)), batch)


def _estimates(
    correction: Correction, world: World, group: Sequence[int], host_loss: HostLoss
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients [group, parameters], weights and keep [group, 4] of a packed batch."""
    chosen = list(group)

    def packed(logits: Tensor) -> Tensor:
        return world.log_probs(logits)[chosen].flatten()

    target = packed(world.target).requires_grad_()
    advantages = world.advantages[chosen].repeat_interleave(STEPS)
    segments = Segments.whole([STEPS] * len(chosen), torch.ones(len(target)))
    rows, head, ids = PREFIXES[chosen].flatten(), None, None
    if correction.center is not None:
        center = Center(min(correction.center.top_k, VOCABULARY))
        correction = replace(correction, center=center)
        head, ids = world.head(center.top_k, rows)
    columns = packed(world.proximal), packed(world.behavior), target, advantages
    tokens = Tokens(segments, *columns, head=head)
    outcome: Outcome = correction(tokens)
    loss, _ = correction.loss(outcome, tokens, host_loss(target, tokens.proximal, advantages), Bounds())
    read = [target] if head is None else [target, head.trainer]
    slope, *of_head = torch.autograd.grad(loss.sum(), read)
    estimates = torch.einsum("st,stp->sp", -slope.view(-1, STEPS), world.score[chosen])
    for slopes in of_head:
        scores = world.head_score[rows[:, None], ids]
        estimates = estimates - torch.einsum("tk,tkp->tp", slopes, scores).view(
            -1, STEPS, scores.shape[2]
        ).sum(1)
    return estimates, outcome.weights.view(-1, STEPS), outcome.keep.view(-1, STEPS)


def _summary(
    world: World, probability: Tensor, estimates: Tensor, weights: Tensor, keep: Tensor, batch: int
) -> Fidelity:
    mean = probability @ estimates
    variance = batch * (probability @ (estimates - mean).square().sum(1))
    true = world.true_gradient
    lengths = mean.norm() * true.norm()
    first, second = (probability @ w.mean(1) for w in (weights, weights.square()))
    return Fidelity(
        mean,
        bias=float((mean - true).norm()),
        true=float(true.norm()),
        cosine=float(mean @ true / lengths) if lengths > 0 else 0.0,
        variance=float(variance),
        ess=float(first.square() / second) if second > 0 else 0.0,
        kept=float(probability @ keep.double().mean(1)),
    )


def _all_prefixes(tokens: Tensor) -> Tensor:
    """Returns [81, 4] the row of logits that each token is drawn from."""
    prefix, rows = torch.zeros(len(tokens), dtype=torch.int64), []
    for t in range(STEPS):
        begin = sum(VOCABULARY**k for k in range(t))
        rows.append(begin + prefix)
        prefix = prefix * VOCABULARY + tokens[:, t]
    return torch.stack(rows, 1)


TOKENS = torch.cartesian_prod(*[torch.arange(VOCABULARY)] * STEPS)
PREFIXES = _all_prefixes(TOKENS)


def tables(
    chosen: Mapping[str, Correction] | None = None,
    seed: int = 0,
    under_way: Callable[[list], Iterable] = iter,
) -> list[Table]:
    """Returns one rich table per mismatch.

    The columns are the bias over the norm of the true gradient, the cosine with it, the variance of one
    sequence's estimate, the effective sample size of the weights, and the share of tokens kept.

    Args:
        chosen: name -> correction. By default score centering, and all presets that do not couple samples,
            because those need all pairs of sequences and a minute or two.
        seed: seed of the random policies.
        under_way: wraps the list of methods to show progress.
    """
    every = {name: preset.correction for name, preset in presets.PRESETS.items()}
    presets_alone = {n: c for n, c in every.items() if Need.WHOLE_STEP not in c.needs}
    chosen = chosen or presets_alone | centerings((1, 2, VOCABULARY))
    worlds = {name: World.of(name, seed) for name in MISMATCHES}
    cells = {
        pair: _cells(chosen[pair[1]], worlds[pair[0]]) for pair in under_way(list(product(worlds, chosen)))
    }
    results = []
    for mismatch, (stale, drift) in MISMATCHES.items():
        title = (
            f"{mismatch}: behavior {stale:g}, target {drift:g} from proximal, k3 {worlds[mismatch].k3:.2g}; "
            f"exact, one random world (seed {seed})"
        )
        result = Table(title=title, title_justify="left", box=None, pad_edge=False)
        result.add_column("correction")
        for column in ("bias", "cosine", "variance", "ESS", "kept"):
            result.add_column(column, justify="right")
        for name in chosen:
            result.add_row(name, *cells[mismatch, name])
        results.append(result)
    return results


def _cells(correction: Correction, world: World) -> list[str]:
    f = evaluate(correction, world, batch=2 if Need.WHOLE_STEP in correction.needs else 1)
    bias = f"{f.bias / f.true:.3f}" if f.bias / f.true > 1e-9 else "0"
    return [bias, f"{f.cosine:.3f}", f"{f.variance:.2f}", f"{f.ess:.2f}", f"{f.kept:.2f}"]
