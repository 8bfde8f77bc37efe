"""Rollouts of a small recurrent softmax model, sampled and scored for real, with a fault of the engine, the
trainer or the code between them planted by its mechanism.

The engine is ``Engine``: weights and arithmetic of its own. The trainer scores the same tokens in float32.
The model keeps a running sum of what it has seen (its "KV cache"), written with the weights of the moment.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from benchmarks.faults.world import draw, truncated
from slime_ext.tools.analysis.records import DumpedRollout

VOCABULARY, WIDTH, EXPERTS = 96, 32, 8
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Weights:
    """Embedding [V, D], cache writer [D, D], reader [D, D], head [D, V]; experts [E, D, D] with a router."""

    embedding: Tensor
    write: Tensor
    read: Tensor
    head: Tensor
    router: Tensor | None = None
    experts: Tensor | None = None

    @classmethod
    def random(cls, generator: torch.Generator, moe: bool = False, vocabulary: int = VOCABULARY) -> Weights:
        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            return torch.randn(*shape, generator=generator) * scale

        unit = WIDTH**-0.5
        return cls(
            normal(vocabulary, WIDTH),
            normal(WIDTH, WIDTH, scale=unit),
            normal(WIDTH, WIDTH, scale=unit),
            normal(WIDTH, vocabulary, scale=1.4 * unit * 2),
            normal(WIDTH, EXPERTS, scale=unit) if moe else None,
            normal(EXPERTS, WIDTH, WIDTH, scale=unit) if moe else None,
        )

    def map(self, change) -> Weights:
        return Weights(*(None if w is None else change(w) for w in vars(self).values()))

    def towards(self, other: Weights, distance: float) -> Weights:
        """A step of training: this much of the way."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Weights(*(None if a is None else a + distance * b for a, b in pairs))


@dataclass(frozen=True)
class Arithmetic:
    """How a side computes: the dtype that its activations and its router are rounded to, and its cache."""

    activations: torch.dtype = torch.float32
    router: torch.dtype = torch.float32
    cache: torch.dtype = torch.float32
    stays: float = 0.9  # share of the cache that stays at each step
    reads: float = 0.3  # how much the cache weighs
    confidence: float = 6.0  # how certain the certain contexts are


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if dtype == x.dtype else x.to(dtype).float()


def int_weights(bits: int):
    """Symmetric integers with a scale per row."""
    top = 2 ** (bits - 1) - 1

    def change(w: Tensor) -> Tensor:
        scale = w.abs().amax(-1, keepdim=True).clamp_min(1e-9) / top
        return (w / scale).round() * scale

    return change


def written(weights: Weights) -> Tensor:
    """What each token adds to the cache, [V, D]."""
    return torch.tanh(weights.embedding @ weights.write)


def seen_after(how: Arithmetic, addition: Tensor, cache: Tensor) -> Tensor:
    """The cache [B, D] after one more token of each row."""
    return rounded(how.stays * cache + addition, how.cache)


def logits_of(weights: Weights, how: Arithmetic, token: Tensor, cache: Tensor) -> Tensor:
    """Logits [.., B, V] after the tokens [.., B], which are in the caches [.., B, D]."""
    hidden = torch.tanh(weights.embedding[token] + times(how.reads * cache, weights.read))
    hidden = rounded(hidden, how.activations)
    if weights.router is not None:
        chosen = times(rounded(hidden, how.router), rounded(weights.router, how.router))
        best = rounded(chosen, how.router).argmax(-1)
        hidden = hidden + torch.einsum("...d,...de->...e", hidden, weights.experts[best])
        hidden = rounded(torch.tanh(hidden), how.activations)
    gain = 1 + how.confidence * hidden[..., :1].relu()  # some contexts are certain, some are not
    return rounded(times(hidden, weights.head), how.activations) * gain


def times(x: Tensor, w: Tensor) -> Tensor:
    """x @ w. Several positions [L, B, D] at once give the same bits as each alone."""
    return x @ w if x.dim() == 2 else x @ w.expand(*x.shape[:-2], *w.shape)


@dataclass(frozen=True)
class Engine:
    """What samples: how it computes, what it draws from, and what it writes down."""

    how: Arithmetic = Arithmetic(activations=BF16)
    temperature: float = 1.0
    recorded_temperature: float | None = None
    top_p: float = 1.0
    top_k: int = 0
    quantise: int = 0  # bits of the weights
    rewrite_cache: bool = True  # after new weights arrive in the middle of a response


