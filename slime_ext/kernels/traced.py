"""Tokens as a graph sees them: tensors under names, and flags as numbers, since the loops that Inductor
writes for the CPU read and write bool one by one."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from slime_ext.correction import Correction, Tokens
from slime_ext.facts import Facts
from slime_ext.ops.grid import SHIFT, Grid
from slime_ext.ops.segments import Segments, as_numbers
from slime_ext.ops.statistics import Unit

Named = dict[str, Tensor]
SPARE = 2  # empty sequences added to every batch: torch.compile treats sizes 0 and 1 as different programs
MADE_UP = (300, 5, 4, 3, 0, 700, 41, 2, 1, 944)  # lengths of the batch that graphs are compiled on


LIBRARY = torch.library.Library("slime_ext", "DEF")
LIBRARY.define("spread(Tensor values, Tensor like, Tensor shared, Tensor blocks, Tensor singles) -> Tensor")


def _spread(values: Tensor, like: Tensor, shared: Tensor, blocks: Tensor, singles: Tensor) -> Tensor:
    """[S] -> [T]. An operation of its own, so that no compiler repeats the work behind ``values`` per
    token."""
    grid = Grid((), values.device)
    grid.__dict__.update(blocks=blocks.shape[0], index=(shared, shared), owners=(blocks, singles))
    return grid.spread(values)


LIBRARY.impl("spread", _spread, "CompositeExplicitAutograd")
torch.library.register_fake(
    "slime_ext::spread", lambda values, like, *_: values.new_empty(like.shape), lib=LIBRARY
)


@dataclass(frozen=True)
class Spreading(Facts):
    """Facts whose spread is one operation."""

    where: tuple[Tensor, ...] = ()

    @classmethod
    def of(cls, facts: Facts, given: Named) -> Spreading:
        """The same facts, with the places of their sequences on the grid."""
        where = tuple(given[name] for name in ("shared", "block_owner", "single_owner") if name in given)
        return cls(**{f.name: getattr(facts, f.name) for f in fields(facts)}, where=where)

    def spread(self, unit: Unit, values: Tensor) -> Tensor:
        if unit == "token":
            return values
        if values.dtype is torch.bool:
            return torch.ops.slime_ext.spread(values.float(), self.log_ratio, *self.where) != 0
        return torch.ops.slime_ext.spread(values, self.log_ratio, *self.where)


def inputs_of(correction: Correction, tokens: Tokens) -> Named:
    """The tensors over tokens that both halves read."""
    seen = {"numerator": correction.numerator_of(tokens), "behavior": tokens.behavior}
    seen["mask"] = as_numbers(tokens.segments.mask, torch.float32)
    if any(step.reads_advantages for step in correction.steps):
        seen["advantages"] = tokens.advantages
    return {name: t.detach() for name, t in seen.items()}


def layout_of(tokens: Tokens) -> Named:
    """Where the sequences lie on the grid."""
    grid = Grid((*tokens.segments.local_lengths, *(0,) * SPARE), tokens.segments.device)
    blocks, singles = grid.owners
    return dict(
        zip(("shared", "begins", "block_owner", "single_owner"), (*grid.index, blocks, singles), strict=True)
    )


def grid_of(given: Named) -> Grid:
    """The grid of a graph: sizes are symbols."""
    begins, tokens = given["begins"], given["mask"].shape[0]
    grid = Grid((), begins.device)
    known = {"count": begins.shape[0] // 2, "blocks": (tokens - 2) // (1 << SHIFT)}
    grid.__dict__.update(known, index=(given["shared"], begins))
    return grid


def tokens_of(given: Named, **known: object) -> Tokens:
    """The tensors of a graph as tokens, whose segments know ``known`` instead of lengths."""
    mask = given["mask"] != 0
    segments = Segments((), (), mask)
    segments.__dict__.update(known, mask=mask)
    numerator = given["numerator"]
    return Tokens(
        segments, numerator, given["behavior"], numerator, given.get("advantages"), given.get("ages")
    )


def made_up(given: Named) -> list[Tensor]:
    """Tensors like the given ones, of sizes that are all different."""
    lengths = (*MADE_UP, *(0,) * SPARE)
    size = sum(lengths)
    whole = Segments.whole(MADE_UP, torch.ones(size, dtype=torch.bool, device=given["mask"].device))
    nothing = torch.zeros(size)
    known = layout_of(Tokens(whole, nothing, nothing)) | {"ids": whole.ids, "within": whole.within}
    return [known[name] if name in known else _like(name, t, size, len(lengths)) for name, t in given.items()]


def _like(name: str, tensor: Tensor, size: int, count: int) -> Tensor:
    per_sequence = ("ages", "scale", "group", "sequence_log_ratio", "sequence_count", "sequence_keep")
    shapes = {"table": (*tensor.shape[:1], count)} | dict.fromkeys(per_sequence, (count,))
    shape = () if name.startswith("number") else shapes.get(name, (size,))
    return torch.ones(shape, dtype=tensor.dtype, device=tensor.device)


def numbers(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Flags as float32, for a graph to hand out."""
    return tuple(t.float() if t.dtype is torch.bool else t for t in tensors)
