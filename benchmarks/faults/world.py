"""A run of reinforcement learning with two engines: a sampler and a trainer of the same small transformer,
each with weights and arithmetic of its own, and code between them in which a fault is planted by its
mechanism.

The trainer learns (Adam on REINFORCE). What it and the sampler did is written in slime's dump format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.faults.dump import Turn, write_layers, write_rollout
from benchmarks.faults.model import BF16, Cache, How, Model, Shape, Weights, random, stored

GROUP = 4  # answers to one prompt
TOOL = 6  # tokens of a tool's answer
Spoil = Callable[[dict], None]  # what code does to a sample on its way to the trainer


@dataclass(frozen=True)
class World:
    """Sizes, the two sides, and the code between them.

    Args:
        learning: Adam's learning rate.
        pushed: whether a weight of this name reaches the engine when weights are pushed.
        stops: rollout from which pushes change nothing, though the version advances.
        interval, late: rollouts between two pushes; rollouts that the engine is behind.
        switch: half of the responses get new weights in their middle; ``refill``: their cache too.
        keeps_prefix: half of the prompts are in a cache that no push empties.
        restart: rollout before which the run was resumed, with the base weights in the engine.
        temperature, top_p, top_k: of sampling; ``recorded_temperature``: of the log-probs that it writes
        down,
            without truncation; ``score_temperature``: the trainer's.
        penalty: of sampling, subtracted from a logit for each time that its token came.
        replays: the engine hands out its kept sets (``rollout_top_p_token_ids``), and the trainer uses them
            ("trainer") or not ("engine").
        turns: of each sample; ``forgets``: tokens of the first turn that the engine's later prompts lack.
        spoil: see ``Spoil``; masks, lists and tokens may change.
        harm: what is done to the files at last.
        most: tokens beyond which a response is thrown away after its reward was given.
        reference: the train dump holds log-probs of the first policy.
        routes: both sides' experts are in the dump; ``replays_routes``: the trainer takes the sampler's;
            ``layer_dumps``: both sides' layer outputs are.
    """

    seed: int = 0
    shape: Shape = field(default_factory=Shape)
    rollouts: int = 8
    samples: int = 24
    prompt: int = 10
    length: int = 64
    learning: float = 1e-3
    engine: How = field(default_factory=lambda: How(dtype=BF16))
    trainer: How = field(default_factory=How)
    pushed: Callable[[str], bool] = lambda name: True
    stops: int = 10**6
    interval: int = 1
    late: int = 0
    switch: bool = False
    refill: bool = True
    keeps_prefix: bool = False
    restart: int | None = None
    first: int = 0
    temperature: float = 1.0
    recorded_temperature: float | None = None
    score_temperature: float | None = None
    top_p: float = 1.0
    top_k: int = 0
    penalty: float = 0.0
    replays: str = ""
    turns: int = 1
    forgets: int = 0
    spoil: Spoil | None = None
    most: int = 10**6
    reference: bool = False
    entropy: bool = False
    routes: bool = False
    replays_routes: bool = False
    layer_dumps: bool = False
    versions: bool = True
    harm: Callable[[Path], None] = lambda folder: None


@dataclass
class _Run:
    world: World
    generator: torch.Generator
    history: list[Weights]  # the trainer's, before each rollout
    engine: Weights
    version: int = 1
    moments: dict = field(default_factory=dict)

    @property
    def mine(self) -> Weights:
        return self.history[-1]


def write(world: World, folder: Path) -> Path:
    """Runs a world and writes its dumps into a folder."""
    g = torch.Generator().manual_seed(world.seed)
    first = random(world.shape, g)
    run = _Run(world, g, [first], dict(first))
    for r in range(world.rollouts):
        _push(run, r)
        turns = [turn for part in _sampled(run) for turn in part]
        scored = _scored(run, turns)
        if world.layer_dumps and not r:
            _dump_layers(run, turns, folder)
        write_rollout(folder, world, world.first + r, turns)
        run.history.append(_learn(run, scored))
    world.harm(folder)
    return folder


def _push(run: _Run, r: int) -> None:
    world = run.world
    if r % world.interval or (r and r <= world.late and world.late):
        return
    source = run.history[max(r - world.late, 0)]
    is_wrong = world.restart == r
    if is_wrong:
        run.version, source = 0, run.history[0]
    if r and r < world.stops:
        run.engine |= {name: w for name, w in source.items() if world.pushed(name)}
    if r:
        run.version += 1


def _learn(run: _Run, scored: Callable[[Weights], Tensor]) -> Weights:
    """The trainer's weights after a step of Adam."""
    weights = {k: w.clone().requires_grad_() for k, w in run.mine.items()}
    gradient = torch.autograd.grad(scored(weights), list(weights.values()))
    found = {}
    for (name, w), g in zip(weights.items(), gradient, strict=True):
        mean, square, count = run.moments.get(name, (torch.zeros_like(g), torch.zeros_like(g), 0))
        mean, square, count = 0.9 * mean + 0.1 * g, 0.95 * square + 0.05 * g.square(), count + 1
        run.moments[name] = mean, square, count
        step = mean / (1 - 0.9**count) / ((square / (1 - 0.95**count)).sqrt() + 1e-8)
        found[name] = (w - run.world.learning * step).detach()
    return found


