"""A run of reinforcement learning with two engines: a sampler and a trainer of the same small transformer,
each with weights and arithmetic of its own, and code between them in which a fault is planted by its
mechanism.

The trainer learns (Adam on REINFORCE). What it and the sampler did is written in slime's dump format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from benchmarks.faults.dump import Turn, copied, told, write_arguments, write_layers, write_rollout
from benchmarks.faults.model import (
    BF16,
    Cache,
    How,
    Model,
    Shape,
    Weights,
    fused,
    log_softmax,
    random,
    stored,
)

GROUP = 4  # answers to one prompt
TOOL = 6  # tokens of a tool's answer
Spoil = Callable[[dict], None]  # what code does to a sample on its way to the trainer


class Text(Protocol):
    """What prompts, tools and rewards are, where tokens are not drawn at random."""

    end: int | None  # the token that ends a response

    def prompts(self, count: int, generator: torch.Generator) -> Tensor: ...
    def tool(self, generator: torch.Generator) -> Tensor: ...
    def reward(self, turn: Turn) -> float: ...
    def decode(self, ids: Tensor) -> str: ...


@dataclass(frozen=True)
class World:
    """Sizes, the two sides, and the code between them.

    Args:
        learning: Adam's learning rate.
        pushed: whether a weight of this name reaches the engine when weights are pushed.
        stops: rollout from which pushes change nothing, though the version advances.
        interval, late: rollouts between two pushes; rollouts that the engine is behind.
        switch: half of the responses get new weights in their middle, ``gap`` rollouts newer than those
            before; ``refill``: their cache too.
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
        noise: of the engine's weights, relative to them; it grows by as much with every rollout.
        text: of prompts, tools and rewards; None for tokens at random.
        reference: the train dump holds log-probs of the first policy.
        routes: both sides' experts are in the dump; ``replays_routes``: the trainer takes the sampler's;
            ``layer_dumps``: both sides' layer outputs are.
        trains: whether a weight of this name is trained.
        processor: of the sampler's logits, before its temperature; ``races``: share of the tokens whose
            log-prob is taken from the logits of the step after.
        emits: probabilities from which tokens are drawn, where they are not those that it writes down.
        told: the prompts that the engine sees, of those that the trainer has.
        holds: what the engine has after a push, of what it should have; ``decodes``: what it uses after the
            prompt; ``prefills``: makes the logits and the cache of a batch of prompts.
        engines, astray: how many engines there are, to which samples go in turn (0: nobody writes it down);
            those that have other weights in a rollout, and the version that they report ("": the right one).
        handed: what code does to the samples of a rollout on their way to the trainer.
        packs: samples that the trainer scores as one sequence, all of which they see (0: each alone).
        ranks, stale_rank: data-parallel ranks of the trainer; one that takes no more steps from a rollout on.
        scored: what code does to what the trainer computed; ``credited``: to rewards and advantages.
        evaluates: dumps of evaluations lie between those of training; ``arguments``: so do the flags.
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
    gap: int = 1
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
    noise: float = 0.0
    text: Text | None = None
    trains: Callable[[str], bool] = lambda name: True
    processor: Callable[[Tensor, _Rows], Tensor] | None = None
    races: float = 0.0
    emits: Callable[[Tensor, _Rows], Tensor] | None = None
    told: Callable[[Tensor], Tensor] | None = None
    holds: Callable[[_Run], Weights] | None = None
    decodes: Callable[[_Run], Weights] | None = None
    prefills: Callable[[Model, Weights, Tensor], tuple[Tensor, Cache]] | None = None
    engines: int = 0
    astray: Callable[[_Run], dict[int, tuple[Weights, str]]] | None = None
    handed: Callable[[list[Turn], _Run], None] | None = None
    packs: int = 0
    ranks: int = 1
    stale_rank: tuple[int, int] | None = None
    scored: Callable[[list[Turn], _Run], None] | None = None
    credited: Callable[[list[Turn], _Run], None] | None = None
    evaluates: bool = False
    arguments: bool = False
    harm: Callable[[Path], None] = lambda folder: None


# What the responses do not depend on.
NOT_SAMPLING = {
    "rollouts": 0,
    "first": 0,
    "trainer": How(),
    "score_temperature": None,
    "replays": "",
    "spoil": None,
    "most": 0,
    "reference": False,
    "entropy": False,
    "layer_dumps": False,
    "versions": False,
    "trains": None,
    "handed": None,
    "packs": 0,
    "ranks": 0,
    "stale_rank": None,
    "scored": None,
    "credited": None,
    "evaluates": False,
    "arguments": False,
    "harm": None,
}


