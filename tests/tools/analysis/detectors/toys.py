"""A bigram policy in which faults are planted by their mechanism, as rollouts in memory."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from functools import cache, lru_cache
from hashlib import md5
from typing import NoReturn

import torch
from torch import Tensor

from benchmarks.faults.world import draw
from slime_ext.tools.analysis.findings import examine, measures
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.measure import Measure
from slime_ext.tools.analysis.records import DumpedRollout
from tests.tools.analysis.rollouts import joined

VOCABULARY, PROMPTS, LENGTH = 60, 8, 48
# Logits [S, V] and a generator -> tokens [S, 1] and the recorded log-probs [S].
Draw = Callable[[Tensor, torch.Generator], tuple[Tensor, Tensor]]
Warp = Callable[[Tensor, Tensor, int], Tensor]  # logits [S, V], how often each token came, place -> logits


@dataclass
class Policy:
    """A table of logits, by the token before, that moves a little at each step."""

    seed: int = 0
    moves: float = 0.01

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)
        sharp = (self.normal(VOCABULARY, 1) * 0.5 + 0.8).exp()
        self.table = self.normal(VOCABULARY, VOCABULARY) * sharp

    def normal(self, *size: int) -> Tensor:
        return torch.randn(*size, generator=self.generator, dtype=torch.float64)

    def step(self) -> None:
        self.table = self.table + self.moves * self.normal(*self.table.shape)


def _drawn(logits: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    log_probs = logits.log_softmax(1)
    drawn = draw(log_probs.exp(), generator)
    return drawn, log_probs.gather(1, drawn)[:, 0]


def _as_it_is(logits: Tensor, seen: Tensor, at: int) -> Tensor:
    return logits


def _drawn_warped(
    table: Tensor, prompts: Tensor, length: int, g: torch.Generator, warp: Warp, draw: Draw
) -> tuple[Tensor, Tensor]:
    """The prompts and the tokens after them [S, 1 + L], and what is recorded of the tokens [S, L]."""
    columns, recorded = [prompts], []
    seen = torch.zeros(len(prompts), VOCABULARY, dtype=torch.float64)
    one = torch.ones_like(seen[:, :1])
    for at in range(length):
        drawn, log_probs = draw(warp(table[columns[-1]], seen, at), g)
        columns.append(drawn[:, 0])
        recorded.append(log_probs)
        seen.scatter_add_(1, drawn, one)
    return torch.stack(columns, 1), torch.stack(recorded, 1)


def _drawn_plainly(table: Tensor, prompts: Tensor, length: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """The same of the table itself, whose log-probs are computed once."""
    log_probs = table.log_softmax(1)
    probabilities, columns = log_probs.exp(), [prompts]
    for _ in range(length):
        columns.append(draw(probabilities[columns[-1]], g)[:, 0])
    tokens = torch.stack(columns, 1)
    return tokens, log_probs[tokens[:, :-1], tokens[:, 1:]]


def sampled(
    policy: Policy,
    number: int = 0,
    *,
    samples: int = 64,
    length: int = LENGTH,
    sampler: Tensor | None = None,
    warp: Warp | None = None,
    noise: float = 0.005,
    draw: Draw | None = None,
    **fields,
) -> DumpedRollout:
    """One rollout of ``samples`` answers to PROMPTS prompts; the trainer's log-probs have some noise, which
    is a function of the text."""
    g, table = policy.generator, policy.table if sampler is None else sampler
    prompts = torch.randint(VOCABULARY, (PROMPTS,), generator=g).repeat_interleave(samples // PROMPTS)
    rounding = 1 + noise * torch.randn(policy.table.shape, generator=g, dtype=torch.float64)
    mine = (policy.table * rounding).log_softmax(1)
    if warp is None and draw is None:
        columns, recorded = _drawn_plainly(table, prompts, length, g)
    else:
        columns, recorded = _drawn_warped(table, prompts, length, g, warp or _as_it_is, draw or _drawn)
    before, tokens = columns[:, :-1].flatten(), columns[:, 1:].flatten()
    behavior, proximal = recorded.flatten(), mine[before, tokens]
    rewards = torch.randint(2, (samples,), generator=g).double()
    groups = torch.arange(PROMPTS).repeat_interleave(samples // PROMPTS)
    means = torch.bincount(groups, rewards) / (samples // PROMPTS)
    known = {
        "lengths": (length,) * samples,
        "prompt_lengths": (8,) * samples,
        "positions": tuple(range(samples)),
        "behavior": behavior.float(),
        "proximal": proximal.float(),
        "mask": torch.ones(samples * length, dtype=torch.bool),
        "tokens": tokens,
        "rewards": rewards,
        "groups": tuple(groups.tolist()),
        "advantages": (rewards - means[groups]).repeat_interleave(length).float(),
        "versions": torch.full((samples * length,), number + 1),
        "newest": number + 1,
        "statuses": ("completed",) * samples,
    }
    return DumpedRollout(number, f"{number}.pt", **known | fields)


def run(count: int = 4, *, policy: Policy | None = None, **settings) -> list[DumpedRollout]:
    """Several rollouts, the policy a step further in each; a copy where no setting says otherwise."""
    if policy is None and not settings:
        return deepcopy(_plain(count))
    return _run(count, policy or Policy(), settings)


@cache
def _plain(count: int) -> list[DumpedRollout]:
    return _run(count, Policy(), {})


def _run(count: int, policy: Policy, settings: dict) -> list[DumpedRollout]:
    rollouts = []
    for number in range(count):
        rollouts.append(sampled(policy, number, **settings))
        policy.step()
    return rollouts


def lagging(moves: float) -> list[DumpedRollout]:
    """Answers of four tokens, most of them cut, from weights that are pushed every fourth rollout."""
    policy, rollouts, held = Policy(moves=moves), [], None
    statuses = ("truncated",) * 60 + ("completed",) * 4
    for number in range(8):
        held = policy.table.clone() if number % 4 == 0 else held
        rollout = sampled(policy, number, sampler=held, length=4, statuses=statuses, newest=None)
        rollouts.append(replace(rollout, versions=torch.full_like(rollout.versions, 1 + number // 4)))
        policy.step()
    return rollouts


def edited(rollouts: list[DumpedRollout], edit: Callable[[DumpedRollout], dict]) -> list[DumpedRollout]:
    """Each rollout with the fields that ``edit`` returns for it."""
    return [replace(rollout, **edit(rollout)) for rollout in rollouts]


class Asked(dict[str, Measure]):
    """The measures of rollouts, each of which is filled when a detector first asks for it.

    A test that looks with one detector needs a few of them. No rollout can be added later.
    """

    def __init__(self, rollouts: list[DumpedRollout]) -> None:
        self.rollouts, self.empty = rollouts, measures(None)

    def values(self) -> NoReturn:
        raise AssertionError("these measures are not filled yet: make a Diagnosis(measures=measures(None))")

    def __missing__(self, name: str) -> Measure:
        measure = self[name] = self.empty.pop(name)
        for rollout in self.rollouts:
            for one in [rollout] if measure.takes_joined else rollout.rollouts:
                for part in one.parts():
                    measure.add(part)
            for one in rollout.rollouts:
                measure.close(one)
        return measure


def diagnosed(rollouts: list[DumpedRollout], **flags) -> Diagnosis:
    """What is measured of rollouts."""
    diagnosis, packed = Diagnosis(flags=flags), joined(rollouts)
    for rollout in packed:
        diagnosis.add(rollout)
    diagnosis.measures = Asked(packed)
    return diagnosis


class _Content:
    """Rollouts that are equal if all of their fields are, bit by bit."""

    def __init__(self, rollouts: list[DumpedRollout]) -> None:
        self.rollouts, content = rollouts, md5()
        for value in (getattr(rollout, field.name) for rollout in rollouts for field in fields(rollout)):
            if isinstance(value, Tensor):
                content.update(repr((value.dtype, value.shape)).encode() + value.numpy().tobytes())
            else:
                content.update(pickle.dumps(value))  # repr leaves out the middle of large arrays
        self.digest = content.digest()

    def __hash__(self) -> int:
        return hash(self.digest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Content) and self.digest == other.digest


@lru_cache(32)
def _diagnosed(content: _Content) -> Diagnosis:
    """All that is measured: several tests ask about the same rollouts, some of them with other flags."""
    diagnosis = Diagnosis(measures=measures(None))
    for rollout in joined(content.rollouts):
        diagnosis.add(rollout)
    return diagnosis


def findings(rollouts: list[DumpedRollout], **flags):
    """Name -> finding, of all that is measured."""
    diagnosis = replace(_diagnosed(_Content(rollouts)), flags=flags)
    return {finding.name: finding for finding in examine(diagnosis)[0]}
