"""Compares score centering with plain loops over floats, in many losses and layouts.

    python -m benchmarks.centering
    python -m benchmarks.centering --layouts 1 TP4 --seeds 1

Policies are random, over 12 tokens and in float64: trainer, proximal policy and sampler. Advantages have both
signs, and some tokens are masked. Real gloo processes compute the loss as the hook does. Each rank has a part
of the logits: of the vocabulary (TP), or of slime's zig-zag slices of the sequences (CP). The numbers are the
largest difference of a token's loss, and of a logit's gradient, on any rank.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from slime_ext.core.centering import Center
from slime_ext.core.correction import Correction
from slime_ext.core.losses import Bounds, HostLoss, Reinforce
from slime_ext.core.state import Step
from slime_ext.core.steps import Reject, Reweight, Truncate
from slime_ext.core.tokens import Head, Support, Tokens
from slime_ext.host.packing import pack_segments
from slime_ext.host.ranks import Parallel, sum_over
from slime_ext.ops.segments import AllSum, identity
from slime_ext.ops.vocabulary import log_probs_at, log_probs_within
from tests import oracle
from tests.ranks import run_ranks

VOCABULARY, TOP_K, TOP_P = 12, 4, 0.8
# (prompt, response). One response has one token. Beside long prompts, a rank holds no response tokens.
SHAPES = ((5, 7), (8, 1), (6, 12), (28, 3), (1, 5))
LOW, HIGH = 0.1, 0.15  # range of PPO's clip, so narrow that tokens of both signs are clipped
PPO = ("ppo", "proximal", LOW, HIGH)
TOKEN, CAPPED = ("reweight", "token"), ("truncate", 1.3)
BAND = ("reject", "token", "ratio", "-", 0.7, 1.4, "always")


@dataclass(frozen=True)
class Loss:
    """A loss in two forms: as a correction, and as the oracle's steps.

    Args:
        steps: the steps of the correction.
        f, m: the oracle's steps for the weight f of a token, and for the mask m of a sequence.
        is_hosts: whether the weights multiply the host's PPO loss; else the loss is REINFORCE.
        steps_per_rollout: if it is 1, the proximal policy is the policy that is being trained.
    """

    steps: tuple[Step, ...] = ()
    f: tuple[Any, ...] = ()
    m: tuple[Any, ...] = ()
    is_hosts: bool = False
    steps_per_rollout: int = 1

    @property
    def numerator(self) -> str:
        return "proximal" if self.is_hosts else "target"

    def centered(self, top_k: int) -> Correction:
        surrogate = HostLoss() if self.is_hosts else Reinforce()
        return Correction(self.numerator, surrogate, self.steps, center=Center(top_k))


TIS = {"steps": (Reweight(), Truncate(1.3)), "f": (TOKEN, CAPPED)}
LOSSES = {
    "REINFORCE": Loss(),
    "TIS": Loss(**TIS),
    "IcePop": Loss((Reweight(), Reject("token", "ratio", low=0.7, high=1.4)), (TOKEN, BAND)),
    "sequence factor": Loss((Reweight("sequence"), Truncate(1.3)), m=(("reweight", "sequence"), CAPPED)),
    "host's PPO, one step": Loss(**TIS, is_hosts=True),
    "host's PPO, four steps": Loss(**TIS, is_hosts=True, steps_per_rollout=4),
    "host's PPO, four steps, no weights": Loss(is_hosts=True, steps_per_rollout=4),
}
CANDIDATES = {"top-k head": TOP_K, "top-p support": None, "whole vocabulary": VOCABULARY}
LAYOUTS = {"1": (1, 1), "TP2": (2, 1), "TP4": (4, 1), "CP2": (1, 2), "CP4": (1, 4), "TP2 x CP2": (2, 2)}


@dataclass(frozen=True)
class World:
    """Random policies as [T][V] logits, and the [T] tokens that the sampler drew."""

    trainer: list[list[float]]
    proximal: list[list[float]]
    sampler: list[list[float]]
    nucleus: list[list[int]]
    sampled: list[int]
    masks: list[list[int]]
    advantages: list[list[float]]

    @classmethod
    def of(cls, seed: int, steps_per_rollout: int) -> World:
        rng = random.Random(seed)
        lengths = [response for _, response in SHAPES]

        def near(logits: list[list[float]], nats: float) -> list[list[float]]:
            return [[x + rng.gauss(0, nats) for x in row] for row in logits]

        sampler = [[rng.gauss(0, 1.5) for _ in range(VOCABULARY)] for _ in range(sum(lengths))]
        proximal = near(sampler, 0.3)
        trainer = near(proximal, 0.3) if steps_per_rollout > 1 else proximal
        nucleus = [_nucleus(row) for row in sampler]
        sampled = [rng.choice(ids) for ids in nucleus]
        masks = [[int(n < 4 or rng.random() > 0.2) for _ in range(n)] for n in lengths]
        signs = rng.sample([-1.3, 0.7, 2.0, -0.4, 0.9], len(lengths))
        advantages = [
            [sign + rng.gauss(0, 0.1) for _ in range(n)] for sign, n in zip(signs, lengths, strict=True)
        ]
        return cls(trainer, proximal, sampler, nucleus, sampled, masks, advantages)

    def candidates(self, top_k: int | None) -> list[list[int]]:
        """Returns [T] ids of each token's candidates: the ``top_k`` likeliest, or the whole nucleus."""
        if top_k is None:
            return self.nucleus
        ids = [sorted(range(VOCABULARY), key=lambda v, row=row: -row[v]) for row in self.sampler]
        return [row[:top_k] for row in ids]

    def log_probs(self, logits: list[list[float]], top_k: int | None) -> list[dict[int, float]]:
        """Returns [T] {id: log-prob}, normalised over the vocabulary, or over the nucleus alone."""
        within = self.nucleus if top_k is None else [None] * len(logits)
        return [oracle.log_softmax(row, ids) for row, ids in zip(logits, within, strict=True)]


