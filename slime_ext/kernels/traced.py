"""Tokens as a graph sees them: tensors under names, cut along a grid of blocks instead of into sequences."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from slime_ext.correction import Correction, Tokens
from slime_ext.facts import Facts
from slime_ext.ops.grid import SHIFT, Grid
from slime_ext.ops.segments import Segments
from slime_ext.ops.statistics import Unit

Named = dict[str, Tensor]
PER_TOKEN = ("numerator", "behavior", "mask", "advantages", "host_loss")
SPARE = 2  # empty sequences added to every batch: torch.compile treats sizes 0 and 1 as different programs
MADE_UP = (300, 5, 4, 3, 0, 700, 41, 2, 1, 944)  # lengths of the batch that graphs are compiled on


@dataclass(frozen=True)
class Rows(Facts):
    """Facts about tokens in rows [R, n], or singly [n], each of which belongs to the sequence ``owner``."""

    owner: Tensor | None = None

    @classmethod
    def of(cls, facts: Facts, owner: Tensor) -> Rows:
        """The same facts, with the owner of each row."""
        return cls(**{f.name: getattr(facts, f.name) for f in fields(facts)}, owner=owner)

    def spread(self, unit: Unit, values: Tensor) -> Tensor:
        if unit == "token":
            return values
        # as_strided is the identity here, but Inductor computes what it reads once, not once per token.
        mine = values.as_strided((values.shape[0],), (1,)).index_select(0, self.owner)
        return mine.unsqueeze(1) if self.log_ratio.dim() == 2 else mine


def inputs_of(correction: Correction, tokens: Tokens) -> Named:
    """The tensors over tokens that both halves read."""
    target = correction.numerator == "target"
    seen = {"numerator": tokens.target if target else tokens.proximal, "behavior": tokens.behavior}
    seen["mask"] = tokens.segments.mask
    if any(step.reads_advantages for step in correction.steps):
        seen["advantages"] = tokens.advantages
    return {name: t.detach() for name, t in seen.items()}


def layout_of(tokens: Tokens) -> Named:
    """Where the sequences lie on the grid."""
    grid = Grid((*tokens.segments.local_lengths, *(0,) * SPARE), tokens.segments.device)
    blocks, singles = grid.owners
    return dict(zip(("shared", "begins", "block_owner", "single_owner"), (*grid.index, blocks, singles), strict=True))


def grid_of(given: Named) -> Grid:
    """The grid of a graph: sizes are symbols."""
    begins, tokens = given["begins"], given["mask"].shape[0]
    grid = Grid((), begins.device)
    known = {"count": begins.shape[0] // 2, "blocks": (tokens - 2) // (1 << SHIFT)}
    grid.__dict__.update(known, index=(given["shared"], begins))
    return grid


def tokens_of(given: Named, **known: object) -> Tokens:
    """The tensors of a graph as tokens, whose segments know ``known`` instead of lengths."""
    segments = Segments((), (), given["mask"])
    segments.__dict__.update(known, mask=given["mask"])
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
    shapes = {"table": (tensor.shape[0], count), "ages": (count,), "scale": (count,), "group": (count,)}
    shapes |= dict.fromkeys(("sequence_log_ratio", "sequence_count", "sequence_keep"), (count,))
    shape = () if name.startswith("number") else shapes.get(name, (size,))
    return torch.ones(shape, dtype=tensor.dtype, device=tensor.device)
