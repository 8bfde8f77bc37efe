"""The two halves of a correction as two graphs that torch.compile turns into loops.

``head`` reads the tokens and yields the table of statistics over sequences; ``expand`` takes the table, lets
the steps decide and spreads what they decided. One graph would evaluate the small [S] part inside the loop
over the tokens. Sizes are dynamic: each graph is compiled once, on a made-up batch in which no two sizes are
alike, and serves every batch from then on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import pad

from slime_ext.correction import Correction, Outcome, Plan, Sequences, Tokens
from slime_ext.kernels.apply import Applied, Eager, Work, finish, over_ranks, settled
from slime_ext.kernels.traced import (
    SPARE,
    Named,
    Spreading,
    grid_of,
    inputs_of,
    layout_of,
    made_up,
    numbers,
    tokens_of,
)
from slime_ext.metrics.layout import Layout
from slime_ext.metrics.measure import Measured, measure
from slime_ext.objectives import Bounds, Host
from slime_ext.ops.segments import as_numbers, identity
from slime_ext.ops.statistics import tabulate
from slime_ext.ops.weighted import Weighted

SMALLEST = 1024  # tokens; below, compiled calls cost more than they save
Flat = tuple[Tensor, ...]
SEEN = ("weights", "keep", "finite", "log_ratio", "clipped", "acted")  # per token, of an observed outcome
FLAGS = ("keep", "finite", "clipped", "sequence_keep")
PLACES = ("ids", "within")
PER_SEQUENCE = ("sequence_log_ratio", "sequence_count", "sequence_keep")


@dataclass(frozen=True)
class Want:
    """What a graph is built for; everything else about a batch may change from call to call."""

    part: str
    observe: bool = False
    bounds: bool = False
    loss: bool = False
    layout: Layout | None = None
    first: bool = True


@dataclass(frozen=True, eq=False)
class Compiled:
    """Compiled graphs for one correction; small batches run eagerly."""

    correction: Correction
    name: str = "compiled"

    def __post_init__(self) -> None:
        self.__dict__.update(_known={}, _lock=threading.Lock(), _eager=Eager(self.correction))

    def outcome(
        self, tokens: Tokens, plan: Plan | None = None, *, observe: bool = False, bounds: bool = False
    ) -> Outcome:
        """As ``Correction.__call__``."""
        if tokens.segments.size < SMALLEST:
            return self._eager.outcome(tokens, plan, observe=observe, bounds=bounds)
        plan = settled(self.correction, tokens, plan)
        want = Want("expand", observe, bounds)
        found = self._call(want, self._inputs(tokens, plan, observe))
        return _outcome(found, plan, tokens.segments.count, want)

    def apply(self, work: Work) -> Applied:
        """As ``Eager.apply``; weighting the host's loss and measuring belong to the second graph."""
        tokens, correction, observe = work.tokens, self.correction, work.layout is not None
        if tokens.segments.size < SMALLEST:
            return self._eager.apply(work)
        if not (work.acts and isinstance(correction.surrogate, Host)) or correction.is_identity:
            outcome = self.outcome(tokens, work.plan, observe=observe, bounds=True)
            return finish(correction, outcome, work, self._measure)
        plan = settled(correction, tokens, work.plan)
        given = self._inputs(tokens, plan, observe) | {"host_loss": work.host_loss.detach()}
        if observe:
            given |= _places(tokens, work.layout)
        want = Want("expand", observe, True, True, work.layout, work.first)
        product, factor, kept, *rest = self._call(want, given)
        keep = kept.to(torch.bool)
        measured = Measured(*rest[3:]) if observe else None
        loss = Weighted.apply(work.host_loss, product, factor, keep)
        return Applied(loss, keep, tuple(rest[:3]), measured)

    def _inputs(self, tokens: Tokens, plan: Plan, observe: bool) -> Named:
        """What the second half reads, the first half's table among it."""
        given = inputs_of(self.correction, tokens)
        needs = self.correction.needs(observe=observe)
        if needs or plan.scale is not None or plan.keep is not None or self.correction.needs_ages:
            given |= layout_of(tokens)
        if needs:
            table = self._call(Want("head", observe), given)
            if tokens.segments.all_sum is not identity:
                summed = over_ranks(table[:, : tokens.segments.count], tokens.segments.all_sum)
                table = pad(summed, (0, SPARE))
            given["table"] = table
        given |= {f"number{i}": plan.numbers[step] for i, step in enumerate(_coupled(self.correction))}
        per_sequence = {"ages": tokens.ages, "scale": plan.scale, "group": plan.keep}
        return given | {name: pad(t, (0, SPARE)) for name, t in per_sequence.items() if t is not None}

    def _measure(self, work: Work, outcome: Outcome, surrogate_clipped: Tensor | None) -> Measured:
        given = dict(zip(SEEN, numbers(tuple(getattr(outcome, name) for name in SEEN)), strict=True))
        given["behavior"] = work.tokens.behavior.detach()
        given["mask"] = as_numbers(work.tokens.segments.mask, torch.float32)
        seen = outcome.sequences
        both = zip(PER_SEQUENCE, (seen.log_ratio, seen.count, seen.keep), strict=True)
        given |= {name: pad(t.double(), (0, SPARE)) for name, t in both}
        given |= _places(work.tokens, work.layout)
        if work.tokens.ages is not None:
            given["ages"] = pad(work.tokens.ages, (0, SPARE))
        if surrogate_clipped is not None:
            given["surrogate_clipped"] = surrogate_clipped
        return Measured(*self._call(Want("measure", layout=work.layout, first=work.first), given))

    def _call(self, want: Want, given: Named) -> Flat | Tensor:
        key = (want, tuple((name, t.dtype) for name, t in given.items()))
        with self._lock:
            if key not in self._known:
                self._known[key] = self._compile(want, given)
            graph = self._known[key]
        with torch.no_grad():
            return graph(*given.values())

    def _compile(self, want: Want, given: Named) -> Callable[..., Flat | Tensor]:
        part = {"head": self._head, "expand": self._expand, "measure": self._measured}[want.part]
        names = list(given)

        def body(*values: Tensor) -> Flat | Tensor:
            found = part(dict(zip(names, values, strict=True)), want)
            return numbers(found) if isinstance(found, tuple) else found

        example = made_up(given)
        with torch.no_grad():
            traced = make_fx(body, tracing_mode="symbolic")(*example)
            compiled = torch.compile(traced, dynamic=True, fullgraph=True)
            compiled(*example)
        return compiled

    def _head(self, given: Named, want: Want) -> Tensor:
        grid = grid_of(given)
        tokens = tokens_of(given, grid=grid, count=grid.count)
        needs = self.correction.needs(observe=want.observe)
        table = tabulate(needs, self.correction.look(tokens).value_of, tokens.segments)
        return torch.stack([table[need] for need in needs])

    def _expand(self, given: Named, want: Want) -> Flat:
        known = {name: given[name] for name in PLACES if name in given}
        correction, tokens = self.correction, tokens_of(given, **known)
        facts = Spreading.of(correction.look(tokens), given)
        needs = correction.needs(observe=want.observe)
        if needs:
            facts = replace(facts, table=dict(zip(needs, given["table"].unbind(), strict=True)))
        numbers = {step: given[f"number{i}"] for i, step in enumerate(_coupled(correction))}
        plan = Plan(numbers, given.get("scale"), given.get("group"))
        outcome = correction.decide(facts, plan, observe=want.observe, bounds=want.bounds)
        outcome = outcome.in_full() if want.observe else outcome
        if not want.loss:
            return _flat(outcome)
        loss, _ = correction.loss(outcome, tokens, given["host_loss"], Bounds())
        factor = correction.factor(outcome, loss.dtype)
        written = (loss, factor, outcome.keep, *outcome.channel(tokens.segments.mask))
        if want.layout is None:
            return written
        return *written, *measure(tokens, outcome, want.layout, first=want.first)

    def _measured(self, given: Named, want: Want) -> Flat:
        known = {name: given[name] for name in PLACES if name in given}
        seen = {name: given[name] != 0 if name in FLAGS else given[name] for name in (*SEEN, *PER_SEQUENCE)}
        outcome = Outcome(*(seen[name] for name in SEEN), Sequences(*(seen[name] for name in PER_SEQUENCE)))
        tokens = tokens_of(given | {"numerator": given["behavior"]}, **known)
        clipped = given.get("surrogate_clipped")
        return tuple(measure(tokens, outcome, want.layout, surrogate_clipped=clipped, first=want.first))