def _nucleus(row: list[float]) -> list[int]:
    """Returns the fewest likeliest tokens whose probabilities sum to at least ``TOP_P``."""
    log_probs, nucleus, mass = oracle.log_softmax(row), [], 0.0
    for v in sorted(log_probs, key=lambda v: -log_probs[v]):
        if mass >= TOP_P:
            break
        nucleus.append(v)
        mass += math.exp(log_probs[v])
    return nucleus


class Written(NamedTuple):
    """Holds [T] losses and [T, V] gradients."""

    loss: Tensor
    gradient: Tensor


def by_loops(loss: Loss, world: World, top_k: int | None) -> Written:
    """Computes losses and gradients with loops over floats."""
    p, o, q = (world.log_probs(x, top_k) for x in (world.trainer, world.proximal, world.sampler))
    candidates = world.candidates(top_k)
    columns = {
        "target": [row[y] for row, y in zip(p, world.sampled, strict=True)],
        "proximal": [row[y] for row, y in zip(o, world.sampled, strict=True)],
        "behavior": [row[y] for row, y in zip(q, world.sampled, strict=True)],
    }
    batch, at = [], 0
    for mask, advantage in zip(world.masks, world.advantages, strict=True):
        rows = {key: values[at : at + len(mask)] for key, values in columns.items()}
        batch.append({"mask": mask, "advantage": advantage, "host_loss": [0.0] * len(mask), **rows})
        at += len(mask)
    heads = [[(a[v], b[v], c[v]) for v in ids] for a, b, c, ids in zip(p, o, q, candidates, strict=True)]
    f, m = (oracle.spec(*steps, numerator=loss.numerator) for steps in (loss.f, loss.m))
    kind = PPO if loss.is_hosts else ("reinforce",)
    terms = oracle.centered(f, m, kind, batch, heads, has_tail=top_k is not None)
    gradient = torch.zeros(len(p), VOCABULARY, dtype=torch.float64)
    for t, (_, of_sampled, of_candidates) in enumerate(terms):
        slopes = dict.fromkeys(p[t], 0.0)
        slopes[world.sampled[t]] += of_sampled
        for v, slope in zip(candidates[t], of_candidates, strict=True):
            slopes[v] += slope
        total = math.fsum(slopes.values())
        for v, slope in slopes.items():
            gradient[t, v] = slope - total * math.exp(p[t][v])
    return Written(torch.tensor([value for value, *_ in terms], dtype=torch.float64), gradient)


class Share(NamedTuple):
    """The result of a rank: its tokens, its first token id, and what it computed."""

    tokens: list[int]
    offset: int
    loss: Tensor
    gradient: Tensor


def on_rank(layout: tuple[int, int], cases: Sequence[tuple[str, str, int]]) -> list[Share]:
    """Computes every case (loss, candidates, seed) with slime_ext on this rank."""
    tp, cp = layout
    rank = dist.get_rank() if dist.is_initialized() else 0
    of_tp = _group([range(i * tp, (i + 1) * tp) for i in range(cp)], rank)
    of_cp = _group([range(j, tp * cp, tp) for j in range(tp)], rank)
    shares = []
    for name, candidates, seed in cases:
        world = World.of(seed, LOSSES[name].steps_per_rollout)
        shares.append(share_of(world, layout, rank, of_tp, of_cp, name, candidates))
    return shares


def _group(rows: Sequence[Sequence[int]], rank: int) -> AllSum:
    """Returns the function that sums over the ranks in this rank's row."""
    if len(rows[0]) == 1:
        return identity
    made = [dist.new_group(list(row)) for row in rows]
    return sum_over(next(group for group, row in zip(made, rows, strict=True) if rank in row))


