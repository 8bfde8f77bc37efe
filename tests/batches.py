"""Oracle batches as packed tensors."""

from __future__ import annotations

import functools
import math

import torch

from slime_ext.core.tokens import Head, Tokens
from slime_ext.ops.segments import Segments
from tests import oracle

META = "meta device"  # of xdist: one worker imports what torch needs there, for 0.8 s
TOP_K = 128  # of the presets that center
FIELDS = ("proximal", "behavior", "target", "advantage", "host_loss")


def flat(batch, key, dtype=torch.float64):
    return torch.tensor([x for s in batch for x in s[key]], dtype=dtype)


def head(batch, dtype=torch.float64):
    """The oracle's heads, filled up with absent tokens."""
    sides = [head_of(len(s["mask"])) for s in batch] or [torch.zeros(2, 0, TOP_K)]
    return Head(*torch.cat(sides, dim=1).to(dtype))


@functools.cache
def head_of(length):
    """[2, length, TOP_K], of sampler and trainer."""
    rows = [[row + [-math.inf] * (TOP_K - len(row)) for row in pair] for pair in oracle.heads(length)]
    return torch.tensor(rows, dtype=torch.float64).reshape(length, 2, TOP_K).movedim(1, 0)


def tokens(batch, dtype=torch.float64):
    segments = Segments.whole([len(s["mask"]) for s in batch], flat(batch, "mask"))
    values = {key: flat(batch, key, dtype) for key in FIELDS}
    values["target"].requires_grad_()
    of_tokens = (values[key] for key in ("proximal", "behavior", "target", "advantage"))
    return Tokens(segments, *of_tokens, head=head(batch, dtype)), values["host_loss"]


def flat_call(batch, **changes):
    """An oracle batch as the arguments of ``slime_ext.correct``."""
    packed, loss = tokens(batch)
    return {
        "loss": loss,
        "behavior": packed.behavior,
        "proximal": packed.proximal,
        "lengths": [len(s["mask"]) for s in batch],
        "mask": packed.segments.mask,
        "target": packed.target,
        "advantages": packed.advantages,
        "head": (packed.head.sampler, packed.head.trainer),
    } | changes