@dataclass
class _Run:
    world: World
    generator: torch.Generator
    history: Any  # the trainer's weights before each rollout: a list, or what looks like one
    engine: Weights
    memo: dict
    number: int = 0
    version: int = 1
    moments: dict = field(default_factory=dict)

    @property
    def draws(self) -> torch.Generator:
        """For what happens to a rollout after it was sampled."""
        return torch.Generator().manual_seed(1000 * self.world.seed + self.number)

    @property
    def mine(self) -> Weights:
        return self.history[self.number]


def write(world: World, folder: Path, history: Any = None, memo: dict | None = None) -> Path:
    """Runs a world and writes its dumps into a folder.

    Args:
        history: the trainer's weights before each rollout; those that it lacks are trained and appended.
        memo: what other worlds of this history have sampled and scored, and what this one adds.
    """
    g = torch.Generator().manual_seed(world.seed)
    history = [random(world.shape, g)] if history is None else history
    run = _Run(world, g, history, dict(history[0]), {} if memo is None else memo)
    for r in range(world.rollouts):
        run.number = r
        _push(run, r)
        key = (repr(replace(world, **NOT_SAMPLING)), r)
        if key not in run.memo:
            run.memo[key] = [turn for part in _sampled(run) for turn in part]
        turns = [copied(turn) for turn in run.memo[key]]
        if world.handed:
            world.handed(turns, run)
        scored = _scored(run, turns)
        if world.layer_dumps and not r:
            _dump_layers(run, turns, folder)
        write_rollout(folder, world, world.first + r, turns)
        if len(history) == r + 1 < world.rollouts:
            history.append(_learn(run, scored))
    if world.arguments:
        write_arguments(folder, world)
    world.harm(folder)
    return folder


def resampled(run: _Run, prompts: Tensor) -> list[Turn]:
    """Other answers to the same prompts."""
    return _batch(replace(run, generator=run.draws), prompts)


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
    if world.noise:
        run.engine = {
            k: w * (1 + world.noise * r * torch.randn(w.shape, generator=run.generator))
            for k, w in run.history[r].items()
        }
    if world.holds:
        run.engine = dict(world.holds(run))
    if r:
        run.version += 1


def _learn(run: _Run, scored: Callable[[Weights], Tensor]) -> Weights:
    """The trainer's weights after a step of Adam."""
    learned = dict(run.mine)
    weights = {k: w.clone().requires_grad_() for k, w in run.mine.items() if run.world.trains(k)}
    gradient = torch.autograd.grad(scored(learned | weights), list(weights.values()))
    for (name, w), g in zip(weights.items(), gradient, strict=True):
        mean, square, count = run.moments.get(name, (torch.zeros_like(g), torch.zeros_like(g), 0))
        mean, square, count = 0.9 * mean + 0.1 * g, 0.95 * square + 0.05 * g.square(), count + 1
        run.moments[name] = mean, square, count
        step = mean / (1 - 0.9**count) / ((square / (1 - 0.95**count)).sqrt() + 1e-8)
        learned[name] = (w - run.world.learning * step).detach()
    return learned