def share_of(
    world: World,
    layout: tuple[int, int],
    rank: int,
    of_tp: AllSum,
    of_cp: AllSum,
    name: str,
    candidates: str,
) -> Share:
    """Computes a rank's part of one case from its part of the trainer's logits."""
    (tp, cp), loss, top_k = layout, LOSSES[name], CANDIDATES[candidates]
    segments = pack_segments(
        [torch.tensor(mask) for mask in world.masks],
        [prompt + response for prompt, response in SHAPES],
        [response for _, response in SHAPES],
        here=Parallel(rank // tp, cp, of_cp),
    )
    mine = segments.positions.tolist()
    width = VOCABULARY // tp
    offset = rank % tp * width
    chosen = _wide([world.trainer[t] for t in mine]).view(-1, VOCABULARY)
    logits = chosen[:, offset : offset + width].clone().requires_grad_()
    ids, sampled = [world.candidates(top_k)[t] for t in mine], [world.sampled[t] for t in mine]
    shared = {"offset": offset, "all_sum": of_tp}
    behind, before = (world.log_probs(x, top_k) for x in (world.sampler, world.proximal))
    sampler, proximal = (
        [[x[t][v] for v in row] for t, row in zip(mine, ids, strict=True)] for x in (behind, before)
    )
    has_moved = loss.steps_per_rollout > 1
    head: Head | Support
    if top_k is None:
        flat, rows = _ints(_joined(ids)), _ints([at for at, row in enumerate(ids) for _ in row])
        offsets = torch.tensor([0, *map(len, ids)]).cumsum(0)
        trainer = log_probs_within(logits, flat, rows, offsets, **shared)
        places = [
            int(offsets[at]) + row.index(y) for at, (row, y) in enumerate(zip(ids, sampled, strict=True))
        ]
        target = trainer[_ints(places)]
        of_proximal = _wide(_joined(proximal)) if has_moved else None
        head = Support(_wide(_joined(sampler)), trainer, offsets, of_proximal)
    else:
        shared |= {"part": rank % tp, "parts": tp}
        trainer = log_probs_at(logits, _ints(ids).view(-1, top_k), **shared)
        target = log_probs_at(logits, _ints(sampled)[:, None], **shared)[:, 0]
        of_proximal = _wide(proximal).view(-1, top_k) if has_moved else None
        head = Head(_wide(sampler).view(-1, top_k), trainer, of_proximal)
    local = [_wide([x[t][y] for t, y in zip(mine, sampled, strict=True)]) for x in (before, behind)]
    advantages = _wide([a for row in world.advantages for a in row])[mine]
    tokens = Tokens(
        segments, local[0] if has_moved else target.detach(), local[1], target, advantages, head=head
    )
    correction = loss.centered(top_k or TOP_K)
    token_losses, _ = correction.loss(
        correction(tokens), tokens, _ppo_of_a_host(target, tokens.proximal, advantages), Bounds(LOW, HIGH)
    )
    (gradient,) = torch.autograd.grad(torch.where(segments.mask, token_losses, 0).sum(), logits)
    return Share(mine, offset, torch.where(segments.mask, token_losses, 0).detach(), gradient)


def _ppo_of_a_host(target: Tensor, proximal: Tensor, advantages: Tensor) -> Tensor:
    ratio = (target - proximal).exp()
    return torch.maximum(-ratio * advantages, -ratio.clamp(1 - LOW, 1 + HIGH) * advantages)


def _joined(rows: Sequence[Sequence[Any]]) -> list[Any]:
    return [value for row in rows for value in row]


def _wide(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _ints(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def differences(
    layouts: Sequence[str], losses: Sequence[str], candidates: Sequence[str], seeds: Sequence[int]
) -> dict[tuple[str, str, str], tuple[float, float]]:
    """Returns (loss, candidates, layout) -> the largest difference of a loss, and of a gradient."""
    cases = [(name, of, seed) for name in losses for of in candidates for seed in seeds]
    wanted = {
        case: by_loops(
            LOSSES[case[0]], World.of(case[2], LOSSES[case[0]].steps_per_rollout), CANDIDATES[case[1]]
        )
        for case in cases
    }
    largest: dict[tuple[str, str, str], tuple[float, float]] = {}
    for layout in layouts:
        tp, cp = LAYOUTS[layout]
        ranks = run_ranks(on_rank, tp * cp, (tp, cp), cases) if tp * cp > 1 else [on_rank((tp, cp), cases)]
        for shares in ranks:
            for case, share in zip(cases, shares, strict=True):
                by = wanted[case]
                gradient = by.gradient[share.tokens, share.offset : share.offset + share.gradient.shape[1]]
                apart = [_largest(share.loss - by.loss[share.tokens]), _largest(share.gradient - gradient)]
                key = (*case[:2], layout)
                before = largest.get(key, (0.0, 0.0))
                largest[key] = max(before[0], apart[0]), max(before[1], apart[1])
    return largest


def _largest(values: Tensor) -> float:
    """Returns the largest absolute value; infinity if a value is NaN."""
    return float(values.abs().nan_to_num(math.inf).max()) if values.numel() else 0.0


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--seeds", type=int, default=3, help="random policies")
    asked = parser.parse_args(argv)
    torch.set_num_threads(1)
    largest = differences(asked.layouts, list(LOSSES), list(CANDIDATES), range(asked.seeds))
    table = Table("loss", "candidates", *asked.layouts, title="largest difference: loss / gradient")
    for name in LOSSES:
        for of in CANDIDATES:
            cells = (largest[name, of, layout] for layout in asked.layouts)
            table.add_row(name, of, *(f"{loss:.0e} / {gradient:.0e}" for loss, gradient in cells))
    Console(width=160).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