def _sampled(run: _Run) -> Iterator[list[Turn]]:
    """The samples of a rollout, in batches of equal treatment."""
    world, g = run.world, run.generator
    prompts = torch.randint(world.shape.vocabulary, (world.samples // GROUP, world.prompt), generator=g)
    prompts = prompts.repeat_interleave(GROUP, 0)
    half = len(prompts) // 2
    if world.keeps_prefix:
        yield _batch(run, prompts[:half])
        yield _batch(run, prompts[half:], prefix=stored(run.history[0], world.engine))
    elif world.switch and run.version > 1:
        before = stored(run.history[-2], world.engine)
        yield _batch(run, prompts[:half], before)
        yield _batch(run, prompts[half:])
    else:
        turns = _batch(run, prompts)
        for i, turn in enumerate(turns):  # all but the first of a group find its prompt in the cache
            turn.cached = len(turn.prompt) - 1 if i % GROUP else 0
        yield turns


def _batch(
    run: _Run, prompts: Tensor, before: Weights | None = None, prefix: Weights | None = None
) -> list[Turn]:
    """Responses to prompts of one length, of which ``before`` sampled the first third; ``prefix`` made the
    keys and values of the prompts, which are taken from a cache."""
    world, g = run.world, run.generator
    model, weights = Model(world.shape, world.engine), stored(run.engine, world.engine)
    lengths = torch.randint(world.length // 2, world.length + 1, (len(prompts),), generator=g)
    current, cache = before or weights, Cache()
    rows = _Rows(world, g)
    begins = _turn_begins(world)
    with torch.no_grad():
        if prefix is not None:
            model(prefix, prompts[:, :-1], cache)
        logits = model(current, prompts[:, cache.length :], cache).logits[:, -1]
        for at in range(world.length):
            if before and at == world.length // 3:
                current = weights
                if world.refill:
                    cache = Cache()
                    logits = model(current, torch.cat([prompts, *rows.tokens], 1), cache).logits[:, -1]
            token = rows.add(logits, is_tool=any(b - TOOL <= at < b for b in begins))
            if at + 1 in begins and world.forgets:
                seen = torch.cat(
                    [prompts, *(t for i, t in enumerate(rows.tokens) if not 2 <= i < 2 + world.forgets)], 1
                )
                cache = Cache()
                logits = model(current, seen, cache).logits[:, -1]
            else:
                logits = model(current, token, cache).logits[:, -1]
        experts = None
        if world.routes:
            whole = torch.cat([prompts, *rows.tokens], 1)
            experts = model(weights, whole[:, :-1]).experts
    old = world.length // 3 if before else 0
    cached = 0 if prefix is None else world.prompt - 1
    return [
        rows.turn(i, prompts[i], int(n), None if experts is None else experts[i], (run.version, old), cached)
        for i, n in enumerate(lengths)
    ]


def _turn_begins(world: World) -> list[int]:
    """Where the turns after the first begin, in tokens of the response; the last one is the longest."""
    return [world.length * k // (world.turns + 1) for k in range(1, world.turns)]


@dataclass
class _Rows:
    """The columns of a batch of responses, as they are sampled."""

    world: World
    generator: torch.Generator
    tokens: list[Tensor] = field(default_factory=list)
    log_probs: list[Tensor] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)
    tools: list[bool] = field(default_factory=list)

    def add(self, logits: Tensor, is_tool: bool) -> Tensor:
        """Draws the next token of each response, [B, 1]."""
        world = self.world
        if world.penalty:
            seen = torch.zeros_like(logits)
            for token in self.tokens:
                seen.scatter_add_(1, token, torch.ones_like(token, dtype=logits.dtype))
            logits = logits - world.penalty * seen
        inside = truncated(logits / world.temperature, world.top_p, world.top_k)
        drawn = inside.log_softmax(-1)
        recorded = drawn
        if world.recorded_temperature is not None:
            recorded = (logits / world.recorded_temperature).log_softmax(-1)
        token = torch.multinomial(drawn.exp(), 1, generator=self.generator)
        log_prob = recorded.gather(1, token)
        if is_tool:
            token = torch.randint(world.shape.vocabulary, token.shape, generator=self.generator)
            log_prob = torch.zeros_like(log_prob)
        self.tokens.append(token)
        self.log_probs.append(log_prob)
        self.kept.append(inside.isfinite())
        self.tools.append(is_tool)
        return token

    def turn(
        self, i: int, prompt: Tensor, length: int, experts: Tensor | None, versions, cached: int
    ) -> Turn:
        """One sample, cut to its length."""
        version, old = versions
        tokens = torch.cat([t[i] for t in self.tokens[:length]])
        return Turn(
            prompt=prompt,
            tokens=tokens,
            behavior=torch.cat([p[i] for p in self.log_probs[:length]]),
            mask=~torch.tensor(self.tools[:length]),
            kept=torch.stack([k[i] for k in self.kept[:length]]),
            versions=torch.tensor([version - 1] * min(old, length) + [version] * max(length - old, 0)),
            cached=cached,
            experts=None if experts is None else experts[: len(prompt) + length - 1],
        )


def truncated(logits: Tensor, top_p: float, top_k: int) -> Tensor:
    """Logits [B, V] with those outside top-k and top-p at -inf."""
    if top_k:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)
    if top_p < 1:
        ordered, order = logits.softmax(-1).sort(descending=True)
        outside = (ordered.cumsum(-1) - ordered) > top_p
        logits = logits.masked_fill(outside.scatter(1, order, outside), -torch.inf)
    return logits


def _scored(run: _Run, turns: list[Turn]) -> Callable[[Weights], Tensor]:
    """Fills in what the trainer computes of the samples; returns its loss as a function of its weights."""
    world = run.world
    for turn in turns if world.spoil else ():
        world.spoil(turn)
    with torch.no_grad():
        for turn, table, own, experts in _log_probs(world, turns, run.mine):
            turn.proximal, turn.routed = own, experts
            turn.entropy = -(table.exp() * table).nan_to_num().sum(-1) if world.entropy else None
        if world.reference:
            for turn, _, own, _ in _log_probs(world, turns, run.history[0]):
                turn.reference = own
    _reward(turns, world)
    count = sum(int(turn.mask.sum()) for turn in turns)

    def loss(weights: Weights) -> Tensor:
        parts = [-own[t.mask].sum() * t.advantage for t, _, own, _ in _log_probs(world, turns, weights)]
        return torch.stack(parts).sum() / count

    return loss


def _log_probs(
    world: World, turns: list[Turn], weights: Weights
) -> Iterator[tuple[Turn, Tensor, Tensor, Tensor | None]]:
    """Each sample with its log-probs over the vocabulary [R, V], those of its tokens [R], and its experts."""
    ids = [torch.cat([turn.prompt, turn.tokens]) for turn in turns]
    padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    held = stored(weights, world.trainer) if world.trainer.dtype == BF16 else weights
    forced = None
    if world.replays_routes:
        forced = torch.nn.utils.rnn.pad_sequence([turn.experts for turn in turns], batch_first=True)
    seen = Model(world.shape, world.trainer)(held, padded[:, :-1], forced=forced)
    for i, turn in enumerate(turns):
        size = len(ids[i]) - 1
        logits = seen.logits[i, len(turn.prompt) - 1 : size] / (world.score_temperature or 1.0)
        if world.replays == "trainer":
            logits = logits.masked_fill(~turn.kept & turn.mask[:, None], -torch.inf)
        table = logits.log_softmax(-1)
        experts = seen.experts[i, :size] if world.routes else None
        yield turn, table, table.gather(1, turn.tokens[:, None])[:, 0], experts


def _reward(turns: list[Turn], world: World) -> None:
    """Long answers fail more often; else it is the share of even tokens that counts."""
    for turn in turns:
        even = (turn.tokens % 2 == 0).float().mean()
        turn.reward = float(even > 0.5) if len(turn.tokens) < 0.85 * world.length else 0.0
        turn.dropped = len(turn.tokens) > world.most
    for group in range(0, len(turns), GROUP):
        rewards = torch.tensor([t.reward for t in turns[group : group + GROUP]])
        for turn, reward in zip(turns[group : group + GROUP], rewards, strict=True):
            turn.advantage = float((reward - rewards.mean()) / (rewards.std() + 1e-6))


def _dump_layers(run: _Run, turns: list[Turn], folder: Path) -> None:
    """Both sides' layer outputs over the first samples, as slime and SGLang dump them."""
    ids = [torch.cat([t.prompt, t.tokens]) for t in turns[:4]]
    sides = []
    for how, weights in ((run.world.trainer, run.mine), (run.world.engine, run.engine)):
        model, held = Model(run.world.shape, how), stored(weights, how)
        with torch.no_grad():
            passes = [model(held, one[None]).layers for one in ids]
        sides.append(
            [torch.cat([p[i][0] for p in passes]).to(how.dtype) for i in range(run.world.shape.layers)]
        )
    write_layers(folder, ids, *sides)