def sample(
    engine: Engine,
    weights: Weights,
    prompts: Tensor,
    length: int,
    generator: torch.Generator,
    later: Weights | None = None,
    switch: int = 0,
    tools: range = range(0),
) -> tuple[Tensor, Tensor]:
    """Tokens [B, L] and recorded log-probs [B, L]; from position ``switch`` on with the weights ``later``; at
    positions of ``tools`` the tokens come from elsewhere and 0 is recorded."""
    current = weights.map(int_weights(engine.quantise)) if engine.quantise else weights
    cache, token, tokens, log_probs = torch.zeros(len(prompts), WIDTH), prompts, [], []
    additions = written(current)
    for at in range(length):
        if later is not None and at == switch:
            current, additions = later, written(later)
            if engine.rewrite_cache:
                cache = refill(later, engine.how, prompts, tokens)
        cache = seen_after(engine.how, additions[token], cache)
        logits = logits_of(current, engine.how, token, cache)
        drawn = truncated(logits / engine.temperature, engine.top_p, engine.top_k).log_softmax(-1)
        recorded = drawn
        if engine.recorded_temperature is not None:
            recorded = (logits / engine.recorded_temperature).log_softmax(-1)
        token = draw(drawn.exp(), generator)[:, 0]
        log_prob = recorded.gather(1, token[:, None])[:, 0]
        if at in tools:
            token = torch.randint(len(weights.embedding), token.shape, generator=generator)
            log_prob = torch.zeros_like(log_prob)
        tokens.append(token)
        log_probs.append(log_prob)
    return torch.stack(tokens, 1), torch.stack(log_probs, 1)


def refill(weights: Weights, how: Arithmetic, prompts: Tensor, tokens: list[Tensor]) -> Tensor:
    """The cache that these weights would have written."""
    cache, additions = torch.zeros(len(prompts), WIDTH), written(weights)
    for token in [prompts, *tokens][: len(tokens)]:
        cache = seen_after(how, additions[token], cache)
    return cache