def _places(tokens: Tokens, layout: Layout) -> Named:
    """What the curves read of where tokens lie."""
    if not layout.curves:
        return {}
    segments = tokens.segments
    return {"within": segments.within} | ({} if tokens.ages is None else {"ids": segments.ids})


def _coupled(correction: Correction) -> list:
    return [step for step in correction.steps if step.is_coupled]


def _flat(outcome: Outcome) -> Flat:
    """An outcome's tensors: per token, then per sequence; those that are not there left out."""
    seen = outcome.sequences
    own = (outcome.weights, outcome.keep, outcome.finite, outcome.log_ratio, outcome.scale, outcome.clipped)
    if seen is not None:
        own += (outcome.acted, seen.log_ratio, seen.count, seen.keep)
    return tuple(t for t in own if t is not None)


def _outcome(flat: Sequence[Tensor], plan: Plan, count: int, want: Want) -> Outcome:
    """The reverse of ``_flat``, with flags as flags and without the spare sequences."""
    weights, keep, finite, log_ratio, *rest = flat
    own = (weights, keep.to(torch.bool), finite.to(torch.bool), log_ratio)
    scale = None if plan.scale is None else rest.pop(0)
    if not (want.observe or want.bounds):
        return Outcome(*own, scale=scale)
    clipped = rest.pop(0).to(torch.bool)
    if not want.observe:
        return Outcome(*own, clipped, scale=scale)
    acted, log_ratios, counts, kept = rest
    sequences = Sequences(log_ratios[:count], counts[:count], kept[:count].to(torch.bool))
    return Outcome(*own, clipped, acted, sequences, scale)