def _sampled(run: _Run) -> Iterator[list[Turn]]:
    """The samples of a rollout, in batches of equal treatment."""
    world, g = run.world, run.generator
    if world.text:
        prompts = world.text.prompts(world.samples // GROUP, g)
    else:
        prompts = torch.randint(world.shape.vocabulary, (world.samples // GROUP, world.prompt), generator=g)
    prompts = prompts.repeat_interleave(GROUP, 0)
    half = -(-len(prompts) // (2 * GROUP)) * GROUP  # of whole groups
    if world.keeps_prefix:
        yield _batch(run, prompts[:half])
        yield _batch(run, prompts[half:], prefix=run.history[0])
    elif world.switch and run.version > 1:
        before = run.history[max(run.number - world.gap, 0)]
        yield _batch(run, prompts[:half], before)
        if half < len(prompts):
            yield _batch(run, prompts[half:])
    else:
        turns = _of_engines(run, prompts)
        for i, turn in enumerate(turns):  # all but the first of a group find its prompt in the cache
            turn.cached = len(turn.prompt) - 1 if i % GROUP else 0
        yield turns


def _of_engines(run: _Run, prompts: Tensor) -> list[Turn]:
    """Responses of several engines, of which some may have other weights."""
    world = run.world
    turns = _batch(run, prompts)
    astray = world.astray(run) if world.astray else {}
    for engine, (weights, version) in astray.items():
        others = _batch(replace(run, engine=weights), prompts)
        for i in range(engine, len(turns), world.engines or 1):
            turns[i] = others[i]
            turns[i].version = version
    for i, turn in enumerate(turns if world.engines else ()):
        turn.engine = f"http://10.0.0.{2 + i % world.engines}:30000"
    return turns


def _batch(
    run: _Run, prompts: Tensor, before: Weights | None = None, prefix: Weights | None = None
) -> list[Turn]:
    """Responses to prompts of one length, of which ``before`` sampled the first third; ``prefix`` made the
    keys and values of the prompts, which are taken from a cache."""
    world = run.world
    model = Model(world.shape, world.engine)
    weights = _held(run, run.engine)
    untold, prompts = prompts, world.told(prompts) if world.told else prompts
    current = _held(run, before) if before else weights
    decoding = _held(run, world.decodes(run)) if world.decodes else current
    rows = _Rows(world, run.generator)
    begins = _turn_begins(world)

    prefill = partial(_prefill, model)

    with torch.inference_mode():
        make = world.prefills or partial(_of_groups, _held(run, prefix) if prefix else None)
        logits, cache = make(model, current, prompts)
        current = decoding
        for at in range(world.length):
            if before and at == world.length // 3:
                current = weights
                if world.refill:
                    cache = Cache()
                    logits = prefill(current, torch.cat([prompts, *rows.tokens], 1), cache)
            token = rows.add(logits, is_tool=any(b - TOOL <= at < b for b in begins))
            if at + 1 == world.length:
                break
            if at + 1 in begins and world.forgets:
                seen = torch.cat(
                    [prompts, *(t for i, t in enumerate(rows.tokens) if not 2 <= i < 2 + world.forgets)], 1
                )
                cache = Cache()
                logits = prefill(current, seen, cache)
            else:
                logits = prefill(current, token, cache)
    experts = _routes(model, weights, torch.cat([prompts, *rows.tokens], 1)) if world.routes else None
    old = world.length // 3 if before else 0
    cached = 0 if prefix is None else prompts.shape[1] - 1
    return list(rows.turns(untold, experts, (run.version, old), cached))


def _prefill(model: Model, weights: Weights, ids: Tensor, cache: Cache) -> Tensor:
    return model(weights, ids, cache, since=ids.shape[1] - 1).logits[:, -1]


def _of_groups(
    prefix: Weights | None, model: Model, weights: Weights, prompts: Tensor
) -> tuple[Tensor, Cache]:
    """Logits and cache of prompts, each of which is computed once for its group."""
    cache = Cache()
    if prefix is not None:
        _prefill(model, prefix, prompts[::GROUP, :-1], cache)
    logits = _prefill(model, weights, prompts[::GROUP, cache.length :], cache)
    return logits.repeat_interleave(GROUP, 0), cache.repeated(GROUP)


@torch.no_grad()  # not inference_mode, because training reads the experts
def _routes(model: Model, weights: Weights, ids: Tensor) -> Tensor | None:
    return model(weights, ids[:, :-1]).experts


def _held(run: _Run, weights: Weights) -> Weights:
    """The weights as the engine multiplies by them."""
    return fused(stored(weights, run.world.engine), run.world.shape)


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
    inside: list[Tensor] = field(default_factory=list)  # logits, of tokens that truncation keeps
    tools: list[bool] = field(default_factory=list)

    def add(self, logits: Tensor, is_tool: bool) -> Tensor:
        """Draws the next token of each response, [B, 1]."""
        world = self.world
        if world.processor:
            logits = world.processor(logits, self)
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
        if world.races and self.tokens:
            raced = torch.rand(len(drawn), 1, generator=self.generator) < world.races
            late = drawn.gather(1, self.tokens[-1])
            self.log_probs[-1] = torch.where(raced, late, self.log_probs[-1])
        emitted = world.emits(drawn, self) if world.emits else drawn.exp()
        token = draw(emitted, self.generator)
        log_prob = recorded.gather(1, token)
        if is_tool:
            token = self._told(token)
            log_prob = torch.zeros_like(log_prob)
        self.tokens.append(token)
        self.log_probs.append(log_prob)
        self.inside.append(inside)
        self.tools.append(is_tool)
        return token

    def lengths(self) -> list[int]:
        """Of the responses: up to the token that ends one, or at random."""
        length, tokens = self.world.length, torch.cat(self.tokens, 1)
        if self.world.text and self.world.text.end is not None:
            ended = tokens == self.world.text.end
            return torch.where(ended.any(1), ended.int().argmax(1) + 1, length).tolist()
        return torch.randint(length // 2, length + 1, (len(tokens),), generator=self.generator).tolist()

    def _told(self, token: Tensor) -> Tensor:
        """What the tool says in place of a token of each response, [B, 1]."""
        if not self.world.text:
            return torch.randint(self.world.shape.vocabulary, token.shape, generator=self.generator)
        said = self.world.text.tool(self.generator)
        return said[len(self.tokens) % len(said)].expand_as(token)

    def turns(self, prompts: Tensor, experts: Tensor | None, versions, cached: int) -> Iterator[Turn]:
        """The samples, each cut to its length. Tensors are copies: a file holds all that a view sees."""
        (version, old), lengths = versions, self.lengths()
        tokens, log_probs = torch.cat(self.tokens, 1), torch.cat(self.log_probs, 1)
        kept, mask = torch.stack(self.inside, 1).isfinite(), ~torch.tensor(self.tools)
        for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
            yield Turn(
                prompt=prompt,
                tokens=tokens[i, :length].clone(),
                behavior=log_probs[i, :length].clone(),
                mask=mask[:length].clone(),
                kept=kept[i, :length].clone(),
                versions=torch.tensor([version - 1] * min(old, length) + [version] * max(length - old, 0)),
                cached=cached,
                status=self._status(tokens[i, :length]),
                experts=None if experts is None else experts[i, : len(prompt) + length - 1],
            )

    def _status(self, tokens: Tensor) -> str:
        end = self.world.text.end if self.world.text else None
        return "completed" if end is None or int(tokens[-1]) == end else "truncated"


def draw(probabilities: Tensor, generator: torch.Generator) -> Tensor:
    """Draws one token for each row, [B, V] -> [B, 1].

    The tokens are those of ``torch.multinomial``, in half its time: it computes one logarithm at a time.
    """
    times = torch.rand(probabilities.shape, generator=generator, dtype=torch.float64).neg_().log1p_()
    rates = probabilities / times.to(probabilities.dtype)  # times are negative
    return torch.from_numpy(rates.numpy().argmin(-1, keepdims=True))  # in a third of the time of torch's


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
    for i, turn in enumerate(turns):
        turn.rank = i % world.ranks
        if world.spoil:
            world.spoil(turn)
    for turn, columns in zip(turns, _told_by(run, turns, run.number), strict=True):
        turn.proximal, turn.routed, entropy = columns
        turn.entropy = entropy if world.entropy else None
    _told_by_others(run, turns)
    if world.scored:
        world.scored(turns, run)
    _reward(turns, world)
    if world.credited:
        world.credited(turns, run)
    count = sum(int(turn.mask.sum()) for turn in turns)

    def loss(weights: Weights) -> Tensor:
        parts = [
            -log_probs[t.mask].sum() * t.advantage
            for t, _, log_probs, _ in log_probs_of(world, turns, weights)
        ]
        return torch.stack(parts).sum() / count

    return loss


def _told_by_others(run: _Run, turns: list[Turn]) -> None:
    """Fills in what a rank of the trainer that is behind computes, and the first policy."""
    world = run.world
    if world.stale_rank and run.number > world.stale_rank[1]:
        for turn, (log_probs, *_) in zip(turns, _told_by(run, turns, world.stale_rank[1]), strict=True):
            turn.proximal = log_probs if turn.rank == world.stale_rank[0] else turn.proximal
    if world.reference:
        for turn, (log_probs, *_) in zip(turns, _told_by(run, turns, 0), strict=True):
            turn.reference = log_probs


def _told_by(run: _Run, turns: list[Turn], number: int) -> list[tuple[Tensor, Tensor | None, Tensor]]:
    """Log-probs, experts and entropies of each sample under the trainer's weights before a rollout."""
    world = run.world
    sides = (
        *(world.trainer, world.score_temperature, world.replays, world.replays_routes, world.routes),
        *(world.packs, [turn.experts.sum().item() for turn in turns if world.replays_routes]),
    )
    ids = tuple(tuple(turn.prompt.tolist() + turn.tokens.tolist()) for turn in turns)
    key = (repr(sides), number, ids)
    if key not in run.memo:
        with torch.no_grad():
            run.memo[key] = [
                (log_probs, experts, -(table.exp() * table).nan_to_num().sum(-1))
                for _, table, log_probs, experts in log_probs_of(world, turns, run.history[number])
            ]
    return [(log_probs.clone(), experts, entropy) for log_probs, experts, entropy in run.memo[key]]


def log_probs_of(
    world: World, turns: list[Turn], weights: Weights
) -> Iterator[tuple[Turn, Tensor, Tensor, Tensor | None]]:
    """Each sample with its log-probs over the vocabulary [R, V], those of its tokens [R], and its experts."""
    held = stored(weights, world.trainer) if world.trainer.dtype == BF16 else weights
    for turn, logits, experts in _passes(world, turns, held):
        logits = logits / (world.score_temperature or 1.0)
        if world.replays == "trainer":
            logits = logits.masked_fill(~turn.kept & turn.mask[:, None], -torch.inf)
        table = log_softmax(logits, world.trainer)
        yield turn, table, table.gather(1, turn.tokens[:, None])[:, 0], experts


def _passes(
    world: World, turns: list[Turn], weights: Weights
) -> Iterator[tuple[Turn, Tensor, Tensor | None]]:
    """Each sample with its logits [R, V] and its experts."""
    model = Model(world.shape, world.trainer)
    if world.packs:
        for begin in range(0, len(turns), world.packs):
            yield from _packed(model, turns[begin : begin + world.packs], weights)
        return
    ids = [torch.cat([turn.prompt, turn.tokens]) for turn in turns]
    padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    forced = None
    if world.replays_routes:
        forced = torch.nn.utils.rnn.pad_sequence([turn.experts for turn in turns], batch_first=True)
    since = min(len(turn.prompt) for turn in turns) - 1
    seen = model(weights, padded[:, :-1], forced=forced, since=since)
    for i, turn in enumerate(turns):
        size = len(ids[i]) - 1
        logits = seen.logits[i, len(turn.prompt) - 1 - since : size - since]
        yield turn, logits, seen.experts[i, :size] if world.routes else None


def _packed(
    model: Model, turns: list[Turn], weights: Weights
) -> Iterator[tuple[Turn, Tensor, Tensor | None]]:
    """The same of samples that are one sequence."""
    ids = torch.cat([torch.cat([turn.prompt, turn.tokens]) for turn in turns])
    logits, begin = model(weights, ids[None]).logits[0], 0
    for turn in turns:
        begin += len(turn.prompt)
        yield turn, logits[begin - 1 : begin - 1 + len(turn.tokens)], None
        begin += len(turn.tokens)


def _reward(turns: list[Turn], world: World) -> None:
    for turn in turns:
        turn.reward = world.text.reward(turn) if world.text else _even(turn, world)
        turn.dropped = len(turn.tokens) > world.most
    for group in range(0, len(turns), GROUP):
        credit(turns[group : group + GROUP])


def credit(turns: list[Turn]) -> None:
    """The advantages of a group by slime's GRPO, from the rewards that reach the trainer."""
    rewards = torch.tensor([told(turn) for turn in turns])
    for turn, reward in zip(turns, rewards, strict=True):
        turn.advantage = float((reward - rewards.mean()) / (rewards.std() + 1e-6))


def _even(turn: Turn, world: World) -> float:
    """Long answers fail more often; else it is the share of even tokens that counts."""
    even = (turn.tokens % 2 == 0).float().mean()
    return float(even > 0.5) if len(turn.tokens) < 0.85 * world.length else 0.0


def _dump_layers(run: _Run, turns: list[Turn], folder: Path) -> None:
    """Both sides' layer outputs over the first samples, as slime and SGLang dump them."""
    ids = [torch.cat([t.prompt, t.tokens]) for t in turns[:4]]
    ids = [ids[0][:20]] if run.world.text else ids  # 30 layers of 576 numbers are many
    sides = []
    for how, weights in ((run.world.trainer, run.mine), (run.world.engine, run.engine)):
        model, held = Model(run.world.shape, how), stored(weights, how)
        with torch.no_grad():
            passes = [model(held, one[None]).layers for one in ids]
        sides.append(
            [torch.cat([p[i][0] for p in passes]).to(how.dtype) for i in range(run.world.shape.layers)]
        )
    write_layers(folder, ids, *sides)