def score(
    weights: Weights, prompts: Tensor, tokens: Tensor, how: Arithmetic, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies [B, L] of the trainer."""
    cache, caches = torch.zeros(len(prompts), WIDTH), []
    before = torch.cat([prompts[:, None], tokens[:, :-1]], 1).T
    for addition in written(weights)[before]:
        cache = seen_after(how, addition, cache)
        caches.append(cache)
    table = (logits_of(weights, how, before, torch.stack(caches)) / temperature).log_softmax(-1)
    log_probs = table.gather(-1, tokens.T[..., None])[..., 0]
    return log_probs.T, -(table.exp() * table).sum(-1).T


@dataclass(frozen=True)
class World:
    """A run: sizes, and how its two sides are set up.

    Args:
        learning: how far the weights move in each rollout.
        interval: rollouts between two pushes of the weights to the engine.
        late: rollouts that the engine is behind (asynchronous sampling).
        resumed_wrong: this many first rollouts are sampled from other weights.
        switch: in-place updates in the middle of the responses of half of the samples.
        tools: positions of tool output; ``masks_tools`` takes them out of the response mask.
    """

    rollouts: int = 6
    samples: int = 48
    length: int = 96
    seed: int = 0
    engine: Engine = Engine()
    trainer: Arithmetic = Arithmetic()
    score_temperature: float = 1.0
    learning: float = 0.003
    interval: int = 1
    late: int = 0
    resumed_wrong: int = 0
    switch: bool = False
    moe: bool = False
    tools: range = range(0)
    masks_tools: bool = True
    first: int = 0  # number of the first rollout
    vocabulary: int = VOCABULARY


def run(world: World) -> list[DumpedRollout]:
    """The dumps of a run; a copy of those that another test made of the same world."""
    return deepcopy(_made(world))


@lru_cache(maxsize=64)
def _made(world: World) -> list[DumpedRollout]:
    g = torch.Generator().manual_seed(world.seed)
    first = Weights.random(g, world.moe, world.vocabulary)
    directions = [Weights.random(g, world.moe, world.vocabulary) for _ in range(world.rollouts + 1)]
    history = [first]
    for direction in directions:
        history.append(history[-1].towards(direction, world.learning))
    return [_rollout(world, r, history, g) for r in range(world.rollouts)]


def _rollout(world: World, r: int, history: list[Weights], g: torch.Generator) -> DumpedRollout:
    version = max(r - r % world.interval - world.late, 0)
    mine, engine = history[r], history[version]
    if r < world.resumed_wrong:
        engine = Weights.random(torch.Generator().manual_seed(world.seed + 1), world.moe, world.vocabulary)
        engine = mine.towards(engine, 0.3)
    prompts = torch.randint(world.vocabulary, (world.samples,), generator=g)
    model = {name: getattr(world.trainer, name) for name in ("stays", "reads", "confidence")}
    how = replace(world.engine.how, **model)
    setting = replace(world.engine, how=how)
    tokens, behavior = sample(setting, engine, prompts, world.length, g, tools=world.tools)
    versions = torch.full(tokens.shape, version)
    if world.switch and version:
        half = world.samples // 2
        at = world.length // 3
        changed = sample(setting, history[version - 1], prompts[:half], world.length, g, engine, at)
        tokens[:half], behavior[:half] = changed
        versions[:half, :at] = version - 1
    proximal, entropy = score(mine, prompts, tokens, world.trainer, world.score_temperature)
    lengths = torch.randint(world.length // 2, world.length + 1, (world.samples,), generator=g)
    inside = torch.arange(world.length) < lengths[:, None]
    mask = torch.ones(tokens.shape, dtype=torch.bool)
    mask[:, list(world.tools)] = not world.masks_tools
    rewards = (torch.rand(world.samples, generator=g) > 0.5).double()
    advantages = (rewards - rewards.mean()).float()[:, None].expand(tokens.shape)
    return DumpedRollout(
        rollout_id=world.first + r,
        source=f"rollout {world.first + r}",
        lengths=tuple(lengths.tolist()),
        prompt_lengths=(1,) * world.samples,
        positions=tuple(range(world.samples)),
        behavior=behavior[inside],
        proximal=proximal[inside],
        mask=mask[inside],
        tokens=tokens[inside],
        advantages=advantages[inside],
        rewards=rewards,
        versions=versions[inside],
        newest=r if world.interval > 1 else version,
        groups=tuple(i // 8 for i in range(world.samples)),
        steps=(0,) * world.samples,
        prompts=[f"prompt {i}" for i in range(world.samples)],
        responses=[f"response {i}" for i in range(world.samples)],
        entropy=entropy[inside],
    )


def recorded_late(rollouts: list[DumpedRollout], by: int) -> list[DumpedRollout]:
    """The engine's list begins with ``by`` log-probs of the prompt, and is cut at the response's length (or,
    for a negative number, lacks the first ones)."""
    return [replace(r, behavior=_each(r, lambda part: part.roll(by))) for r in rollouts]


def padded_late(rollouts: list[DumpedRollout], by: int) -> list[DumpedRollout]:
    """The same, by code that fills the gap with 0."""

    def change(part: Tensor) -> Tensor:
        part = part.roll(by)
        part[slice(by) if by > 0 else slice(by, None)] = 0
        return part

    return [replace(r, behavior=_each(r, change)) for r in rollouts]


def recorded_late_in(rollouts: list[DumpedRollout], by: int, every: int) -> list[DumpedRollout]:
    """The same in one response of ``every``, such as those that went on after an abort."""
    counters = [iter(range(r.count)) for r in rollouts]
    return [
        replace(r, behavior=_each(r, lambda part, c=c: part if next(c) % every else part.roll(by)))
        for r, c in zip(rollouts, counters, strict=True)
    ]


def _each(rollout: DumpedRollout, change) -> Tensor:
    return torch.cat([change(part) for part in rollout.behavior.split(rollout.lengths)])


def overflowing(rollouts: list[DumpedRollout], value: float = torch.nan) -> list[DumpedRollout]:
    """NaN where the engine's half precision overflows, now and then; or another value in its place."""
    found = []
    for r in rollouts:
        behavior = r.behavior.clone()
        behavior[::97] = value
        found.append(replace(r, behavior=behavior))
    return found


def unrecorded(rollouts: list[DumpedRollout]) -> list[DumpedRollout]:
    """A generate function that forgets the log-probs of every eighth sample."""
    found = []
    for r in rollouts:
        forgotten = torch.arange(r.count) % 8 == 0
        found.append(replace(r, behavior=torch.where(forgotten[r.segments.ids], torch.nan, r.behavior)))
    return found
